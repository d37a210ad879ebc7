"""Kinds inferred from the names that published models use."""

from __future__ import annotations

import pytest
import torch

from bitport.checkpoint.names import target_of, targets_of

MATRIX, STACK, ROUTER = (64, 32), (4, 64, 32), (4, 32)
NAMES = (
    ("model.embed_tokens.weight", MATRIX, "embedding"),
    ("model.language_model.embed_tokens.weight", MATRIX, "embedding"),
    ("model.embed_tokens_per_layer.weight", MATRIX, "embedding"),
    ("transformer.wte.weight", MATRIX, "embedding"),
    ("wpe.weight", MATRIX, "embedding"),
    ("shared.weight", MATRIX, "embedding"),
    ("tok_embeddings.weight", MATRIX, "embedding"),
    ("bert.embeddings.word_embeddings.weight", MATRIX, "embedding"),
    ("bert.embeddings.token_type_embeddings.weight", MATRIX, "embedding"),
    ("gpt_neox.embed_in.weight", MATRIX, "embedding"),
    ("model.encoder.embed_positions.weight", MATRIX, "embedding"),
    ("vision_model.embeddings.position_embedding.weight", MATRIX, "embedding"),
    ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", MATRIX, "embedding"),
    ("embed_out.weight", MATRIX, "linear"),
    ("model.per_layer_embed_projection.weight", MATRIX, "linear"),
    ("albert.encoder.embedding_hidden_mapping_in.weight", MATRIX, "linear"),
    ("time_embedding.linear_1.weight", MATRIX, "linear"),
    ("lm_head.weight", MATRIX, "linear"),
    ("weight", MATRIX, "linear"),
    ("model.layers.0.mlp.gate_proj.weight", MATRIX, "linear"),
    ("model.layers.0.mlp.experts.3.gate_proj.weight", MATRIX, "linear"),
    ("model.layers.0.mlp.shared_expert.down_proj.weight", MATRIX, "linear"),
    ("model.layers.0.mlp.shared_experts.up_proj.weight", MATRIX, "linear"),
    ("model.layers.0.mlp.gate.weight", ROUTER, "other"),
    ("model.layers.0.mlp.router.weight", ROUTER, "other"),
    ("model.layers.0.block_sparse_moe.router.layer.weight", ROUTER, "other"),
    ("model.layers.0.mlp.gate.wg.weight", ROUTER, "other"),
    ("model.layers.0.mlp.gate.weight", MATRIX, "linear"),
    ("model.layers.0.mlp.experts.gate_up_proj_bias", MATRIX, "other"),
    ("text_model.encoder.0.self_attn.in_proj_weight", MATRIX, "attention"),
    ("encoder.lstm.weight_ih_l0", MATRIX, "recurrent"),
    ("encoder.lstm.weight_hh_l11_reverse", MATRIX, "recurrent"),
    ("weight_hr_l0", MATRIX, "recurrent"),
    ("decoder.rnn.weight_hh", MATRIX, "recurrent"),
    ("encoder.lstm.weight_hh_l0_v", MATRIX, "other"),
    ("encoder.lstm.weight_hh_l0_raw", MATRIX, "other"),
    ("encoder.lstm.bias_ih_l0", (64,), None),
    ("model.layers.0.mlp.experts.gate_up_proj", STACK, "experts"),
    ("block_sparse_moe.w1", STACK, "experts"),
    ("model.layers.0.mlp.input_linear.weight", STACK, "experts"),
    ("encoder.conv1.weight", STACK, "conv"),
    ("vision.patch_embed.proj.weight", (8, 3, 4, 4), "conv"),
    ("vision.patch_embed.proj.weight", (8, 3, 2, 4, 4), "conv"),
    ("vision.pos_embed", (1, 64, 32), "other"),
    ("model.norm.weight", (64,), None),
    ("model.layers.0.self_attn.q_proj.bias", (64,), None),
)


@pytest.mark.parametrize(("name", "shape", "kind"), NAMES, ids=[f"{name}-{len(shape)}d" for name, shape, _ in NAMES])
def test_kind(name: str, shape: tuple[int, ...], kind: str | None) -> None:
    target = target_of(name, shape, torch.bfloat16)
    assert (target and target.kind) == kind
    if target:
        assert target.name == name
        assert not target.transposed


ROUTERS = (
    ("mlp.gate.weight", "mlp.experts.0.gate_proj.weight"),  # Qwen, DeepSeek
    ("mlp.gate.weight", "mlp.experts.gate_up_proj"),
    ("block_sparse_moe.gate.weight", "block_sparse_moe.experts.0.w1.weight"),  # Mixtral
    ("mixer.gate.weight", "mixer.experts.0.up_proj.weight"),  # Nemotron-H
    ("moe.gate.weight", "moe.up_proj.weight"),  # Step
    ("mlp.gate.wg.weight", "mlp.experts.0.up_proj.weight"),  # Hunyuan
    ("mlp.router.weight", "mlp.experts.gate_up_proj"),  # gpt-oss
    ("feed_forward.router.weight", "feed_forward.experts.gate_up_proj"),  # Llama 4
    ("mlp.router.gate.weight", "mlp.experts.0.up_proj.weight"),  # AFMoE
    ("block_sparse_moe.router.layer.weight", "block_sparse_moe.input_linear.weight"),  # Granite
)


@pytest.mark.parametrize(("router", "beside"), ROUTERS)
def test_routers_of_published_models(router: str, beside: str) -> None:
    tensors = {
        f"model.layers.1.{name}": (shape, torch.bfloat16) for name, shape in ((router, ROUTER), (beside, MATRIX))
    }
    assert targets_of(tensors)[0].kind == "other"


def test_a_gate_without_experts_is_no_router() -> None:
    names = (
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.up.weight",
        "model.layers.1.mlp.experts.0.gate.weight",
    )
    tensors = {name: (ROUTER, torch.bfloat16) for name in names}
    assert {target.kind for target in targets_of(tensors)} == {"linear"}


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_only_floats_are_quantized(dtype: torch.dtype) -> None:
    assert target_of("q_proj.weight", MATRIX, dtype) is None


@pytest.mark.parametrize(
    ("name", "shape", "model_type", "transposed"),
    [
        ("h.0.attn.c_attn.weight", MATRIX, "gpt2", True),
        ("h.0.mlp.c_proj.weight", MATRIX, "gpt_bigcode", False),
        ("lm_head.weight", MATRIX, "gpt2", False),
    ],
)
def test_transposed(name: str, shape: tuple[int, ...], model_type: str, transposed: bool) -> None:
    target = target_of(name, shape, torch.float32, model_type)
    assert target is not None
    assert target.transposed == transposed


@pytest.mark.parametrize(
    ("gate_up", "down", "flipped"), [((4, 96, 64), (4, 64, 48), False), ((4, 64, 96), (4, 48, 64), True)]
)
def test_shapes_tell_how_experts_lie(gate_up: tuple[int, ...], down: tuple[int, ...], flipped: bool) -> None:
    """Each stack on its own is ambiguous."""
    shapes = {"0.experts.gate_up_proj": gate_up, "0.experts.down_proj": down, "1.experts.down_proj": (4, 48, 64)}
    found = targets_of({name: (shape, torch.bfloat16) for name, shape in shapes.items()})
    assert {target.name: target.transposed for target in found} == {
        "0.experts.gate_up_proj": flipped,
        "0.experts.down_proj": flipped,
        "1.experts.down_proj": False,
    }
