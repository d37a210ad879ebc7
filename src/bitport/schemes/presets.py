"""Schemes by name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re

from bitport.errors import SchemeError
from bitport.numerics import Format
from bitport.schemes.elsewhere import meant_elsewhere
from bitport.schemes.scheme import Scheme

TENSOR, CHANNEL, BLOCK128 = (0, 0), (1, 0), (128, 128)


def _int(
    bits: int, block: tuple[int, int], zero: str, act: str = "", scale: str = "input", static: bool = False
) -> Scheme:
    return Scheme(weight=Format(dtype=f"int{bits}", block=block, zero=zero, scale=scale), act=act, static=static)


def _float(dtype: str, block: tuple[int, int], act: str, scale: str = "float32", global_scale: bool = False) -> Scheme:
    return Scheme(weight=Format(dtype=dtype, block=block, scale=scale, global_scale=global_scale), act=act)


def _mx(dtype: str, act: str, rule: str) -> Scheme:
    return Scheme(weight=Format(dtype=dtype, block=(1, 32), scale="e8m0", scale_rule=rule), act=act)


PRESETS: dict[str, Scheme] = {
    **{f"int{bits}": _int(bits, (1, 128), "int") for bits in range(2, 8)},
    "int8": _int(8, CHANNEL, "none"),
    "int8-dyn": _int(8, CHANNEL, "none", act="int8", scale="float32"),
    "int8-static": _int(8, CHANNEL, "none", act="int8-tensor", scale="float32", static=True),
    "int4-int8": _int(4, (1, 128), "none", act="int8"),
    "int4-fp8": _int(4, (1, 128), "none", act="fp8"),
    "fp8": _float("float8_e4m3", TENSOR, "fp8-tensor"),
    "fp8-row": _float("float8_e4m3", CHANNEL, "fp8"),
    "fp8-block": _float("float8_e4m3", BLOCK128, "fp8-128"),
    "fp8-wo": _float("float8_e4m3", CHANNEL, ""),
    "fp8-e5m2-wo": _float("float8_e5m2", CHANNEL, ""),
    "mxfp8": _mx("float8_e4m3", "mxfp8", "rceil"),
    "mxfp6": _mx("float6_e2m3", "mxfp8", "even"),
    "mxfp4": _mx("float4_e2m1", "mxfp4", "even"),
    "nvfp4": _float("float4_e2m1", (1, 16), "nvfp4", scale="e4m3", global_scale=True),
    "nf4": _float("nf4", (1, 64), "", scale="input"),
}
"""Schemes by name, to which :func:`preset` adds suffixes."""

ZERO_SUFFIX = {"sym": "none", "asym": "int", "fzero": "float"}
BLOCK_SUFFIX = {"tensor": TENSOR, "channel": CHANNEL}
NUMBER = r"[1-9][0-9]{0,9}"
"""At most ten digits, as many as the size of a block can have: Python refuses to read thousands of them."""
SUFFIXES = ("g<N>", "b<R>x<C>", *BLOCK_SUFFIX, *ZERO_SUFFIX, "wo", "static")


def preset(name: str) -> Scheme:
    """The scheme called ``name``; SchemeError with the known names for any other.

    A name is one of :data:`PRESETS`, then any of these suffixes, such as ``int4-g32-sym`` or ``mxfp4-wo``::

        -g<N>       one scale per N inputs          -channel  one per output row     -tensor  one for all
        -b<R>x<C>   one per block of R rows and C inputs
        -sym        no zero point     -asym  integer zero point     -fzero  float zero point (HQQ, tinygemm)
        -wo         weight only: the input is not rounded    -static  its scale is fixed by calibration
    """
    if not isinstance(name, str):
        hint = meant_elsewhere(type(name).__name__)
        raise SchemeError(f"a scheme is given as a Scheme or by name, such as 'int4', not as {name!r}{hint}")
    base = _base(name)
    if base is None:
        raise SchemeError(
            f"unknown scheme {name!r}{_meant(name)}; presets: {', '.join(PRESETS)}; after a dash: "
            f"{', '.join(SUFFIXES)}; docs/choosing.md has the names of other libraries"
        )
    scheme = PRESETS[base]
    said: set[str] = set()
    for suffix in name[len(base) + 1 :].split("-") if name != base else ():
        change = _read(suffix)
        if change is None:
            longer = f"{base}-{suffix}"
            raise SchemeError(
                f"scheme {name!r}: unknown suffix {suffix!r}{_meant(name)}; allowed: {', '.join(SUFFIXES)}"
                + (f"; {longer} is a preset, to which suffixes are added" if longer in PRESETS else "")
            )
        (field,) = change
        if field in said:
            raise SchemeError(f"scheme {name!r}: its {field} is given twice")
        said.add(field)
        scheme = _with(scheme, change, name)
    return scheme


def scheme_of(given: str | Scheme) -> Scheme:
    """``given``, or the scheme of that name."""
    return given if isinstance(given, Scheme) else preset(given)


def _base(name: str) -> str | None:
    """The longest preset with which ``name`` begins."""
    return max((p for p in PRESETS if name == p or name.startswith(p + "-")), key=len, default=None)


def _read(suffix: str) -> dict[str, object] | None:
    """What ``suffix`` says about one of "block", "zero" and "input"; None if it is none."""
    if suffix in ("wo", "static"):
        return {"input": suffix}
    if suffix in ZERO_SUFFIX:
        return {"zero": ZERO_SUFFIX[suffix]}
    if suffix in BLOCK_SUFFIX:
        return {"block": BLOCK_SUFFIX[suffix]}
    if match := re.fullmatch(rf"g({NUMBER})", suffix):
        return {"block": (1, int(match[1]))}
    if match := re.fullmatch(rf"b({NUMBER})x({NUMBER})", suffix):
        return {"block": (int(match[1]), int(match[2]))}
    return None


def _with(scheme: Scheme, change: dict[str, object], name: str) -> Scheme:
    if change.get("input") == "wo":
        return dataclasses.replace(scheme, act="", static=False)
    if change.get("input") == "static":
        return dataclasses.replace(scheme, static=True)
    try:
        return dataclasses.replace(scheme, weight=dataclasses.replace(scheme.weight, **change))  # type: ignore[arg-type]
    except ValueError as error:
        raise SchemeError(f"scheme {name!r}: {error}") from error


def _meant(name: str) -> str:
    """For an error about ``name``: what was probably meant, if anything."""
    plain = name.strip().lower().replace("_", "-")
    if plain != name:
        try:
            preset(plain)
        except SchemeError:
            pass
        else:
            return f" (did you mean {plain!r}?)"
    if theirs := meant_elsewhere(name):
        return theirs
    near = [] if _base(plain) else difflib.get_close_matches(plain[:99], PRESETS)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


@functools.cache
def name_of(scheme: Scheme) -> str:
    """The inverse of :func:`preset`: preset(name_of(s)) == s, or 'custom' if no name describes s."""
    candidates = (_name_from(base, scheme) for base in PRESETS)
    return min((name for name in candidates if name), key=len, default="custom")


def described(scheme: Scheme) -> str:
    """A human-readable description of ``scheme``, whether it has a name or not."""
    fmt = scheme.weight
    zero = {"none": "", "int": "-asym", "float": "-fzero"}[fmt.zero]
    parts = [f"{fmt.dtype}-{_block_suffix(fmt.block)}{zero}"]
    parts += [] if fmt.scale == "input" else [f"{fmt.scale} scales"]
    parts += ["global scale"] if fmt.global_scale else []
    parts += [f"{'static ' * scheme.static}{scheme.act} inputs"] if scheme.act else []
    return f"custom({', '.join(parts)})"


def _name_from(base: str, scheme: Scheme) -> str | None:
    name = base
    if scheme.weight.block != PRESETS[base].weight.block:
        name += "-" + _block_suffix(scheme.weight.block)
    if scheme.weight.zero != PRESETS[base].weight.zero:
        name += "-" + next(suffix for suffix, zero in ZERO_SUFFIX.items() if zero == scheme.weight.zero)
    if PRESETS[base].act and not scheme.act:
        name += "-wo"
    if scheme.static and not PRESETS[base].static:
        name += "-static"
    try:
        return name if preset(name) == scheme else None
    except SchemeError:
        return None


def _block_suffix(block: tuple[int, int]) -> str:
    for suffix, named in BLOCK_SUFFIX.items():
        if block == named:
            return suffix
    rows, cols = block
    return f"g{cols}" if rows == 1 else f"b{rows}x{cols}"
