"""Whether ``_version`` tracks writes to a tensor, so that caches of its contents can be validated by it.

It does not for tensors created in inference mode, nor for what FSDP2 gathers: it refills a weight's memory before each
use and preserves the version counter, because the values that a gradient needs are the same. Writes through ``.data``,
and those of a CUDA graph that is replayed, are never counted and cannot be detected here.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_uncounted = WeakTensorKeyDictionary()


def leave_uncounted(part: Tensor) -> None:
    """Mark ``part`` as written to without a change of its version counter, now and in the future."""
    _uncounted[part] = True


def counts(part: Tensor) -> bool:
    return not part.is_inference() and part not in _uncounted
