"""The dtypes that values, scales and zero points come in. float64 is none of them: codes are computed in float32,
so it would be rounded twice."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Of values, and of what is made from them in their dtype."""

SCALES = (*FLOATS, torch.float8_e8m0fnu, torch.float8_e4m3fn)
ZEROS = (torch.uint8, *FLOATS)
