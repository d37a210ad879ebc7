"""Calibrated quantization of models larger than memory: from files to files, block by block, to be taken up again after
it was killed."""

from bitport.stream.quantize import KEEP, Stream

__all__ = ["KEEP", "Stream"]
