"""Libraries that bitport can do without: how they are imported, and what they raise for files they cannot use."""

from __future__ import annotations

import importlib
from typing import Any

from safetensors import SafetensorError

from bitport.errors import BitportError

UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
)
"""The exceptions of transformers and diffusers for settings and files that they do not expect, such as a
ZeroDivisionError for 0 heads; for config.json, huggingface_hub has one more."""


def optional(module: str, extra: str, wanted_by: str) -> Any:
    """Import ``module``; BitportError with how to install ``extra`` if it is missing. ``wanted_by``: the beginning of
    the error, before the name of the library, such as "Hugging Face models need"."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        raise BitportError(f"{wanted_by} {library}, which is not installed: pip install 'bitport[{extra}]'") from error
