"""What older versions of PyTorch cannot do: tests of it name the first that can."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion


def since(version: str) -> pytest.MarkDecorator:
    """Skip with PyTorch before ``version``."""
    return pytest.mark.skipif(TorchVersion(torch.__version__) < version, reason=f"needs PyTorch {version}")
