"""Pickling of a QTensor: torch.save, torch.load and sending to another process."""

from __future__ import annotations

import traceback
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics.format import SCALE_DTYPES
from bitport.numerics.packing import from_bytes
from bitport.schemes import Scheme
from bitport.tensor.parts import check_dense
from bitport.tensor.qtensor import PARTS, QTensor, from_parts, rebuild, split_parts


def reduced(q: QTensor, parameter: bool) -> tuple[Any, ...]:
    if q.repeated:
        raise ArgumentError(f"{q!r} is an expanded view of a quantized tensor: save the tensor itself")
    names, (scheme, bits_layout, _, transposed, _, dtype) = q.__tensor_flatten__()
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(q.shape)
    tensors = {name: _as_bytes(getattr(q, name)) for name in names}
    return rebuild, (tensors, scheme.to_json(), bits_layout, shape, dtype, transposed, parameter)


def _reduced_as_it_lies(q: QTensor) -> tuple[Any, ...]:
    """For another process of this machine, which maps the parts later: a converted copy would be freed by then."""
    return _rebuilt_as_it_lies, reduced(q, isinstance(q, torch.nn.Parameter))[1]


def _as_bytes(part: Tensor) -> Tensor:
    """8-bit floats viewed as uint8, as pickle fails on them; :func:`rebuild` restores their dtype from the scheme."""
    return part.view(torch.uint8) if part.is_floating_point() and part.dtype.itemsize == 1 else part


def _is_unread(part: Tensor) -> bool:
    """Whether torch.load has yet to read this storage. Its mark stays afterwards, hence the look at the stack."""
    marked = getattr(part.untyped_storage(), "_torch_load_uninitialized", False)
    return marked and any(frame.f_code.co_name == "_legacy_load" for frame, _ in traceback.walk_stack(None))


DESCRIPTION = {
    "tensors": dict,
    "scheme": str,
    "bits_layout": str,
    "shape": tuple,
    "dtype": torch.dtype,
    "transposed": bool,
    "parameter": bool,
}
"""What :func:`reduced` hands over, in this order, and its types."""


def rebuilt(*described: Any) -> QTensor:
    """The QTensor of a file, in the layout of the device it was read to: torch.load calls this with whatever the file
    says, also with weights_only=True."""
    result = _checked(*described)
    return _as_described(result.to_device_layout() if result.bits_layout == "plain" else result, described)


def _rebuilt_as_it_lies(*described: Any) -> QTensor:
    """The QTensor of another process: its memory is shared, and a conversion would copy it."""
    return _as_described(_checked(*described), described)


def _as_described(q: QTensor, described: tuple[Any, ...]) -> QTensor:
    *_, parameter = described
    return torch.nn.Parameter(q, requires_grad=False) if parameter else q  # type: ignore[return-value]


def _checked(*described: Any) -> QTensor:
    """The QTensor that :func:`reduced` described, or ArgumentError."""
    fits = map(isinstance, described, DESCRIPTION.values())
    if len(described) != len(DESCRIPTION) or not all(fits):
        given = ", ".join(type(each).__name__ for each in described)
        raise ArgumentError(f"a saved quantized tensor is made of {', '.join(DESCRIPTION)}, not of {given}")
    tensors, text, bits_layout, shape, dtype, transposed, _ = described
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ArgumentError(f"a saved quantized tensor has the shape {shape!r}")
    if missing := [name for name in ("qdata", "scale") if tensors.get(name) is None]:
        raise ArgumentError(f"a saved quantized tensor lacks {', '.join(missing)}")
    if unknown := [name for name in tensors if name not in PARTS]:
        raise ArgumentError(f"a saved quantized tensor has the part {unknown[0]!r}; known are {', '.join(PARTS)}")
    check_dense(tensors.items())
    if _is_unread(tensors["qdata"]):
        raise ArgumentError(
            "the old format of torch.save hands over a tensor before its numbers, so it can be neither checked nor "
            "packed: write the file without _use_new_zipfile_serialization=False, or with bitport.save(model, "
            "directory)"
        )
    scheme = Scheme.from_json(text)
    parts, extra = split_parts(tensors)
    scale = from_bytes(parts.scale, SCALE_DTYPES[scheme.weight.scale])
    data = parts.data  # 8-bit floats only in the canonical layout
    data = from_bytes(data, scheme.weight.number.storage) if bits_layout == "plain" else data
    parts = parts._replace(data=data, scale=scale)
    return from_parts(parts, scheme, shape=shape, dtype=dtype, transposed=transposed, bits_layout=bits_layout, **extra)


torch.serialization.add_safe_globals([rebuild])
ForkingPickler.register(QTensor, _reduced_as_it_lies)
