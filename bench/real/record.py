"""The record: what was measured of the model, row by row, and of its weights."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import TINYLM
from bench.real.page import PAGE, RECORD, as_markdown, as_record
from bench.real.plan import GRIDS
from bench.real.sources import prepared
from bitport.evaluate.yardstick import Yardstick
from bitport.integrations.huggingface import load_model
from bitport.numerics import dequantize, quantize
from bitport.numerics.error import sqnr
from bitport.schemes import preset

TOKENS = 2048
FOLDER = Path("build/real")


def grids(model: nn.Module) -> dict[str, tuple[float, float, float]]:
    """Median SQNR in dB of the weights of ``model``, of tinylm's and of normally distributed numbers, by scheme."""
    normal = torch.randn(1536, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    of = (list(_weights(model)), list(_weights(load_model(TINYLM))), [normal])
    return {scheme: tuple(round(_kept(each, scheme), 3) for each in of) for scheme in GRIDS}


def _weights(model: nn.Module) -> Iterable[Tensor]:
    """The weights that a scheme given by name quantizes: those of all linear layers but the tied head."""
    tied = model.get_input_embeddings().weight
    return (each.weight for each in model.modules() if isinstance(each, nn.Linear) and each.weight is not tied)


@torch.no_grad()
def _kept(weights: Iterable[Tensor], scheme: str) -> float:
    fmt = preset(scheme).weight
    rounded = ((each, dequantize(quantize(each, fmt), fmt, *each.shape)) for each in weights)
    return statistics.median(float(sqnr(*pair)) for pair in rounded)


def yardstick_of_texts() -> Yardstick:
    """The model and the texts, made anew in FOLDER."""
    yardstick = Yardstick(prepared(FOLDER))
    yardstick.tokens = yardstick.tokens[:TOKENS]
    return yardstick


def digest(yardstick: Yardstick) -> str:
    """SHA-256 of the token ids for evaluation and calibration."""
    both = torch.cat([yardstick.tokens, yardstick.calibration])
    return hashlib.sha256(both.numpy().tobytes()).hexdigest()


def opened(yardstick: Yardstick) -> dict[str, Any]:
    """The record, a new one if there is none."""
    about = {"tokens": len(yardstick.tokens), "calibration": len(yardstick.calibration), "ids": digest(yardstick)}
    if not RECORD.exists():
        return about | {"sqnr": grids(yardstick.base), "rows": [], "reference": []}
    data: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    if {key: data[key] for key in about} != about:
        raise RuntimeError(f"{RECORD} was made with other tokens: remove it, so that all rows are measured on the same")
    return data


def measure(
    data: dict[str, Any], part: str, plan: Sequence[tuple[str, str]], row: Callable[[str, str], dict[str, Any]]
) -> None:
    """Add what is missing of the plan to this part of the record, and write the page."""
    rows = {(each["scheme"], each["algorithm"]): each for each in data[part]}
    for name in plan:
        if name not in rows:
            rows[name] = row(*name)
            print(f"{' '.join(name)} ({len(rows)} of {len(plan)})", file=sys.stderr)
            data[part] = [rows[each] for each in plan if each in rows]
            RECORD.write_text(as_record(data), encoding="utf-8")
    PAGE.write_text(as_markdown(data), encoding="utf-8")
