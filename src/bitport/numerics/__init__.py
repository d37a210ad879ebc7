"""Number types, bit packing, exact codecs, scales and blocks. Pure tensor functions."""

from bitport.numerics.activations import (
    ACTIVATIONS,
    STATIC,
    activation_format,
    fake_quantize,
    quantize_rows,
    static_scale,
)
from bitport.numerics.blocks import block_amax, expand, from_blocks, spread, to_blocks
from bitport.numerics.codebooks import NF4, decode_codebook, encode_codebook
from bitport.numerics.codec import (
    Quantized,
    block_scale,
    dequantize,
    dequantize_codes,
    quantize,
    quantize_codes,
    quantize_dequantize,
)
from bitport.numerics.dtypes import FLOATS, SCALES, ZEROS
from bitport.numerics.error import decibels, kl_terms, numbers_at_once, sqnr, squares
from bitport.numerics.floats import decode, encode
from bitport.numerics.format import Format
from bitport.numerics.in_stretches import dequantize_now, is_computed, stretches
from bitport.numerics.packing import from_storage, pack_bits, packed_size, to_storage, unpack_bits
from bitport.numerics.qparams import Params, choose_qparams, power_of_two_scale
from bitport.numerics.rounding import RandomSource, Rounding, round_to_int
from bitport.numerics.types import NUMBER_TYPES, NumberType, number_type

__all__ = [
    "ACTIVATIONS",
    "FLOATS",
    "NF4",
    "NUMBER_TYPES",
    "SCALES",
    "STATIC",
    "ZEROS",
    "Format",
    "NumberType",
    "Params",
    "Quantized",
    "RandomSource",
    "Rounding",
    "activation_format",
    "block_amax",
    "block_scale",
    "choose_qparams",
    "decibels",
    "decode",
    "decode_codebook",
    "dequantize",
    "dequantize_codes",
    "dequantize_now",
    "encode",
    "encode_codebook",
    "expand",
    "fake_quantize",
    "from_blocks",
    "from_storage",
    "is_computed",
    "kl_terms",
    "number_type",
    "numbers_at_once",
    "pack_bits",
    "packed_size",
    "power_of_two_scale",
    "quantize",
    "quantize_codes",
    "quantize_dequantize",
    "quantize_rows",
    "round_to_int",
    "spread",
    "sqnr",
    "squares",
    "static_scale",
    "stretches",
    "to_blocks",
    "to_storage",
    "unpack_bits",
]
