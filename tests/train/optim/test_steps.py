"""The numbers of a step against float64 and torch.optim, and the features that torch's optimizers support."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitport.errors import ArgumentError
from bitport.ops import optimizer_step, use_kernel
from bitport.tensor import QTensor
from bitport.train import prepare_
from bitport.train.optim import SGD, STATES, AdamW, Lion, LowBitOptimizer

from .judges import OPTIONS, judged

ULP = 2.0**-24
TORCH = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}


def run(optimizer: torch.optim.Optimizer, param: Tensor, grads: list[Tensor]) -> Tensor:
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (4, 3, 2, 2)])
def test_float_states_against_float64(name: str, shape: tuple[int, ...]) -> None:
    """Each step rounds a few times: within 16 ulp of the update and of the parameter."""
    cls, options = OPTIONS[name]
    param = nn.Parameter(torch.randn(shape))
    optimizer = cls([param], states="float32", **options)
    wanted, state, steps = param.detach().double(), {}, 6  # type: ignore[var-annotated]
    for t in range(1, steps + 1):
        param.grad = torch.randn(shape)
        optimizer.step()
        wanted = judged(cls, wanted, param.grad.double(), state, t, **options)
    bound = 16 * ULP * steps * (wanted.abs().max() + options["lr"] * 10)
    assert (param.detach() - wanted).abs().max() <= bound


@pytest.mark.parametrize("name", [name for name, (cls, _) in OPTIONS.items() if cls is not Lion])
def test_float_states_are_those_of_torch(name: str) -> None:
    cls, options = OPTIONS[name]
    start, grads = torch.randn(40, 130), [torch.randn(40, 130) for _ in range(8)]
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours, peer = cls([mine], states="float32", **options), TORCH[cls.__name__]([theirs], **options)
    torch.testing.assert_close(run(ours, mine, grads), run(peer, theirs, grads), rtol=8 * 8 * ULP, atol=64 * ULP)
    for key, value in peer.state[theirs].items():
        if key != "step" and value is not None:
            torch.testing.assert_close(ours.state[mine][key], value, rtol=8 * 8 * ULP, atol=64 * ULP)


@pytest.mark.parametrize("states", ["8bit", "4bit", "fp8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_step_rounds_nothing(name: str, states: str) -> None:
    """Moments start at zero, and the update uses the new ones before they are rounded."""
    cls, options = OPTIONS[name]
    start, grad = torch.randn(20, 300), torch.randn(20, 300)
    results = []
    for kind in (states, "float32"):
        param = nn.Parameter(start.clone())
        results.append(run(cls([param], states=kind, **options), param, [grad]))
    assert torch.equal(*results)


def test_what_changes_between_steps_counts() -> None:
    """A schedule, groups with their own options, a learning rate in a tensor, a frozen parameter, a closure."""
    layer = nn.Linear(8, 8)
    frozen = nn.Parameter(torch.ones(3))
    lr = torch.tensor(0.5)
    optimizer = SGD(
        [{"params": [layer.weight, frozen], "lr": 0.25}, {"params": [layer.bias], "lr": lr}], states="float32"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer.weight.sum() + layer.bias.sum()
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    schedule.step()
    optimizer.step(closure)
    torch.testing.assert_close(layer.weight.detach(), weight - 0.25 * 1.5)
    torch.testing.assert_close(layer.bias.detach(), bias - 0.5 * 1.5)
    assert torch.equal(frozen, torch.ones(3))
    assert frozen not in optimizer.state


def test_gradient_scaling_of_amp_works() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer, scaler = SGD([param], lr=1.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(param.detach(), torch.zeros(4))


def test_memory_format_and_slices_are_no_matter() -> None:
    start, grad = torch.randn(70, 4, 9, 9), torch.randn(70, 4, 9, 9)
    straight = nn.Parameter(start.clone())
    last = nn.Parameter(start.clone(memory_format=torch.channels_last))
    with use_kernel("generic"):
        run(AdamW([straight]), straight, [grad, -grad])
        run(AdamW([last]), last, [grad.clone(memory_format=torch.channels_last), -grad])
    assert torch.equal(straight, last)


def numbers_of(state: Tensor) -> list[Tensor]:
    return [state.qdata.view(torch.uint8), state.scale] if isinstance(state, QTensor) else [state]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("states", STATES)
def test_some_rows_at_a_time_are_as_all_at_once(
    states: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, including random bits. Processed all at once, temporaries would be eight times as large as the
    parameter."""
    for shape in ((20, 300), (7, 4, 9, 9), (999,)):
        start, grads = torch.randn(shape).to(dtype), [torch.randn(shape).to(dtype) for _ in range(3)]
        found = []
        for piece in (1 << 22, 1000):
            monkeypatch.setattr(optimizer_step, "PIECE", piece)
            param = nn.Parameter(start.clone())
            optimizer = AdamW([param], states=states, min_elements=0)
            with use_kernel("generic"):
                run(optimizer, param, grads)
            moments = [state for name, state in optimizer.state[param].items() if name != "step"]
            found.append([param.detach(), *(part for state in moments for part in numbers_of(state))])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_a_compiled_training_step_is_the_eager_one() -> None:
    start, x = torch.randn(64, 80), torch.randn(5, 80)
    results = []
    for wrap in (lambda fn: fn, lambda fn: torch.compile(fn, backend="eager")):
        param = nn.Parameter(start.clone())
        optimizer = AdamW([param], lr=0.1)

        def train(param: Tensor = param, optimizer: LowBitOptimizer = optimizer) -> None:
            optimizer.zero_grad()
            (x @ param.t()).square().mean().backward()
            optimizer.step()

        step = wrap(train)
        for _ in range(3):
            step()
        results.append(param.detach())
    assert torch.equal(*results)


class Prepared(Tensor):
    """A float tensor behind a wrapper subclass without storage of its own, as in training with simulated rounding."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Prepared:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.held = inner
        return self

    def __init__(self, inner: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        inner = [arg.held if isinstance(arg, Prepared) else arg for arg in args]
        result = func(*inner, **(kwargs or {}))
        if func is torch.ops.aten.detach.default:
            return Prepared(result)
        return args[0] if func._schema.is_mutable else result


@pytest.mark.parametrize("states", STATES)
def test_a_parameter_behind_a_wrapper(states: str) -> None:
    start, grads = torch.randn(20, 300), [torch.randn(20, 300) for _ in range(3)]
    plain, inner = nn.Parameter(start.clone()), start.clone()
    wrapped = nn.Parameter(Prepared(inner))
    with use_kernel("generic"):
        run(AdamW([plain], states=states), plain, grads)
    optimizer = AdamW([wrapped], states=states)
    for grad in grads:
        wrapped.grad = grad
        optimizer.step()
    assert torch.equal(inner, plain.detach())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"states": "2bit"}, r"unknown states='2bit'; allowed: 8bit, 4bit, fp8, float32, bfloat16"),
    ({"lr": -1.0}, r"lr=-1.0: must be a number of at least 0"),
    ({"lr": float("nan")}, r"lr=nan: must be a number of at least 0"),
    ({"lr": torch.ones(2)}, r"a tensor must hold one number"),
    ({"eps": -1.0}, r"eps=-1.0"),
    ({"weight_decay": -1.0}, r"weight_decay=-1.0"),
    ({"min_elements": -1}, r"min_elements=-1"),
    ({"seed": -1}, r"seed=-1: must be a whole number, at least 0 and below 2\^64"),
    ({"seed": 0.5}, r"seed=0.5: must be a whole number"),
    ({"betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\): must be two numbers, both at least 0 and below 1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(at) for at in range(len(REFUSED))])
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        AdamW([nn.Parameter(torch.ones(3))], **options)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ArgumentError, match="it needs momentum above 0 and no dampening"):
        SGD([nn.Parameter(torch.ones(3))], nesterov=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_dtypes_that_are_not_taken(dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=rf"parameter 0 of the group is {dtype}; allowed are float32"):
        AdamW([nn.Parameter(torch.ones(3, dtype=dtype))])


@pytest.mark.parametrize("states", STATES)
def test_data_of_another_shape_is_refused(states: str) -> None:
    """Kernels would read and write out of bounds."""
    param = nn.Parameter(torch.zeros(64, 256))
    optimizer = AdamW([param], states=states)
    param.grad = torch.ones(64, 256)
    optimizer.step()
    param.data = torch.zeros(32, 256)
    with pytest.raises(ArgumentError, match=r"parameter 0 has the shape \[32, 256\], and its gradient or moments"):
        optimizer.step()
    param.grad = None
    param.grad = torch.ones(32, 256)
    with pytest.raises(ArgumentError, match=r"make the gradient and the optimizer again"):
        optimizer.step()
    assert not param.any()


def test_parameters_that_are_frozen_are_not_looked_at() -> None:
    """Such as those of quantized layers next to adapters; once they have a gradient, they are checked."""
    layer = nn.Linear(4, 4)
    whole = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    optimizer = AdamW([*layer.parameters(), whole])
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    whole.grad = torch.ones_like(whole)
    with pytest.raises(ArgumentError, match=r"parameter 2 is torch.float64; allowed are float32"):
        optimizer.step()


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("shape", [(0, 300), (3, 0), (0,)])
def test_a_parameter_without_elements(shape: tuple[int, ...], states: str) -> None:
    param = nn.Parameter(torch.zeros(shape))
    optimizer = AdamW([param], states=states, min_elements=0)
    for _ in range(2):
        param.grad = torch.zeros(shape)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[param]["step"] == 2


def test_momentum_that_begins_late_begins_as_torchs_does() -> None:
    ends = []
    for cls in (SGD, torch.optim.SGD):
        param = nn.Parameter(torch.ones(4))
        optimizer = cls([param], lr=0.1, dampening=0.5)
        for momentum in (0.0, 0.0, 0.9, 0.9):
            optimizer.param_groups[0]["momentum"] = momentum
            param.grad = torch.ones(4)
            optimizer.step()
        ends.append(param.detach())
    torch.testing.assert_close(*ends)


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ArgumentError, match="weight_decay"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "weight_decay": -1.0})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    first, table = nn.Parameter(torch.ones(3)), nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    first.grad = torch.ones(3)
    optimizer = AdamW([first, table.weight])
    with pytest.raises(ArgumentError, match=r"parameter 1 has a gradient of layout torch.sparse_coo"):
        optimizer.step()
    assert torch.equal(first.detach(), torch.ones(3))
    assert optimizer.state[first]["step"] == 0


def test_no_warning_and_no_gradient() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = AdamW([nn.Parameter(torch.ones(3))])
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("states", ["8bit", "float32"])
def test_weights_in_training_are_stepped_as_their_values(states: str) -> None:
    """By the same kernel; and autograd is informed of the change."""
    torch.manual_seed(0)
    plain, prepared = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
    prepared.load_state_dict(plain.state_dict())
    prepare_(prepared, "int8-dyn", gradients="int8")
    grad = torch.randn(128, 64)
    for model in (plain, prepared):
        optimizer = AdamW(model.parameters(), lr=1e-2, states=states)
        model.weight.grad = grad.clone()
        optimizer.step()
    assert torch.equal(prepared.state_dict()["weight"], plain.weight)
    optimizer = AdamW(prepared.parameters(), lr=1e-2, states=states)
    y = prepared(torch.randn(4, 64, requires_grad=True)).sum()
    prepared.weight.grad = grad.clone()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
