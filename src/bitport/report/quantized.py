"""The report of quantize_: what was quantized, what was not and why, sizes and errors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bitport.arguments import path_of
from bitport.report.text import decibels, size, table
from bitport.schemes import Choice, Plan


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """The result for one weight; ``scheme`` None: not quantized. Errors are signal-to-noise ratios in dB, None if not
    measured; for algorithms other than rounding to nearest, the ``.._rtn`` ones are those of rounding to nearest."""

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
    """The error of the layer's output on the calibration data, excluding that of rounding its inputs."""
    output_sqnr_rtn: float | None = None
    tied: bool = False
    """Whether this is another name of a parameter that is already listed."""
    note: str = ""
    """What was done or measured other than requested, and why."""

    @property
    def why(self) -> str:
        """The reason, and the note if there is one."""
        return "; ".join(filter(None, (self.reason, self.note)))

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
    """One report per choice of ``plan``. ``storages``: name -> storage label; ``told``: storage label -> report of a
    quantized weight, under one of its names; ``left``: makes the report of any other weight."""
    first: dict[str, str] = {}
    layers = []
    for choice in plan.choices:
        storage = storages[choice.name]
        if storage in told:
            layer = dataclasses.replace(told[storage], name=choice.name, reason=choice.reason)
        else:
            layer = left(choice)
        layers.append(dataclasses.replace(layer, tied=first.setdefault(storage, choice.name) != choice.name))
    return tuple(layers)


@dataclasses.dataclass(frozen=True)
class Report:
    """What was done to a model, weight by weight; printed, a table."""

    layers: tuple[LayerReport, ...]
    bytes_before: int
    """Size of all parameters of the model, counting tied ones once."""
    bytes_after: int
    recipe: str = ""
    """The recipe in the form of Recipe.to_json; empty if none was used."""
    algorithm: str = ""
    """The name of the algorithm, or a Python expression if it has non-default settings."""
    memory_estimate: int | None = None
    """Estimated peak memory of a streamed run in bytes."""
    memory_peak: int | None = None
    """Measured peak memory of the process in bytes; None if nothing was run, or the system does not tell."""
    calibration: str | None = None
    """Description of the calibration data."""

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        """The weights that are quantized, including those that were so before, whose algorithm is None."""
        return tuple(layer for layer in self.layers if layer.scheme is not None)

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        """The weights that are not quantized."""
        return tuple(layer for layer in self.layers if layer.scheme is None)

    def as_data(self) -> dict[str, Any]:
        """JSON-compatible data. JSON has no infinity: the sqnr of a weight that its scheme represents exactly is null,
        like one that was not measured."""
        data = dataclasses.asdict(self)
        for layer in data["layers"]:
            for error in ("sqnr", "sqnr_rtn", "output_sqnr", "output_sqnr_rtn"):
                layer[error] = layer[error] if layer[error] is not None and math.isfinite(layer[error]) else None
        return data

    def to_json(self) -> str:
        """:meth:`as_data` as JSON text."""
        return json.dumps(self.as_data(), allow_nan=False)

    def to_html(
        self,
        path: str | Path,
        *,
        title: str = "",
        command: str = "",
        perplexity: tuple[float, float] | None = None,
    ) -> None:
        """Write a self-contained page: sizes, the error of each layer, what was not quantized and why, how to reproduce
        it. ``title``: the name of the model; ``command``: the command line that was used; ``perplexity``: before and
        after, if known."""
        from bitport.report.page import page  # here, as it imports this module

        path_of(path, "path").write_text(page(self, title, command, perplexity), encoding="utf-8")

    def __str__(self) -> str:
        rows = [
            (
                layer.name,
                layer.scheme or "-",
                _sizes(layer),
                decibels(layer.sqnr, layer.sqnr_rtn),
                layer.algorithm or "-",
                decibels(layer.output_sqnr, layer.output_sqnr_rtn),
                layer.why,
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

    def __repr__(self) -> str:
        """The value of a notebook cell: of a large model, one line per weight would be too much."""
        return f"{self.summary()}\n(print the report to see each weight)"

    def summary(self) -> str:
        """One line per scheme and algorithm, and per reason of what is left. The size of tied weights counts once."""
        groups: dict[tuple[str, str], list[LayerReport]] = {}
        for layer in self.layers:
            how = "" if layer.algorithm in (None, "rtn") else f" by {layer.algorithm}"
            groups.setdefault((f"{layer.scheme or '-'}{how}", "" if layer.scheme else layer.reason), []).append(layer)
        rows = []
        for (scheme, reason), layers in groups.items():
            errors = [layer.sqnr for layer in layers if layer.sqnr is not None]
            own = [layer for layer in layers if not layer.tied]
            before, after = (sum(getattr(layer, when) for layer in own) for when in ("bytes_before", "bytes_after"))
            tied = f"{len(layers) - len(own)} tied" if len(own) < len(layers) else ""
            number = " + ".join(filter(None, (f"{len(own)}" if own else "", tied)))
            sizes = f"{size(before)} -> {size(after)}" if own else ""
            rows.append((scheme, number, sizes, decibels(min(errors, default=None)), reason))
        total = f"all tensors: {size(self.bytes_before)} -> {size(self.bytes_after)}{self.run_text()}"
        return f"{table(('scheme', 'weights', 'size', 'lowest SQNR', 'why not'), rows)}\n{total}"

    def run_text(self) -> str:
        """Lines about calibration data and memory, if known."""
        lines = [] if self.calibration is None else [f"calibrated on {self.calibration}"]
        if self.memory_estimate is not None:
            measured = "" if self.memory_peak is None else f"; peak: {size(self.memory_peak)}"
            lines.append(f"memory estimate: {size(self.memory_estimate)}{measured}")
        return "".join(f"\n{line}" for line in lines)


def count(layers: tuple[LayerReport, ...]) -> int:
    """The number of weights, counting tied ones once."""
    return sum(not layer.tied for layer in layers)


def _sizes(layer: LayerReport) -> str:
    after = f" -> {size(layer.bytes_after)}" if layer.scheme else ""
    return f"{size(layer.bytes_before)}{after}{' (tied)' if layer.tied else ''}"
