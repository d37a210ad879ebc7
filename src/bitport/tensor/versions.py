"""Whether PyTorch counts in ``_version`` what is written to a tensor, so that who has read it knows it is unchanged.

Nothing is counted for tensors made in inference mode. Nor is what FSDP2 gathers: it fills a weight's memory anew before
each use, and leaves the count as it is, since the numbers that a gradient needs are the same. What is written through
``.data`` is counted nowhere, and cannot be seen here.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_uncounted = WeakTensorKeyDictionary()


def leave_uncounted(part: Tensor) -> None:
    """``part`` was written to, and will be again, without being counted."""
    _uncounted[part] = True


def counts(part: Tensor) -> bool:
    return not part.is_inference() and part not in _uncounted
