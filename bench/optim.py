"""Time of an optimizer step and size of its state, compared with torch.optim and, if installed, bitsandbytes and
torchao; with --quality the loss of a small language model trained with each kind of state.

Candidates take turns in every repetition; a ratio is the median over repetitions of the ratio to torch's fused AdamW on
float32 parameters within one, and its noise half the interquartile range of these ratios.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import busy, header, record
from bitport.evaluate.timing import spread
from bitport.report.text import table
from bitport.train.optim import STATES, AdamW, Lion

BASE = "torch fused"
SHAPES = {
    "layers": ((2048, 2048),) * 4 + ((5632, 2048),) * 3 + ((2048,),) * 2,
    "small": ((256, 256),) * 24 + ((1024, 256),) * 24 + ((256,),) * 48,
}
"""A block of a model of a billion parameters, and a whole small model, where the overhead of calls counts."""
FP32, BF16 = torch.float32, torch.bfloat16

Row = dict[str, Any]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def candidates() -> dict[str, tuple[torch.dtype, Make]]:
    found: dict[str, tuple[torch.dtype, Make]] = {
        BASE: (FP32, lambda params: torch.optim.AdamW(params, fused=True)),
        "torch foreach": (FP32, lambda params: torch.optim.AdamW(params, foreach=True)),
        "torch fused bf16": (BF16, lambda params: torch.optim.AdamW(params, fused=True)),
        **{f"bitport {name}": (FP32, functools.partial(AdamW, states=name)) for name in STATES},
        "bitport 8bit bf16": (BF16, AdamW),
        "bitport Lion 8bit": (FP32, Lion),
    }
    if importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes.optim import AdamW8bit

        found["bitsandbytes 8bit"] = (FP32, AdamW8bit)
    if importlib.util.find_spec("torchao"):
        from torchao import optim

        found["torchao 8bit"] = (FP32, optim.AdamW8bit)
        found["torchao 4bit"] = (FP32, optim.AdamW4bit)
    return found


def ready(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, make: Make) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = 0.01 * torch.randn_like(param)
    optimizer = make(params)
    optimizer.step()
    return optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The size of the moments; tensor subclasses without storage of their own are measured by their parts."""
    values = [
        value for state in optimizer.state.values() for key, value in state.items() if key not in ("step", "qmap")
    ]
    return sum(_bytes(value) for value in values if isinstance(value, Tensor) and value.dim() and value.numel() != 256)


def _bytes(value: Tensor) -> int:
    if type(value) is Tensor or not hasattr(value, "__tensor_flatten__"):
        return value.nbytes
    return sum(getattr(value, name).nbytes for name in value.__tensor_flatten__()[0] if name != "qmap")


def measure(name: str, repetitions: int) -> list[Row]:
    shapes = SHAPES[name]
    count = sum(torch.Size(shape).numel() for shape in shapes)
    running = {who: ready(shapes, *how) for who, how in candidates().items()}
    seconds: dict[str, list[float]] = {who: [] for who in running}
    for _ in range(repetitions):
        for who, optimizer in running.items():
            start = time.perf_counter()
            optimizer.step()
            seconds[who].append(time.perf_counter() - start)
    rows = []
    for who, times in seconds.items():
        ratios = [mine / base for mine, base in zip(times, seconds[BASE], strict=True)]
        rows.append(
            {
                "shapes": name,
                "optimizer": who,
                "ms": round(1e3 * statistics.median(times), 2),
                "to_fused": round(statistics.median(ratios), 3),
                "noise": round(spread(ratios), 3),
                "state_bytes_per_parameter": round(state_bytes(running[who]) / count, 3),
            }
        )
    return rows


class Model(nn.Module):
    """Predicts the next of 64 letters of a text in which two letters nearly always determine the next."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(64, 128)
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))

    def forward(self, pairs: Tensor) -> Tensor:
        return self.layers(self.letters(pairs).flatten(-2))


def quality(steps: int, dtype: torch.dtype) -> list[Row]:
    rows = []
    makers: dict[str, Make] = {"torch": lambda params: torch.optim.AdamW(params, lr=3e-3)}
    makers |= {name: functools.partial(AdamW, lr=3e-3, states=name) for name in STATES}
    for name, make in makers.items():
        torch.manual_seed(0)
        rule = torch.randint(64, (64, 64))
        model = Model().to(dtype)
        optimizer = make(list(model.parameters()))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
        losses = []
        for _ in range(steps):
            pairs = torch.randint(64, (256, 2))
            chance = torch.rand(256) < 0.05
            wanted = torch.where(chance, torch.randint(64, (256,)), rule[pairs[:, 0], pairs[:, 1]])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pairs).float(), wanted)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        rows.append({"parameters": str(dtype), "states": name, "loss": round(statistics.mean(losses[-50:]), 4)})
    return rows


def show(rows: list[Row]) -> None:
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--quality", type=int, metavar="STEPS", help="train a small model for so many steps instead")
    parser.add_argument("--json", action="store_true", help="append the rows to bench/results/optim.jsonl")
    options = parser.parse_args()
    head = header() | {"busy": busy(), "threads": torch.get_num_threads()}
    for name in ("bitsandbytes", "torchao"):
        if not importlib.util.find_spec(name):
            print(f"without {name}: it is not installed here (make bench-peers)")
    if options.quality:
        rows = [row for dtype in (FP32, BF16) for row in quality(options.quality, dtype)]
    else:
        rows = [row for name in options.shapes for row in measure(name, options.repetitions)]
    show(rows)
    if options.json:
        record("optim", head, rows)


if __name__ == "__main__":
    main()
