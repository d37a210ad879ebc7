"""AWQ (``quant_method: awq``), as written by AutoAWQ, GPTQModel and AutoRound: 4 bits. A layer [N, K] with groups of g
columns has, by ``version``::

    gemm    qweight int32 [K, N/8]     qzeros int32 [K/g, N/8]     scales float16 [K/g, N]
    gemv    qweight int32 [N, K/8]     qzeros int32 [N, w]         scales float16 [N, 8*w]     w >= K/g/8

    value[n, k] = (code - zero) * scale, both of group k/g

A word of gemm holds eight columns of N, the even ones first: 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits. Words of gemv
hold codes in order; the last columns of its qzeros and scales are padding.

AMD Quark also writes gemm, with a pack_method: "order" means that columns are in order, and without zero points codes
are signed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import codec, gptq
from bitport.interop.checks import Stored, exactly
from bitport.interop.codec import Described, WeightNames, grouped, tensors_of
from bitport.interop.configuration import agreed, one_of, setting
from bitport.interop.shifts import of_zero_points, zero_points
from bitport.interop.words import from_codes, to_codes, to_stream
from bitport.numerics import FLOATS, pack_bits, unpack_bits
from bitport.numerics.format import FLOAT8_SCALES
from bitport.schemes import Scheme
from bitport.tensor import QTensor, from_parts

BITS, PER_WORD, MIDPOINT = 4, 8, 8
VERSIONS = ("gemm", "gemv")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column at each position in a word of gemm."""
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)
"""The inverse: the position of each column."""
PLACES = {"reorder": PLACE, "order": tuple(range(PER_WORD))}
"""Positions by the pack_method of Quark."""


class Reader(codec.Reader):
    known = (
        *("quant_method", "method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "sym", "version"),
        *("format", "checkpoint_format", "pack_method", "export", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
        *gptq.CHOOSING,
    )
    usual = gptq.USUAL

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        one_of(config, "method", ("awq",))
        bits, self.group = (agreed(config, keys, int) for keys in (("bits", "w_bit"), ("group_size", "q_group_size")))
        self.version = agreed(config, ("version", "format", "checkpoint_format"), str, "gemm")
        backend = setting(config, "backend", str, "")
        self.asymmetric = setting(config, "zero_point", bool, True)
        packing = setting(config, "pack_method", str, "reorder")
        if packing not in PLACES or (packing != "reorder" and self.version != "gemm"):
            raise CheckpointError(
                f"AWQ {self.version} with pack_method {packing!r}: of gemm {', '.join(PLACES)} are read"
            )
        self.place = PLACES[packing]
        self.signed = config.get("pack_method") is not None and not self.asymmetric
        if bits != BITS:
            raise CheckpointError(f"AWQ with {bits} bits: {BITS} are read")
        if self.group < 1 and self.group != -1:
            raise CheckpointError(f"AWQ with groups of {self.group}: must be at least 1, or -1 for one group a row")
        if self.version not in VERSIONS or backend == "llm-awq":
            raise CheckpointError(
                f"AWQ in the version {backend if backend == 'llm-awq' else self.version!r}: {', '.join(VERSIONS)} are "
                "read; the others are ordered for one kernel"
            )

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found = grouped(held, "qweight", ("qzeros", "scales"), telling=("qzeros",))
        known = tensors_of(found)
        for name in held:
            if name.endswith(".act.scales") and name not in known:
                raise CheckpointError(
                    f"{name}: outputs of an activation are divided by it (falcon, mpt, gptj ..), which bitport does "
                    f"not read"
                )
        return found

    def read(self, weight: Stored) -> Tensor:
        qweight = weight.expect("qweight", (torch.int32,), (None, None))
        rows, columns = qweight.shape
        n, k = (rows, columns * PER_WORD) if self.version == "gemv" else (columns * PER_WORD, rows)
        group = k if self.group == -1 else self.group
        if k % group:
            raise CheckpointError(f"{weight.names['qweight']}: {k} columns are no whole groups of {group}")
        stored = (self._gemv if self.version == "gemv" else self._gemm)(weight, n, k, k // group)
        parts, fmt = of_zero_points(*stored, BITS, (1, max(self.group, 0)), droppable=not self.asymmetric)
        return from_parts(parts, Scheme(weight=fmt), shape=(n, k), dtype=self.dtype)

    def _gemm(self, weight: Stored, n: int, k: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """(bit stream, scales, zero points)"""
        qzeros = weight.expect("qzeros", (torch.int32,), (groups, n // PER_WORD))
        scales = weight.expect("scales", FLOATS, (groups, n))
        codes, zero = (reordered(to_codes(words, n, BITS), self.place).t() for words in (weight["qweight"], qzeros))
        if self.signed:
            codes, zero = codes ^ MIDPOINT, zero ^ MIDPOINT
        return pack_bits(codes.contiguous(), BITS), scales.t(), zero

    def _gemv(self, weight: Stored, n: int, k: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        qzeros = weight.expect("qzeros", (torch.int32,), (n, None))
        width = qzeros.shape[1] * PER_WORD
        if width < groups:
            raise CheckpointError(f"{weight.names['qzeros']} holds {width} zero points a row, {groups} are needed")
        scales = weight.expect("scales", FLOATS, (n, width))
        zero = to_codes(qzeros, width, BITS)[:, :groups]
        return to_stream(weight["qweight"], k, BITS), scales[:, :groups], zero


class Writer(codec.Writer):
    """Writes the version gemm. The format has one scheme for all weights."""

    name = "awq"

    def refuses(self, q: Described) -> str | None:
        fmt = q.scheme.weight
        if wrong := codec.no_layer(q, "AWQ quantizes"):
            return wrong
        if fmt.dtype != "int4" or fmt.block[0] != 1 or fmt.zero == "float" or q.scheme.act:
            return "AWQ holds integers of 4 bits in groups, inputs as they are"
        if fmt.scale in FLOAT8_SCALES:
            return f"AWQ has scales in float16, not {fmt.scale}"
        if extra := codec.no_place(q, "AWQ"):
            return extra
        n, k = q.shape
        if n % PER_WORD or k % (fmt.block[1] or k):
            return f"AWQ takes a multiple of {PER_WORD} rows and whole groups of columns, not {n}x{k} of {q.scheme}"
        return self.refuses_another_scheme(q, "AWQ has")

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        zero = zero_points(q).to(torch.uint8)
        if int(zero.max()) >= 1 << BITS:
            raise ArgumentError(f"{name}: the zero point {int(zero.max())} does not fit AWQ's 4 bits")
        module = name.removesuffix(".weight")
        codes = unpack_bits(q.qdata, BITS, q.matrix.k)
        qweight, qzeros = (from_codes(reordered(part.t(), ORDER), BITS) for part in (codes, zero))
        scales = exactly(q.scale, torch.float16, f"{module}: a scale of AWQ").t().contiguous()
        return {f"{module}.qweight": qweight, f"{module}.qzeros": qzeros, f"{module}.scales": scales}

    def config(self, left: list[str]) -> dict[str, Any]:
        assert self.scheme is not None
        fmt = self.scheme.weight
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": BITS,
            "group_size": fmt.block[1] or -1,
            "zero_point": fmt.zero == "int",
            "modules_to_not_convert": left,
        }


def reordered(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Reorder each eight columns of [.., 8*m] by ``order``."""
    return codes.unflatten(-1, (-1, PER_WORD))[..., list(order)].flatten(-2)
