"""Common base of the optimizers: options, state, saving and loading, and iteration over the parameters.

The state of a parameter consists of ``step``, a float32 scalar on the CPU as in torch.optim, and its moments. The
random bits of stochastic rounding are a function of the option ``seed``, the index of the parameter, the step, and the
position in the tensor, so a state dict is complete, and a resumed run continues with the same bits.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from bitport.errors import ArgumentError
from bitport.numerics import FLOATS, Format
from bitport.numerics.stochastic import CUT, key_of
from bitport.ops.optimizer_step import Numbers, ParamStep, optimizer_step
from bitport.tensor import QTensor
from bitport.tensor.sharded import sharded_like
from bitport.train.optim import sharded
from bitport.train.optim.states import fits, loaded, moment_of, states_of, zeros
from bitport.train.tensor import TrainedTensor, value_of

Group = dict[str, Any]


class LowBitOptimizer(torch.optim.Optimizer):
    """What the optimizers of this module have in common.

    ``states``: the numbers that moments are kept in, a key of STATES. ``min_elements``: smaller tensors keep them in
    float32. ``stochastic_rounding``: parameters of 16 bits, and moments kept in bfloat16, are rounded up or down at
    random so that the expected value is right, instead of to nearest, where small steps would be lost. ``seed``: of its
    random bits.

    Parameters may be float32, bfloat16 or float16 on any device; all arithmetic is float32.
    """

    rule: ClassVar[str]

    def __init__(
        self,
        params: Any,
        options: Group,
        states: str,
        min_elements: int,
        stochastic_rounding: bool,
        seed: int,
    ) -> None:
        own = {"states": states, "min_elements": min_elements, "stochastic_rounding": stochastic_rounding, "seed": seed}
        super().__init__(params, {**options, **own})

    def moments(self, group: Group) -> dict[str, bool]:
        """Map the names of moments to whether they are non-negative."""
        raise NotImplementedError

    def numbers(self, group: Group, step: int, begins: bool) -> Numbers:
        """Inputs of the formulas of bitport.ops.optimizer_step for step number ``step`` (the first is 1).
        ``begins``: the moments have seen no gradient yet."""
        raise NotImplementedError

    def check(self, group: Group) -> None:
        """Raise ArgumentError unless every option of ``group`` is in its range."""
        states_of(group["states"])
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ArgumentError(f"lr={lr!r}: a tensor must hold one number")
        for name in ("lr", "weight_decay", "min_elements", "eps", "momentum"):
            if name in group and not _number(group[name]) >= 0:
                raise ArgumentError(f"{name}={group[name]!r}: must be a number of at least 0")
        betas = group.get("betas", (0, 0))
        if not isinstance(betas, (tuple, list)) or [0 <= _number(beta) < 1 for beta in betas] != [True, True]:
            raise ArgumentError(f"betas={betas!r}: must be two numbers, both at least 0 and below 1")
        if type(group["seed"]) is not int or not 0 <= group["seed"] < 1 << 64:
            raise ArgumentError(f"seed={group['seed']!r}: must be a whole number, at least 0 and below 2^64")
        if group.get("amsgrad"):
            raise ArgumentError("amsgrad=True: the largest second moment is not kept; use torch.optim for it")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As in torch.optim: ``closure`` is run first, with gradients enabled, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @torch._disable_dynamo
    def _update(self) -> None:
        """Update all parameters; nothing is changed before all gradients have been checked."""
        targets: dict[str, list[ParamStep]] = {}
        stepped, wrapped = [], []
        position = -1
        for group in self.param_groups:
            for param in group["params"]:
                position += 1
                if param.grad is None:
                    continue
                target = self._target(group, param, position)
                targets.setdefault(target.param.device.type, []).append(target)
                stepped.append(self.state[param]["step"])
                if isinstance(param, TrainedTensor):
                    wrapped.append(param)
        for of_device in targets.values():
            optimizer_step(self.rule, of_device)
        for step in stepped:
            step += 1
        increment_version(wrapped)  # autograd knows the weight in training, not the value that was written to

    def _target(self, group: Group, param: Tensor, position: int) -> ParamStep:
        _check_param(param, f"parameter {position}")
        local, grad = sharded.local_of(param, param.grad)
        if grad.layout != torch.strided:
            raise ArgumentError(
                f"parameter {position} has a gradient of layout {grad.layout}: moments are kept for every element; "
                f"make it dense (nn.Embedding(sparse=False)), or use torch.optim.SparseAdam for this parameter"
            )
        state = self.state[param]
        moments = self.moments(group)
        new = not moments.keys() <= state.keys()
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        for name, positive in moments.items():
            if name not in state:
                state[name] = sharded_like(param, zeros(local, *self._kind(group, param, positive)))
        step = int(state["step"].item()) + 1
        begins = step == 1 or new
        held = [_plain(state, name) for name in moments]
        if grad.shape != local.shape or not all(fits(each, local) for each in held):
            raise ArgumentError(
                f"parameter {position} has the shape {[*param.shape]}, and its gradient or moments have another: after "
                "other data was put into a parameter, make the gradient and the optimizer again"
            )
        kept = [moment_of(each, positive) for each, positive in zip(held, moments.values(), strict=True)]
        keys = None
        if group["stochastic_rounding"] and any(part.dtype in CUT for part in (local, *(each.data for each in kept))):
            piece = sharded.piece_of(param)
            keys = tuple(key_of(group["seed"], position, step, which, *piece) for which in range(1 + len(kept)))
        return ParamStep(value_of(local), grad, tuple(kept), self.numbers(group, step, begins), keys)

    def _kind(self, group: Group, param: Tensor, positive: bool) -> tuple[Format | None, torch.dtype]:
        """The format of a moment, and its dtype if the format is None."""
        states = states_of(group["states"])
        fmt = states.format(positive)
        if param.numel() < group["min_elements"]:
            return None, torch.float32
        if fmt is not None and not sharded.takes_codes(param, fmt):
            return None, torch.float32
        return fmt, states.dtype

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        try:
            self._check_last(self.param_groups[-1])
        except ArgumentError:
            del self.param_groups[-1]
            raise

    def _check_last(self, group: Group) -> None:
        self.check(group)
        for at, param in enumerate(group["params"]):
            if param.requires_grad:
                _check_param(param, f"parameter {at} of the group")

    def load_state_dict(self, state_dict: Group) -> None:
        """As in torch.optim: options are taken from the state dict. A state dict of torch.optim is accepted too:
        options that it lacks are kept, and its moments are rounded to ``states``. Unlike torch, which casts float
        states to the parameter's dtype, states keep their dtype."""
        final: Group = {}
        handle = self.register_load_state_dict_pre_hook(lambda _, given: final.update(given))  # after all other hooks
        before = self.__getstate__()
        try:
            super().load_state_dict(state_dict)
            for group, had, given in zip(self.param_groups, before["param_groups"], final["param_groups"], strict=True):
                group.update({name: had[name] for name in self.defaults.keys() & had.keys() - given.keys()})
            self._take_states(final)
        except BaseException:
            self.__setstate__(before)
            raise
        finally:
            handle.remove()

    def _take_states(self, given: Group) -> None:
        saved = itertools.chain.from_iterable(group["params"] for group in given["param_groups"])
        for group in self.param_groups:
            self.check(group)
            for param, number in zip(group["params"], saved, strict=False):
                if state := given["state"].get(number):
                    self.state[param] = self._taken(group, param, state, f"parameter {number}")

    def _taken(self, group: Group, param: Tensor, state: Group, what: str) -> Group:
        moments = self.moments(group)
        if set(state) != {"step", *moments}:
            raise ArgumentError(
                f"the state of {what} has {sorted(state)}; {type(self).__name__} has step, {', '.join(moments)}"
            )
        step = state["step"]
        one = isinstance(step, (int, float)) or (isinstance(step, Tensor) and step.numel() == 1)
        if not one or not (float(step).is_integer() and step >= 0):
            raise ArgumentError(f"the state of {what} has step={step!r}; it must be one whole number, 0 or more")
        taken: Group = {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
        for name, positive in moments.items():
            fmt, dtype = self._kind(group, param, positive)
            value = loaded(
                sharded.local_part(state[name], param), sharded.local_part(param), fmt, dtype, f"{name} of {what}"
            )
            taken[name] = sharded_like(param, value)
        return taken


def _check_param(param: Tensor, what: str) -> None:
    if param.dtype not in FLOATS:
        raise ArgumentError(
            f"{what} is {param.dtype}; allowed are float32, bfloat16 and float16: cast it, or leave it to torch.optim"
        )


def _plain(state: Group, name: str) -> Tensor:
    """The moment in the plain layout that the step takes; moving or unpickling may have changed its layout."""
    kept: Tensor = sharded.local_part(state[name])
    if isinstance(kept, QTensor) and kept.bits_layout != "plain":
        kept = kept.to_layout("plain")
        state[name] = sharded_like(state[name], kept)
    return kept


def _number(option: Any) -> float:
    """Return ``option`` as a float, or NaN, which is outside every range, if it is not a number."""
    return float(option) if isinstance(option, (numbers.Real, Tensor)) else float("nan")
