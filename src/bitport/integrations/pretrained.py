"""Checkpoints of bitport for from_pretrained of transformers.

transformers opens files of weights itself, and gives a quantizer each tensor by the name that the model has for it, on
the device it goes to. So it is given a file of empty tensors, one for each of the checkpoint's; in the place of each,
bitport's own reader brings the tensor.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils.hub import convert_file_size_to_int

from bitport.checkpoint.load import read_tensor
from bitport.checkpoint.manifest import shortened
from bitport.checkpoint.parse import read_manifest
from bitport.checkpoint.shards import Shards
from bitport.checkpoint.writer import SHARD_SIZE
from bitport.errors import ArgumentError, CheckpointError
from bitport.integrations.huggingface import save_model
from bitport.integrations.names import arrangement
from bitport.ops.device import check_device

IDLE = ("token", "save_peft_format", "save_original_format")
"""Arguments of save_pretrained that change nothing in a directory of bitport."""


class Stored:
    """The checkpoint of ``files`` as the tensors of ``model``, which is on meta and to compute in ``dtype``. ``files``
    becomes the one file that transformers is to open."""

    def __init__(self, model: Any, files: list[str], dtype: torch.dtype) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise ArgumentError(
                "a distributed_config (tp_plan) cuts tensors while they are read, which quantized ones are not: load "
                "the model whole and shard it then (docs/distributed.md)"
            )
        self.path, self.dtype = Path(files[0]).parent, dtype
        held = read_manifest(self.path)
        manifest = arrangement(model)(held)
        self.wanted = {name: entry for name, entry in manifest.tensors.items() if entry.buffer != "derived"}
        ties = {frozenset(pair) for pair in model.all_tied_weights_keys.items()}
        own = model.state_dict()
        self.tied = {alias: name for alias, name in manifest.tied.items() if alias in own and {alias, name} not in ties}
        """Those that transformers does not make one by itself."""
        self.wanted |= {alias: manifest.tensors[name] for alias, name in self.tied.items()}
        self._check(model, own)
        self.shards = Shards(self.path, held, verify=True, mmap=True)
        self.shared: dict[str, Tensor] = {}
        self.folder = tempfile.TemporaryDirectory()
        files[:] = [str(Path(self.folder.name, "model.safetensors"))]
        with torch.device("cpu"):
            save_file({name: torch.empty(0, dtype=torch.float32) for name in self.wanted}, files[0], {"format": "pt"})

    def _check(self, model: Any, own: dict[str, Tensor]) -> None:
        both = [(name, self.wanted[name], own[name]) for name in self.wanted.keys() & own.keys()]
        if other := sorted(
            f"{name} (checkpoint {[*entry.shape]}, model {[*tensor.shape]})"
            for name, entry, tensor in both
            if entry.shape != tuple(tensor.shape)
        ):
            raise CheckpointError(
                f"{self.path} does not fit {type(model).__name__}. {len(other)} of another shape: {shortened(other)}"
            )
        buffers = {name for name, _ in model.named_buffers()}
        if wrong := sorted(name for name, entry, _ in both if entry.scheme and name in buffers):
            raise CheckpointError(
                f"{self.path}: {shortened(wrong)} is quantized, but a buffer in {type(model).__name__}"
            )

    def tensor(self, name: str, asked: Tensor, model: Any) -> Tensor:
        """``asked``: in the dtype and on the device that the tensor is wanted in."""
        entry, there = self.wanted[name], model.get_parameter_or_buffer(name)
        if entry.name in self.shared:
            return self.shared[entry.name]
        if entry.scheme is not None:
            check_device(entry.scheme, asked.device)
        read = read_tensor(self.shards, self.path, entry, asked.device)
        if entry.dtype.is_floating_point:  # all are asked for in the dtype of the model, whatever this one is made in
            read = read.to(there.dtype if asked.dtype == self.dtype else asked.dtype)
        if isinstance(there, nn.Parameter):
            trains = there.requires_grad and entry.scheme is None and read.is_floating_point()
            read = nn.Parameter(read, requires_grad=trains)
        if entry.name in self.tied.values():
            self.shared[entry.name] = read
        return read

    def close(self) -> None:
        self.shards.__exit__()
        self.folder.cleanup()


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    max_shard_size: int | str | None = None,
    **given: Any,
) -> None:
    """In the place of that method of a model that bitport has quantized. One with adapters has transformers write
    these."""
    size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    if getattr(model, "_hf_peft_config_loaded", False):
        type(model).save_pretrained(model, save_directory, is_main_process=is_main_process, **size, **given)
        return
    if wrong := sorted(name for name, value in given.items() if name not in IDLE and value):
        raise ArgumentError(
            f"save_pretrained of a model that bitport has quantized takes a directory, is_main_process and "
            f"max_shard_size, not {', '.join(wrong)}; model.push_to_hub(name) uploads what it writes"
        )
    if is_main_process:
        limit = SHARD_SIZE if max_shard_size is None else min(SHARD_SIZE, convert_file_size_to_int(max_shard_size))
        save_model(model, save_directory, shard_size=limit)
