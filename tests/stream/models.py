"""A small model of blocks with experts, one of which gets no tokens, and its files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

VOCABULARY, WIDTH = 48, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, str]:
        y = self.norm(x + shift)
        y = torch.cat([F.linear(y[:, :1], self.experts[0]), F.linear(y[:, 1:], self.experts[2])], 1)
        return x + self.down(F.silu(self.up(y))), "nothing"


class Model(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head, self.between = nn.Linear(WIDTH, VOCABULARY, bias=False), between

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        shift = x.mean(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x if self.between is None else self.between(x), shift)[0]
        return self.head(self.norm(x))


class Tied(Model):
    """The head is the embedding; the first and the last block share a layer, whose inputs are larger in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight, self.layers[2].up.weight = self.embed.weight, self.layers[0].up.weight
        with torch.no_grad():
            self.layers[2].experts.mul_(30)


def built(make: type[Model] = Model) -> Model:
    torch.manual_seed(1)
    return make()


def empty(make: type[Model] = Model) -> Model:
    with torch.device("meta"):
        return make()


def write(folder: Path, make: type[Model] = Model) -> Path:
    """Write two files with an index to ``folder / "model"``, and return that path."""
    directory = folder / "model"
    directory.mkdir()
    model = built(make)
    state = model.state_dict()
    held = (*model.named_parameters(), *model.named_buffers())  # tied ones by their first name
    names = [name for name, _ in held if name in state]
    index = {name: f"model-{at % 2}.safetensors" for at, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: state[name] for name in names if index[name] == file}, directory / file)
    text = ", ".join(f'"{name}": "{file}"' for name, file in index.items())
    (directory / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{text}}}}}')
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer" / "words.txt").write_text("words")
    return directory


def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (2, length), generator=draw) for length in (20, 20, 20, 9)]


def hashes(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
