"""Serve bitport checkpoints by vLLM, using bitport's kernels::

    vllm serve OUT --load-format bitport

:func:`register` is an entry point of the group ``vllm.general_plugins``, which vLLM calls in each of its processes.
"""

from __future__ import annotations

NAME = "bitport"
"""Name of the quantization method and of the load format."""


def register() -> None:
    """Register the quantization method and the loader with vLLM, by importing them."""
    from bitport.integrations.vllm import config, loader  # noqa: F401
