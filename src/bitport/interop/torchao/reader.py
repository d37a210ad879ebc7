"""torchao (``quant_method: torchao``) in safetensors files, as saved by transformers: the parts of each tensor have
their own names, and are described in the header of the file. Other modules: ``header``; ``tensors``, the classes and
the meaning of their numbers; ``inputs``, the rounding of inputs.

quantization_config only says how weights were chosen. Checkpoints of older versions are pickles, which bitport does not
read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import CheckpointError
from bitport.interop import codec
from bitport.interop.checks import Stored
from bitport.interop.codec import WeightNames, named_scheme
from bitport.interop.configuration import refuse_unknown
from bitport.interop.shifts import ROUNDED
from bitport.interop.torchao.header import Entry, entry_of, is_part
from bitport.interop.torchao.inputs import Inputs, inputs_of
from bitport.interop.torchao.tensors import DTYPES, KERNELS, TENSOR_CLASSES
from bitport.numerics import FLOATS
from bitport.tensor import from_parts

WITH_SHIFTS = ("Int4Tensor", "Int4TilePackedTo4dTensor")


class Reader(codec.Reader):
    known = (
        *("quant_method", "quant_type", "quant_type_kwargs", "modules_to_not_convert"),
        *("include_input_output_embeddings", "untie_embedding_weights"),
    )
    entries: dict[str, tuple[Entry, Inputs]]
    """Keyed by the names of the parameters."""

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found = [entry for name, text in self.metadata.items() if (entry := entry_of(name, text)) is not None]
        for entry in found:
            _check(entry, held)
        self.entries = {entry.name: (entry, inputs_of(entry)) for entry in found}
        known = {part for entry in found for part in entry.parts.values()}
        if lost := [name for name in held if name not in known and is_part(name)]:
            raise CheckpointError(
                f"the headers of the files do not say what {lost[0]} is; fetch the checkpoint again, or save it with a "
                f"newer torchao"
            )
        if not found:
            raise CheckpointError(
                "the headers of the files describe no tensor of torchao; save the model with a newer torchao"
            )
        self.notes += dict.fromkeys(inputs.note for _, inputs in self.entries.values() if inputs.note)
        if any(entry.kind in WITH_SHIFTS for entry in found):
            self.notes.append(ROUNDED)
        return [WeightNames(entry.name, entry.parts) for entry in found]

    def read(self, weight: Stored) -> Tensor:
        entry, inputs = self.entries[weight.name]
        parts, fmt, shape = TENSOR_CLASSES[entry.kind].read(entry, weight)
        before, fixed = _of_inputs(inputs, weight, shape[1])
        both = fmt.scale == "input" and parts.scale.dtype == torch.float32  # which may be that of the scheme
        scheme = named_scheme(fmt, inputs.act, inputs.static, ("input", "float32") if both else (fmt.scale,))
        return from_parts(parts, scheme, shape=shape, dtype=self.dtype, pre_scale=before, act_scale=fixed)


def _check(entry: Entry, held: Mapping[str, FileTensor]) -> None:
    kind = TENSOR_CLASSES.get(entry.kind)
    if kind is None:
        raise CheckpointError(f"{entry.name} is a {entry.kind} of torchao; {', '.join(TENSOR_CLASSES)} are read")
    known = (*kind.attributes, *KERNELS, *DTYPES)
    refuse_unknown(entry.said, known, f"{entry.name}, {entry.kind} of torchao")
    if others := [role for role in entry.parts if role not in kind.parts + kind.optional]:
        raise CheckpointError(
            f"{entry.parts[others[0]]}: a {entry.kind} of torchao has {', '.join(kind.parts + kind.optional)}"
        )
    wanted = dict.fromkeys([*kind.parts, *entry.parts])
    if lost := [role for role in wanted if entry.parts.get(role) not in held]:
        raise CheckpointError(f"{entry.name}, {entry.kind} of torchao, lacks {lost[0]}; fetch the checkpoint again")


def _of_inputs(inputs: Inputs, weight: Stored, k: int) -> tuple[Tensor | None, Tensor | None]:
    """(pre_scale, act_scale)"""
    before, fixed = weight.get("act_pre_scale"), None
    if before is not None:
        before = weight.expect("act_pre_scale", FLOATS, (1,) * (before.dim() - 1) + (k,)).flatten()
    if inputs.static and inputs.act == "nvfp4":  # the second level defaults to 1
        given = "act_per_tensor_scale" in weight
        fixed = weight.number("act_per_tensor_scale") if given else torch.ones((), dtype=torch.float32)
    elif inputs.static:
        fixed = weight.number("act_quant_scale")
        shift = weight.get("act_quant_zero_point")
        if shift is not None and bool(shift.bool().any()):
            raise CheckpointError(f"{weight.names['act_quant_zero_point']} must be 0, for inputs without zero points")
    return before, fixed
