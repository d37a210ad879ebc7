"""Writing the directory of a quantized Hugging Face model from a stream of tensors, all or nothing.

Shard names such as model-00001-of-00003.safetensors require the number of shards; until it is known, all files are in
the folder ``unfinished``. config.json is moved last: without it the directory is not taken for a model.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import TracebackType

from torch import Tensor

from bitport.checkpoint.dtypes import TAGS_FOR_OTHERS
from bitport.checkpoint.manifest import DIFFUSERS_INDEX, FOLDER
from bitport.checkpoint.quantized_by import QUANTIZATION_FILES
from bitport.checkpoint.safetensors_writer import SafetensorsWriter, header_bytes, metadata_entry
from bitport.checkpoint.side_files import COMPONENT
from bitport.checkpoint.source import INDEX, INDEXES
from bitport.checkpoint.writer import move, write_new
from bitport.errors import ArgumentError, CheckpointError, remedy

SHARD = re.compile(r"(diffusion_pytorch_)?model(-\d{5,}-of-\d{5,})?\.safetensors")
METADATA = {"format": "pt"}
"""Required by the loaders of transformers."""


class Directory:
    """``with Directory(path) as out: out.add(name, tensor); out.publish(files)``; without publish() nothing remains.
    ``room``: bytes to reserve in each file header for the metadata passed to publish()."""

    def __init__(self, directory: Path, shard_size: int, room: int = 0) -> None:
        self.directory, self.shard_size, self.folder = directory, shard_size, directory / FOLDER
        self.room = room + len(metadata_entry(METADATA))
        self.shards: list[list[str]] = []
        self.ended: list[SafetensorsWriter] = []
        self.current: SafetensorsWriter | None = None
        self.nbytes = 0
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError as error:
            raise ArgumentError(f"{self.folder} is there already, from a run that ended early: remove it") from error
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be made: {error}") from error

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.current is not None:
            self.current.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"writing {self.directory} failed: {error}; {remedy(error)} or choose another directory"
            ) from error

    def add(self, name: str, tensor: Tensor) -> None:
        header = header_bytes(name, tensor, TAGS_FOR_OTHERS) + self.room
        current = self.current
        if current and not (current.holds(header) and current.data_size + tensor.nbytes <= self.shard_size):
            self._end_shard()
        if self.current is None:
            self.shards.append([])
            self.current = SafetensorsWriter(self.folder / f"{len(self.shards)}", header, TAGS_FOR_OTHERS)
        self.current.write(name, tensor)
        self.shards[-1].append(name)
        self.nbytes += tensor.nbytes

    def publish(self, files: dict[Path, str | Path], metadata: dict[str, str] | None = None) -> None:
        """Move everything to the directory. ``files``: path in it -> text, or the file to copy. ``metadata``: more
        entries for the metadata of each tensor file."""
        self._end_shard()
        for shard in self.ended:
            shard.finish({**METADATA, **(metadata or {})})
        count = len(self.shards)
        single = count == 1
        config = files.get(Path("config.json"), "{}")
        listed = DIFFUSERS_INDEX if isinstance(config, str) and COMPONENT in json.loads(config) else INDEX
        stem = listed.removesuffix(".safetensors.index.json")
        names = [f"{stem}{'' if single else f'-{at + 1:05}-of-{count:05}'}.safetensors" for at in range(count)]
        index = {
            "metadata": {"total_size": self.nbytes},
            "weight_map": {key: name for name, keys in zip(names, self.shards, strict=True) for key in keys},
        }
        texts = files if single else {**files, Path(listed): json.dumps(index, indent=2) + "\n"}
        for path, text in texts.items():
            staged = self.folder / "files" / path
            staged.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(text, Path):
                shutil.copyfile(text, staged)
            else:
                write_new(staged, text.encode())
        for path in self.directory.iterdir():
            if SHARD.fullmatch(path.name) or path.name in (*INDEXES, "config.json", *QUANTIZATION_FILES):
                path.unlink()
        for at, name in enumerate(names):
            move(self.folder / f"{at + 1}", self.directory, Path(name))
        for path in sorted(texts, key=lambda path: path == Path("config.json")):
            move(self.folder / "files" / path, self.directory, path)

    def _end_shard(self) -> None:
        if self.current is not None:
            self.current.pause()
            self.ended.append(self.current)
            self.current = None
