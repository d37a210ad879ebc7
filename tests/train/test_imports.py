"""What training imports."""

from __future__ import annotations

from tests.scripts import printed


def test_optimizers_bring_in_no_distributed_tensors() -> None:
    """Nor a compiler, so that a process without either does not wait for them."""
    script = (
        "import sys, torch; before = set(sys.modules); import bitport.train.optim; print(*set(sys.modules) - before)"
    )
    new = printed(script).split()
    assert "bitport.train.optim.sharded" in new
    assert [name for name in new if name.startswith(("torch.distributed.tensor", "torch._dynamo", "triton"))] == []
