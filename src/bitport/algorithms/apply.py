"""Run an algorithm on one weight of a model and measure the error of the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bitport.algorithms.algorithm import RTN, Algorithm
from bitport.algorithms.chain import Chain
from bitport.algorithms.gptq_core import objective
from bitport.algorithms.trial import NO_PRODUCTS
from bitport.calibrate.contexts import no_autocast
from bitport.calibrate.inputs import Inputs
from bitport.errors import ArgumentError
from bitport.nn.quantize import error_of, quantize_target
from bitport.numerics import Format, Quantized, decibels, quantize
from bitport.report import LayerReport
from bitport.schemes import Choice, Scheme, Target
from bitport.tensor import QTensor
from bitport.tensor.parts import has_data
from bitport.tensor.qtensor import rows_of
from bitport.tensor.sharded import nbytes_of


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result for one weight. ``algorithm``: the one that was used; ``note``: why it is not the requested one, or
    was not used for the whole weight. The error fields are those of LayerReport."""

    q: QTensor
    algorithm: str
    note: str = ""
    sqnr: float | None = None
    sqnr_rtn: float | None = None
    output_sqnr: float | None = None
    output_sqnr_rtn: float | None = None

    def to(self, device: torch.device | str) -> Outcome:
        return dataclasses.replace(self, q=self.q.to(device))  # type: ignore[arg-type]

    def as_parameter(self) -> Outcome:
        """Return a copy that holds a Parameter, which tied weights can share."""
        return dataclasses.replace(self, q=nn.Parameter(self.q, requires_grad=False))  # type: ignore[arg-type]

    def report(self, choice: Choice, nbytes: int) -> LayerReport:
        """``nbytes``: the size of the original weight."""
        return LayerReport(
            choice.name,
            str(choice.scheme),
            choice.reason,
            nbytes,
            nbytes_of(self.q),
            sqnr=self.sqnr,
            algorithm=self.algorithm,
            sqnr_rtn=self.sqnr_rtn,
            output_sqnr=self.output_sqnr,
            output_sqnr_rtn=self.output_sqnr_rtn,
            note=self.note,
        )


@no_autocast()
def apply(
    algorithm: Algorithm,
    value: Tensor,
    target: Target,
    scheme: Scheme,
    inputs: Inputs | None = None,
    act_scale: Tensor | None = None,
    *,
    measure: bool = True,
    pre_scale: Tensor | None = None,
) -> Outcome:
    """Quantize ``value`` to ``scheme`` by ``algorithm``. A weight without data (on meta) only gets shapes.
    ``pre_scale``: the factor that its input will be multiplied by before the product. Tables and convolutions, whose
    inputs are not measured, get what the algorithm does without."""
    if inputs is not None and not inputs.any_rows and target.kind in NO_PRODUCTS:
        inputs, algorithm = None, algorithm.solver if isinstance(algorithm, Chain) else algorithm
    refused = algorithm.refuses(scheme.weight, target.kind)
    note = refused or (_unseen(inputs) if inputs is not None else "")
    used = RTN() if refused or (inputs is not None and not inputs.any_rows) else algorithm

    divided, seen = value, inputs
    if pre_scale is not None:
        pre_scale = pre_scale.to(value)
        divided = value / (pre_scale[:, None] if target.transposed else pre_scale)
        seen = None if inputs is None else inputs.divided(1 / pre_scale.to(inputs.gram))

    def by(rows: Tensor, fmt: Format) -> Quantized:
        return _solved(used, rows, fmt, seen) if has_data(rows) else quantize(rows, fmt)

    how = quantize if isinstance(used, RTN) else by
    q = quantize_target(divided, target, scheme, act_scale, how, pre_scale)
    if not measure or not has_data(value, q.qdata):
        return Outcome(q, used.name, note)
    if used.name == "rtn":
        return Outcome(q, used.name, note, error_of(value, q))
    nearest = quantize_target(value, target, scheme)
    weight = error_of(value, q), error_of(value, nearest)
    if inputs is None:
        return Outcome(q, used.name, note, *weight)
    signal, *noises = (each.clamp(min=0) for each in output_squares(value, target, inputs, q, nearest))
    return Outcome(q, used.name, note, *weight, *(float(decibels(signal, noise)) for noise in noises))


def _solved(algorithm: Algorithm, w: Tensor, fmt: Format, inputs: Inputs | None) -> Quantized:
    """The algorithm's result. ArgumentError if it is of another type, or if the weight has been written into, with
    which the result would be compared."""
    before = None if w.is_inference() else w._version
    q = algorithm.solve(w, fmt, inputs)
    if not isinstance(q, Quantized):
        raise ArgumentError(
            f"solve of the algorithm {algorithm.name} has returned {type(q).__name__}, not a bitport.numerics.Quantized"
        )
    if before is not None and w._version != before:
        raise ArgumentError(f"solve of the algorithm {algorithm.name} has written into the weight: clone it first")
    return q


def _unseen(inputs: Inputs) -> str:
    """Return a note if calibration showed too few inputs to generalize from, else "". With fewer rows than columns,
    some errors are invisible on every row, and a search finds them."""
    if inputs.rows.dim() == 0 and not inputs.any_rows:
        return "calibration showed no input of it: rounded to nearest"
    notes, columns, seen = [], inputs.gram.shape[-1], inputs.rows[inputs.rows > 0]
    if empty := inputs.rows.numel() - len(seen):
        notes.append(f"{empty} of {inputs.rows.numel()} matrices saw no input in calibration: rounded to nearest")
    if len(seen) and (least := int(seen.min())) < columns:
        notes.append(
            f"calibrated on only {least} rows of {columns} numbers: on other inputs its output is worse than shown here"
        )
    return "; ".join(notes)


def output_squares(value: Tensor, target: Target, inputs: Inputs, *quantized: QTensor) -> Iterator[Tensor]:
    """Squared norms in float64 of the outputs y of a weight on ``inputs``, and of y - y' for those y' of each of its
    quantized forms."""
    exact = rows_of(value.detach().float(), target.kind, target.transposed)
    gram = inputs.gram.to(exact.device)
    yield objective(exact, gram).double().sum()
    for q in quantized:
        error = exact - rows_of(q.dequantize(torch.float32), target.kind, target.transposed)
        yield objective(error, gram).double().sum()
