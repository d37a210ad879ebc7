"""Calibrated quantization of models larger than memory: from files to files, block by block, to be taken up again after
it was killed."""

from bitport.stream.quantize import Stream

__all__ = ["Stream"]
