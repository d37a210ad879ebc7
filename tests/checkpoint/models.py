"""Small models with everything that a checkpoint has to carry, and comparisons of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitport.checkpoint.concurrent_writers import ABANDONED
from bitport.checkpoint.manifest import NAME, checksum
from bitport.tensor import QTensor


class Everything(nn.Module):
    """Linear, tied embedding and head, convolution, attention, experts, float and integer parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.linear = nn.Linear(64, 48)
        self.conv = nn.Conv1d(64, 8, 3)
        self.experts = nn.Parameter(torch.randn(3, 32, 64) * 0.1)
        self.norm = nn.LayerNorm(64, dtype=torch.float64)
        self.head = nn.Linear(64, 20, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.tensor(2.5, dtype=torch.float16), requires_grad=False)
        self.register_buffer("steps", torch.tensor([1, 2**40]))
        self.register_buffer("mask", torch.tensor([[True, False]]), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
        self.register_buffer("nothing", torch.zeros(0, 4, dtype=torch.bfloat16))

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(ids)
        y = self.attention(x, x, x, need_weights=False)[0]
        expert = F.linear(y, self.experts[1])
        return self.head(y), self.linear(y), self.conv(y.transpose(1, 2)), expert, self.norm(y.double())


IDS = torch.arange(10).reshape(2, 5)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name; for a quantized one also its canonical parts."""
    found: dict[str, Tensor] = {}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in every:
        if isinstance(tensor, QTensor):
            plain = tensor.to_layout("plain")
            found |= {f"{name}.{part}": getattr(plain, part) for part in plain.__tensor_flatten__()[0]}
        else:
            found[name] = tensor.detach()
    return found


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same tensors, bit for bit, with the same schemes and dtypes."""
    mine, theirs = tensors_of(one), tensors_of(other)
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert raw(tensor) == raw(theirs[name]), name
    kinds = [
        [(p.scheme, p.transposed, p.dtype) if isinstance(p, QTensor) else p.dtype for p in model.parameters()]
        for model in (one, other)
    ]
    assert kinds[0] == kinds[1]


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def edit(directory: Path, change: Any) -> None:
    """Apply ``change`` to the manifest as data and fix its checksum: a lie rather than damage."""
    path = directory / NAME
    content = json.loads(path.read_text())
    content.pop("crc32")
    content = change(content) or content
    path.write_text(json.dumps({**content, "crc32": checksum(content)}))


def rewrite_header(shard: Path, change: Any) -> None:
    """Apply ``change`` to the header of a shard as data and fix its size in the manifest."""
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    edit(shard.parent, lambda manifest: manifest["shards"].update({shard.name: shard.stat().st_size}))


def long_ago(path: Path) -> None:
    """Make the file old enough that no writer can still be using it."""
    then = path.stat().st_mtime - ABANDONED - 1
    os.utime(path, (then, then))
