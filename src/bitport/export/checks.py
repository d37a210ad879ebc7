"""Argument checks shared by the exports."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bitport.arguments import path_of
from bitport.errors import ArgumentError, ExportError


def check_target(path: str | os.PathLike[str], suffix: str, what: str) -> Path:
    target = path_of(path, "path").absolute()
    if target.suffix != suffix or not target.parent.is_dir():
        raise ArgumentError(f"{what} is a file *{suffix} in a folder that exists, not {target}")
    return target


def check_float32(module: nn.Module, args: tuple[Any, ...]) -> None:
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves(args)]
    found = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()}
    if others := found - {torch.float32}:
        raise ArgumentError(
            f"this runtime computes in float32, and the module or its arguments have {', '.join(map(str, others))}: "
            "give module.float(), which leaves quantized weights as they are"
        )


def check_installed(what: str, extra: str, *packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"{what} needs {', '.join(missing)}: pip install 'bitport[{extra}]'")
