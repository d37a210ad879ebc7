"""The native kernels at PyTorch's dispatcher: which calls they take, which they hand over, and that result, error and
choice equal those of the kernels called through ctypes."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import bitport as bp
from bitport import layouts
from bitport.backends import cpu
from bitport.errors import ArgumentError, KernelError
from bitport.numerics import STATIC
from bitport.ops import IMPLS, OPS, Impl, call, decide, register_kernel, unregister_kernel, use_kernel
from bitport.ops.product import operand
from bitport.ops.select import CHOOSERS, DIRECT, own_kernel
from tests.backends.products import products, shortfall
from tests.backends.taken import BF16, arguments, compiled, linear, taken, takes, tiles

pytestmark = [compiled, pytest.mark.usefixtures("own_tables")]
FP16, FP32 = torch.float16, torch.float32
KINDS = ("int4-g32", "int8", "int3", "int4-g64-fzero", "int4-g48", "nf4", "mxfp4-wo", "nvfp4-wo")
"""Each has other parts to read: zeros or none, float ones, odd groups, a table, 8-bit scales, scale2."""


def without_native(op: str, *args: Any) -> Any:
    """The result of the chooser, which calls the library through ctypes."""
    return takes(lambda: CHOOSERS[op](*args), 0)


def test_this_torch_has_what_they_register_with() -> None:
    """One library is for every torch: where registering fails, calls go through Python and are only slower."""
    assert cpu.NOT_AT_DISPATCHER is None


# -- what is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("scheme", KINDS)
def test_linear_against_float64(scheme: str, dtype: torch.dtype) -> None:
    for sample in products(scheme, dtype, "cpu_tiles", n=40, k=192, m=3):
        y = takes(lambda args=sample.args: linear(*args))
        assert shortfall(sample, y) <= 0
        assert torch.equal(y, without_native("linear", *sample.args))


@pytest.mark.parametrize("shape", [(96,), (1, 96), (2, 3, 96), (1, 2, 1, 3, 96)], ids=str)
def test_any_rank(shape: tuple[int, ...]) -> None:
    args = [torch.randn(shape, dtype=BF16), *arguments()[1:]]
    y = takes(lambda: linear(*args))
    assert y.shape == (*shape[:-1], 40)
    assert torch.equal(y, without_native("linear", *args))


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("act", ["int8", "int8-asym", "int8-tensor", "fp8", "fp8-tensor", "mxfp8", "nvfp4"])
def test_rounded_inputs(act: str, bias: bool) -> None:
    *args, given = arguments("int8-dyn")
    scales = [None, torch.tensor([[0.02]])] if act in STATIC else [None]
    for scale in scales:
        rest = (act, scale, given if bias else None)
        y = takes(lambda rest=rest: torch.ops.bitport.dyn_linear.default(*args, *rest))
        assert torch.equal(y, without_native("dyn_linear", *args, *rest))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_lookups(shape: tuple[int, ...]) -> None:
    table = tiles("int4-g32", 40, 96)
    ids = torch.arange(6)[: torch.Size(shape).numel()].reshape(shape) * 7
    args = (ids, *operand(table), FP32)
    y = takes(lambda: torch.ops.bitport.embedding.default(*args))
    assert torch.equal(y, table.dequantize(FP32)[ids])


@pytest.mark.parametrize("ends", [(2, 2, 6), (0, 0, 7), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("scheme", ["int4-g32", "nvfp4-wo"])
def test_experts(scheme: str, ends: tuple[int, ...]) -> None:
    args = (torch.randn(7, 64, dtype=BF16), torch.tensor(ends, dtype=torch.int32), *operand(tiles(scheme, 3, 40, 64)))
    y = takes(lambda: torch.ops.bitport.grouped_linear.default(*args))
    assert torch.equal(y, without_native("grouped_linear", *args))
    assert not y[ends[-1] :].any()


def test_experts_with_rounded_inputs() -> None:
    ends = torch.tensor((2, 2, 6), dtype=torch.int32)
    args = (torch.randn(7, 64, dtype=BF16), ends, *operand(tiles("int8-dyn", 3, 40, 64)))
    for act, calls in (("int8", 1), ("int8-asym", 1), ("int8-tensor", 0)):
        y = takes(lambda act=act: torch.ops.bitport.dyn_grouped_linear.default(*args, act), calls)
        assert torch.equal(y, without_native("dyn_grouped_linear", *args, act))


def test_f_linear_and_its_kin_come_here() -> None:
    weight, x = tiles("int4-g32", 40, 96), torch.randn(3, 96, dtype=BF16)
    assert torch.equal(takes(lambda: F.linear(x, weight)), takes(lambda: x @ weight.t()))
    takes(lambda: F.embedding(torch.tensor([1, 2]), weight))
    experts, ends = tiles("int4-g32", 3, 40, 96), torch.tensor([1, 1, 3], dtype=torch.int32)
    takes(lambda: F.grouped_mm(x, experts.transpose(-1, -2), offs=ends))
    with torch.inference_mode():
        takes(lambda: F.linear(x, weight))
    assert takes(lambda: F.linear(x[:0], weight)).shape == (0, 40)


# -- what is handed over ---------------------------------------------------------------------------------------------

VARIED: dict[str, Callable[[list[Any]], list[Any]]] = {
    "x strided": lambda a: [torch.randn(96, 3, dtype=BF16).T, *a[1:]],
    "x negated": lambda a: [torch._neg_view(a[0]), *a[1:]],
    "bias of another dtype": lambda a: [*a[:-1], a[-1].float()],
    "bias strided": lambda a: [*a[:-1], torch.stack([a[-1], a[-1]], 1)[:, 0]],
    "data strided": lambda a: [a[0], torch.stack([a[1], a[1]], -1)[..., 0], *a[2:]],
    "scale strided": lambda a: [*a[:2], torch.stack([a[2], a[2]], -1)[..., 0], *a[3:]],
    "another layout": lambda a: [
        a[0],
        *layouts.repack(layouts.Matrix(*a[5:10]), bp.numerics.Quantized(*a[1:5]), "cpu_tiles", "plain"),
        *a[5:10],
        "plain",
        a[-1],
    ],
}


@pytest.mark.parametrize("change", VARIED)
def test_other_arguments_are_handed_over(change: str) -> None:
    args = VARIED[change](arguments())
    y = takes(lambda: linear(*args), 1 if change == "x negated" else 0)  # PyTorch resolves the negation first
    with use_kernel("generic"):
        expected = linear(*args)
    assert y.shape == expected.shape
    torch.testing.assert_close(y, expected, rtol=2**-6, atol=2**-4)  # bfloat16, sums of 96 products


def test_rows_that_lie_dense_are_no_tiles() -> None:
    """Plain data as tiles is refused here; the kernel of exported programs accepts it."""
    table = bp.quantize_tensor(torch.randn(40, 96), "int4-g32").to_layout("plain")
    args = (torch.tensor([3]), *operand(table)[:-1], "cpu_tiles", FP32)
    with pytest.raises(RuntimeError):
        torch.ops.bitport.embedding.default(*args)
    with pytest.raises(ArgumentError, match=r"in layout cpu_tiles needs data .*\[40, 48\]"):
        call("embedding", *args)


def test_a_bias_that_is_the_negative_of_what_lies_there() -> None:
    *args, bias = arguments()
    y = without_native("linear", *args, torch._neg_view(bias))
    assert torch.equal(y, without_native("linear", *args, -bias))


WRONG: dict[str, tuple[int, Any, str]] = {
    "x-dtype": (0, torch.ones(3, 96, dtype=torch.float64), "x must be float32"),
    "x-shape": (0, torch.ones(3, 95, dtype=BF16), r"shape \[..., 96\]"),
    "x-scalar": (0, torch.ones((), dtype=BF16), r"shape \[..., 96\]"),
    "data-short": (1, torch.zeros(1, 3, 512, dtype=torch.uint8), "needs data torch.uint8"),
    "data-dtype": (1, torch.zeros(2, 3, 512, dtype=torch.int8), "needs data torch.uint8"),
    "data-narrow": (1, torch.zeros(2, 3, 256, dtype=torch.uint8), "needs data torch.uint8"),
    "scale-short": (2, torch.ones(2, 2, 32, dtype=BF16), "need a float scale"),
    "scale-dtype": (2, torch.ones(2, 3, 32, dtype=torch.int32), "need a float scale"),
    "zero-short": (3, torch.zeros(2, 3, 16, dtype=torch.uint8), "zero must be"),
    "zero-dtype": (3, torch.zeros(2, 3, 32, dtype=torch.int64), "zero must be"),
    "scale2": (4, torch.ones(1, 1), "scale2 goes with"),
    "dtype": (5, "int8", "needs data"),
    "dtype-unknown": (5, "int40", "unknown number type"),
    "n-more": (6, 80, r"bias must be float \[80\]"),
    "n-huge": (6, 2**62, "bias must be float"),
    "n-negative": (6, -40, "bias must be float"),
    "k-more": (7, 128, "x must have shape"),
    "block_n-zero": (8, 0, "must be positive"),
    "block_k-less": (9, 16, "need a float scale"),
    "block_k-huge": (9, 2**63 - 1, "need a float scale"),
    "bias-short": (11, torch.ones(39, dtype=BF16), r"bias must be float \[40\]"),
    "bias-int": (11, torch.ones(40, dtype=torch.int64), r"bias must be float \[40\]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_errors_of_bitports_own(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Data that does not fit is never read; the error is the chooser's, whatever C functions it passed through."""
    at, value, message = WRONG[what]
    args = arguments()
    args[at] = value
    with pytest.raises(ArgumentError, match=message):
        takes(lambda: linear(*args), 0)
    with torch.inference_mode(), pytest.raises(RuntimeError) as raised:  # no Python frame on this path
        takes(lambda: linear(*args), 0)
    assert re.search(message, f"{raised.value}\n{capfd.readouterr().err}")  # before PyTorch 2.13 it is only printed
    with torch.inference_mode(), pytest.raises(ArgumentError, match=message):
        call("linear", *args)


@pytest.mark.parametrize("at", range(12), ids=lambda at: f"argument-{at}")
def test_sizes_at_random_read_nothing_they_should_not(at: int) -> None:
    """Each argument in turn is replaced by others of its type: the call gives a correct result or an error."""
    args = arguments("int4-g32")
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    others = tensors if isinstance(args[at], torch.Tensor) else [0, 1, 31, 33, 2**40, "int2", "cpu_tiles"]
    for other in others:
        changed = [*args[:at], other, *args[at + 1 :]]
        if type(other) is not type(args[at]):
            continue
        try:
            expected = CHOOSERS["linear"](*changed) if OPS["linear"].check(*changed) is None else None
        except (ArgumentError, bp.errors.LayoutError) as error:
            with pytest.raises(type(error)):
                linear(*changed)
        else:
            assert torch.equal(linear(*changed), expected)


def test_arguments_are_given_back() -> None:
    """No reference leaks, neither in the kernel nor, when handed over, in the chooser."""
    for bias in (BF16, FP32):
        args = arguments()
        args[-1] = args[-1].to(bias)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        linear(*args)
        before = [tensor._use_count() for tensor in tensors]
        for _ in range(10):
            linear(*args)
        assert [tensor._use_count() for tensor in tensors] == before


class Mallinfo2(ctypes.Structure):
    """glibc's allocator statistics for all threads: ``uordblks`` bytes are in use in its heaps, ``hblkhd`` are
    mapped."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@pytest.mark.skipif(
    sys.platform == "win32" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="counts the bytes in use as glibc 2.33 does",
)
def test_no_memory_is_left_behind() -> None:
    """Neither calls taken nor calls handed over leak, with their strings and optional tensors: a leak grows with every
    call, by a block of Python's allocator or by at least malloc's 24 bytes. Counted by the allocators, since the
    system's page count is imprecise; the least of three runs, to exclude other threads."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    args = arguments("nvfp4-wo")

    def held() -> tuple[int, int]:
        info = mallinfo2()
        return info.uordblks + info.hblkhd, sys.getallocatedblocks()

    def grown(calls: int, bias: Any) -> tuple[int, int]:
        before = held()
        for _ in range(calls):
            linear(*args[:-1], bias)
        after = held()
        return after[0] - before[0], after[1] - before[1]

    with torch.inference_mode():
        for bias in (args[-1], args[-1].double()):
            grown(200, bias)
            nbytes, blocks = zip(*(grown(2000, bias) for _ in range(3)), strict=True)
            assert min(nbytes) < 2000 * 24
            assert min(blocks) < 2000


# -- the choice ------------------------------------------------------------------------------------------------------


def constant(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_full((*x.shape[:-1], rest[5]), 7.0)


def test_a_kernel_of_higher_priority_is_asked_first() -> None:
    args, weight = arguments(), tiles("int4-g32", 40, 96)
    impl = Impl("linear", "mine", "cpu", constant, lambda *args: None, priority=1000)
    register_kernel(impl)
    assert decide("linear", *args).kernel == "mine"
    assert (takes(lambda: linear(*args), 0) == 7).all()
    assert (takes(lambda: F.linear(args[0], weight), 0) == 7).all()
    unregister_kernel(impl)
    assert decide("linear", *args).kernel == "native"
    takes(lambda: linear(*args))
    takes(lambda: F.linear(args[0], weight))


def test_a_kernel_that_refuses_leaves_the_call_to_the_native_one() -> None:
    register_kernel(Impl("linear", "picky", "cpu", constant, lambda *args: "no", priority=1000))
    args = arguments()
    y = linear(*args)
    assert decide("linear", *args).kernel == "native"
    assert torch.equal(y, call("linear", *args, kernel="native"))


def test_a_forced_kernel_runs() -> None:
    args, weight = arguments(), tiles("int4-g32", 40, 96)
    with use_kernel("linear=generic"):
        assert torch.equal(takes(lambda: linear(*args), 0), OPS["linear"].generic(*args))
        takes(lambda: F.linear(args[0], weight), 0)
        takes(lambda: F.embedding(torch.tensor([1]), weight))  # another op
    with use_kernel("linear=nothing"), pytest.raises(KernelError, match="'nothing' was forced for linear"):
        linear(*args)
    takes(lambda: linear(*args))


def test_it_is_not_taken_for_a_device_s_own_kernel() -> None:
    device = torch.device("cpu")
    assert not any(own_kernel(op, device) for op in OPS)
    library = torch.library.Library("bitport", "IMPL")
    try:
        library.impl("linear", constant, "CPU", allow_override=True)
        assert own_kernel("linear", device)
        assert decide("linear", *arguments()).kernel == "cpu's own (dispatcher)"
        assert (F.linear(torch.randn(3, 96, dtype=BF16), tiles("int4-g32", 40, 96)) == 7).all()
    finally:
        library._destroy()
    assert not own_kernel("linear", device)
    takes(lambda: linear(*arguments()))


def test_the_way_without_the_dispatcher_s_other_keys_exists_only_while_the_kernel_is_first() -> None:
    key = ("linear", "cpu", "cpu_tiles")
    assert key in DIRECT
    with use_kernel("generic"):
        assert key not in DIRECT
    assert key in DIRECT
    assert all(impl.name == "native" for impl in IMPLS["linear", "cpu"][:1])


# -- tracing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["linear", "dyn_linear"])
def test_opcheck(op: str) -> None:
    args = arguments("int8-dyn")
    rest = [None] if op == "linear" else ["int8", None, None]
    takes_some = taken()
    torch.library.opcheck(OPS[op].overload, (*args[:-1], *rest))
    assert taken() > takes_some


class Layers(torch.nn.Module):
    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(96, 64), torch.nn.Linear(64, 32)
        bp.quantize_(self, scheme, measure=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def test_compiled_code_comes_here() -> None:
    model = Layers("int4-g32")
    run = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 5, 9):
        x = torch.randn(rows, 96)
        with torch.no_grad():
            run(x)
            assert torch.equal(takes(lambda x=x: run(x), 2), takes(lambda x=x: model(x), 2))


def test_an_exported_program_comes_here() -> None:
    model = Layers("int4-g32")
    program = torch.export.export(model, (torch.randn(3, 96),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    x = torch.randn(11, 96)
    with torch.no_grad():
        assert torch.equal(takes(lambda: program.module()(x), 2), model(x))


def test_gradients() -> None:
    x, weight = torch.randn(3, 96, requires_grad=True), tiles("int4-g32", 40, 96, dtype=FP32)
    y = takes(lambda: F.linear(x, weight))
    (wanted,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(wanted, weight.dequantize().sum(0).expand(3, -1), rtol=1e-5, atol=1e-5)
    y = takes(lambda: linear(x, *operand(weight), None))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)


@pytest.mark.slow
def test_ahead_of_time(tmp_path: Path) -> None:
    """AOTInductor calls the op through its proxy executor, with any number of rows."""
    model = Layers("int4-g32")
    program = torch.export.export(model, (torch.randn(3, 96),), dynamic_shapes=({0: torch.export.Dim("rows", max=64)},))
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        run = torch._inductor.aoti_load_package(package)
        for rows in (1, 3, 17):
            x = torch.randn(rows, 96)
            torch.testing.assert_close(takes(lambda x=x: run(x), 2), model(x))
