"""Error of every layer of a quantized model: of its weight, and of its output on inputs of the original model.

The original's weights are read from its files, one at a time; a few rows of its inputs were sampled while it ran.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitport.calibrate.inputs import Watch
from bitport.checkpoint.source import Source
from bitport.errors import CheckpointError
from bitport.integrations.transformers_names import arrangement
from bitport.nn.quantize import error_of
from bitport.nn.targets import find_targets
from bitport.numerics import decibels, fake_quantize
from bitport.ops.product import in_code_order
from bitport.report import LayerReport, Report
from bitport.report.progress import progress as with_progress
from bitport.schemes import Target
from bitport.tensor import QTensor
from bitport.tensor.qtensor import rows_of
from bitport.tensor.sharded import model_nbytes

ROWS = 128
"""Inputs kept per matrix: 1 MB for 4096 features in bf16."""

HELD = "as in the checkpoint"


class SampledRows:
    """Up to ROWS inputs of each matrix of a weight, evenly spaced in the first batch that it receives."""

    def __init__(self, *_: Any) -> None:
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def add(self, x: Tensor, index: tuple[int, ...] = ()) -> None:
        rows = x.detach().reshape(-1, x.shape[-1])
        if index in self.kept or not len(rows):
            return
        at = torch.linspace(0, len(rows) - 1, min(ROWS, len(rows)), device=rows.device).round().long()
        self.kept[index] = rows[at].cpu()


@contextlib.contextmanager
def sampled(model: nn.Module) -> Iterator[dict[str, SampledRows]]:
    """Sample the inputs of each weight of ``model`` within this context; yields them by the weight's name."""
    targets = [target for target in find_targets(model) if not isinstance(target.weight(model), QTensor)]
    with Watch.of(model, targets, SampledRows) as watch:
        yield watch.seen


@torch.no_grad()
def layer_errors(model: nn.Module, original: str | Path, inputs: dict[str, SampledRows]) -> Report:
    """Compare each quantized weight of ``model`` with the one of the same name in the files of ``original``.

    ``inputs``: those of the original model, from :func:`sampled`. Outputs are computed in float32 with the dequantized
    weight, and with rounded inputs if the scheme rounds them.
    """
    files = _files(original, model)
    targets = {target.name: target for target in find_targets(model)}
    seen = {targets[name].storage: rows for name, rows in inputs.items() if name in targets and rows.kept}
    layers: dict[str, LayerReport] = {}  # by storage: a tied weight is one layer
    for name, value in with_progress(files.read(files.stored), len(files.stored), "comparing weights"):
        if name in targets and (storage := targets[name].storage) not in layers:
            layers[storage] = _layer(targets[name].weight(model), value, targets[name], seen.get(storage))
    for target in targets.values():
        if target.storage not in layers:
            layers[target.storage] = _unknown(target.weight(model), target, original)
    ordered = dict.fromkeys(target.storage for target in targets.values())
    before = sum(held.nbytes for held in files.stored.values())
    return Report(tuple(layers[storage] for storage in ordered), before, model_nbytes(model))


def _files(original: str | Path, model: nn.Module) -> Source:
    """The files of ``original``, arranged like ``model``; unarranged if only transformers can do that. The report then
    says that weights without a counterpart were not compared."""
    try:
        return Source(original, arrangement=arrangement(model))
    except CheckpointError:
        return Source(original)


def _layer(param: Tensor, value: Tensor, target: Target, inputs: SampledRows | None) -> LayerReport:
    if not isinstance(param, QTensor):
        return LayerReport(target.name, None, "not quantized", value.nbytes, param.nbytes)
    if param.shape != value.shape:
        note = f"not compared: {list(param.shape)} here, {list(value.shape)} in the original"
        return LayerReport(target.name, str(param.scheme), HELD, value.nbytes, param.nbytes, note=note)
    return LayerReport(
        target.name,
        str(param.scheme),
        HELD,
        value.nbytes,
        param.nbytes,
        sqnr=error_of(value, param),
        output_sqnr=_output_sqnr(value, param, target, inputs) if inputs is not None else None,
    )


def _output_sqnr(value: Tensor, q: QTensor, target: Target, inputs: SampledRows) -> float:
    exact = rows_of(value.float(), target.kind, target.transposed)
    codes = q.replace(perm=None, pre_scale=None)
    rounded = rows_of(codes.dequantize(torch.float32).cpu(), target.kind, target.transposed)
    signal = noise = torch.zeros((), dtype=torch.float64)
    for index, kept in inputs.kept.items():
        x = kept.float()
        seen = in_code_order(x.to(q.device), q).cpu()
        if q.scheme.act:
            seen = fake_quantize(seen, q.scheme.act, _cpu(q.act_scale))
        wanted = x @ exact[index].t()
        signal = signal + wanted.double().square().sum()
        noise = noise + (wanted - seen @ rounded[index].t()).double().square().sum()
    return float(decibels(signal, noise))


def _unknown(param: Tensor, target: Target, original: str | Path) -> LayerReport:
    size = param.numel() * param.dtype.itemsize
    if not isinstance(param, QTensor):
        return LayerReport(target.name, None, "not quantized", size, param.nbytes)
    note = f"not compared: the files in {original} have no tensor of this name"
    return LayerReport(target.name, str(param.scheme), HELD, size, param.nbytes, note=note)


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
