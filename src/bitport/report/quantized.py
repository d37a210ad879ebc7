"""The report of quantize_: what was quantized, what was not and why, sizes and errors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bitport.report.text import size, table
from bitport.schemes import Choice, Plan


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """``scheme`` None: the weight stayed as it was. Errors are ratios of signal to noise in dB, None where they were
    not measured; those of rounding to nearest stand beside those of any other ``algorithm``."""

    name: str
    scheme: str | None
    reason: str
    bytes_before: int
    bytes_after: int
    sqnr: float | None = None
    """The error of the weight."""
    algorithm: str | None = None
    sqnr_rtn: float | None = None
    output_sqnr: float | None = None
    """The error of the layer's output over the calibration data, without that of rounding its inputs."""
    output_sqnr_rtn: float | None = None
    tied: bool = False
    """A second name of a parameter that is listed under another one."""

    @classmethod
    def kept(cls, choice: Choice, before: int, after: int) -> LayerReport:
        """The report of a weight that is not quantized."""
        return cls(choice.name, None, choice.reason, before, after)


def listed(
    plan: Plan,
    storages: Mapping[str, str],
    told: Mapping[str, LayerReport],
    left: Callable[[Choice], LayerReport],
) -> tuple[LayerReport, ...]:
    """One for each choice of ``plan``. ``storages``: which tensor it is; ``told``: of each of these that was quantized,
    under one of its names; ``left``: of the others."""
    reasons = {choice.name: choice.reason for choice in plan.choices}
    first: dict[str, str] = {}
    layers = []
    for choice in plan.choices:
        storage = storages[choice.name]
        if storage in told:
            layer = told[storage]
            note = layer.reason.removeprefix(reasons[layer.name])
            layer = dataclasses.replace(layer, name=choice.name, reason=choice.reason + note)
        else:
            layer = left(choice)
        layers.append(dataclasses.replace(layer, tied=first.setdefault(storage, choice.name) != choice.name))
    return tuple(layers)


@dataclasses.dataclass(frozen=True)
class Report:
    layers: tuple[LayerReport, ...]
    bytes_before: int
    """All parameters of the model, tied ones once."""
    bytes_after: int
    recipe: str = ""
    """As Recipe.to_json writes it; empty where none was used."""
    algorithm: str = ""
    """The name, or the Python expression of one with other settings."""
    memory_estimate: int | None = None
    """Bytes that a streamed run was expected to take at most, worked out beforehand."""
    memory_peak: int | None = None
    """The most that the process has taken since it began."""
    calibration: str | None = None
    """What the inputs of layers were measured on."""

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        """Those with a scheme."""
        return tuple(layer for layer in self.layers if layer.scheme is not None)

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        """Those that stay as they are."""
        return tuple(layer for layer in self.layers if layer.scheme is None)

    def as_data(self) -> dict[str, Any]:
        """What JSON can hold. It has no infinity: the sqnr of a weight that its scheme holds exactly is null, as of one
        not measured."""
        data = dataclasses.asdict(self)
        for layer in data["layers"]:
            for error in ("sqnr", "sqnr_rtn", "output_sqnr", "output_sqnr_rtn"):
                layer[error] = layer[error] if layer[error] is not None and math.isfinite(layer[error]) else None
        return data

    def to_json(self) -> str:
        """:meth:`as_data` as text."""
        return json.dumps(self.as_data(), allow_nan=False)

    def to_html(
        self,
        path: str | Path,
        *,
        title: str = "",
        command: str = "",
        perplexity: tuple[float, float] | None = None,
    ) -> None:
        """Write one page that needs nothing else: sizes, the error of each layer, what was left and why, how to do it
        again. ``title``: the name of the model; ``command``: the command line that did it; ``perplexity``: before and
        after, where it is known."""
        from bitport.report.page import page  # which draws reports, and so knows this module

        Path(path).write_text(page(self, title, command, perplexity), encoding="utf-8")

    def __str__(self) -> str:
        rows = [
            (
                layer.name,
                layer.scheme or "-",
                _sizes(layer),
                _decibels(layer.sqnr, layer.sqnr_rtn),
                layer.algorithm or "-",
                _decibels(layer.output_sqnr, layer.output_sqnr_rtn),
                layer.reason,
            )
            for layer in self.layers
        ]
        shown = [0, 1, 2, 3, 6]
        if any(layer.algorithm not in (None, "rtn") for layer in self.layers):
            shown = [0, 1, 4, 2, 3, 5, 6]
        header = ("weight", "scheme", "size", "SQNR", "algorithm", "SQNR of output, calibration data", "why")
        chosen = table([header[at] for at in shown], [[row[at] for at in shown] for row in rows])
        done, left = count(self.quantized), count(self.skipped)
        total = (
            f"{done} weight{'' if done == 1 else 's'} quantized, {left} left; "
            f"{size(self.bytes_before)} -> {size(self.bytes_after)}"
        )
        return chosen + "\n" + total + self.run_text()

    __repr__ = __str__  # what a notebook shows of a cell that ends with it

    def run_text(self) -> str:
        """Lines about the run, where it was streamed."""
        lines = [] if self.calibration is None else [f"calibrated on {self.calibration}"]
        if self.memory_estimate is not None:
            measured = "" if self.memory_peak is None else f"; peak: {size(self.memory_peak)}"
            lines.append(f"memory estimate: {size(self.memory_estimate)}{measured}")
        return "".join(f"\n{line}" for line in lines)


def count(layers: tuple[LayerReport, ...]) -> int:
    """How many weights they are: tied ones are one."""
    return sum(not layer.tied for layer in layers)


def _sizes(layer: LayerReport) -> str:
    after = f" -> {size(layer.bytes_after)}" if layer.scheme else ""
    return f"{size(layer.bytes_before)}{after}{' (tied)' if layer.tied else ''}"


def _decibels(error: float | None, nearest: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.1f} dB" if nearest is None else f"{error:.1f} dB (rtn {nearest:.1f})"
