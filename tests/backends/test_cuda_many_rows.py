"""kernels/many_rows.cu on machines without a GPU: its numbers, from the same source on an emulated device; what is
refused; which size is chosen; and that each compiles to the intended code. test_gpu.py runs the real kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.backends.cuda import capability, many_rows
from bitport.backends.cuda.many_rows import COSTS, Form, Size, size_of, sizes, source
from bitport.ops import Sample, Weight
from bitport.schemes import preset
from tests.backends.emulated import Emulated, emulated, every_code_and_zero, in_place_of_a_device
from tests.backends.products import products, shortfall
from tests.native.builds import assembled
from tests.turns import slow

BF16, FP16 = torch.bfloat16, torch.float16
MEMORY = 227 << 10
"""Bytes of shared memory available to a block on sm_90."""


def arguments(scheme: str, dtype: torch.dtype = BF16, m: int = 5, k: int = 256) -> list[Any]:
    (sample,) = products(scheme, dtype, "plain", 40, k, m=m)
    return list(sample.args)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "of", lambda device: (9, 0))
    monkeypatch.setattr(many_rows, "missing", lambda: None)


NARROW, MIDDLE, WIDE = (size for size, _ in COSTS["int4"])
FEW = COSTS["int8"][0][0]
CASES = (
    (NARROW, "int4", 64, 384, 64, BF16, True),
    (NARROW._replace(splits=2), "int4-g32", 70, 320, 37, BF16, False),
    (NARROW._replace(splits=4), "int4-channel", 65, 576, 3, FP16, True),
    (MIDDLE, "int4-g64-sym", 130, 512, 129, BF16, True),
    (MIDDLE._replace(splits=2), "int4-g192", 33, 576, 100, FP16, True),
    (WIDE._replace(splits=2), "int4-channel-sym", 131, 192, 260, BF16, False),
    (WIDE, "int4-g32-sym", 16, 128, 255, FP16, True),
    (FEW, "int8", 67, 640, 1, BF16, True),
    (FEW._replace(splits=4), "int8-g128", 64, 128, 16, BF16, True),
    (NARROW._replace(splits=4), "int8-g32", 50, 576, 33, FP16, True),
    (MIDDLE._replace(splits=2), "int8-sym", 128, 320, 128, FP16, False),
    (WIDE, "int8-g64", 40, 256, 200, BF16, True),
)
"""Rows and columns that fill a block or not; scales per row, of several steps, of one and of half a step; fewer and
more steps of K than are prefetched, and with 2 steps some of 4 blocks have none."""


@pytest.fixture
def emulator(
    compiler: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, hopper: None
) -> None:
    def build(size: Size, form: Form, device: torch.device) -> Emulated:
        return emulated("many_rows", source(size, form), compiler, tmp_path_factory.getbasetemp())

    monkeypatch.setattr(many_rows, "_function", build)
    in_place_of_a_device(monkeypatch)


def product(sample: Sample, size: Size) -> torch.Tensor:
    x, *rest = sample.args
    return many_rows.product(x, Weight(*rest[:10]), rest[10], size)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("size", "scheme", "n", "k", "m", "dtype", "bias"), CASES)
def test_numbers(size: Size, scheme: str, n: int, k: int, m: int, dtype: torch.dtype, bias: bool) -> None:
    (sample,) = products(scheme, dtype, "plain", n, k, m=m, with_bias=bias)
    assert many_rows.refuses(preset(scheme).weight.dtype, *sample.args) is None
    y = product(sample, size)
    assert y.dtype == dtype
    assert shortfall(sample, y) <= 0
    assert torch.equal(y, product(sample, size)), "other threads come first, and the sums are the same"


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("number", ["int4", "int8"])
def test_every_code_and_zero(number: str, dtype: torch.dtype) -> None:
    """Their values are exact."""
    weights, exact = every_code_and_zero(number, dtype)
    for weight in weights:
        assert torch.equal(many_rows.product(torch.eye(256, dtype=dtype), weight, None, WIDE).double(), exact.T)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("scheme", ["int4", "int4-sym", "int4-g32", "int4-channel", "int8", "int8-g128"])
def test_what_it_takes(scheme: str) -> None:
    for dtype in (BF16, FP16):
        assert many_rows.refuses(preset(scheme).weight.dtype, *arguments(scheme, dtype)) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheme": "nf4"}, "must be int4"),
        ({"scheme": "int8"}, "must be int4"),
        ({"scheme": "int4", "dtype": torch.float32}, "bfloat16 or both float16"),
        ({"scheme": "int4-sym", "k": 288}, "a multiple of 64"),
        ({"scheme": "int4", "m": 1025}, "1 to 1024 rows"),
        ({"scheme": "int4", "m": 0}, "x has no rows"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], reason: str) -> None:
    assert reason in str(many_rows.refuses("int4", *arguments(**change)))


@pytest.mark.usefixtures("hopper")
def test_what_it_refuses_of_a_weight() -> None:
    x, *rest = arguments("int4")
    weight = Weight(*rest[:10])
    for changed, reason in (
        (weight._replace(layout="cpu_tiles"), "layout plain or signed_int8"),
        (weight._replace(zero=weight.scale), "zeros must be uint8"),
        (weight._replace(scale2=weight.scale), "a scale of the scales"),
        (weight._replace(scale=weight.scale.float()), "the scale must both"),
        (weight._replace(block_n=2), "of one row"),
        (weight._replace(block_k=16), "32 columns or a multiple of 64"),
        (weight._replace(n=0), "the weight has no rows"),
    ):
        assert reason in str(many_rows.refuses("int4", x, *changed, *rest[10:]))
    assert many_rows.refuses("int4", x[:, :0], *weight._replace(k=0, block_k=0), *rest[10:]) == "x has no columns"


def test_other_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "of", lambda device: (8, 0))
    assert "sm9x" in str(many_rows.refuses("int4", *arguments("int4")))


@pytest.mark.parametrize(("number", "bits"), [("int4", 4), ("int8", 8)])
def test_every_size_fits(number: str, bits: int) -> None:
    for size, _ in COSTS[number]:
        assert size.blocks * size.shared(bits) <= MEMORY
        assert size.stages > 3, "something is copied ahead"
    for _, size in sizes(number, 64, 4096, 4096, 132):
        assert size.rows % size.splits == 0, "a block adds up whole rows"


MEASURED = {
    (64, 4096, 4096): (64, 2),
    (256, 4096, 4096): (128, 2),
    (512, 4096, 4096): (256, 2),
    (1024, 4096, 4096): (256, 1),
    (128, 14336, 4096): (128, 1),
    (256, 14336, 4096): (256, 1),
    (256, 4096, 14336): (128, 2),
    (512, 8192, 3072): (256, 1),
}
"""(rows, N, K) -> (rows per block, splits) of the fastest on an H100."""


def test_sizes_are_those_that_were_fastest() -> None:
    chosen = {given: size_of("int4", *given, 132) for given in MEASURED}
    assert {given: (size.rows, size.splits) for given, size in chosen.items()} == MEASURED


@pytest.mark.parametrize(
    "form", [Form(4, 0, 1, BF16), Form(4, 0, 2, FP16), Form(8, 0, 0, BF16), Form(8, 0x80, 2, FP16)], ids=str
)
@pytest.mark.parametrize("splits", [2, *slow(1)])
def test_registers_are_enough(splits: int, form: Form, tmp_path: Path) -> None:
    """No register is spilled, and matrix products overlap with the preparation of the next ones. They do not where the
    compiler sees writes to registers that a product in flight reads."""
    for size, _ in COSTS[f"int{form.bits}"]:
        said = assembled(source(size._replace(splits=splits), form), "90a", tmp_path)
        assert "Performance Loss" not in said
        assert re.findall(r"(\d+) bytes spill", said) == ["0", "0"]
