"""Methods and functions of torch that work otherwise on a QTensor than on a float tensor, or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.tensor.dispatch import handled
from bitport.tensor.qtensor import ATEN, FUNCTIONS, PARTS, QTensor, unsupported


def _set_data(self: Tensor, value: Tensor) -> None:
    """``param.data = q``, including the parts, which torch's own setter does not replace."""
    if not (isinstance(self, QTensor) and isinstance(value, QTensor)):
        raise ArgumentError(
            "the .data of a quantized tensor can only be another one: assign a new nn.Parameter instead, or make the "
            "model a float one, bitport.dequantize_(model), as before adapters are merged"
        )
    with torch._C.DisableTorchFunctionSubclass():
        SET_DATA(self, value)
    for name in (
        *PARTS,
        "scheme",
        "bits_layout",
        "matrix",
        "transposed",
        "repeated",
        "is_rows",
        "piece_of_packed",
        "room",
    ):
        setattr(self, name, getattr(value, name))


def _storage(q: QTensor) -> NoReturn:
    """Called by safetensors, and so by save_pretrained of transformers and diffusers."""
    raise ArgumentError(
        "a quantized tensor lies in several storages, its parts; to write a model use bitport.save(model, directory), "
        "or save_model of bitport.integrations.huggingface for one of transformers or diffusers; save_state of "
        "accelerate takes it with safe_serialization=False, and save_pretrained of PEFT writes adapters without "
        "weights of the model with save_embedding_layers=False"
    )


def _outside(q: QTensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise ArgumentError(
        "a quantized tensor has no memory that other libraries can read: give them its dequantize(). In accelerate, "
        "cpu_offload takes it and disk_offload does not"
    )


def _apply(q: QTensor, callable: Callable[..., Any]) -> NoReturn:
    unsupported("Tensor.apply_", q)


def _norm(q: QTensor, *args: Any) -> NoReturn:
    """Called by weight_norm, which takes NotImplementedError to mean a parametrization without an inverse."""
    raise ArgumentError(
        "weight_norm cannot take a quantized weight apart: bitport.dequantize_(model) first, and quantize_ it again "
        "after torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
    )


def _detach(q: QTensor) -> Tensor:
    """As PyTorch's dispatcher does it, and ``nn.Parameter(q)`` with it; but the first op that reaches a tensor subclass
    there imports torch.distributed.tensor with all that it needs."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.detach(q)
    made: Tensor = handled(ATEN, torch.ops.aten.detach.default, (q,), {})
    return made


def _requires_grad(q: QTensor, requires_grad: bool = True) -> QTensor:
    """Keep requires_grad False: functions recorded by torch itself would compute a float gradient of the weight."""
    if requires_grad and isinstance(q, torch.nn.Parameter):  # no warning for nn.Parameter(q), which always asks
        warnings.warn(
            "a quantized weight is a constant, which gets no gradient: its requires_grad stays False; "
            "bitport.train.prepare_(model, scheme) makes weights that are trained",
            stacklevel=3,
        )
    return q


def _element_size(q: QTensor) -> float:
    """Bytes per element including its share of the scales, such as 0.5625; nbytes is this times numel."""
    return q.nbytes / q.numel() if q.numel() else 0.0


SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
FUNCTIONS[SET_DATA] = _set_data
FUNCTIONS[Tensor.storage] = _storage
FUNCTIONS[Tensor.detach] = _detach
FUNCTIONS[Tensor.requires_grad_] = FUNCTIONS[Tensor.requires_grad.__set__] = _requires_grad  # type: ignore[attr-defined]
FUNCTIONS.update(dict.fromkeys((Tensor.__dlpack__, Tensor.numpy, Tensor.__array__, Tensor.tolist), _outside))
FUNCTIONS[Tensor.element_size] = _element_size
FUNCTIONS[Tensor.data_ptr] = lambda q: q.qdata.data_ptr()  # accelerate finds tied weights by it; torch's is 0
FUNCTIONS[torch.norm_except_dim] = _norm
FUNCTIONS[Tensor.apply_] = _apply  # torch's own would read memory that a QTensor does not have
