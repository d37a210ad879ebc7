"""The tensors of one compressed-tensors weight, as the parts of a QTensor. Nothing is known about them beforehand: each
accessor validates what it returns."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop.checks import E4M3, E8M0, POWERS, Stored, order_of
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
    weight: Stored
    padded: bool
    """Whether no code crosses a word boundary, if the number of words is ambiguous."""

    def codes(self) -> tuple[Tensor, int, int]:
        """(codes as bitport stores them, N, K)."""
        number = self.group.scheme.weight.number
        if self.group.format == PACKED:
            words = self.weight.expect("weight_packed", (torch.int32,), (None, None))
            rows, k = self.weight.expect("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
            if rows != words.shape[0] or k < 1:
                self._fail("weight_shape", f"[{words.shape[0]}, columns]")
            return self._stream(words, k, number.bits), rows, k
        if number.kind == "int":
            codes = self._codes("weight", self.weight.expect("weight", (torch.int8,), (None, None)))
            return pack_bits(codes, number.bits), *codes.shape
        role = "weight_packed" if is_packed(self.group) else "weight"
        stored = self.weight.expect(role, (number.storage,), (None, None))
        n, width = stored.shape
        if width * 8 % number.bits:
            self._fail("weight_packed", f"rows of whole codes of {number.bits} bits")
        return stored, n, width * 8 // number.bits

    def scale(self, grid: tuple[int, int]) -> Tensor:
        kept = self.group.scheme.weight.scale
        if kept == "e8m0":
            return self.weight.grid("weight_scale", POWERS, grid).view(E8M0)
        if kept == "e4m3":
            return self.weight.grid("weight_scale", (E4M3,), grid)
        scale = self.weight.grid("weight_scale", FLOATS, grid)
        return scale.to(torch.float32) if kept == "float32" else scale

    def zero(self, n: int, grid: tuple[int, int]) -> Tensor | None:
        fmt = self.group.scheme.weight
        if self.group.symmetric:
            self._must_be_zero("weight_zero_point")
            return None if fmt.zero == "none" else torch.full(grid, 1 << (fmt.number.bits - 1), dtype=torch.uint8)
        if self.group.format == PACKED and fmt.block[0] == 1:
            words = self.weight.expect("weight_zero_point", (torch.int32,), (None, None))
            return unpack_bits(self._stream(words.t(), n, fmt.number.bits), fmt.number.bits, n).t().contiguous()
        return self._codes("weight_zero_point", self.weight.grid("weight_zero_point", (torch.int8,), grid))

    def scale2(self) -> Tensor:
        return self._reciprocal("weight_global_scale", (1, 1))

    def perm(self, k: int) -> Tensor | None:
        """The order that sorts columns by group; None if they are sorted, or if it was never set (-1)."""
        group = self.group.scheme.weight.block[1]
        if "weight_g_idx" not in self.weight or group == 0:
            return None
        group_of = self.weight.grid("weight_g_idx", (torch.int32,), (k,))
        unset = bool((group_of == -1).any())
        return None if unset else order_of(group_of, k, group, self.weight.names["weight_g_idx"])

    def act_scale(self) -> Tensor | None:
        if not self.group.scheme.static:
            return None
        if (role := fixed_scale_of(self.group)) == "input_global_scale":
            return self._reciprocal(role, (1,))
        self._must_be_zero("input_zero_point")
        return self.weight.grid("input_scale", FLOATS, (1,)).to(torch.float32)

    def _reciprocal(self, role: str, shape: tuple[int, ...]) -> Tensor:
        divisor = self.weight.grid(role, (torch.float32,), shape)
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
        if role in self.weight and bool((self.weight[role].to(torch.float32) != 0).any()):
            self._fail(role, "0, since quantization_config says that it is symmetric")

    def _fail(self, role: str, wanted: str) -> NoReturn:
        tensor = self.weight[role]
        values = tensor.tolist() if 0 < tensor.numel() <= 4 else ""
        raise CheckpointError(
            f"{self.weight.names[role]} must be {wanted}, not {tensor.dtype} {list(tensor.shape)} {values}"
        )
