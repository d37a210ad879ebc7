"""The ops of exported programs: native kernels with their operands spelled out as tensors and numbers.

They exist in programs only: generated code calls the C function of the same name (``native/shim/bitport_shim.h``).
Weights are in the layout cpu_tiles, tokens of a cache in plain. ``table`` maps codes to values; ``act`` and ``then``
are numbers from :mod:`bitport.ops.native_codes`. ``number_table`` stands for such a table until
:mod:`bitport.export.lower` replaces it by a constant.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from bitport.numerics import NUMBER_TYPES
from bitport.ops.native_codes import meanings

NAMESPACE = "bitport_export"
WEIGHT = (
    "Tensor data, Tensor scale, Tensor? zero, Tensor? scale2, Tensor table, "
    "int n, int k, int group, int bits, int integer"
)


def _tokens(side: str) -> str:
    tensors = f"Tensor {side}_data, Tensor {side}_scale, Tensor? {side}_zero, Tensor? {side}_dense, Tensor {side}_table"
    return ", ".join([tensors, *(f"int {side}_{name}" for name in ("n", "k", "block", "group", "bits", "integer"))])


SCHEMAS = {
    "bitport_linear": f"(Tensor x, {WEIGHT}, Tensor? bias, int then, Tensor? times) -> Tensor",
    "bitport_dyn_linear": (
        f"(Tensor x, {WEIGHT}, int act, Tensor? act_scale, Tensor? bias, int then, Tensor? times) -> Tensor"
    ),
    "bitport_grouped_linear": f"(Tensor x, Tensor ends, {WEIGHT}) -> Tensor",
    "bitport_dyn_grouped_linear": f"(Tensor x, Tensor ends, {WEIGHT}, int act) -> Tensor",
    "bitport_embedding": f"(Tensor ids, {WEIGHT}, ScalarType dtype) -> Tensor",
    "bitport_attention": (
        f"(Tensor q, {_tokens('k')}, {_tokens('v')}, int first, Tensor? mask, int causal, float scale) -> Tensor"
    ),
    "bitport_float_attention": (
        "(Tensor q, Tensor keys, Tensor values, Tensor? mask, int causal, float scale) -> Tensor"
    ),
}
LIB = torch.library.Library(NAMESPACE, "DEF")
C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Tensor?": "AtenTensorHandle*",
    "int": "int64_t",
    "float": "double",
    "ScalarType": "int32_t",
}


def _linear(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], rest[5]))  # type: ignore[arg-type]


def _grouped_linear(x: Tensor, ends: Tensor, *rest: object) -> Tensor:
    return x.new_empty((x.shape[0], rest[5]))  # type: ignore[arg-type]


def _embedding(ids: Tensor, *rest: object) -> Tensor:
    return torch.empty((*ids.shape, rest[6]), dtype=rest[10], device=ids.device)  # type: ignore[call-overload]


def _attention(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty((*q.shape[:3], rest[17]))  # type: ignore[arg-type]


def _float_attention(q: Tensor, keys: Tensor, values: Tensor, *rest: object) -> Tensor:
    return q.new_empty((*q.shape[:3], values.shape[3]))


FAKES: dict[str, Callable[..., Tensor]] = {
    "bitport_linear": _linear,
    "bitport_dyn_linear": _linear,
    "bitport_grouped_linear": _grouped_linear,
    "bitport_dyn_grouped_linear": _grouped_linear,
    "bitport_embedding": _embedding,
    "bitport_attention": _attention,
    "bitport_float_attention": _float_attention,
}
for _name, _fake in FAKES.items():
    LIB.define(_name + SCHEMAS[_name], tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=LIB)
LIB.define("number_table(str dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIB.impl("number_table", lambda dtype: torch.tensor(meanings(dtype), dtype=torch.float32), "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{NAMESPACE}::number_table",
    lambda dtype: torch.empty(1 << NUMBER_TYPES[dtype].bits, dtype=torch.float32),
    lib=LIB,
)


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def declarations() -> dict[torch._ops.OpOverload, list[str]]:
    """The C functions behind the ops, in the form of AOTInductor's option ``custom_ops_to_c_shims``."""
    return {overload(name): [_declaration(name, schema)] for name, schema in SCHEMAS.items()}


def _declaration(name: str, schema: str) -> str:
    arguments = re.findall(r"([\w?]+) (\w+)[,)]", schema)
    given = [f"{C_TYPES[kind]} {argument}" for kind, argument in arguments]
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join([*given, 'AtenTensorHandle* result'])})"
