"""AutoRound (``quant_method: auto-round``): layers are in the format of another library, given by ``packing_format``::

    auto_round:auto_gptq     GPTQ, zero points minus 1
    auto_round               GPTQ, zero points unchanged
    auto_round:auto_awq      AWQ
    mlx                      MLX, whose own settings are read instead (bitport.checkpoint.quantized_by)

Files from before May 2025 instead have a ``backend``, the program and kernel they were made for: auto_round:exllamav2,
auto_round:gptq:exllamav2, auto_round:awq ..

Layers may have their own settings (``extra_config``), keyed by name or regular expression. If ``data_type`` is not
"int" see :mod:`bitport.interop.auto_round_floats`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import CheckpointError
from bitport.interop import auto_round_floats, awq, codec, gptq
from bitport.interop.auto_round_floats import FLOAT8, KEPT, KINDS
from bitport.interop.checks import Stored
from bitport.interop.codec import WeightNames
from bitport.interop.configuration import refuse_unknown, setting

GPTQ = {"auto_gptq": "gptq", "gptq": "gptq", "auto_round": "gptq_v2", "gptqmodel": "gptq_v2"}
"""packing_format -> checkpoint_format of GPTQ."""
AWQ = ("auto_awq", "awq")
OWN = ("bits", "group_size", "sym")
ROTATIONS = ("rotation_config", "spinquant_config")
FLOATS = ("data_type", "act_bits", "act_data_type", "act_dynamic")
"""Settings of a layer that have no effect, or one value, where data_type is "int"."""


class Reader(codec.Reader):
    known = (
        *("quant_method", "packing_format", "backend", "data_type", "act_bits", "extra_config", "desc_act"),
        *(*ROTATIONS, *OWN, *FLOAT8, *gptq.CHOOSING),
    )
    writes_zero_biases = True

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        packing = setting(config, "packing_format", str, _of_backend(config)).removeprefix("auto_round:")
        if rotation := next((key for key in ROTATIONS if config.get(key)), None):
            raise CheckpointError(
                f"AutoRound with {rotation}: inputs of layers are rotated on each call, which bitport does not do"
            )
        kind, rounded = setting(config, "data_type", str, "int"), setting(config, "act_bits", int, KEPT) < KEPT
        if kind not in ("int", *KINDS) or (kind == "int" and rounded):
            raise CheckpointError(
                f"AutoRound with data_type {kind!r}{', and rounded inputs' if rounded else ''}: int without rounded "
                f"inputs, {', '.join(KINDS)} are read"
            )
        own = setting(config, "extra_config", dict, {})
        layers = {_pattern(name): _settings(name, setting(own, name, dict), kind) for name in own}
        quantized = {pattern: said for pattern, said in layers.items() if said}
        if kind != "int":
            self.inner: codec.Reader = auto_round_floats.reader_of(config, quantized, dtype)
            self.notes = self.inner.notes
            return
        common = {key: config[key] for key in ("desc_act", *OWN) if key in config}
        if packing in AWQ and not quantized:
            asymmetric = not setting(config, "sym", bool, True)
            self.inner = awq.Reader({**common, "version": "gemm", "zero_point": asymmetric}, dtype)
        elif packing in GPTQ:
            self.inner = gptq.Reader({**common, "checkpoint_format": GPTQ[packing], "dynamic": quantized}, dtype)
        else:
            raise CheckpointError(
                f"AutoRound with packing_format {packing!r}: {', '.join(GPTQ)} are read, and {', '.join(AWQ)} with the "
                f"same settings for all layers"
            )

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        return self.inner.weights(held)

    def read(self, weight: Stored) -> Tensor:
        return self.inner.read(weight)

    def dropped(self, held: Mapping[str, FileTensor]) -> dict[str, str]:
        return self.inner.dropped(held)


def _of_backend(config: Mapping[str, Any]) -> str:
    """The packing_format that ``backend`` stands for. 3-bit codes were always packed as in GPTQ."""
    backend = setting(config, "backend", str, "auto")
    if backend == "auto" or config.get("bits") == 3:
        return "auto_gptq"
    kinds = {"gptqmodel": "gptqmodel", "gptq": "gptq", "awq": "awq", "round": "auto_round"}
    return next((packing for mark, packing in kinds.items() if mark in backend), backend)


def _pattern(name: str) -> str:
    """A regular expression for the layer ``name``, or ``name`` itself if it is one."""
    plain = re.fullmatch(r"[\w.\-]+", name)
    return f"^{re.escape(name)}$" if plain else name


def _settings(name: str, own: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The settings that determine the numbers; empty for a layer that is not quantized. ``kind``: the data_type of
    layers without settings of their own."""
    if setting(own, "bits", int, 0) >= KEPT:
        return {}
    what = f"extra_config of {name!r}"
    refuse_unknown(own, (*FLOATS, *OWN, *gptq.CHOOSING), what)
    if kind != "int":
        return {key: own[key] for key in (*FLOATS, "bits", "group_size") if own.get(key) is not None}
    if setting(own, "data_type", str, "int") != "int" or setting(own, "act_bits", int, KEPT) < KEPT:
        raise CheckpointError(f"AutoRound with {what}: integer weights are read, as in the other layers")
    return {key: own[key] for key in OWN if own.get(key) is not None}
