"""PyTorch's products with a quantized weight: which kernel dequantizes the weight, or multiplies by it in packed
form."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import KernelError
from bitport.numerics import fake_quantize, sqnr
from bitport.ops import IMPLS, use_kernel
from bitport.ops.samples import product_budget
from bitport.schemes import preset
from bitport.tensor import QTensor

Make = Callable[..., QTensor]
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SOME = pytest.mark.parametrize("scheme", ["int4-g32", "int8", "nf4", "nvfp4-wo"])


def asks(op: str, product: Callable[[], Tensor]) -> bool:
    with use_kernel(f"{op}=none of that name"):
        try:
            product()
        except KernelError as error:
            return f"forced for {op}" in str(error)
    return False


@FLOATS
@SOME
def test_products_of_pytorch_have_the_weight_from_the_kernel_of_the_device(
    make: Make, scheme: str, dtype: torch.dtype
) -> None:
    """Dequantizing with torch's ops would take several times as long as the product. A global scale is multiplied in a
    different order, so values may differ by an ulp; y is rounded too."""
    conv = make(scheme, 8, 16, 3, 3, kind="conv", dtype=dtype)
    experts, transposed = make(scheme, 2, 64, 96, dtype=dtype), make(scheme, 2, 96, 64, transposed=True, dtype=dtype)
    image = torch.randn(2, 16, 9, 9, dtype=dtype)
    products: list[tuple[QTensor, Callable[[Tensor], Tensor]]] = [
        (conv, lambda weight: F.conv2d(image, weight, padding=1)),
        (experts, lambda weight: torch.bmm(torch.ones(2, 5, 64, dtype=dtype), weight)),
        (transposed, lambda weight: torch.bmm(torch.ones(2, 65, 96, dtype=dtype), weight)),
        (transposed, lambda weight: torch.bmm(torch.ones(2, 5, 96, dtype=dtype, requires_grad=True), weight)),
        (transposed, lambda weight: torch.ones(5, 96, dtype=dtype) @ weight),
    ]
    for q, product in products:
        expected, found = product(q.dequantize(dtype)), product(q)
        if q.scale2 is None:
            assert torch.equal(found, expected), q.shape
        assert float(sqnr(expected, found)) > -20 * math.log10(2 * torch.finfo(dtype).eps), q.shape
        assert asks("dequantize", lambda product=product, q=q: product(q))  # type: ignore[misc]


@FLOATS
@SOME
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_few_rows_for_each_expert_are_multiplied_by_packed_weights(
    make: Make, rows: int, scheme: str, dtype: torch.dtype
) -> None:
    powers = torch.exp2(torch.randint(-1, 2, (96,)).float())  # multiplying x by them is exact
    q, x = make(scheme, 3, 64, 96, dtype=dtype, pre_scale=powers), torch.randn(3, rows, 96, dtype=dtype)
    y = torch.bmm(x, q.mT)
    wanted = x.double() @ q.dequantize(torch.float64).mT
    assert (y.dtype, y.shape) == (dtype, wanted.shape)
    assert float(sqnr(wanted, y)) >= product_budget(dtype, 96, wanted.numel())
    packed = bool(IMPLS.get(("grouped_linear", "cpu")))  # otherwise no kernel takes it
    assert asks("grouped_linear", lambda: torch.bmm(x, q.mT)) is packed
    assert asks("dequantize", lambda: torch.bmm(x, q.mT)) is not packed


ROUNDED = ("int8-dyn", "int4-int8-g32", "fp8-row", "mxfp8", "int8-static")


@FLOATS
@pytest.mark.parametrize("scheme", ROUNDED)
def test_so_are_few_rounded_ones(make: Make, scheme: str, dtype: torch.dtype) -> None:
    """By the product with a kernel for such inputs or, with a fixed scale, as floats that have been rounded."""
    act = preset(scheme).act
    scale = torch.tensor([[0.02]]) if preset(scheme).static else None
    q, x = make(scheme, 3, 64, 96, dtype=dtype, act_scale=scale), torch.randn(3, 7, 96, dtype=dtype)
    with torch.no_grad():
        y = torch.bmm(x, q.mT)
    wanted = fake_quantize(x, act, scale).double() @ q.dequantize(torch.float64).mT
    assert (y.dtype, y.shape) == (dtype, wanted.shape)
    assert float(sqnr(wanted, y)) >= product_budget(dtype, 96, wanted.numel())
    op = "grouped_linear" if scale is not None else "dyn_grouped_linear"
    packed = bool(IMPLS.get((op, "cpu")))
    assert asks(op, lambda: torch.bmm(x, q.mT)) is packed
