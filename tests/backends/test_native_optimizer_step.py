"""The native optimizer step equals the generic one, bit for bit except for the square root, in every variant that this
processor can run."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitport import plugins
from bitport.backends.cpu import moment_tables
from bitport.errors import KernelError
from bitport.numerics import Format, number_type
from bitport.numerics.types import STATE_TYPES
from bitport.ops import IMPLS, use_kernel
from bitport.ops.optimizer_step import STEP, Moment, Numbers, ParamStep, generic, optimizer_step
from bitport.tensor import QTensor
from bitport.train.optim import SGD, STATES, Adam, AdamW, Lion, LowBitOptimizer
from tests.backends.taken import compiled
from tests.turns import turns

pytestmark = compiled
SHAPES = ((20, 320), (256, 21), (5000,), (6, 512), (), (3, 64), (7, 130), (2, 3, 15, 15), (3, 1))
"""Whole vectors and remainders, short rows, odd rows, one number."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=["fp32", "bf16", "fp16"])
RULES: dict[str, tuple[type[LowBitOptimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam-l2": (Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "lion": (Lion, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd-momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "sgd-nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
FORMATS = [
    *((name, False) for name in ("dynamic8", "dynamic4", "float8_e4m3")),
    *((name, True) for name in ("udynamic8", "ulinear4", "float8_e4m3")),
]


def give_gradients(optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for param in optimizer.param_groups[0]["params"]:
        columns = param.shape[-1] if param.dim() else 1
        param.grad = (torch.randn(param.shape) * torch.logspace(-4, 0, columns).reshape(param.shape[-1:])).to(
            param.dtype
        )


def begun(cls: type[LowBitOptimizer], states: str, dtype: torch.dtype, **options: Any) -> LowBitOptimizer:
    torch.manual_seed(0)
    optimizer = cls([nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES], states=states, min_elements=0, **options)
    with use_kernel("generic"):
        for seed in (1, 2):
            give_gradients(optimizer, seed)
            optimizer.step()
    return optimizer


def bits(tensor: Tensor) -> list[Tensor]:
    return [tensor.qdata.view(torch.uint8), tensor.scale] if isinstance(tensor, QTensor) else [tensor]


@pytest.mark.parametrize(("rule", "states", "dtype"), turns(RULES, STATES, FLOATS))
def test_a_step_is_the_generic_one(isa: str, rule: str, states: str, dtype: torch.dtype) -> None:
    """The parameter of Adam too, up to the square root: where torch's op is off by an ulp, that and the four roundings
    after it may each move the update by an ulp, and the parameter to its neighbour."""
    cls, options = RULES[rule]
    wanted = begun(cls, states, dtype, **options)
    got = copy.deepcopy(wanted)
    before = [param.detach().clone().float() for param in wanted.param_groups[0]["params"]]
    for optimizer, kernel in ((wanted, "generic"), (got, "native")):
        give_gradients(optimizer, 3)
        with use_kernel(kernel):
            optimizer.step()
    for param, twin, old in zip(*(o.param_groups[0]["params"] for o in (wanted, got)), before, strict=True):
        for name, value in wanted.state[param].items():
            assert all(map(torch.equal, bits(value), bits(got.state[twin][name])))
        if cls in (Lion, SGD):
            assert torch.equal(param, twin)
        else:
            new = param.detach().float()
            update = (new - old).abs() + options["lr"] * options["weight_decay"] * old.abs()
            step = torch.finfo(dtype).eps * torch.maximum(new.abs(), old.abs()) + 5 * 2.0**-23 * update
            assert ((new - twin.detach().float()).abs() <= step).all()


@pytest.mark.parametrize("kernel", ["native", "generic"])
def test_backward_sees_that_a_parameter_changed(kernel: str) -> None:
    param = nn.Parameter(torch.ones(4))
    loss = param.square().sum()
    loss.backward(retain_graph=True)
    with use_kernel(kernel):
        SGD([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        optimizer = begun(AdamW, "8bit", torch.bfloat16)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(300, 1024)), nn.Parameter(torch.ones(100000))]})
        for group in optimizer.param_groups:
            for param in group["params"]:
                torch.manual_seed(param.numel())
                param.grad = torch.randn(param.shape).to(param.dtype)
        with use_kernel("native"):
            optimizer.step()
        ends.append([part for p, s in optimizer.state.items() for t in (p.detach(), *s.values()) for part in bits(t)])
    assert all(torch.equal(a, b) for others in ends[1:] for a, b in zip(ends[0], others, strict=True))


def moment(fmt: Format, positive: bool, rows: int, k: int) -> Moment:
    number = fmt.number
    data = torch.zeros(rows, k * number.bits // 8, dtype=torch.uint8).view(number.storage)
    return Moment(data, torch.zeros(rows, -(-k // fmt.block[1])), fmt, positive)


def scale_of(kept: Moment) -> Tensor:
    assert kept.scale is not None
    return kept.scale


def near_thresholds(name: str) -> Tensor:
    """Rows of 128 numbers, each with the largest of the type: its values, the midpoints, their neighbours, tiny
    ones."""
    number = number_type(name)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    table = torch.tensor(number.table) if number.table else every[every.isfinite()].unique()
    middles = (table[1:] + table[:-1]) / 2
    infinity = torch.tensor(math.inf)
    x = torch.cat([table, middles, middles.nextafter(infinity), middles.nextafter(-infinity), table * 1e-7])
    x = torch.cat([x, torch.randn(9000) * 0.3 * number.max]).clamp(table.min(), table.max())
    x = x[: x.numel() // 127 * 127].view(-1, 127)
    return torch.cat([x, torch.full((x.shape[0], 1), number.max)], 1) + 0.0


@pytest.mark.parametrize(("name", "positive"), FORMATS)
def test_every_code_at_its_ends(isa: str, name: str, positive: bool) -> None:
    """sgd with rate 0 sets its moment to the gradient."""
    fmt, x = Format(dtype=name, block=(1, 128)), near_thresholds(name)
    for factor in (1.0, 0.37, 1e-30, 1e30):
        value = (x.abs() if positive else x) * factor
        results = []
        for run in (generic, lambda rule, target: optimizer_step(rule, [target])):
            kept = moment(fmt, positive, *value.shape)
            run("sgd", ParamStep(torch.zeros_like(value), value, (kept,), Numbers()))
            results.append(kept)
        assert torch.equal(*(scale_of(kept) for kept in results))
        assert torch.equal(*(kept.data.view(torch.uint8) for kept in results))


@pytest.mark.parametrize(("name", "positive"), FORMATS)
def test_blocks_with_an_end_of_their_own(isa: str, name: str, positive: bool) -> None:
    """Zeros, subnormals, the largest floats, and NaN or infinity: blocks with those are read back as NaN."""
    fmt, k = Format(dtype=name, block=(1, 128)), 128
    value = torch.randn(6, k).abs()
    value[0] = 0.0
    value[1] *= 1e-44
    value[2] *= 1e-38
    value[3] = torch.finfo(torch.float32).max * torch.rand(k)
    value[4, 5] = math.nan
    value[5, 6] = math.inf
    results = []
    for run in (generic, lambda rule, target: optimizer_step(rule, [target])):
        kept = moment(fmt, positive, 6, k)
        run("sgd", ParamStep(torch.zeros_like(value), value, (kept,), Numbers()))
        results.append(kept)
    assert torch.equal(*(scale_of(kept).view(torch.int32)[:4] for kept in results))
    assert torch.equal(*(kept.data.view(torch.uint8)[:4] for kept in results))
    assert all(scale_of(kept)[4:].isnan().all() for kept in results)


def test_lion_goes_nowhere_by_what_is_no_number(isa: str) -> None:
    """In whole vectors, and in the remainder of a row."""
    grad = torch.randn(1, 300)
    grad[0, [5, 290]], grad[0, [9, 299]], grad[0, 11] = math.nan, -math.inf, 0.0
    ends = []
    for run in (generic, lambda rule, target: optimizer_step(rule, [target])):
        param, mean = torch.zeros(1, 300), torch.zeros(1, 300)
        run("lion", ParamStep(param, grad, (Moment(mean),), Numbers(rate=0.5, beta2=0.9, rest2=0.1)))
        ends.append(param)
    assert ends[0].isnan().nonzero()[:, 1].tolist() == [5, 9, 290, 299]
    torch.testing.assert_close(*ends, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("chance", [True, False])
@DTYPES
def test_parameters_of_every_size(isa: str, dtype: torch.dtype, chance: bool) -> None:
    """Rounding to a 16-bit float gives the bits of the generic kernel: subnormals, infinities, both zeros."""
    x = torch.exp2(torch.empty(70, 64).uniform_(-45, 17)) * torch.randn(70, 64).sign()
    x[0, :6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 65504.0, 65519.9])
    for shape in ((70, 64), (448, 10)):
        ends = []
        for run in (generic, lambda rule, target: optimizer_step(rule, [target])):
            param = torch.zeros(shape, dtype=dtype)
            run("sgd", ParamStep(param, -x.view(shape), (), Numbers(rate=1.0), (123456789,) if chance else None))
            ends.append(param)
        assert torch.equal(*ends)


@pytest.mark.parametrize(("name", "positive"), FORMATS)
def test_ranks_are_estimated_at_most_one_too_low(name: str, positive: bool) -> None:
    number = number_type(name)
    tables = moment_tables.tables_of(Format(dtype=name, block=(1, 128)), positive)
    thresholds = moment_tables._thresholds(number, positive)
    if tables.map.way == moment_tables.CENTRED:
        thresholds = thresholds[tables.map.zero :]
    lowest, borders, slopes, offsets, zones = moment_tables._zones(number)
    x = torch.arange(0, 0x43F00000, 4099, dtype=torch.int32).view(torch.float32)
    ends = torch.cat([thresholds, borders[borders.isfinite()]])
    near = [ends, ends.nextafter(torch.tensor(0.0)), ends.nextafter(torch.tensor(9e9))]
    x = torch.cat([x[x <= number.max * 1.0001], *near])
    exponent = ((x.clamp(min=lowest).view(torch.int32) >> 23) % 32).long()
    zone = (zones[exponent] + (x.clamp(min=lowest) > borders[exponent])).long()
    for noise in (0.0, 1e-5):
        estimate = (x.clamp(min=lowest).double() * slopes[zone] * (1 + noise) + offsets[zone]).trunc()
        short = torch.bucketize(x, thresholds) - estimate
        assert ((short == 0) | (short == 1)).all()


def test_all_states_are_told_of() -> None:
    for states in STATES.values():
        for fmt in (states.signed, states.positive):
            assert fmt is None or moment_tables.refuses_format(fmt) is None
    assert {"ulinear4", *moment_tables.DECADES} == set(STATE_TYPES)


def refusals() -> dict[str, ParamStep]:
    p, g, eight = torch.zeros(4, 128), torch.zeros(4, 128), Format(dtype="dynamic8", block=(1, 128))
    kept = moment(eight, False, 4, 128)

    def odd(**changes: Any) -> Moment:
        return kept._replace(format=Format(**{"dtype": "dynamic8", "block": (1, 128), **changes}))

    return {
        "must be plain tensors": ParamStep(_Other(p), g, (), Numbers()),
        "not torch.float64 and torch.float32": ParamStep(p.double(), g, (), Numbers()),
        "the parameter must be contiguous": ParamStep(torch.zeros(128, 4).t(), g, (), Numbers()),
        "without codes must be contiguous": ParamStep(p, g, (Moment(torch.zeros(128, 4).t()),), Numbers()),
        "codes must be of dynamic8, udynamic8": ParamStep(p, g, (odd(dtype="int8"),), Numbers()),
        "up to 256, not": ParamStep(p, g, (odd(block=(1, 0)),), Numbers()),
        "scales must be float32": ParamStep(p, g, (kept._replace(scale=scale_of(kept).half()),), Numbers()),
        "codes and scales must be contiguous": ParamStep(
            p, g, (kept._replace(data=torch.zeros(128, 4).t()),), Numbers()
        ),
        "moments must have one block": ParamStep(p, g, (kept, odd(block=(1, 64))), Numbers()),
    }


class _Other(Tensor):
    pass


@pytest.mark.parametrize("reason", refusals())
def test_what_it_does_not_take_it_says(reason: str) -> None:
    target = refusals()[reason]
    (impl,) = (impl for impl in IMPLS[STEP, "cpu"] if impl.name == "native")
    assert reason in (impl.supports("sgd", target) or "")
    with (
        use_kernel("native"),
        pytest.raises(KernelError, match="kernel 'native' was forced for optimizer_step on cpu, but refuses"),
    ):
        optimizer_step("sgd", [target])


def test_what_one_kernel_refuses_goes_to_the_next() -> None:
    plugins.load()
    turned, straight = torch.zeros(8, 4).t(), torch.zeros(4, 8)
    g = torch.ones(4, 8)
    optimizer_step("sgd", [ParamStep(p, g, (), Numbers(rate=1.0)) for p in (turned, straight)])
    assert torch.equal(turned, -g)
    assert torch.equal(straight, -g)


def test_a_kernel_that_does_not_exist_is_an_error() -> None:
    with use_kernel("dense_mm"), pytest.raises(KernelError, match="but cpu has only: native, generic"):
        optimizer_step("sgd", [ParamStep(torch.zeros(3), torch.ones(3), (), Numbers())])


def test_the_library_checks_what_it_is_given() -> None:
    """Two moments for sgd are refused."""
    target = ParamStep(torch.zeros(8), torch.zeros(8), (Moment(torch.zeros(8)), Moment(torch.zeros(8))), Numbers())
    with pytest.raises(KernelError, match="rules 0 to 2 with the moments they have"):
        optimizer_step("sgd", [target])
