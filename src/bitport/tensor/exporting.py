"""Slices of a weight, such as ``weight[:64]``, under torch.export.

Export records such a call with the resulting QTensor, but it only knows the parts of parameters: those of any other
QTensor would end up in the program as constants without a value. Accessing each part by torch's own op records it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

INNER = torch.ops.export.access_subclass_inner_tensor.default


def recorded(made: Any, kind: type) -> Any:
    """Return ``made``, the result of a traced function, after recording the parts of all tensors of ``kind`` in it."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, kind):
                for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                    INNER(tensor, name)
    return made
