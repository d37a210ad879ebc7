"""Every op on every one of its samples, against the float64 reference and within the budget derived for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bitport.ops import OPS, Op, Sample, Weight, call
from bitport.ops.convert import format_json
from bitport.ops.table import bits
from bitport.schemes import PRESETS, preset

from .made import CPU, samples

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    pytest.param(op, dtype, id=f"{op.name}-{str(dtype)[6:]}")
    for op in OPS.values()
    for dtype in DTYPES
    if next(iter(op.samples(CPU, dtype)), None) is not None
]


def shortfall(sample: Sample, result: Any) -> float:
    """dB by which the result misses its budget."""
    assert isinstance(result, list) or result.shape == sample.expected().shape
    return -sample.judged(result)[1]


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_within_budget(op: Op, dtype: torch.dtype) -> None:
    missed = {}
    for sample in samples(op.name, dtype):
        if not (gap := shortfall(sample, op.overload(*sample.args))) <= 0:
            missed[sample.name] = gap
    assert missed == {}


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_generic_overload_is_the_generic_kernel(op: Op, dtype: torch.dtype) -> None:
    generic = getattr(torch.ops.bitport, op.name).generic
    for sample in samples(op.name, dtype)[::7]:
        results = (generic(*sample.args), op.generic(*sample.args))
        for got, wanted in zip(*(r if isinstance(r, list) else [r] for r in results), strict=True):
            assert torch.equal(bits(got), bits(wanted))


class Calls(TorchDispatchMode):
    """Records the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.of: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_a_call_that_names_no_overload_is_one_of_the_op(op: Op) -> None:
    """Not of an overload with the same arguments, without its gradient and its fake kernel."""
    sample = samples(op.name, torch.bfloat16)[0]
    with Calls() as calls:
        getattr(torch.ops.bitport, op.name)(*sample.args)
    assert calls.of[0] == op.overload


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_fake_kernel_tells_the_truth(op: Op, dtype: torch.dtype) -> None:
    """Shape, dtype and contiguity on meta tensors equal those of the real result."""
    for sample in samples(op.name, dtype):
        real = op.overload(*sample.args)
        fake = op.overload(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in sample.args))
        for got, wanted in zip(*(r if isinstance(r, list) else [r] for r in (fake, real)), strict=True):
            described = [(t.shape, t.dtype, t.is_contiguous()) for t in (got, wanted)]
            assert described[0] == described[1], sample.name
            assert got.device.type == "meta"


@pytest.mark.parametrize("scheme", PRESETS)
def test_quantizing_shapes_computes_nothing(scheme: str) -> None:
    """Else a model of many experts on the meta device would take minutes. Also of matrices that are empty."""
    for shape in ((64, 96), (3, 5, 33), (0, 8), (8, 0)):
        given = torch.randn(shape), format_json(preset(scheme).weight)
        with Calls() as calls:
            torch.ops.bitport.quantize(given[0].to("meta"), given[1])
        assert {str(func) for func in calls.of[1:]} <= {"bitport.quantize.default", "aten.new_empty.default"}
        real, fake = (torch.ops.bitport.quantize(value, given[1]) for value in (given[0], given[0].to("meta")))
        assert [(each.shape, each.dtype) for each in fake] == [(each.shape, each.dtype) for each in real]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_an_op_computes_in_its_own_dtypes_under_autocast(op: Op) -> None:
    """Autocast has cast the input before the op: products within a kernel must not round their factors again."""
    for sample in samples(op.name, torch.float32)[:12]:
        wanted = op.overload(*sample.args)
        with torch.autocast("cpu", torch.bfloat16):
            for kernel in (None, "generic"):
                made = call(op.name, *sample.args, kernel=kernel)
                got, same = (each[0] if isinstance(each, list) else each for each in (made, wanted))
                assert got.dtype == same.dtype, sample.name
                assert torch.equal(got.isnan(), same.isnan()), sample.name
                got, same = (each.double().nan_to_num() for each in (got, same))
                assert (got - same).norm() <= 1e-5 * same.norm(), sample.name


def test_the_samples_hold_every_kind_of_input() -> None:
    seen = {sample.name.rsplit("-", 1)[-1]: sample.args[0] for sample in samples("linear", torch.float32)}
    every = dict(seen)
    assert every["other"].stride(-1) == 2  # "every-other"
    assert {name: every[name].dim() for name in ("vector", "row", "batch")} == {"vector": 1, "row": 2, "batch": 4}
    assert every["empty"].shape[0] == 0
    assert not every["strided"].is_contiguous()
    assert 0 in every["nan"].stride()  # "expanded-nan"


def test_the_samples_hold_every_granularity_and_zero() -> None:
    weights = [sample.args[1:11] for sample in samples("linear", torch.float32)]
    zeros = {None if zero is None else zero.is_floating_point() for _, _, zero, *_ in weights}
    assert zeros == {None, True, False}
    blocks = {(w[7] == w[5], w[7] == 1, w[8] == w[6]) for w in weights}
    assert {(True, False, True), (False, True, True), (False, True, False), (False, False, False)} <= blocks
    assert any(w[6] % w[8] for w in weights), "no sample has a short last group"


@pytest.mark.parametrize("op", ["linear", "dyn_linear"])
def test_a_budget_is_not_slack(op: str) -> None:
    """One changed byte of codes is noticed."""
    for sample in samples(op, torch.float32):
        if not sample.name.endswith("-rows"):
            continue
        x, data, *rest = sample.args
        broken = data.clone().view(torch.uint8)
        broken[0, 0] ^= 0x22
        result = OPS[op].overload(x, broken.view(data.dtype), *rest)
        assert shortfall(sample, result) > 0, sample.name


def without(at: int, value: Any = None) -> Callable[..., Any]:
    return lambda run, *args: run(*args[:at], value, *args[at + 1 :])


def spoilt(when: Callable[..., Any], at: int = 0) -> Callable[..., Any]:
    """A kernel whose result (part ``at`` of it) is wrong where ``when`` holds of the arguments."""

    def kernel(run: Callable[..., Any], *args: Any) -> Any:
        result = run(*args)
        if when(*args):
            part = result[at] if isinstance(result, list) else result
            part.view(torch.uint8)[..., -1:].bitwise_xor_(0x55)
        return result

    return kernel


def through_half(*ats: int) -> Callable[..., Any]:
    """A kernel that computes with these arguments in float16."""
    return lambda run, *args: run(
        *(arg.half().to(arg.dtype) if at in ats and arg.dtype == torch.bfloat16 else arg for at, arg in enumerate(args))
    )


def rounds_up_halves(run: Callable[..., Any], value: Tensor, fmt: str) -> Any:
    result = run(value, fmt)
    return run(value + 1e-6, fmt) if value.eq(value.floor() + 0.5).any() else result


def sees_nothing(*args: Any) -> bool:
    return args[24] is not None and args[24].dtype == torch.bool and not args[24].any(-1).all()


def without_the_maximum(run: Callable[..., Any], *args: Any) -> Any:
    """Softmax by exponentials that may overflow, as those of scores of 89 do."""
    result = run(*args)
    keys = Weight(*args[1:11])
    scores = args[0].float() @ keys.dense(torch.float32).mT.repeat_interleave(args[0].shape[1] // keys.batch[1], 1)
    scale = args[0].shape[-1] ** -0.5 if args[26] is None else args[26]
    return result * torch.nan if scores.numel() and (scores * scale).max() > 89 else result


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a bias of another dtype": (
        "linear",
        spoilt(lambda *args: args[11] is not None and args[11].dtype != args[0].dtype),
    ),
    "no bias": ("linear", spoilt(lambda *args: args[11] is None)),
    "a bias of rounded inputs": ("dyn_linear", without(13)),
    "the static scale": ("dyn_linear", without(12)),
    "zeros of rounded inputs": ("dyn_linear", without(3)),
    "a row of zeros": ("dyn_linear", lambda run, x, *rest: run(x, *rest) / x.abs().amax(-1, True).bool()),
    "a second scale": ("linear", without(4)),
    "e8m0 scales": ("linear", spoilt(lambda *args: args[2].dtype == torch.float8_e8m0fnu)),
    "a short last group with zeros": (
        "linear",
        spoilt(lambda *args: args[3] is not None and args[9] < args[7] and args[7] % args[9]),
    ),
    "many rows": ("linear", spoilt(lambda x, *rest: x.dim() == 2 and x.shape[0] > 64)),
    "many outputs": ("linear", spoilt(lambda *args: args[6] > 128)),
    "many inputs": ("linear", spoilt(lambda *args: args[7] > 256)),
    "weights of whole tiles": ("linear", spoilt(lambda *args: args[6] % 64 == 0 == args[7] % 256)),
    "weights of whole tiles and rounded inputs": (
        "dyn_linear",
        spoilt(lambda *args: args[6] % 64 == 0 == args[7] % 256),
    ),
    "inputs that start later": ("linear", spoilt(lambda x, *rest: x.storage_offset())),
    "inputs of four dimensions": ("linear", spoilt(lambda x, *rest: x.dim() > 3)),
    "rows in one place": ("dyn_linear", spoilt(lambda x, *rest: 0 in x.stride())),
    "zeros of another dtype than the scales": (
        "linear",
        spoilt(lambda x, data, scale, zero, *rest: zero is not None and zero.dtype not in (torch.uint8, scale.dtype)),
    ),
    "a weight that lies apart": ("linear", spoilt(lambda x, data, *rest: not data.is_contiguous())),
    "scales that lie apart": ("dyn_linear", spoilt(lambda *args: not args[2].is_contiguous())),
    "a NaN": ("linear", lambda run, *args: run(*args).nan_to_num()),
    "a NaN of rounded inputs": ("dyn_linear", lambda run, *args: run(*args).nan_to_num()),
    "ids of 32 bits": ("embedding", spoilt(lambda ids, *rest: ids.dtype == torch.int32)),
    "ids that lie apart": ("embedding", spoilt(lambda ids, *rest: not ids.is_contiguous())),
    "a second scale of floats": ("dequantize", without(3)),
    "scales of codes": ("quantize", spoilt(lambda *args: True, at=1)),
    "codes of several matrices": ("quantize", spoilt(lambda value, *rest: value.dim() > 2)),
    "blocks of codes": ("quantize", spoilt(lambda value, fmt: "e8m0" in fmt)),
    "scales of inputs": ("quantize_input", spoilt(lambda *args: True, at=1)),
    "a static scale of inputs": ("quantize_input", without(2)),
    "scales in another layout": ("repack", spoilt(lambda *args: True, at=1)),
    "another layout of whole tiles": ("repack", spoilt(lambda *args: args[5] % 64 == 0 == args[6] % 256)),
    "a table of whole tiles": ("embedding", spoilt(lambda *args: args[6] % 64 == 0 == args[7] % 256)),
    "experts of whole tiles": ("grouped_linear", spoilt(lambda *args: args[7] % 64 == 0 == args[8] % 256)),
    "many rows of an expert": ("grouped_linear", spoilt(lambda x, *rest: x.shape[0] > 64)),
    "inputs of experts that lie apart": ("dyn_grouped_linear", spoilt(lambda x, *rest: not x.is_contiguous())),
    "the scale of scores": ("attention", lambda run, *args: run(*args[:26], args[0].shape[-1] ** -0.5)),
    "queries that lie apart": ("attention", spoilt(lambda q, *rest: not q.is_contiguous())),
    "many tokens": ("attention", spoilt(lambda *args: args[6] > 256)),
    "a mask of each head": ("attention", spoilt(lambda *args: args[24] is not None and args[24].shape[1] > 1)),
    "many rows of int4pack_mm": ("int4pack_mm", spoilt(lambda x, *rest: x.shape[0] > 64)),
    "rows of int4pack_mm that lie apart": ("int4pack_mm", spoilt(lambda x, *rest: not x.is_contiguous())),
    "rows of quantized_matmul that lie apart": ("quantized_matmul", spoilt(lambda x, *rest: not x.is_contiguous())),
    "contiguous inputs that start later": (
        "linear",
        spoilt(lambda x, *rest: x.is_contiguous() and x.storage_offset() and x.dtype == torch.bfloat16),
    ),
    "a weight that starts later": ("linear", spoilt(lambda x, data, *rest: data.storage_offset())),
    "scales that start later": ("dyn_linear", spoilt(lambda x, data, scale, *rest: scale.storage_offset())),
    "an odd number of inputs": ("linear", spoilt(lambda *args: args[5].startswith("int") and args[7] % 2)),
    "an odd number of outputs": ("dyn_linear", spoilt(lambda *args: args[5].startswith("int") and args[6] % 2)),
    "large inputs": ("linear", through_half(0)),
    "large rounded inputs": ("dyn_linear", through_half(0)),
    "small scales": ("linear", through_half(2)),
    "small scales of experts": ("grouped_linear", through_half(3)),
    "a bias that lies apart": ("linear", spoilt(lambda *args: args[11] is not None and args[11].stride() != (1,))),
    "scales of another dtype than the inputs": (
        "linear",
        spoilt(lambda *args: args[5] == "int4" and args[2].dtype != args[0].dtype),
    ),
    "a table that lies apart": ("embedding", spoilt(lambda ids, data, *rest: not data.is_contiguous())),
    "experts that lie apart": ("grouped_linear", spoilt(lambda x, ends, data, *rest: not data.is_contiguous())),
    "a first expert without rows": ("grouped_linear", spoilt(lambda x, ends, *rest: int(ends[0]) == 0 < int(ends[-1]))),
    "experts in another layout": ("repack", spoilt(lambda data, *rest: data.dim() > 2)),
    "a matrix that lies apart": ("dequantize", spoilt(lambda data, *rest: not data.is_contiguous())),
    "weights of zeros": ("quantize", spoilt(lambda value, fmt: (value == 0).all(-1).any(), at=1)),
    "weights halfway between codes": ("quantize", rounds_up_halves),
    "weights that are not finite": ("quantize", lambda run, value, fmt: run(value.nan_to_num(), fmt)),
    "weights that are very small": (
        "quantize",
        lambda run, value, fmt: run(torch.where(value.abs() < 1e-30, 0, value), fmt),
    ),
    "weights whose columns lie together": ("quantize", spoilt(lambda value, fmt: not value.is_contiguous())),
    "inputs of zeros": ("quantize_input", spoilt(lambda x, *rest: (x == 0).all(-1).any(), at=1)),
    "inputs that are not finite": ("quantize_input", lambda run, x, *rest: run(x.nan_to_num(), *rest)),
    "inputs of one dimension": ("quantize_input", spoilt(lambda x, *rest: x.dim() == 1)),
    "a row that sees no token": ("attention", spoilt(sees_nothing)),
    "a mask of another dtype": (
        "attention",
        spoilt(lambda *args: args[24] is not None and args[24].dtype not in (torch.bool, args[0].dtype)),
    ),
    "a mask that lies apart": (
        "attention",
        spoilt(lambda *args: args[24] is not None and not args[24].is_contiguous()),
    ),
    "causal with a mask of bools": (
        "attention",
        lambda run, *args: run(*args[:25], args[25] and (args[24] is None or args[24].dtype != torch.bool), args[26]),
    ),
    "which dense tokens come first": ("attention", lambda run, *args: run(*args[:23], 0, *args[24:])),
    "the usual scale of scores": ("attention", spoilt(lambda *args: args[26] is None)),
    "large scores": ("attention", without_the_maximum),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_kernel_that_overlooks_something_is_found_out(what: str) -> None:
    name, fault = FAULTS[what]
    of_any = itertools.chain.from_iterable(OPS[name].samples(CPU, dtype) for dtype in DTYPES[::-1])
    assert any(not sample.judged(fault(OPS[name].generic, *sample.args))[1] >= 0 for sample in of_any)


def test_what_takes_bits_that_agree_takes_no_others() -> None:
    sample = next(iter(OPS["quantize"].samples(CPU, torch.float32)))
    data, scale, *rest = OPS["quantize"].generic(*sample.args)
    assert sample.judged([data, scale, *rest]) == (math.inf, math.inf)
    for wrong in ([data, scale.double(), *rest], [data, scale.half(), *rest], [data, scale]):
        assert sample.judged(wrong) == (-math.inf, -math.inf)
