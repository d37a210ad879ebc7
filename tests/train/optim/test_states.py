"""Formats of the moments: their code tables, rounding and size."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitport.errors import LayoutError
from bitport.numerics import Format, number_type
from bitport.numerics.types import NUMBER_TYPES, STATE_TYPES
from bitport.schemes import Scheme
from bitport.tensor import QTensor, quantize_tensor
from bitport.train.optim import SGD, STATES, AdamW, Lion

from .judges import OPTIONS, judged


def published(signed: bool, exponents: int, bits: int) -> Tensor:
    """The code tables as bitsandbytes builds them: midpoints of a linspace in each decade, in float32."""
    values = [torch.tensor([0.0, 1.0])]
    for i in range(exponents):
        items = 2 ** (i + bits - 1 - exponents + (0 if signed else 1)) + 1
        ends = torch.linspace(0.1, 1, items)
        middles = 10 ** (i - (exponents - 1)) * (ends[:-1] + ends[1:]) / 2
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


@pytest.mark.parametrize(("name", "signed", "exponents"), [("dynamic8", 1, 7), ("udynamic8", 0, 7), ("dynamic4", 1, 3)])
def test_the_maps_are_the_published_ones(name: str, signed: bool, exponents: int) -> None:
    number = number_type(name)
    table = torch.tensor(number.table)
    assert table.numel() == 1 << number.bits
    torch.testing.assert_close(table, published(bool(signed), exponents, number.bits), rtol=4 * 2.0**-24, atol=0)


def test_the_linear_map_has_no_zero() -> None:
    assert number_type("ulinear4").table == tuple(i / 16 for i in range(1, 17))
    assert [name for name, number in STATE_TYPES.items() if not number.has_zero] == ["ulinear4"]
    without = {name for name, number in NUMBER_TYPES.items() if not number.has_zero}
    assert without == {"int1", "float8_e8m0", "ggml_iq4", "ggml_iq3", "ggml_iq3s", "ggml_iq2"}


def test_they_are_no_types_of_weights() -> None:
    assert not set(STATE_TYPES) & set(NUMBER_TYPES)


@pytest.mark.parametrize("name", STATE_TYPES)
def test_codes_are_the_nearest_and_kept(name: str) -> None:
    fmt = Format(dtype=name, block=(1, 64))
    value = torch.randn(6, 200)
    value = value.abs() if name.startswith("u") else value
    q = quantize_tensor(value, Scheme(weight=fmt))
    assert q.bits_layout == "plain"
    table = np.array(number_type(name).table)
    scale = q.scale.repeat_interleave(64, 1)[:, :200].double().numpy()
    error = np.abs(q.dequantize().double().numpy() - value.double().numpy())
    least = np.abs(table * scale[..., None] - value.double().numpy()[..., None]).min(-1)
    assert (error <= least + 2.0**-22 * scale).all()
    with pytest.raises(LayoutError, match=f"{name} is for states of optimizers; no product takes it"):
        q.to_layout("cpu_tiles")


@pytest.mark.parametrize("name", STATE_TYPES)
def test_a_block_of_zeros_reads_as_zeros(name: str) -> None:
    q = quantize_tensor(torch.zeros(3, 40), Scheme(weight=Format(dtype=name, block=(1, 16))))
    assert torch.equal(q.dequantize(), torch.zeros(3, 40))


def scaled_bytes(n: int, k: int, bits: int, block: int) -> int:
    return n * -(-k * bits // 8) + 4 * n * -(-k // block)


MATRICES = {
    **{(512, 1024): (512, 1024), (40, 256): (40, 256), (64, 3, 16, 16): (64, 768)},
    **{(300, 77): (1, 23100), (5000,): (1, 5000)},
}
"""A shape, and the matrix that it is stored as."""


@pytest.mark.parametrize("shape", MATRICES)
def test_the_memory_is_what_was_promised(shape: tuple[int, ...]) -> None:
    n, k = MATRICES[shape]
    wanted = {
        "8bit": 2 * scaled_bytes(n, k, 8, 256),
        "4bit": 2 * scaled_bytes(n, k, 4, 128),
        "fp8": 2 * scaled_bytes(n, k, 8, 256),
        "float32": 8 * math.prod(shape),
        "bfloat16": 4 * math.prod(shape),
    }
    assert set(wanted) == set(STATES)
    for states, count in wanted.items():
        param = nn.Parameter(torch.randn(shape))
        param.grad = torch.randn(shape)
        optimizer = AdamW([param], states=states)
        optimizer.step()
        moments = {name: value for name, value in optimizer.state[param].items() if name != "step"}
        assert sum(value.nbytes for value in moments.values()) == count
        for value in moments.values():
            assert isinstance(value, QTensor) == (states in ("8bit", "4bit", "fp8"))
            assert not isinstance(value, QTensor) or value.qdata.shape[0] == n
    if k == 1024:
        assert wanted["8bit"] / math.prod(shape) == 2 + 8 / 256
        assert wanted["4bit"] / math.prod(shape) == 1 + 8 / 128


def test_small_tensors_keep_float32() -> None:
    small, large = nn.Parameter(torch.ones(4095)), nn.Parameter(torch.ones(4096))
    small.grad, large.grad = torch.ones(4095), torch.ones(4096)
    for limit, coded in ((4096, [False, True]), (0, [True, True]), (10000, [False, False])):
        optimizer = Lion([small, large], min_elements=limit)
        optimizer.step()
        kinds = [optimizer.state[param]["exp_avg"] for param in (small, large)]
        assert [isinstance(kind, QTensor) for kind in kinds] == coded
        assert all(kind.dtype == torch.float32 for kind in kinds)


KEPT = {
    "adamw": {"exp_avg": False, "exp_avg_sq": True},
    "lion": {"exp_avg": False},
    "sgd-momentum": {"momentum_buffer": False},
}
"""The moments of a rule, and whether they are never negative."""


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("states", ["8bit", "4bit", "fp8"])
@pytest.mark.parametrize("shape", [(20, 300), (333, 21)])
def test_a_step_from_kept_moments_against_float64(states: str, shape: tuple[int, ...], name: str) -> None:
    """The moments are decoded, updated and rounded to the nearest number of the table, scaled by the maximum of each
    block."""
    param = nn.Parameter(torch.randn(shape))
    (cls, options), moments = OPTIONS[name], KEPT[name]
    optimizer = cls([param], states=states, **options)
    wanted = param.detach().double()
    for t in range(1, 5):
        state = optimizer.state[param]
        before = {moment: read(state[moment], shape) for moment in moments} if state else {}
        param.grad = torch.randn(shape) * torch.logspace(-4, 0, shape[-1])
        optimizer.step()
        wanted = judged(cls, wanted, param.grad.double(), before, t, **options)
        assert (param.detach() - wanted).abs().max() <= 16 * 2.0**-24 * (wanted.abs().max() + 1)
        wanted = param.detach().double()
        for moment, positive in moments.items():
            assert_nearest(state[moment], before[moment], positive=positive)


def entries(name: str) -> Tensor:
    number = number_type(name)
    if number.kind == "codebook":
        return torch.tensor(number.table, dtype=torch.float64)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return every[every.isfinite()].unique()


def read(kept: QTensor, shape: tuple[int, ...]) -> Tensor:
    return kept.dequantize(torch.float32).double().reshape(shape)


def assert_nearest(kept: QTensor, value: Tensor, positive: bool) -> None:
    fmt = kept.scheme.weight
    value, table = value.reshape(kept.qdata.shape[0], -1), entries(fmt.dtype)
    for row in range(value.shape[0]):
        for at, block in enumerate(value[row].split(fmt.block[1])):
            scale = kept.scale[row, at].double()
            torch.testing.assert_close(scale * table.abs().max(), block.abs().max(), rtol=2.0**-21, atol=0)
            got = read(kept, tuple(value.shape))[row, at * fmt.block[1] :][: block.numel()] / scale
            steps = block / scale
            allowed = table[table > 0] if positive else table
            least = (allowed - steps[:, None]).abs().min(1).values
            assert ((got - steps).abs() <= least + 2.0**-20 * (steps.abs() + got.abs())).all()


@pytest.mark.parametrize("states", ["8bit", "4bit", "fp8"])
def test_a_second_moment_never_becomes_zero(states: str) -> None:
    """If a gradient vanishes next to large ones, the next step would divide by eps alone."""
    param = nn.Parameter(torch.zeros(16, 256))
    optimizer = AdamW([param], lr=1e-3, states=states, weight_decay=0.0)
    grad = torch.full((16, 256), 1e-4)
    grad[:, 0] = 100.0
    param.grad = grad
    optimizer.step()
    assert (read(optimizer.state[param]["exp_avg_sq"], (16, 256)) > 0).all()
    before = param.detach().clone()
    param.grad = torch.zeros(16, 256)
    optimizer.step()
    assert (param.detach() - before).abs().max() <= 10 * 1e-3


@pytest.mark.parametrize("states", ["8bit", "4bit", "fp8"])
def test_what_never_had_a_gradient_stays(states: str) -> None:
    param = nn.Parameter(torch.randn(16, 256))
    start = param.detach().clone()
    optimizer = AdamW([param], states=states, weight_decay=0.0)
    for _ in range(3):
        param.grad = torch.zeros(16, 256)
        param.grad[:, :8] = torch.randn(16, 8)
        optimizer.step()
    assert torch.equal(param.detach()[:, 8:], start[:, 8:])


@pytest.mark.parametrize("states", ["8bit", "4bit", "fp8"])
def test_a_nan_reads_as_nan(states: str) -> None:
    """It is not rounded to a number: its block is NaN from then on, and the other blocks are unaffected."""
    param = nn.Parameter(torch.zeros(16, 512))
    optimizer = AdamW([param], states=states)
    param.grad = torch.ones(16, 512)
    param.grad[3, 300] = math.nan
    optimizer.step()
    kept = read(optimizer.state[param]["exp_avg"], (16, 512))
    assert kept[3, 300].isnan()
    assert kept[:3].isfinite().all()
    assert kept[3, :256].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sign_that_there_is_not_is_seen(bad: float) -> None:
    """torch.sign of a NaN is 0: its block would silently stop moving."""
    param = nn.Parameter(torch.zeros(2, 300))
    optimizer = Lion([param], min_elements=0)
    for first in (bad, 1.0):
        param.grad = torch.ones(2, 300)
        param.grad[0, [3, 290]] = first
        optimizer.step()
    assert param[0].isnan().all()
    assert param[1].isfinite().all()


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_quadratic_is_brought_to_its_minimum(states: str, dtype: torch.dtype) -> None:
    """Lion moves every element by lr, so it ends within a few steps of the optimum for any format of the moments, plus
    the spacing of numbers in the parameter's dtype."""
    target = torch.empty(16, 300).uniform_(-1, 1)
    param = nn.Parameter(torch.zeros(16, 300, dtype=dtype))
    optimizer = Lion([param], lr=0.02, betas=(0.5, 0.5), states=states)
    for _ in range(120):
        param.grad = (param.detach().float() - target).to(dtype)
        optimizer.step()
    assert (param.detach().float() - target).abs().max() <= 8 * 0.02 + torch.finfo(dtype).eps


def test_small_steps_are_not_lost_in_bfloat16() -> None:
    """1000 steps of 2^-12 from 1, each a 32nd of the spacing of bfloat16: rounding to nearest never moves. With
    stochastic rounding the mean of n elements ends within 5 standard deviations, each at most half a spacing per
    step."""
    n, steps, lr = 4096, 1000, 2.0**-12
    ends = {}
    for chance in (True, False):
        param = nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
        optimizer = SGD([param], lr=lr, stochastic_rounding=chance)
        for _ in range(steps):
            param.grad = -torch.ones(n, dtype=torch.bfloat16)
            optimizer.step()
        ends[chance] = param.detach().double().mean().item()
    assert ends[False] == 1.0
    assert abs(ends[True] - (1 + steps * lr)) <= 5 * 2.0**-8 * math.sqrt(steps / n)


def test_moments_in_bfloat16_do_not_stick() -> None:
    """A second moment that shrinks by a thousandth per step, less than bfloat16 can resolve."""
    param = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([param], states="bfloat16", weight_decay=0.0)
    for step in range(301):
        param.grad = torch.full((4096,), 1.0 if step == 0 else 0.0)
        optimizer.step()
    wanted = 0.001 * 0.999**300
    got = optimizer.state[param]["exp_avg_sq"].double().mean().item()
    assert abs(got / wanted - 1) <= 5 * 2.0**-8 * math.sqrt(300 / 4096)
