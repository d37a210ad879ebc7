"""Calibrated quantization of models larger than memory, from files to files, block by block; a killed run can be
resumed."""

from bitport.stream.quantize import KEEP, Stream

__all__ = ["KEEP", "Stream"]
