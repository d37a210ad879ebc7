"""Pieces of a weight, such as ``weight[:64]``, while torch.export traces.

It records such a call with the QTensor that comes out, but knows the parts of parameters alone: those of any other
would end in the program as constants without a value. Asking for each part by torch's own op makes it a recorded one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

INNER = torch.ops.export.access_subclass_inner_tensor.default


def recorded(made: Any, kind: type) -> Any:
    """``made``, which a traced function has given; the parts of those of ``kind`` in it are known from now on."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, kind):
                for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                    INNER(tensor, name)
    return made
