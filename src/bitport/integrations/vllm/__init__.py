"""Serve bitport checkpoints by vLLM, using bitport's kernels::

    vllm serve OUT --load-format bitport

:func:`register` is an entry point of the group ``vllm.general_plugins``, which vLLM calls in each of its processes.
"""

from __future__ import annotations

import functools

NAME = "bitport"
"""Name of the quantization method and of the load format."""

FITS = ">=0.32,<0.34"
"""The versions of vLLM whose internals this is made for, as in the extra ``vllm``."""


@functools.cache
def register() -> None:
    """Register the quantization method and the loader with vLLM, by importing them. vLLM calls this whatever model it
    is to serve, and ends if it fails: where a vLLM has other internals, only the use of bitport is an error."""
    try:
        # The configuration comes last: it registers itself only where all the rest is there.
        from bitport.integrations.vllm import loader, config  # noqa: F401, I001
    except (ImportError, AttributeError) as error:
        from bitport.integrations.vllm.misfit import register_misfit

        register_misfit(error)
