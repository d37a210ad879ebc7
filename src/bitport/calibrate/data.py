"""Load token ids for calibration from a text, JSON lines, a dataset, or stored token ids.

Nothing that is read is executed: no pickles, no dataset scripts.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bitport.arguments import path_of
from bitport.errors import ArgumentError, shortened

Encode = Callable[[str], Sequence[int]]

TABLES = (".parquet", ".arrow")
TEXTS = (".txt", ".md", ".jsonl")
TOKENS = (".safetensors", ".npy")
REACH = 4
"""With a seed, windows are drawn from this many times the requested number of tokens."""


def token_batches(
    path: str | Path, encode: Encode, *, window: int = 512, tokens: int = 65536, seed: int | None = None
) -> list[Tensor]:
    """Return ``tokens`` tokens as int64 token ids [1, window], the last of which may be shorter.

    ``path``: a UTF-8 text; a .jsonl file with a document in the field "text" of each line; a .parquet or .arrow file
    with a column "text"; a directory of these, such as a Hugging Face dataset; or token ids, as the first tensor of a
    .safetensors file or as a .npy file. ``encode``: text -> token ids. ``seed``: take documents in random order, and
    random windows of their tokens; None: take the first ones.
    """
    for name, count in (("window", window), ("tokens", tokens)):
        if type(count) is not int or count < 1:
            raise ArgumentError(f"{name} must be a number of tokens, at least 1, not {count!r}")
    file = path_of(path, "path")
    draw = None if seed is None else torch.Generator().manual_seed(seed)
    enough = tokens if draw is None else REACH * tokens
    if file.suffix in TOKENS:
        ids = _stored_ids(file)
    else:
        found: list[int] = []
        for document in _documents(file, draw):
            if len(found) >= enough:
                break
            found += list(encode(document))
        ids = torch.tensor(found, dtype=torch.int64, device="cpu")
    if len(ids) < 2:
        raise ArgumentError(f"{file} gives {len(ids)} tokens; calibration needs at least two")
    pieces = [piece[None] for piece in ids[:enough].split(window)]
    if draw is None:
        return pieces
    whole = [piece for piece in pieces if piece.shape[1] == window] or pieces
    chosen = torch.randperm(len(whole), generator=draw, device="cpu")[: -(-tokens // window)]
    return list(torch.cat([whole[at] for at in chosen.tolist()], 1)[:, :tokens].split(window, 1))


def _documents(path: Path, draw: torch.Generator | None) -> Iterator[str]:
    files = [path]
    if path.is_dir():
        kinds = (*TABLES, *TEXTS)
        files = [each for each in sorted(path.rglob("*")) if each.suffix in kinds and each.is_file()]
        if not files:
            raise ArgumentError(f"{path} holds no {', '.join(kinds)} file; give a text or a dataset")
    if draw is None:
        for file in files:
            yield from _documents_of(file)
        return
    every = [document for file in files for document in _documents_of(file)]
    for at in torch.randperm(len(every), generator=draw, device="cpu").tolist():
        yield every[at]


def _documents_of(file: Path) -> Iterator[str]:
    if file.suffix in TABLES:
        yield from _column(file)
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {file} as UTF-8 text: {error}") from error
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also split at U+2028 and the like
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits
            raise ArgumentError(f"{file}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ArgumentError(f'{file}, line {number}: each line must be an object with a string "text"')
        yield row["text"]


def _column(file: Path) -> Iterator[str]:
    """The column "text", read in batches."""
    arrow = _pyarrow(file)
    try:
        if file.suffix == ".parquet":
            table: Any = importlib.import_module("pyarrow.parquet").ParquetFile(file)
            schema, parts = table.schema_arrow, table.iter_batches(columns=["text"])
        else:
            parts = arrow.ipc.open_stream(arrow.memory_map(str(file)))
            schema = parts.schema
        if schema.get_field_index("text") < 0:  # or there are several
            raise ArgumentError(
                f'{file} has the columns {shortened(schema.names)}; the documents must be in one that is called "text"'
            )
        kind = schema.field("text").type
        if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
            raise ArgumentError(f'the column "text" of {file} holds {kind}, not strings')
        for part in parts:
            part.validate(full=True)  # pyarrow trusts what it maps: offsets, lengths and the encoding of strings
            yield from filter(None, part.column("text").to_pylist())
    except (OSError, UnicodeDecodeError, arrow.ArrowException) as error:
        raise ArgumentError(f"cannot read {file} as a table: {error}") from error


def _pyarrow(file: Path) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise ArgumentError(f"{file} needs pyarrow, which is not installed: pip install pyarrow") from error


def _stored_ids(file: Path) -> Tensor:
    """All integers of the file, in a row."""
    try:
        if file.suffix == ".npy":  # mapped, so that a size beyond the file is an error before memory is taken
            held = np.load(file, mmap_mode="r", allow_pickle=False)
            if not isinstance(held, np.ndarray) or held.dtype.kind not in "iu":
                raise ArgumentError(f"{file} holds {getattr(held, 'dtype', 'several arrays')}, not token ids")
            return _checked(file, torch.from_numpy(held.astype(np.int64)))
        with safe_open(file, "pt") as stored:
            ids = stored.get_tensor(next(iter(stored.keys())))
    except (OSError, ValueError, TypeError, StopIteration, OverflowError, EOFError, SafetensorError) as error:
        raise ArgumentError(f"cannot read token ids from {file}: {error}") from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ArgumentError(f"{file} holds {ids.dtype}, not token ids")
    return _checked(file, ids.to(torch.int64))


def _checked(file: Path, ids: Tensor) -> Tensor:
    if bool((ids < 0).any()):  # or uint64 from 2^63 on
        raise ArgumentError(f"{file} holds negative token ids, or some of 2^63 and more")
    return ids.reshape(-1)
