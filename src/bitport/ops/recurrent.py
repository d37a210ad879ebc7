"""LSTM, GRU and simple recurrent networks as products by F.linear, whose weights may be quantized.

PyTorch's own functions hand the weights to libraries (oneDNN, cuDNN) that read memory of floats. Here the product with
the inputs runs once for all steps, and that with the state once per step, both by F.linear: kernels, rounded inputs,
gradients and calibration are those of linear layers.

The rows of the steps lie one after the other, [rows of all steps, K]. A packed sequence has fewer rows from step to
step, as its shorter sequences end. The state has a row for every sequence, of which a step replaces the first ones: the
rest belong to sequences that have ended or, from the last step back to the first, have not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.tensor.dispatch import not_compiled_alone

State = tuple[Tensor, ...]
"""(hidden,), or (hidden, cell) of an LSTM, each [sequences, width]."""


class Weights(NamedTuple):
    """Those of one layer in one direction. ``hr``: the projection of the hidden state of an LSTM."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None


class How(NamedTuple):
    """The last arguments of PyTorch's functions for sequences; packed ones have no batch dimension."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False


Cell = Callable[[Tensor, State, Weights], State]
"""(product with the inputs of a step, state before it, weights) -> state after it."""


def _lstm(given: Tensor, state: State, w: Weights) -> State:
    hidden, cell = state
    write, keep, new, show = (given + F.linear(hidden, w.hh, w.bias_hh)).chunk(4, -1)
    cell = keep.sigmoid() * cell + write.sigmoid() * new.tanh()
    hidden = show.sigmoid() * cell.tanh()
    return hidden if w.hr is None else F.linear(hidden, w.hr), cell


def _gru(given: Tensor, state: State, w: Weights) -> State:
    (hidden,) = state
    reset, keep, new = given.chunk(3, -1)
    reset_h, keep_h, new_h = F.linear(hidden, w.hh, w.bias_hh).chunk(3, -1)
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (new + (keep + keep_h).sigmoid() * (hidden - new),)


def _simple(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda given, state, w: (activation(given + F.linear(state[0], w.hh, w.bias_hh)),)


CELLS: dict[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _simple(torch.tanh),
    "rnn_relu": _simple(torch.relu),
}
"""By the name of the function in ``torch``; that of a single step is NAME_cell."""


def _in_one_direction(
    cell: Cell, x: Tensor, sizes: Sequence[int], state: State, w: Weights, back: bool
) -> tuple[Tensor, State]:
    """Run all steps of a layer; return its hidden states [rows of all steps, width] and its last state. ``sizes``: rows
    of each step."""
    hidden = list(F.linear(x, w.ih, w.bias_ih).split(sizes))
    for at in reversed(range(len(sizes))) if back else range(len(sizes)):
        rows = sizes[at]
        if rows == state[0].shape[0]:
            state = cell(hidden[at], state, w)
        else:
            made = cell(hidden[at], tuple(part[:rows] for part in state), w)
            state = tuple(torch.cat((new, old[rows:])) for new, old in zip(made, state, strict=True))
        hidden[at] = state[0][:rows]
    return torch.cat(hidden), state


def _run(
    cell: Cell, x: Tensor, sizes: Sequence[int], first: Sequence[Tensor], params: Sequence[Tensor], how: How
) -> tuple[Tensor, ...]:
    """``first``: the parts of the state, each [layers * directions, sequences, width]; the last one is returned so."""
    directions = 2 if how.bidirectional else 1
    each = len(params) // (how.num_layers * directions)
    weights = [_weights(params[at : at + each], how.has_biases) for at in range(0, len(params), each)]
    states: list[State] = [*zip(*(part.unbind(0) for part in first), strict=True)]
    for layer in range(how.num_layers):
        if layer and how.train and how.dropout:
            x = F.dropout(x, how.dropout)
        outputs = []
        for back in range(directions):
            at = layer * directions + back
            hidden, states[at] = _in_one_direction(cell, x, sizes, states[at], weights[at], bool(back))
            outputs.append(hidden)
        x = torch.cat(outputs, -1)
    return x, *(torch.stack(part) for part in zip(*states, strict=True))


def _weights(params: Sequence[Tensor], has_biases: bool) -> Weights:
    """From PyTorch's order, in which a projection comes after the biases if there are any."""
    ih, hh, *rest = params
    return Weights(ih, hh, *rest) if has_biases else Weights(ih, hh, None, None, *rest)


def _parts(hx: Tensor | Sequence[Tensor]) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _sequence(cell: Cell) -> Callable[..., tuple[Tensor, ...]]:
    """A function of ``torch`` for whole sequences, which has two forms."""

    def padded(
        input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        how = How(*args, **kwargs)
        x = input.transpose(0, 1) if how.batch_first else input
        steps, sequences = x.shape[:2]
        if steps == 0:
            raise ArgumentError(f"a sequence has one step or more; this input has none: {[*input.shape]}")
        x, *last = _run(cell, x.flatten(0, 1), [sequences] * steps, _parts(hx), params, how)
        x = x.unflatten(0, (steps, sequences))
        return x.transpose(0, 1) if how.batch_first else x, *last

    def packed(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        return _run(cell, data, batch_sizes.tolist(), _parts(hx), params, How(*args, **kwargs))

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        is_packed = "batch_sizes" in kwargs or (len(args) > 3 and not isinstance(args[3], bool))
        return (packed if is_packed else padded)(*args, **kwargs)

    return not_compiled_alone(run, nor_what_it_calls=True)


def _step(cell: Cell) -> Callable[..., Tensor | State]:
    """A function of ``torch`` for a single step."""

    def run(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor | State:
        state = cell(F.linear(input, w_ih, b_ih), _parts(hx), Weights(w_ih, w_hh, b_ih, b_hh))
        return state[0] if isinstance(hx, Tensor) else state

    return run


RECURRENT: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): _sequence(cell) for name, cell in CELLS.items()},
    **{getattr(torch, f"{name}_cell"): _step(cell) for name, cell in CELLS.items()},
    torch._cudnn_rnn_flatten_weight: lambda *args: None,
}
"""Function of ``torch`` -> the same by F.linear. The last one, called when a module is moved to a GPU, copies weights
together for cuDNN."""
