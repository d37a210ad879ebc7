"""Peculiarities of single architectures, in files that express them differently or incorrectly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import convert
from bitport.interop.gguf import Gguf, Writer
from bitport.interop.gguf.special import layer_types
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .files import config_in
from .gguf_files import gguf, model_of, write
from .gguf_models import config_of
from .test_gguf import KINDS, assert_same_answers
from .test_gguf_writer import written

types = gguf.GGUFValueType


def edited(path: Path, model: Any, change: dict[str, Tensor | None]) -> Path:
    """Write ``model`` as a file to ``path``, with some tensors replaced or, for None, removed."""
    write(path / "whole.gguf", model, KINDS)
    whole = gguf.GGUFReader(path / "whole.gguf")
    writer = gguf.GGUFWriter(path / "m.gguf", whole.fields["general.architecture"].contents())
    for key, field in whole.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for each in whole.tensors:
        if each.name not in change:
            writer.add_tensor(each.name, each.data, raw_dtype=each.tensor_type)
    for name, value in change.items():
        if value is not None:
            writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "m.gguf"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gpt-oss", {"blk.0.ffn_gate_exps.bias": None}, r"ffn_up_exps.bias is there without blk.0.ffn_gate_exps.bias"),
        ("gpt-oss", {"blk.0.ffn_gate_exps.bias": torch.ones(4, 256)}, "one type and size"),
        ("gpt-oss", {"blk.0.ffn_down_exps.bias": torch.ones(4, 256, 1)}, "must have 2 dimensions"),
        ("gpt-oss", {"blk.0.ffn_down_exps.weight": torch.ones(256, 512)}, "must have 3 dimensions"),
        ("gpt-oss", {"blk.0.attn_sinks.bias": torch.ones(4)}, "attn_sinks.bias: a gpt_oss of 4 layers has no such"),
        ("mixtral", {"blk.0.ffn_down_exps.bias": torch.ones(4, 256)}, "ffn_down_exps.bias: a mixtral"),
        ("qwen2moe", {"blk.0.ffn_gate_inp_shexp.weight": torch.ones(2, 256)}, "floats of one row"),
        ("cohere2", {"output.weight": torch.ones(288, 256)}, "output.weight: a cohere2"),
        ("olmo2", {"blk.0.attn_output.bias": torch.ones(256)}, "attn_output.bias: a olmo2"),
    ],
)
def test_tensors_that_are_not_as_they_must_be(
    name: str, change: dict[str, Tensor | None], reason: str, tmp_path: Path
) -> None:
    path = edited(tmp_path, model_of(config_of(name)), change)
    with pytest.raises(CheckpointError, match=reason):
        convert(path, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gpt-oss", {"gpt-oss.expert_feed_forward_length": (64, types.UINT32)}, "is not feed_forward_length, 512"),
        ("gpt-oss", {"gpt-oss.rope.scaling.yarn_beta_fast": (16.0, types.FLOAT32)}, "yarn_beta_fast is 16.0; 32.0 is"),
        ("gpt-oss", {"gpt-oss.expert_count": None}, "expert_count must be int, not absent"),
        ("mixtral", {"llama.expert_used_count": None}, "expert_used_count must be int, not absent"),
        ("mixtral", {"general.architecture": ("mixtral", types.STRING)}, "'mixtral' is not read; llama, qwen2"),
        ("granite", {"granite.rope.scaling.finetuned": (False, types.BOOL)}, "without rotary embeddings"),
        ("granite", {"granite.logit_scale": None}, "logit_scale must be float, not absent"),
        ("mistral3", {"mistral3.rope.scaling.type": ("linear", types.STRING)}, "with yarn alone, not 'linear'"),
        ("cohere2", {"cohere2.attention.layer_norm_epsilon": None}, "layer_norm_epsilon must be float, not absent"),
        ("olmo2", {"olmo2.attention.sliding_window": (64, types.UINT32)}, "sliding_window = 64"),
        ("cohere2", {"cohere2.attention.sliding_window_pattern": ([True], types.ARRAY)}, "is not of 5 layers"),
    ],
)
def test_settings_that_are_not_read(name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", model_of(config_of(name)), KINDS, changes=changes)
    with pytest.raises(CheckpointError, match=reason):
        Gguf(tmp_path / "m.gguf")


def test_mistral_small_is_a_llama(tmp_path: Path) -> None:
    """Its attention scale does not depend on the position."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.0}
    config = config_of("mistral3", rope_parameters=rope | {"original_max_position_embeddings": 128})
    model = write(tmp_path / "m.gguf", model_of(config), KINDS)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert config_in(tmp_path / "out")["architectures"] == ["LlamaForCausalLM"]
    assert_same_answers(model, tmp_path / "out")


def test_a_shared_expert_whose_gate_is_a_matrix(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", model_of(config_of("qwen2moe")), KINDS, squeezed=False)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(model, tmp_path / "out")


def test_old_files_of_qwen2moe(tmp_path: Path) -> None:
    """They do not store the size of experts: it is a fraction of the size of all selected experts together."""
    sizes = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}
    changes = dict.fromkeys(f"qwen2moe.expert_{which}feed_forward_length" for which in ("", "shared_"))
    model = write(tmp_path / "m.gguf", model_of(config_of("qwen2moe", **sizes)), KINDS, changes=changes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert sizes.items() <= config_in(tmp_path / "out").items()
    assert_same_answers(model, tmp_path / "out")


def test_what_yarn_begins_and_ends_with(tmp_path: Path) -> None:
    """Newer files state the values that llama.cpp assumes."""
    changes = {
        f"gpt-oss.rope.scaling.yarn_beta_{key}": (value, types.FLOAT32)
        for key, value in (("fast", 32.0), ("slow", 1.0))
    }
    model = write(tmp_path / "m.gguf", model_of(config_of("gpt-oss")), KINDS, changes=changes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert config_in(tmp_path / "out")["rope_parameters"]["truncate"] is False
    assert_same_answers(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        (2, ["sliding_attention", "full_attention"] * 2),
        (1, ["full_attention"] * 4),
        (0, ["sliding_attention"] * 4),
        ([True, True, False, True], [*["sliding_attention"] * 2, "full_attention", "sliding_attention"]),
    ],
)
def test_layers_with_a_window(pattern: Any, kinds: list[str], tmp_path: Path) -> None:
    kind = types.ARRAY if isinstance(pattern, list) else types.UINT32
    model = model_of(config_of("gpt-oss", layer_types=kinds))
    changes = {"gpt-oss.attention.sliding_window_pattern": (pattern, kind)}
    write(tmp_path / "m.gguf", model, KINDS, changes=changes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert config_in(tmp_path / "out")["layer_types"] == kinds
    assert_same_answers(model, tmp_path / "out")


def test_usual_patterns() -> None:
    assert layer_types(4, 2) == ["sliding_attention", "full_attention"] * 2


def test_experts_of_gpt_oss_are_transposed(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", model_of(config_of("gpt-oss")), {".*_exps.*": "MXFP4"})
    tensors = dict(Gguf(tmp_path / "m.gguf").items())
    both = tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert isinstance(both, QTensor)
    assert both.transposed
    assert tuple(both.shape) == (4, 256, 1024)
    assert tuple(tensors["model.layers.0.mlp.experts.gate_up_proj_bias"].shape) == (4, 1024)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("gpt-oss", "model.layers.0.mlp.experts.down_proj_bias"),
        ("gpt-oss", "model.layers.1.self_attn.sinks"),
        ("qwen2moe", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("starcoder2", "model.norm.bias"),
        ("starcoder2", "model.layers.0.mlp.c_fc.bias"),
        ("qwen3next", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("qwen3next", "model.layers.2.linear_attn.in_proj_ba.weight"),
        ("glm4moe", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("glm4moe", "model.layers.0.mlp.gate_proj.weight"),
        ("glm4moe", "model.layers.1.mlp.shared_experts.down_proj.weight"),
        ("glm4moe-groups", "model.layers.1.self_attn.q_norm.weight"),
        ("glm4moe-groups", "model.layers.0.self_attn.k_norm.weight"),
        ("deepseek2", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("deepseek3", "model.layers.2.self_attn.q_a_layernorm.weight"),
        ("deepseek32", "model.layers.0.self_attn.indexer.k_norm.bias"),
        ("glm-dsa", "model.layers.2.self_attn.indexer.wk.weight"),
        ("deepseek3", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("gemma4", "model.layers.1.layer_scalar"),
        ("gemma4", "model.layers.1.self_attn.v_proj.weight"),
        ("gemma4", "model.layers.3.per_layer_projection.weight"),
        ("gemma4", "model.embed_tokens_per_layer.weight"),
        ("gemma4-values", "model.layers.2.self_attn.v_proj.weight"),
        ("gemma4-experts", "model.layers.1.router.per_expert_scale"),
        ("gemma4-experts", "model.layers.1.router.scale"),
        ("gemma4-experts", "model.layers.1.mlp.up_proj.weight"),
        ("lfm2moe", "model.layers.2.feed_forward.expert_bias"),
        ("lfm2", "model.embedding_norm.weight"),
        ("lfm2", "model.layers.2.conv.conv.weight"),
        ("lfm2", "model.layers.3.self_attn.k_layernorm.weight"),
    ],
)
def test_a_model_that_lacks_what_llama_cpp_asks_for(name: str, lost: str, tmp_path: Path) -> None:
    written(config_of(name), tmp_path, {"*q_*proj": "int8", "*": "skip"})
    files = Own(tmp_path / "q")
    names = [each for each in files.names() if each != lost]
    assert len(names) < len(files.names())
    Writer(files.names(), files.tied, dict(files.others({})))
    with pytest.raises(ArgumentError, match="lacks what would be"):
        Writer(names, files.tied, dict(files.others({})))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("cohere2", "lm_head.weight"),
        ("olmo2", "model.layers.0.self_attn.o_proj.bias"),
        ("gpt-oss", "model.layers.0.self_attn.sinks.bias"),
        ("mixtral", "model.layers.0.mlp.experts.down_proj_bias"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.4.w1.weight"),
        ("qwen3next", "model.layers.1.linear_attn.in_proj_qkvz.weight"),
        ("qwen3next", "model.layers.0.linear_attn.in_proj_z.weight"),
        ("glm4moe", "model.layers.0.mlp.experts.0.gate_proj.weight"),
        ("glm4moe", "model.layers.0.mlp.experts.gate_up_proj"),
        ("glm4moe", "model.layers.1.mlp.gate_proj.weight"),
        ("glm4moe", "model.layers.1.mlp.experts.0.gate.weight"),
        ("deepseek2", "model.layers.1.self_attn.q_proj.weight"),
        ("deepseek2", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek3", "model.layers.1.self_attn.kv_b_proj.bias"),
        ("deepseek32", "model.layers.1.self_attn.indexer.wk.bias"),
        ("glm-dsa", "model.layers.1.self_attn.indexer.wk.weight"),
        ("lfm2", "model.layers.4.ffn_norm.weight"),
        ("gemma4-values", "model.layers.1.self_attn.v_proj.weight"),
        ("gemma4-values", "model.layers.1.router.scale"),
        ("gemma4-values", "model.layers.1.experts.gate_up_proj"),
        ("gemma4-values", "model.embed_tokens_per_layer.weight"),
        ("gemma4-values", "model.layers.1.per_layer_input_gate.weight"),
        ("lfm2moe", "model.layers.0.feed_forward.experts.0.w1.weight"),
        ("lfm2moe", "model.layers.0.self_attn.q_proj.weight"),
        ("lfm2", "model.layers.1.conv.conv.weight"),
        ("lfm2", "model.layers.0.conv.conv.bias"),
        ("lfm2", "model.norm.weight"),
    ],
)
def test_what_files_have_no_place_for(name: str, more: str, tmp_path: Path) -> None:
    written(config_of(name), tmp_path, {"*q_*proj": "int8", "*": "skip"})
    files = Own(tmp_path / "q")
    with pytest.raises(ArgumentError, match=f"no place for {more}"):
        Writer([*files.names(), more], files.tied, dict(files.others({})))


def test_weights_that_lie_otherwise(tmp_path: Path) -> None:
    """Experts of gpt-oss stored as rows, or a matrix stored as columns, cannot be written to a file."""
    written(config_of("gpt-oss"), tmp_path, {"*experts.*_proj": "mxfp4-wo", "*": "skip"})
    files = Own(tmp_path / "q")
    writer = Writer(files.names(), files.tied, dict(files.others({})))
    its = next(q for q in files.described() if q.name.endswith("down_proj"))
    assert writer.refuses(its) is None
    turned = type(its)(its.name, its.scheme, its.shape, its.kind, not its.transposed, its.parts)
    assert "[.., N, K]" in str(writer.refuses(turned))
    bias = type(its)(f"{its.name}_bias", its.scheme, (4, 256), "other", False, its.parts)
    assert "matrices" in str(writer.refuses(bias))


def test_a_window_that_llama_cpp_does_not_have(tmp_path: Path) -> None:
    written(config_of("starcoder2", sliding_window=20), tmp_path, {"*o_proj": "mxfp4-wo", "*": "skip"})
    done = convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    assert any("no window of 20 tokens for starcoder2" in note for note in done.notes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert config_in(tmp_path / "out")["sliding_window"] == 20


def test_experts_of_mixtral_by_their_names_of_today(tmp_path: Path) -> None:
    """They are stacked in between when a GGUF file is converted to another."""
    written(config_of("mixtral"), tmp_path)
    convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    convert(tmp_path / "m.gguf", tmp_path / "n.gguf", to="gguf", progress=False)
    assert (tmp_path / "m.gguf").stat().st_size == (tmp_path / "n.gguf").stat().st_size
    one, other = (
        {each.name: each.data.tobytes() for each in gguf.GGUFReader(tmp_path / name).tensors}
        for name in ("m.gguf", "n.gguf")
    )
    assert one == other


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("gpt-oss", "blk.1.ffn_gate_exps.weight"),
        ("mixtral", "blk.0.ffn_gate_inp.weight"),
        ("qwen2moe", "blk.1.ffn_gate_shexp.weight"),
        ("gemma4", "blk.0.post_norm.weight"),
        ("deepseek2", "blk.1.attn_v_b.weight"),
        ("deepseek2", "blk.1.attn_kv_a_norm.weight"),
        ("deepseek3", "blk.0.attn_q_b.weight"),
        ("deepseek32", "blk.1.indexer.k_norm.bias"),
        ("glm-dsa", "blk.2.indexer.proj.weight"),
        ("lfm2", "token_embd_norm.weight"),
        ("glm4", "token_embd.weight"),
    ],
)
def test_a_tensor_that_is_missing(kind: str, tensor: str, tmp_path: Path) -> None:
    """transformers would make up numbers for it."""
    edited(tmp_path, model_of(config_of(kind)), {tensor: None})
    with pytest.raises(CheckpointError, match=rf"(without|lacks) {re.escape(tensor)}"):
        Gguf(tmp_path / "m.gguf")
