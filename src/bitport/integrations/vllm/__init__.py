"""vLLM serves checkpoints of bitport, by the kernels that bitport has for its device::

    vllm serve OUT --load-format bitport

:func:`register` is an entry point of the group ``vllm.general_plugins``: vLLM calls it in each of its processes.
"""

from __future__ import annotations

NAME = "bitport"
"""Of the quantization and of the load format."""


def register() -> None:
    """Importing the two makes them known to vLLM."""
    from bitport.integrations.vllm import config, loader  # noqa: F401
