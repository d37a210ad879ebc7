"""Translation between the arguments of compressed-tensors, for weights and inputs alike, and Format::

    type, num_bits, symmetric       the numbers, and whether there is no zero point
    strategy                        tensor, channel (an input: token), group, tensor_group (nvfp4) or block
    group_size, block_structure     the block size for the last three
    scale_dtype                     torch.uint8 if scales are powers of two
    dynamic                         inputs: whether scales are computed on each call; "local": all but the global one

The others (observer, zp_dtype ..) determine how numbers were chosen, not what they mean.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from bitport.errors import CheckpointError
from bitport.interop.codec import named_scheme, same_numbers
from bitport.interop.configuration import refuse_unknown, setting
from bitport.numerics import ACTIVATIONS, Format
from bitport.numerics.format import LONGEST_BLOCK
from bitport.schemes import PRESETS, Scheme

PACKED = "pack-quantized"
BYTES = ("int-quantized", "float-quantized", "naive-quantized")
"""The formats with a byte per code: three names for the same."""
FIXED = {
    "nvfp4-pack-quantized": PRESETS["nvfp4"].weight,
    "mxfp4-pack-quantized": PRESETS["mxfp4"].weight,
    "mxfp6-pack-quantized": PRESETS["mxfp6"].weight,
    "mxfp8-quantized": PRESETS["mxfp8"].weight,
}
"""Formats with a fixed Format; they do not specify the rule by which scales were rounded to powers of two."""
FORMATS = (PACKED, *BYTES, *FIXED)

FLOATS = {8: "float8_e4m3", 6: "float6_e2m3", 4: "float4_e2m1"}
SCALES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}
WHOLE = {(0, 0): "tensor", (1, 0): "channel"}
"""Blocks of whole rows."""

CHOOSING = {"zp_dtype", "observer", "observer_kwargs"}
ARGUMENTS = {
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "scale_dtype"),
    *("dynamic", "actorder", *CHOOSING),
}


def format_of(said: Mapping[str, Any], what: str) -> Format:
    """The Format of arguments, with float32 scales unless they specify another type."""
    refuse_unknown(said, ARGUMENTS, what)
    bits, kind = setting(said, "num_bits", int, 8), setting(said, "type", str, "int").lower()
    if not (kind == "int" and 1 <= bits <= 8) and not (kind == "float" and bits in FLOATS):
        raise CheckpointError(f"{what}: type={kind!r} of {bits} bits; int of 1 to 8 and float of 4, 6 and 8 are read")
    strategy, block = _blocks(said, what)
    powers = setting(said, "scale_dtype", str, "").endswith("uint8") or bits < 8
    scale = "e8m0" if kind == "float" and block == (1, 32) and powers else "float32"
    try:
        return Format(
            dtype=FLOATS[bits] if kind == "float" else f"int{bits}",
            block=block,
            zero="none" if setting(said, "symmetric", bool, True) else "int",
            scale="e4m3" if strategy == "tensor_group" else scale,
            global_scale=strategy == "tensor_group",
        )
    except ValueError as error:
        raise CheckpointError(f"{what}: {told(said)}: {error}") from error


def arguments_of(fmt: Format, *, inputs: bool = False, dynamic: bool | str = False) -> dict[str, Any]:
    """The inverse of :func:`format_of`."""
    rows, columns = fmt.block
    strategy = WHOLE.get(fmt.block, "block" if rows != 1 else "tensor_group" if fmt.global_scale else "group")
    said: dict[str, Any] = {
        "type": "int" if fmt.number.kind == "int" else "float",
        "num_bits": fmt.number.bits,
        "symmetric": fmt.zero == "none",
        "strategy": "token" if inputs and strategy == "channel" else strategy,
        "group_size": columns if strategy in ("group", "tensor_group") else None,
        "dynamic": dynamic,
    }
    if strategy == "block":
        said["block_structure"] = [rows, columns]
    if fmt.scale in SCALES:
        said["scale_dtype"] = said["zp_dtype"] = SCALES[fmt.scale]
    return said


def formats_of(fmt: Format) -> tuple[str, ...]:
    """The formats that can store a weight in ``fmt``."""
    fixed = tuple(name for name, known in FIXED.items() if same_numbers(known, fmt))
    partly_whole = 0 in fmt.block and fmt.block not in WHOLE
    if fixed or partly_whole or fmt.scale in SCALES or fmt.zero == "float":
        return fixed
    if fmt.number.kind == "int":
        return (
            (PACKED, "int-quantized", "naive-quantized") if fmt.block[0] < 2 else ("int-quantized", "naive-quantized")
        )
    return ("float-quantized", "naive-quantized") if fmt.dtype == FLOATS[8] else ()


def scheme_of(fmt: Format, stored: str, act: str, static: bool) -> Scheme:
    """The scheme of a weight in the format ``stored``. Scales keep their dtype or become float32, which represents them
    exactly: whichever yields a preset, if any."""
    if stored in FIXED:
        return Scheme(weight=FIXED[stored], act=act, static=static)
    if fmt.dtype == "int1":  # symmetric int1 means -1 and 0 here, but -1/2 and 1/2 in bitport
        fmt = dataclasses.replace(fmt, zero="int")
    return named_scheme(fmt, act, static, ("input", "float32") if fmt.number.kind == "int" else ("float32", "input"))


def activation_of(said: Mapping[str, Any], what: str) -> tuple[str, bool]:
    """(name of the activation, whether the tensor-wide scale of inputs is static) for the arguments of inputs. They do
    not say how dynamic scales are computed: for int8 the library divides the largest magnitude by 127.5, and bitport by
    127."""
    fmt = format_of(said, what)
    act = next((name for name, known in ACTIVATIONS.items() if same_numbers(known, fmt)), None)
    dynamic = setting(said, "dynamic", (bool, str), False)
    fits = dynamic == "local" if fmt.global_scale else dynamic is True or (dynamic is False and fmt.block == (0, 0))
    if act is None or not fits or setting(said, "strategy", str, "").lower() == "channel":
        raise CheckpointError(
            f"{what}: {told(said)}, dynamic={dynamic!r}; read are int of 8 bits by tensor (symmetric) or dynamic by "
            f"token, float of 8 bits by tensor or dynamic by token or groups of 128, and dynamic mxfp8, mxfp4, nvfp4"
        )
    return act, fmt.global_scale or dynamic is False


def told(said: Mapping[str, Any]) -> str:
    keys = ("type", "num_bits", "symmetric", "strategy", "group_size", "block_structure")
    return ", ".join(f"{key}={said[key]!r}" for key in keys if said.get(key) is not None)


def _blocks(said: Mapping[str, Any], what: str) -> tuple[str, tuple[int, int]]:
    size, structure = setting(said, "group_size", int, None), setting(said, "block_structure", (list, str), None)
    if isinstance(structure, str):  # "128x128" in older files
        structure = [int(part) for part in re.findall(r"\d{1,10}", structure)]
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = setting(said, "strategy", str, usual).lower()
    whole = {name: block for block, name in WHOLE.items()} | {"token": (1, 0)}
    if strategy in whole:
        return strategy, whole[strategy]
    block = [1, size] if strategy in ("group", "tensor_group") else structure if strategy == "block" else None
    if block is None or len(block) != 2 or not all(type(each) is int and 1 <= each < LONGEST_BLOCK for each in block):
        raise CheckpointError(
            f"{what}: strategy={strategy!r} with group_size={size!r}, block_structure={structure!r}; tensor, channel, "
            f"token, group and tensor_group with a group_size, block with a block_structure [rows, columns] are read"
        )
    return strategy, (block[0], block[1])
