"""Intel XPU: PyTorch's oneDNN kernels."""

from functools import partial

import torch

from bitport.backends.aten import from_rows, int8pack_mm, int_mm, scaled_mm
from bitport.backends.xpu import int4pack_mm
from bitport.ops import Impl, register_kernel

FP8_RESULTS = (torch.bfloat16, torch.float16)
"""float32 is excluded: it is not established that the sums keep 24 bits."""

INT8 = partial(int8pack_mm.refuses, "signed_int8")
INT8_DYN, FP8_DYN = partial(int_mm.refuses, "signed_int8"), partial(scaled_mm.refuses, FP8_RESULTS)

for _kernel in (
    Impl("linear", "int4pack_mm", "xpu", int4pack_mm.run, from_rows("int4pack_mm", int4pack_mm.refuses)),
    Impl("linear", "int8pack_mm", "xpu", int8pack_mm.run, from_rows("int8pack_mm", INT8)),
    Impl("dyn_linear", "int_mm", "xpu", partial(int_mm.run, 0), from_rows("int_mm", INT8_DYN)),
    Impl("dyn_linear", "scaled_mm", "xpu", scaled_mm.run, from_rows("scaled_mm", FP8_DYN)),
):
    register_kernel(_kernel)
