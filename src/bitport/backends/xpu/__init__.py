"""Intel XPU: PyTorch's oneDNN kernels."""

from functools import partial

import torch

from bitport.backends.aten import int8pack_mm, int_mm, scaled_mm
from bitport.backends.xpu import int4pack_mm
from bitport.ops import Impl, register_kernel

FP8_RESULTS = (torch.bfloat16, torch.float16)
"""float32 is left out: nobody has shown that the sums keep 24 bits."""

register_kernel(Impl("linear", "int4pack_mm", "xpu", int4pack_mm.run, int4pack_mm.refuses))
register_kernel(Impl("linear", "int8pack_mm", "xpu", int8pack_mm.run, partial(int8pack_mm.refuses, "signed_int8")))
register_kernel(Impl("dyn_linear", "int_mm", "xpu", partial(int_mm.run, 0), partial(int_mm.refuses, "signed_int8")))
register_kernel(Impl("dyn_linear", "scaled_mm", "xpu", scaled_mm.run, partial(scaled_mm.refuses, FP8_RESULTS)))
