"""Statistics of the inputs of a weight: the sum of x x^T, which determines the error of its output.

Inputs are observed at the products rather than at modules, so F.linear with a tied weight and an expert that is a slice
of a parameter are covered like any nn.Linear.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bitport.calibrate.contexts import no_autocast
from bitport.calibrate.stand_in import Between, StandIn
from bitport.errors import ArgumentError
from bitport.ops.recurrent import RECURRENT
from bitport.schemes import Target

PANEL = 512
"""Columns of a sum of x x^T that are computed at once. Each panel starts at the diagonal; the rest follows from the
symmetry of the sum."""


class Inputs:
    """``gram`` float32 [.., K, K]: the sum of x x^T over the inputs of each matrix; ``rows`` int64 [..]: their
    number."""

    def __init__(self, batch: tuple[int, ...], k: int, device: torch.device | str | None = None) -> None:
        self.gram = torch.zeros(*batch, k, k, dtype=torch.float32, device=device)
        self.rows = torch.zeros(batch, dtype=torch.int64, device=device)

    def add(self, x: Tensor, index: tuple[int, ...] = ()) -> None:
        """Add inputs ``x`` [.., K] of the matrix at ``index``."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        gram, k = self.gram[index], rows.shape[-1]
        for start in range(0, k, PANEL):
            end = min(start + PANEL, k)
            panel = rows[:, start:].t() @ rows[:, start:end]
            gram[start:, start:end] += panel
            gram[start:end, end:] += panel[end - start :].t()
        self.rows[index] += rows.shape[0]

    def __getitem__(self, at: int) -> Inputs:
        """The statistics of one matrix of a stack."""
        one = Inputs((), 0)
        one.gram, one.rows = self.gram[at], self.rows[at]
        return one

    @property
    def any_rows(self) -> bool:
        """Whether any of the matrices has received input."""
        return bool((self.rows > 0).any())

    def divided(self, scale: Tensor) -> Inputs:
        """The statistics if every x were divided by ``scale`` [.., K]."""
        other = Inputs((), 0)
        other.gram, other.rows = self.gram / (scale[..., None] * scale[..., None, :]), self.rows
        return other


class Rows:
    """Alternative to Inputs that keeps the rows themselves, call by call: (matrix index, rows [M, K])."""

    def __init__(self, *_: object) -> None:
        self.calls: list[tuple[tuple[int, ...], Tensor]] = []

    def add(self, x: Tensor, index: tuple[int, ...] = ()) -> None:
        if x.numel():
            self.calls.append((index, x.detach().reshape(-1, x.shape[-1]).clone()))


Product = tuple[Tensor, Tensor, bool, Tensor | None]
"""(x, the weight, whether it is stored as [.., K, N], ends of the groups of rows)."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product:
    return input, weight, False, None


def _matmul(input: Tensor, other: Tensor, **kwargs: Any) -> Product:
    return input, other, True, None


def _mm(input: Tensor, mat2: Tensor, **kwargs: Any) -> Product:
    return input, mat2, True, None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **kwargs: Any) -> Product:
    return mat1, mat2, True, None


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, **kwargs: Any) -> Product:
    return batch1, batch2, True, None


def _mv(input: Tensor, vec: Tensor, **kwargs: Any) -> Product:
    return input, vec, True, None


def _grouped(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any) -> Product:
    return mat_a, mat_b, True, offs


PRODUCTS: dict[Callable[..., Any], Callable[..., Product]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch._grouped_mm: _grouped,
    **dict.fromkeys((Tensor.addmm, Tensor.addmm_), _addmm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_), _baddbmm),
    **dict.fromkeys((torch.mv, Tensor.mv), _mv),
    **dict.fromkeys((torch.mm, torch.bmm, Tensor.mm, Tensor.bmm), _mm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
}


def _open(func: Any) -> Callable[..., Any]:
    """Return a Python function that does not dispatch to torch function overrides, so that its inner products are
    seen."""
    own = {**func.__globals__, "has_torch_function": lambda _: False}
    return types.FunctionType(func.__code__, own, func.__name__, func.__defaults__)


ATTENTION = _open(F.multi_head_attention_forward)


class Watch(TorchFunctionMode):
    """Within this context every product with one of ``weights`` adds to its Inputs in ``seen``.

    Products are matched if they use the weight itself, one of its matrices, or rows of a single matrix, whose inputs
    then count for all rows: cross-attention uses some rows of in_proj_weight for queries, others for keys and values.
    ``transposed``: names of weights that are stored as [.., K, N].
    ``collect``: what to collect instead of Inputs; constructed and added to in the same way.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], transposed: Sequence[str] = (), collect: Callable[..., Any] = Inputs
    ) -> None:
        super().__init__()
        self.weights: dict[int, tuple[str, Tensor, bool]] = {}
        self.seen: dict[str, Any] = {}
        for name, weight in weights.items():
            first, _, flipped = self.weights.setdefault(id(weight), (name, weight, name in transposed))
            if first == name:
                self.seen[name] = collect(tuple(weight.shape[:-2]), weight.shape[-2 if flipped else -1], weight.device)
            self.seen[name] = self.seen[first]  # tied weights share their inputs

    @classmethod
    def of(cls, model: nn.Module, targets: Iterable[Target], collect: Callable[..., Any] = Inputs) -> Watch:
        """Watch the weights of ``model`` that ``targets`` describe."""
        every = list(targets)
        weights = {target.name: target.weight(model) for target in every}
        return cls(weights, [target.name for target in every if target.transposed], collect)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            x, weight, flipped, ends = PRODUCTS[func](*args, **(kwargs or {}))
            self._note(x, weight, flipped, ends)
            if flipped and ends is None:  # W X is (X^T W^T)^T
                self._note(weight.mT if weight.dim() > 1 else weight, x, False, None)
        if func is F.multi_head_attention_forward:
            with self:
                return ATTENTION(*args, **(kwargs or {}))
        if func in RECURRENT and any(id(each) in self.weights for each in tree_leaves((args, kwargs))):
            with self:
                return RECURRENT[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(self, x: Tensor, weight: Tensor, flipped: bool, ends: Tensor | None) -> None:
        owner = weight if weight._base is None else weight._base
        if id(owner) not in self.weights:
            return
        if isinstance(x, StandIn):
            raise Between("a product with a watched weight")
        name, owner, lies_flipped = self.weights[id(owner)]
        rows_by_columns, whole = weight.mT if flipped else weight, owner.mT if lies_flipped else owner
        alike = rows_by_columns.shape[-1] == whole.shape[-1] and rows_by_columns.stride()[-2:] == whole.stride()[-2:]
        alike = alike and (rows_by_columns.shape[-2] == whole.shape[-2] or whole.dim() == weight.dim() == 2)
        with no_autocast():
            for index, rows in _matrices(x, rows_by_columns, whole, ends) if alike else ():
                self.seen[name].add(rows, index)


def _matrices(
    x: Tensor, weight: Tensor, whole: Tensor, ends: Tensor | None
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield (index of the matrix in the parameter ``whole``, its inputs)."""
    if whole.dim() == 2:
        yield (), x
    elif weight.dim() == 2:
        at = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
        yield (at,), x
    elif weight.shape == whole.shape and ends is not None:
        start = 0
        for at, end in enumerate(ends.tolist()):
            yield (at,), x[start:end]
            start = end
    elif weight.shape == whole.shape and whole.dim() == 3:
        rows = x if x.dim() > 1 else x.unsqueeze(0)
        rows = rows.expand(*torch.broadcast_shapes(rows.shape[:-2], whole.shape[:1]), *rows.shape[-2:])
        for at in range(whole.shape[0]):
            yield (at,), rows[..., at, :, :] if whole.shape[0] > 1 else rows


def check_inputs(inputs: Mapping[str, Inputs]) -> None:
    for name, each in inputs.items():
        if not bool(each.gram.isfinite().all()):
            raise ArgumentError(f"calibration gave NaN or infinity at the input of {name}")
