"""Validation of the settings in a quantization_config: each is read with its type and limits, or is an error."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bitport.errors import CheckpointError, shortened

LARGEST = 2**63
"""Of integers in a configuration: larger ones do not fit a float, or a tensor."""


def setting(config: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """``config[key]``; CheckpointError unless it is a ``kind``. ``default``: the value if it is absent or null."""
    value = config.get(key)
    if value is None and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(each.__name__ for each in kinds)
        raise CheckpointError(f"quantization_config: {key} must be {names}, not {value!r}")
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise CheckpointError(f"quantization_config: {key} must be within -2^63 and 2^63, not {value}")
    return value


def agreed(config: Mapping[str, Any], keys: Sequence[str], kind: type, default: Any = ...) -> Any:
    """The value of ``keys``, names of one setting, text in lowercase; CheckpointError if two of them contradict each
    other, since libraries differ in which they read. ``default``: the value if all are absent or null."""
    found = {key: setting(config, key, kind) for key in keys if config.get(key) is not None}
    if not found:
        return setting(config, keys[0], kind, default)
    first, *others = (value.lower() if isinstance(value, str) else value for value in found.values())
    if any(value != first for value in others):
        told = ", ".join(f"{key} {reprlib.repr(value)}" for key, value in found.items())
        raise CheckpointError(f"quantization_config: {told}: these mean the same, so keep the one that is right")
    return first


def one_of(config: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> str:
    """The lowercase value of ``key``, which must be among ``allowed``; the first of these is the default."""
    value: str = setting(config, key, str, allowed[0]).lower()
    if value not in allowed:
        raise CheckpointError(f"quantization_config: {key} {value!r}: {' and '.join(allowed)} are read")
    return value


def refuse_unknown(
    said: Mapping[str, Any], known: Collection[str], what: str, usual: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """CheckpointError for a setting of ``what`` that is not ``known``: it may change the numbers. It changes nothing if
    it is false, null, 0 or empty, or has its ``usual`` value."""
    for key, value in said.items():
        if key not in known and value and value != usual.get(key):
            raise CheckpointError(
                f"{what}: {key} is not understood; known are {shortened(sorted(known))}. Here it is "
                f"{reprlib.repr(value)}: remove it if you know that it changes no number"
            )


def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression ``pattern`` of a quantization_config."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"quantization_config: {pattern[:200]!r} is no regular expression: {error}") from error
