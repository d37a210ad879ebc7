"""The report of quantize_: what was quantized, what was not and why, sizes and errors."""

from __future__ import annotations

import dataclasses
import json
import math

from bitport.report.text import size, table


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """``scheme`` None: the weight stayed as it was. ``sqnr``: signal to noise of the weight in dB."""

    name: str
    scheme: str | None
    reason: str
    bytes_before: int
    bytes_after: int
    sqnr: float | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    layers: tuple[LayerReport, ...]
    bytes_before: int
    """All parameters of the model, tied ones once."""
    bytes_after: int

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.scheme is not None)

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.scheme is None)

    def to_json(self) -> str:
        """JSON has no infinity: the sqnr of a weight that its scheme holds exactly is null, as of one not measured."""
        data = dataclasses.asdict(self)
        for layer in data["layers"]:
            layer["sqnr"] = layer["sqnr"] if layer["sqnr"] is not None and math.isfinite(layer["sqnr"]) else None
        return json.dumps(data, allow_nan=False)

    def __str__(self) -> str:
        rows = [
            (
                layer.name,
                layer.scheme or "-",
                f"{size(layer.bytes_before)} -> {size(layer.bytes_after)}"
                if layer.scheme
                else size(layer.bytes_before),
                "" if layer.sqnr is None else f"{layer.sqnr:.1f} dB",
                layer.reason,
            )
            for layer in self.layers
        ]
        total = (
            f"{len(self.quantized)} weights quantized, {len(self.skipped)} left; "
            f"{size(self.bytes_before)} -> {size(self.bytes_after)}"
        )
        return table(("weight", "scheme", "size", "SQNR", "why"), rows) + "\n" + total
