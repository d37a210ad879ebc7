"""The tensors of one compressed-tensors weight, as the parts of a QTensor. Nothing is known about them beforehand: each
accessor validates what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop.checks import as_grid
from bitport.interop.codec import order_of
from bitport.interop.compressed_tensors.arguments import BYTES, PACKED
from bitport.interop.compressed_tensors.groups import Group
from bitport.interop.words import to_stream, word_count
from bitport.numerics import FLOATS
from bitport.numerics.packing import pack_bits, unpack_bits


def roles_of(group: Group) -> tuple[set[str], set[str]]:
    """(required, optional) tensors of a weight of ``group``."""
    needed = {"weight_packed" if is_packed(group) else "weight", "weight_scale"}
    settings = {
        "weight_shape": group.format == PACKED,
        "weight_zero_point": not group.symmetric,
        "weight_g_idx": group.reordered,
        "weight_global_scale": group.scheme.weight.global_scale,
        fixed_scale_of(group): group.scheme.static,
    }
    needed.update(role for role, there in settings.items() if there)
    zeros = {"weight_zero_point", "input_zero_point"} if group.scheme.static else {"weight_zero_point"}
    return needed, zeros | {"weight_g_idx"}


def fixed_scale_of(group: Group) -> str:
    """The name of the tensor with the static scale of inputs, if they have one."""
    return "input_global_scale" if group.scheme.act == "nvfp4" else "input_scale"


def is_packed(group: Group) -> bool:
    return group.format not in (*BYTES, "mxfp8-quantized")


@dataclasses.dataclass(frozen=True)
class Parts:
    group: Group
    names: Mapping[str, str]
    """Role -> name in the file."""
    tensors: Mapping[str, Tensor]
    padded: bool
    """Whether no code crosses a word boundary, if the number of words is ambiguous."""

    def codes(self) -> tuple[Tensor, int, int]:
        """(codes as bitport stores them, N, K)."""
        number = self.group.scheme.weight.number
        if self.group.format == PACKED:
            words = self._matrix("weight_packed", torch.int32)
            rows, k = self._shaped("weight_shape", (2,), torch.int64, torch.int32).tolist()
            if rows != words.shape[0] or k < 1:
                self._fail("weight_shape", f"[{words.shape[0]}, columns]")
            return self._stream(words, k, number.bits), rows, k
        if number.kind == "int":
            codes = self._codes("weight", self._matrix("weight", torch.int8))
            return pack_bits(codes, number.bits), *codes.shape
        stored = self._matrix("weight_packed" if is_packed(self.group) else "weight", number.storage)
        n, width = stored.shape
        if width * 8 % number.bits:
            self._fail("weight_packed", f"rows of whole codes of {number.bits} bits")
        return stored, n, width * 8 // number.bits

    def scale(self, grid: tuple[int, int]) -> Tensor:
        kept = self.group.scheme.weight.scale
        if kept == "e8m0":
            return self._shaped("weight_scale", grid, torch.uint8, torch.float8_e8m0fnu).view(torch.float8_e8m0fnu)
        if kept == "e4m3":
            return self._shaped("weight_scale", grid, torch.float8_e4m3fn)
        scale = self._shaped("weight_scale", grid, *FLOATS)
        return scale.to(torch.float32) if kept == "float32" else scale

    def zero(self, n: int, grid: tuple[int, int]) -> Tensor | None:
        fmt = self.group.scheme.weight
        if self.group.symmetric:
            self._must_be_zero("weight_zero_point")
            return None if fmt.zero == "none" else torch.full(grid, 1 << (fmt.number.bits - 1), dtype=torch.uint8)
        if self.group.format == PACKED and fmt.block[0] == 1:
            words = self._matrix("weight_zero_point", torch.int32)
            return unpack_bits(self._stream(words.t(), n, fmt.number.bits), fmt.number.bits, n).t().contiguous()
        return self._codes("weight_zero_point", self._shaped("weight_zero_point", grid, torch.int8))

    def scale2(self) -> Tensor:
        return self._reciprocal("weight_global_scale", (1, 1))

    def perm(self, k: int) -> Tensor | None:
        """The order that sorts columns by group; None if they are sorted, or if it was never set (-1)."""
        group = self.group.scheme.weight.block[1]
        if "weight_g_idx" not in self.tensors or group == 0:
            return None
        group_of = self._shaped("weight_g_idx", (k,), torch.int32)
        unset = bool((group_of == -1).any())
        return None if unset else order_of(group_of, k, group, self.names["weight_g_idx"])

    def act_scale(self) -> Tensor | None:
        if not self.group.scheme.static:
            return None
        if (role := fixed_scale_of(self.group)) == "input_global_scale":
            return self._reciprocal(role, (1,))
        self._must_be_zero("input_zero_point")
        return self._shaped("input_scale", (1,), *FLOATS).to(torch.float32)

    def _reciprocal(self, role: str, shape: tuple[int, ...]) -> Tensor:
        divisor = self._shaped(role, shape, torch.float32)
        number = 1 / divisor
        if not (0 < float(number) < float("inf") and 0 < float(divisor) < float("inf")):
            self._fail(role, "a positive number that has a reciprocal")
        return number

    def _stream(self, words: Tensor, k: int, bits: int) -> Tensor:
        each = 32 // bits
        padded, dense = -(-k // each), word_count(k, bits)
        if words.shape[-1] != padded or (padded == dense and not self.padded):
            return to_stream(words, k, bits)
        codes = (words[..., None] >> (torch.arange(each, dtype=torch.int32) * bits)) & ((1 << bits) - 1)
        return pack_bits(codes.flatten(-2)[..., :k].to(torch.uint8), bits)

    def _codes(self, role: str, signed: Tensor) -> Tensor:
        bits = self.group.scheme.weight.number.bits
        codes = signed.to(torch.int16) + (1 << (bits - 1))
        if int(codes.min()) < 0 or int(codes.max()) >= 1 << bits:
            self._fail(role, f"integers of {bits} bits")
        return codes.to(torch.uint8)

    def _must_be_zero(self, role: str) -> None:
        if role in self.tensors and bool((self.tensors[role].to(torch.float32) != 0).any()):
            self._fail(role, "0, since quantization_config says that it is symmetric")

    def _matrix(self, role: str, dtype: torch.dtype) -> Tensor:
        tensor = self.tensors[role]
        if tensor.dtype != dtype or tensor.dim() != 2 or not tensor.numel():
            self._fail(role, f"a matrix of {dtype}")
        return tensor

    def _shaped(self, role: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """The tensor as ``shape``; in the file it may be flat: one number, or one per row."""
        tensor = as_grid(self.tensors[role], shape)
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
            self._fail(role, f"{' or '.join(map(str, dtypes))} {list(shape)}")
        return tensor.contiguous()

    def _fail(self, role: str, wanted: str) -> NoReturn:
        tensor = self.tensors[role]
        values = tensor.tolist() if 0 < tensor.numel() <= 4 else ""
        raise CheckpointError(f"{self.names[role]} must be {wanted}, not {tensor.dtype} {list(tensor.shape)} {values}")
