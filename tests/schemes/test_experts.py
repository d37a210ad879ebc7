"""Routers and blocks of experts are told by their names."""

from __future__ import annotations

import pytest

from bitport.schemes.experts import expert_blocks, is_router


@pytest.mark.parametrize(
    ("names", "blocks"),
    [
        (["layers.0.mlp.experts.3.up.weight"], {"layers.0.mlp"}),
        (["experts.0.up.weight", "gate.weight"], {""}),
        (["layers.1.block_sparse_moe.w1"], {"layers.1", "layers.1.block_sparse_moe"}),
        (["layers.2.mlp.gate.weight", "layers.2.mlp.up.weight"], set()),
    ],
)
def test_blocks_of_experts(names: list[str], blocks: set[str]) -> None:
    assert expert_blocks(names) == blocks


@pytest.mark.parametrize(
    ("module", "shape", "blocks", "router"),
    [
        ("mlp.gate", (8, 64), {"mlp"}, True),
        ("gate", (8, 64), {""}, True),
        ("mlp.gate", (8, 64), None, True),
        ("mlp.gate", (8, 64), {"other"}, False),
        ("mlp.router.classifier", (8, 64), set(), True),
        ("mlp.gate", (64, 64), {"mlp"}, False),  # as many experts as channels: a gate of a gated MLP
        ("mlp.gate_proj", (8, 64), {"mlp"}, False),
    ],
)
def test_routers(module: str, shape: tuple[int, int], blocks: set[str] | None, router: bool) -> None:
    assert is_router(module, shape, blocks) is router
