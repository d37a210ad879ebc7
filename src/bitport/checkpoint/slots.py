"""The places in a model that hold a tensor: parameters and buffers, under all of their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bitport.errors import ArgumentError
from bitport.schemes.target import bare
from bitport.tensor import QTensor
from bitport.tensor.sharded import is_quantized, own


@dataclasses.dataclass(frozen=True)
class Slot:
    """``buffer``: "" for a parameter, else "persistent" or "derived" (a buffer outside the state_dict)."""

    name: str
    module: nn.Module
    attribute: str
    buffer: str

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.attribute)

    def put(self, tensor: Tensor) -> None:
        """Use setattr, so that modules which keep lists of their weights (nn.LSTM) are updated."""
        setattr(self.module, self.attribute, tensor)


def fill(group: Sequence[Slot], tensor: Tensor) -> None:
    """Put ``tensor`` into all slots of ``group``, which share one: into its parameters as a single parameter, which
    keeps requires_grad if possible, since PyTorch's choice of kernels depends on it."""
    parameters = [slot.tensor for slot in group if not slot.buffer]
    trains = bool(parameters) and parameters[0].requires_grad
    trains = trains and not is_quantized(tensor) and tensor.dtype.is_floating_point
    parameter = nn.Parameter(tensor, requires_grad=trains) if parameters else tensor
    for slot in group:
        slot.put(tensor if slot.buffer else parameter)


def slots(model: nn.Module) -> Iterator[Slot]:
    """Every slot in the order of the model; tied tensors and shared modules appear under each of their names."""
    full: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            what = f"{prefix or 'the model'} ({type(module).__name__})"
            raise ArgumentError(f"{what} has extra state (get_extra_state); a checkpoint holds tensors only")
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            whole = f"{prefix}.{attribute}" if prefix else attribute
            name = bare(whole)
            if full.setdefault(name, whole) != whole:
                raise ArgumentError(
                    f"{full[name]} and {whole} would both be {name} in a checkpoint, which leaves out the _orig_mod of "
                    f"torch.compile: give that child another name"
                )
            if is_lazy(tensor):
                raise ArgumentError(f"{name} has no shape yet: run the model once, so that its lazy modules get theirs")
            _check(name, own(tensor))
            yield Slot(name, module, attribute, _kind(module, attribute))


def _check(name: str, tensor: Tensor) -> None:
    if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, QTensor):
        raise ArgumentError(
            f"{name} is a {type(tensor).__name__}; a checkpoint holds dense and quantized tensors, and would replace "
            "it by one. Resume what bitport.train prepared from its state_dict(); to save it, first convert_(model) "
            "or release_(model), and load before prepare_(model)"
        )


def identity(tensor: Tensor) -> object:
    """A key that is equal for tensors that are the same object, or the same view of the same memory."""
    dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not dense or tensor.device.type == "meta" or not tensor.untyped_storage().nbytes():
        return id(tensor)
    where = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return (*where, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _kind(module: nn.Module, attribute: str) -> str:
    if attribute in module._parameters:
        return ""
    return "derived" if attribute in module._non_persistent_buffers_set else "persistent"
