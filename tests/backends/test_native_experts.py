"""Products of experts in the native kernels, whose threads take whole experts or share the tiles of each: the result is
bit for bit the same."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest
import torch

from bitport.backends.cpu.dispatcher import TORCH
from bitport.ops import use_kernel
from bitport.ops.product import operand
from bitport.tensor import QTensor
from tests.backends.taken import BF16, compiled, takes, tiles
from tests.scripts import printed

pytestmark = compiled
N, K = 80, 192
ROWS = {
    "a row each": [1] * 9,
    "alike": [40] * 8,
    "one has most": [1, 300, 2, 1],
    "the last has most": [3, 1, 0, 2, 200],
    "many without": [0, 0, 5, 0, 0, 0, 5, 0, 0],
    "all but one without": [0, 0, 70, 0],
    "one": [130],
    "two": [33, 33],
    "none": [0, 0, 0],
}
PRODUCTS = {
    "int4-g32": "",
    "int8": "",
    "nf4": "",
    "nvfp4-wo": "",
    "int8-dyn": "int8",
    "int4-int8": "int8-asym",
    "fp8-block": "fp8",
}
"""Weight scheme -> rounding of x."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def grouped(x: torch.Tensor, ends: torch.Tensor, experts: QTensor, act: str) -> torch.Tensor:
    op = torch.ops.bitport.dyn_grouped_linear if act else torch.ops.bitport.grouped_linear
    result: torch.Tensor = op.default(x, ends, *operand(experts), *([act] if act else []))
    return result


def one_by_one(x: torch.Tensor, rows: list[int], experts: QTensor, act: str) -> torch.Tensor:
    """Every expert's product separately, in one thread; zeros past the last row."""
    torch.set_num_threads(1)
    y, first = x.new_zeros(len(x), N), 0
    for expert, count in enumerate(rows):
        data, scale, zero, scale2, *rest = operand(experts)
        own = [None if part is None else part[expert] for part in (data, scale, zero, scale2)]
        some, rounding = x[first : first + count], [act, None] if act else []
        op = torch.ops.bitport.dyn_linear if act else torch.ops.bitport.linear
        if count:
            y[first : first + count] = takes(lambda: op.default(some, *own, *rest, *rounding, None))  # noqa: B023
        first += count
    return y


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("scheme", PRODUCTS)
def test_bits_are_those_of_each_expert_alone(scheme: str, dtype: torch.dtype, threads: None) -> None:
    act = PRODUCTS[scheme]
    for name, rows in ROWS.items():
        experts = tiles(scheme, len(rows), N, K, dtype=dtype)
        x, ends = torch.randn(sum(rows) + 3, K, dtype=dtype), torch.tensor(rows).cumsum(0).int()
        expected = one_by_one(x, rows, experts, act)
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            y = takes(lambda: grouped(x, ends, experts, act))  # noqa: B023
            assert torch.equal(y, expected), (name, count)


@pytest.mark.parametrize("count", [1, 2])
def test_products_that_no_expert_has_are_handed_over(count: int, threads: None) -> None:
    """The integer product takes no lookup table of floats: it is refused in every thread."""
    torch.set_num_threads(count)
    experts, x, ends = tiles("nf4", 4, N, K), torch.randn(103, K, dtype=BF16), torch.tensor([20, 50, 75, 103]).int()
    y = takes(lambda: grouped(x, ends, experts, "int8"), 0)
    with use_kernel("generic"):
        assert torch.equal(y, grouped(x, ends, experts, "int8"))


def test_many_python_threads_at_once(threads: None) -> None:
    rows = [20, 30, 25, 28]
    experts, x, ends = tiles("int8-dyn", 4, N, K), torch.randn(103, K, dtype=BF16), torch.tensor(rows).cumsum(0).int()
    expected = one_by_one(x, rows, experts, "int8")
    torch.set_num_threads(2)
    wrong: list[int] = []

    def work(number: int) -> None:
        wrong.extend(number for _ in range(20) if not torch.equal(grouped(x, ends, experts, "int8"), expected))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_within_a_parallel_region_of_torch_they_run_alone(threads: None) -> None:
    rows = [20, 30, 25, 28]
    experts, x, ends = tiles("int4-g32", 4, N, K), torch.randn(103, K, dtype=BF16), torch.tensor(rows).cumsum(0).int()
    same: list[bool] = []
    expected = one_by_one(x, rows, experts, "")
    torch.set_num_threads(2)
    body = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    equal = lambda: torch.equal(grouped(x, ends, experts, ""), expected)  # noqa: E731
    run = body(lambda begin, end, _: same.extend(equal() for _ in range(begin, end)))
    i64 = ctypes.c_int64
    assert ctypes.CDLL(str(TORCH)).torch_parallel_for(i64(0), i64(8), i64(1), run, None) == 0
    assert same == [True] * 8


def test_threads_are_woken_once_where_that_keeps_them_all_busy() -> None:
    """Counted by a pool that replaces torch's for good, hence in a separate process."""
    script = """
import ctypes, torch
from bitport.backends import cpu
from tests.backends.test_native_experts import grouped
from tests.backends.taken import BF16, tiles

woken = 0
i64, pointer = ctypes.c_int64, ctypes.c_void_p
Body = ctypes.CFUNCTYPE(None, i64, i64, pointer)

@ctypes.CFUNCTYPE(ctypes.c_int32, i64, i64, i64, Body, pointer)
def pool(begin, end, grain, body, context):
    global woken
    woken += 1
    for i in reversed(range(begin, end)):
        body(i, i + 1, context)
    return 0

cpu.LIBRARY.functions.bitport_use_pool(pool)
torch.set_num_threads(2)
for rows in ([40] * 6, [1] * 8, [200, 40, 40, 40], [0, 0, 70, 0], [300, 20, 20]):
    x, ends = torch.randn(sum(rows), 256, dtype=BF16), torch.tensor(rows).cumsum(0).int()
    experts, woken = tiles("int4-g32", len(rows), 256, 256), 0
    grouped(x, ends, experts, "")
    print(woken)
"""
    alike, rows_each, balanced, alone, one_has_most = map(int, printed(script).split())
    assert alike == rows_each == balanced == 1
    assert alone > 0
    assert one_has_most > 1
