"""Format: the number type a matrix is stored in, how many elements share a scale, and how that scale is stored.

int       value = (code - zero) * scale          zero = the type's midpoint where the format has no zero point
others    value = decode(code) * scale           scale = block scale [* global scale]
"""

from dataclasses import dataclass

import torch

from bitport.numerics.packing import packed_size
from bitport.numerics.types import NumberType, number_type

ZERO_KINDS = ("none", "int", "float")
SCALE_RULES = ("floor", "ceil", "even", "rceil")
SCALE_DTYPES: dict[str, torch.dtype | None] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "input": None,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}
FLOAT8_SCALES = ("e8m0", "e4m3")


LONGEST_BLOCK = 1 << 31
"""Exclusive upper bound of a block's length: no matrix is longer, and native kernels take it as a 64-bit integer."""


def _choose(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"Format.{field}={value!r}: allowed are {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a matrix [..., N, K] is quantized. `block` = (rows, columns) that share one scale, 0 = the whole axis:

        tensor (0, 0)    channel or token (1, 0)    group (1, g)    2-D block (128, 128)

    Blocks at the far edges may be short. `scale` is the storage dtype of the scale; "input" means the dtype of the
    tensor being quantized. `scale_rule` says how an e8m0 scale is rounded to a power of two (see qparams).
    `global_scale` adds one float32 scale over the whole matrix, so that e4m3 block scales use their full range (nvfp4).
    """

    dtype: str
    block: tuple[int, int] = (1, 0)
    zero: str = "none"
    scale: str = "float32"
    scale_rule: str = "floor"
    global_scale: bool = False

    def __post_init__(self) -> None:
        number = number_type(self.dtype)
        _choose("zero", self.zero, ZERO_KINDS)
        _choose("scale", self.scale, tuple(SCALE_DTYPES))
        _choose("scale_rule", self.scale_rule, SCALE_RULES)
        if number.kind == "float" and not number.signed:
            raise ValueError(f"Format.dtype={self.dtype!r} is a type for scales; use scale='e8m0' with another dtype")
        block = self.block
        if not isinstance(block, tuple) or [type(b) is int and 0 <= b < LONGEST_BLOCK for b in block] != [True, True]:
            raise ValueError(
                f"Format.block={block!r}: must be (rows, columns), whole numbers >= 0 and < 2^31, 0 = the whole axis"
            )
        if self.zero != "none" and number.kind != "int":
            raise ValueError(f"Format.zero={self.zero!r}: only integer types have a zero point, {self.dtype} has none")
        if self.zero != "none" and self.scale in FLOAT8_SCALES:
            raise ValueError(f"Format.zero={self.zero!r} needs a 16- or 32-bit float scale, not scale={self.scale!r}")
        if self.scale_rule != "floor" and self.scale != "e8m0":
            raise ValueError(f"Format.scale_rule={self.scale_rule!r} is for scale='e8m0', not scale={self.scale!r}")
        if self.scale_rule == "even" and number.kind == "codebook":
            raise ValueError(f"Format.scale_rule='even' needs a mantissa, {self.dtype} is a table; use another rule")
        if self.scale == "e8m0" and not number.has_zero:
            raise ValueError(
                f"Format.scale='e8m0' with dtype={self.dtype!r}: a block of zeros needs the scale 0, e8m0 has none"
            )
        if self.global_scale and self.scale != "e4m3":
            raise ValueError(f"Format.global_scale=True is for scale='e4m3', not scale={self.scale!r}")

    @property
    def number(self) -> NumberType:
        """The number type of the codes."""
        return number_type(self.dtype)

    def scale_dtype(self, input_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the scales of a tensor of ``input_dtype`` are stored."""
        return SCALE_DTYPES[self.scale] or input_dtype

    def zero_dtype(self, input_dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which its zero points are stored; None if it has none."""
        return {"none": None, "int": torch.uint8, "float": self.scale_dtype(input_dtype)}[self.zero]

    def block_shape(self, n: int, k: int) -> tuple[int, int]:
        """Block size with 0 resolved; the single block of an empty axis has length 1."""
        return self.block[0] or max(n, 1), self.block[1] or max(k, 1)

    def scale_shape(self, n: int, k: int) -> tuple[int, int]:
        """Number of blocks along each axis; block size 0 always gives one block, even for an empty axis."""
        rows, columns = self.block
        return -(-n // rows) if rows else 1, -(-k // columns) if columns else 1

    def nbytes(self, n: int, k: int, input_dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of one stored matrix: data, scales, zero points and global scale."""
        rows, columns = self.scale_shape(n, k)
        zero_dtype = self.zero_dtype(input_dtype)
        per_block = self.scale_dtype(input_dtype).itemsize + (zero_dtype.itemsize if zero_dtype else 0)
        return n * packed_size(k, self.number.bits) + rows * columns * per_block + (4 if self.global_scale else 0)

    def bits_per_weight(self, n: int, k: int, input_dtype: torch.dtype = torch.bfloat16) -> float:
        """:meth:`nbytes` in bits, divided by the number of elements."""
        return 8 * self.nbytes(n, k, input_dtype) / (n * k)
