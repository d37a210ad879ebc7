"""Checks in several processes: models in training under FSDP2, against the same training in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import bitport as bp
from bitport.algorithms.solving import uses_data
from bitport.errors import ArgumentError
from bitport.train import convert_, prepare_
from tests.train.steps import steps

CASES = {
    "int4-g32": None,
    "int8-dyn": "int8",
    "fp8": "fp8",
    "fp8-block": "fp8-block",
    "nvfp4": None,
}


def model_of(scheme: str, gradients: str | None = None, algorithm: str = "rtn", seed: int = 0) -> nn.Module:
    """A model whose rows no number of processes divides evenly."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 131), nn.ReLU(), nn.Linear(131, 40, bias=False))
    data = [torch.randn(40, 64)] if uses_data(algorithm, scheme) else None
    prepare_(model, scheme, gradients=gradients, algorithm=algorithm, calibrate=data)
    return model


def sharded(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(model: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # type: ignore[return-value]


def check_the_numbers_are_those_of_one_piece(mesh: Any) -> None:
    for scheme, gradients in CASES.items():
        alone = model_of(scheme, gradients)
        together = sharded(copy.deepcopy(alone), mesh)
        assert steps(together) == pytest.approx(steps(alone), rel=1e-5), scheme
        state = full(together)
        for name, value in alone.state_dict().items():
            assert type(state[name]) is Tensor
            assert torch.allclose(state[name], value, atol=1e-5), (scheme, name)


def check_weights_stay_gathered_if_asked(mesh: Any) -> None:
    alone = model_of("int4-g32", None)
    together = sharded(copy.deepcopy(alone), mesh, reshard_after_forward=False)
    assert steps(together) == pytest.approx(steps(alone), rel=1e-5)


def check_mixed_precision_rounds_the_values_themselves(mesh: Any) -> None:
    """Codes from bfloat16 values would differ; only the product is in bfloat16."""
    alone = model_of("int4-g32", None)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    together = sharded(copy.deepcopy(alone), mesh, mp_policy=policy)
    x = torch.randn(16, 64).bfloat16()
    with torch.no_grad():
        first = alone[0]  # type: ignore[index]
        want = F.linear(x, first.weight, first.bias.bfloat16())
        want = F.linear(want.relu(), alone[2].weight)  # type: ignore[index]
        assert torch.equal(together(x), want)


def check_mixed_precision_trains(mesh: Any) -> None:
    """Gradients have the dtype of the policy until they are reduced, including those of biases and norms."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Embedding(20, 64), nn.LayerNorm(64), nn.Linear(64, 131))
    prepare_(alone, {"*": "int8-dyn"})
    together = fully_shard(copy.deepcopy(alone), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ids = torch.arange(20)
    for model in (alone, together):
        model(ids).float().square().mean().backward()
    for one, piece in zip(alone.parameters(), together.parameters(), strict=True):
        assert one.grad is not None
        assert isinstance(piece.grad, DTensor)
        assert piece.grad.dtype == torch.float32
        assert (piece.grad.full_tensor() - one.grad).norm() <= 2.0**-5 * one.grad.norm()


def check_the_state_is_of_floats_and_is_converted_in_one_piece(mesh: Any) -> None:
    together = sharded(model_of("int4-g32", None), mesh)
    steps(together, 1)
    held = together.state_dict()["0.weight"]
    assert isinstance(held, DTensor)
    assert type(held.to_local()) is Tensor
    with pytest.raises(ArgumentError, match="load its full state_dict into a prepared model of one process"):
        convert_(together)
    with pytest.raises(ArgumentError, match=r"0\.weight is a TrainedTensor"):
        bp.save(together, "prepared")
    single = model_of("int4-g32", None)
    single.load_state_dict(full(together))
    x = torch.randn(4, 64)
    with torch.no_grad():
        want = together(x)
        convert_(single)
        assert torch.equal(single(x), want)


def check_scales_that_are_held(mesh: Any) -> None:
    """Every process holds those of the whole weight, in training and in a checkpoint, from which any model
    continues."""
    for scheme in ("int4-g32", "nvfp4", "fp8-block"):
        alone = model_of(scheme, algorithm="gptq")
        together, x = sharded(copy.deepcopy(alone), mesh), torch.randn(4, 64)
        with torch.no_grad():
            assert torch.equal(together(x), alone(x)), scheme
        assert steps(together) == pytest.approx(steps(alone), rel=1e-5), scheme
        state = full(together)
        assert all(type(value) is Tensor for value in state.values())
        with torch.no_grad():
            want = together(x)
        for other in (model_of(scheme), model_of(scheme, algorithm="clip", seed=5)):
            other.load_state_dict(state)
            with torch.no_grad():
                convert_(other)
                assert torch.equal(other(x), want), scheme
        again = sharded(model_of(scheme, algorithm="clip", seed=5), mesh)
        set_model_state_dict(again, state, options=StateDictOptions(full_state_dict=True))  # type: ignore[arg-type]
        with torch.no_grad():
            assert torch.equal(again(x), want), scheme
        follows = sharded(model_of(scheme), mesh)
        with pytest.raises(RuntimeError, match=r"_extra_state holds .*, 0\.weight {}: load it before"):
            follows.load_state_dict(together.state_dict())


def check_tensor_parallelism_takes_gradients_at_inputs_as_they_are(mesh: Any) -> None:
    """The sum over the rows of x rounds each of its terms at most once per row."""
    torch.manual_seed(0)
    alone = nn.Linear(64, 32 * mesh.size(), bias=False)
    prepare_(alone, "mxfp4")
    together = parallelize_module(copy.deepcopy(alone), mesh, ColwiseParallel(output_layouts=Replicate()))
    x, g = torch.randn(16, 64), torch.randn(16, 32 * mesh.size())
    y = together(x)
    assert torch.equal(y, alone(x))
    y.backward(g)
    error = together.weight.grad.full_tensor().double() - g.t().double() @ x.double()
    assert bool((error.abs() <= len(x) * 2.0**-24 * (g.t().abs() @ x.abs())).all())


def check_tensor_parallelism_does_not_round_gradients(mesh: Any) -> None:
    model = nn.Linear(64, 32 * mesh.size(), bias=False)
    prepare_(model, "mxfp8", gradients="mxfp8")
    together = parallelize_module(model, mesh, ColwiseParallel())
    with pytest.raises(ArgumentError, match="does not round its gradients"):
        together(torch.randn(16, 64))


def check_what_is_sharded_is_not_prepared(mesh: Any) -> None:
    model = fully_shard(nn.Linear(64, 32), mesh=mesh)
    with pytest.raises(ArgumentError, match="weight is sharded; prepare_ the model first"):
        prepare_(model, "int8")
