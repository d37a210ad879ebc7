"""Parts given by hand, in a layout of a device."""

from __future__ import annotations

import pytest
import torch

from bitport.errors import ArgumentError
from bitport.schemes import preset
from bitport.tensor import from_parts, quantize_tensor


@pytest.mark.parametrize("part", ["data", "scale", "zero"])
def test_packed_parts_are_checked(part: str) -> None:
    """Kernels read them where the layout says that they are."""
    q = quantize_tensor(torch.randn(64, 96), preset("int4-g32")).to_layout("cpu_tiles")
    given = {"scheme": q.scheme, "shape": (64, 96), "dtype": torch.float32, "bits_layout": "cpu_tiles"}
    assert torch.equal(from_parts(q.parts, **given), q)
    held = getattr(q.parts, part)
    for wrong in (held.double(), torch.cat([held, held])):
        with pytest.raises(ArgumentError, match="in layout cpu_tiles wants"):
            from_parts(q.parts._replace(**{part: wrong}), **given)
