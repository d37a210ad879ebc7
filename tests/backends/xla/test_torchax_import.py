"""Importing torchax beside a torch version that it does not know."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch._decomp
from torch._ops import OpOverloadPacket, _OpNamespace

from bitport.backends.xla.torchax_import import import_torchax, removed_overloads

pytestmark = pytest.mark.xla


def test_torchax_still_needs_help() -> None:
    """When this fails, torchax can be imported directly: delete torchax_import.py and its tests."""
    done = subprocess.run([sys.executable, "-c", "import torchax"], capture_output=True, text=True, check=False)
    assert any(missing in done.stderr for missing in ("has no overload name 'dim_Dimname'", "no attribute 'cholesky'"))


def lookups() -> tuple[object, ...]:
    return OpOverloadPacket.__getattr__, _OpNamespace.__getattr__, torch._decomp.get_decompositions


def test_torch_is_as_it_was_afterwards() -> None:
    before = lookups()
    with removed_overloads():
        assert not any(now is then for now, then in zip(lookups(), before, strict=True))
        assert not hasattr(torch.ops.aten.prod, "no_such_overload")
        _ = torch.ops.aten.prod.dim_Dimname, torch.ops.aten.cholesky.default
    assert before == lookups()
    assert not hasattr(torch.ops.aten.prod, "dim_Dimname")


def test_torchax_is_imported() -> None:
    """default_env() imports what else torchax has."""
    assert import_torchax().default_env()
