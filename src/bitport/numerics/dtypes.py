"""The dtypes of values, scales and zero points. float64 is not among them: codes are computed in float32, so it would
be rounded twice."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of values, and of results computed in the dtype of the values."""

SCALES = (*FLOATS, torch.float8_e8m0fnu, torch.float8_e4m3fn)
ZEROS = (torch.uint8, *FLOATS)
