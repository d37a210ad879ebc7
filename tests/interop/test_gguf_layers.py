"""Layers of several types in GGUF files: with experts after those without (glm4moe, lfm2moe), with a convolution in
place of attention (lfm2), with keys and values of another layer (gemma4), and those that predict tokens after the
next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitport.checkpoint import quantize_files
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import convert
from bitport.interop.gguf import Gguf, Writer
from bitport.interop.gguf.header import read_header
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from . import gguf_files
from .files import config_in, edited
from .gguf_files import gguf, model_of, write
from .gguf_models import config_of
from .test_gguf import KINDS, assert_same_answers, huggingface, logits
from .test_gguf_writer import written

types = gguf.GGUFValueType
RECIPE = {"*q_proj": "int8", "*": "skip"}
CORRECTION = {
    "glm4moe": "model.layers.2.mlp.gate.e_score_correction_bias",
    "deepseek3": "model.layers.2.mlp.gate.e_score_correction_bias",
    "lfm2moe": "model.layers.2.feed_forward.expert_bias",
}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("glm4moe", {"expert_gating_func": (1, types.UINT32)}, "expert_gating_func is 1; 2 is read"),
        ("glm4moe", {"expert_shared_count": None}, "expert_shared_count must be int, not absent"),
        ("glm4moe", {"leading_dense_block_count": (2, types.UINT32)}, r"blk\.1\.ffn_.* has no such"),
        ("glm4moe", {"leading_dense_block_count": (0, types.UINT32)}, r"blk\.0\.ffn_.* has no such"),
        ("glm4moe", {"leading_dense_block_count": (1 << 30, types.UINT32)}, "and must be 0 to 4096"),
        ("glm4moe", {"expert_weights_norm": (1, types.UINT32)}, "expert_weights_norm must be bool, not 1"),
        ("glm4moe", {"rope.dimension_sections": ([1, 1, 1, 0], types.ARRAY)}, "dimension_sections"),
        ("gemma4", {"attention.key_length_swa": None}, "key_length_swa must be int, not absent"),
        ("gemma4", {"attention.value_length_swa": (64, types.UINT32)}, r"are \[32, 64\]; one size is read"),
        ("gemma4", {"rope.dimension_count_swa": (16, types.UINT32)}, r"are \[16, 32\]; one size is read"),
        ("gemma4", {"attention.shared_kv_layers": (1, types.UINT32)}, "of which 1 have no keys, is not read"),
        ("gemma4", {"attention.shared_kv_layers": (4, types.UINT32)}, "of which 4 have no keys, is not read"),
        ("gemma4", {"attention.shared_kv_layers": (5, types.UINT32)}, "shared_kv_layers is 5, and must be 0 to 4"),
        ("gemma4", {"attention.shared_kv_layers": (0, types.UINT32)}, r"; \[512, 512, 512, 512\] would be read"),
        ("gemma4", {"attention.sliding_window_pattern": ([True] * 4, types.ARRAY)}, "is not read: the last must be"),
        ("gemma4", {"feed_forward_length": ([512, 512, 512, 1024], types.ARRAY)}, "512, 1024, 1024. would be read"),
        (
            "gemma4",
            {"attention.head_count_kv": ([2, 2, 2, 1], types.ARRAY)},
            r"is \[2, 2, 2, 1\]; \[2, 1, 2, 1\] would be",
        ),
        ("gemma4", {"attention.head_count_kv": ([2, 1, 2, 1], types.ARRAY)}, r"blk\.1\.attn_v.* has no such"),
        ("gemma4", {"rope.freq_base_swa": None}, "freq_base_swa must be float, not absent"),
        ("gemma4", {"rope.scaling.factor": (8.0, types.FLOAT32)}, "rope.scaling.type is 'linear'; none is read"),
        ("gemma4", {"embedding_length_per_layer_input": (0, types.UINT32)}, r"blk\.0\.inp_gate.* has no such"),
        ("gemma4", {"expert_count": (4, types.UINT32)}, "expert_used_count must be int, not absent"),
        ("gemma4", {"expert_used_count": (2, types.UINT32)}, "expert_count must be int, not absent"),
        ("gemma4-experts", {"expert_feed_forward_length": None}, "expert_feed_forward_length must be int, not absent"),
        ("lfm2moe", {"expert_weights_scale": (2.0, types.FLOAT32)}, "expert_weights_scale = 2.0"),
        ("lfm2", {"attention.head_count_kv": (2, types.UINT32)}, "head_count_kv is 2; a list of 0 and one other"),
        (
            "lfm2",
            {"attention.head_count_kv": ([0, 2, 0], types.ARRAY)},
            r"head_count_kv is \[0, 2, 0\], no number for each of 4",
        ),
        ("lfm2", {"attention.head_count_kv": ([0, 2, 0, 1], types.ARRAY)}, "a list of 0 and one other number is"),
        ("lfm2", {"attention.head_count_kv": ([0, 2, 0, -2], types.ARRAY)}, "no number for each of 4"),
        ("lfm2", {"attention.head_count_kv": ([0, 0, 0, 0], types.ARRAY)}, "a list of 0 and one other number is"),
        ("lfm2", {"attention.head_count_kv": ([0, 8, 0, 8], types.ARRAY)}, "a list of 0 and one other number is"),
        ("lfm2", {"attention.head_count_kv": ([2, 2, 0, 2], types.ARRAY)}, r"blk\.0\.shortconv.* has no such"),
        ("lfm2", {"shortconv.l_cache": None}, "l_cache must be int, not absent"),
    ],
)
def test_settings_that_are_not_read(name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    named = {f"{name.partition('-')[0]}.{key}": value for key, value in changes.items()}
    write(tmp_path / "m.gguf", model_of(config_of(name)), KINDS, changes=named)
    with pytest.raises(CheckpointError, match=reason):
        Gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["lfm2", "lfm2moe"])
def test_a_convolution_has_no_bias(name: str, tmp_path: Path) -> None:
    more = {"blk.0.shortconv.conv.bias": torch.ones(256)}
    write(tmp_path / "m.gguf", model_of(config_of(name)), KINDS, vectors=more)
    with pytest.raises(CheckpointError, match=r"shortconv\.conv\.bias: a lfm2.* of 4 layers has no such"):
        Gguf(tmp_path / "m.gguf")


def test_experts_that_are_as_llama_cpp_assumes(tmp_path: Path) -> None:
    """What a file need not say."""
    names = ("leading_dense_block_count", "expert_weights_scale", "expert_weights_norm", "expert_gating_func")
    changes = dict.fromkeys(f"glm4moe.{key}" for key in (*names, "expert_group_count", "expert_group_used_count"))
    config = config_of("glm4moe", first_k_dense_replace=0, routed_scaling_factor=1.0, norm_topk_prob=False)
    model = write(tmp_path / "m.gguf", model_of(config), KINDS, changes=changes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(model, tmp_path / "out")


@pytest.mark.parametrize(
    "factors", [[1.0] * 32, [1.0] * 8 + [1e29] * 24, [1e30] * 24 + [1.0] * 8, [0.5] * 8 + [1e30] * 24]
)
def test_frequencies_that_are_turned_otherwise(factors: list[float], tmp_path: Path) -> None:
    vectors = {"rope_freqs.weight": torch.tensor(factors)}
    model = model_of(config_of("gemma4"))
    write(tmp_path / "m.gguf", model, KINDS, vectors=vectors)
    if factors[-1] == 1 == factors[0]:
        assert Gguf(tmp_path / "m.gguf").config["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 1
        return
    with pytest.raises(CheckpointError, match="must be some 1 and then 1e\\+30"):
        Gguf(tmp_path / "m.gguf")


def test_a_cap_of_logits_that_llama_cpp_assumes(tmp_path: Path) -> None:
    model = write(
        tmp_path / "m.gguf", model_of(config_of("gemma4")), KINDS, changes={"gemma4.final_logit_softcapping": None}
    )
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(model, tmp_path / "out")


def test_scales_of_experts_that_are_parameters(tmp_path: Path) -> None:
    """llama.cpp's converter multiplies the scales of NVFP4 into them."""
    kinds = {r".*down_exps\.weight": "NVFP4", **KINDS}
    model = write(tmp_path / "m.gguf", model_of(config_of("gemma4-experts")), kinds, scaled=False)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert done.weights["model.layers.0.experts.down_proj"] == "nvfp4-wo"
    assert_same_answers(model, tmp_path / "out")
    written(config_of("gemma4-experts"), tmp_path / "w", {"*experts.down_proj": "nvfp4-wo", "*": "skip"})
    with pytest.raises(ArgumentError, match="the scale of ffn_down_exps: mxfp4-wo does without"):
        convert(tmp_path / "w" / "q", tmp_path / "n.gguf", to="gguf", progress=False)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("glm4moe", "*experts.*.gate_proj"),
        ("glm4moe", "*shared_experts.up_proj"),
        ("glm4moe", "*layers.0.mlp.down_proj"),
        ("minimax-m2", "*experts*"),
        ("lfm2", "*w1"),
        ("lfm2", "*in_proj"),
        ("lfm2moe", "*experts*"),
        ("seed_oss", "*gate_proj"),
        ("glm4", "*gate_up_proj"),
        ("starcoder2", "*c_fc"),
        ("gemma4", "*per_layer_input_gate"),
        ("gemma4", "*embed_tokens_per_layer"),
    ],
)
def test_weights_whose_scale_llama_cpp_leaves_out(name: str, rule: str, tmp_path: Path) -> None:
    written(config_of(name), tmp_path, {rule: "nvfp4-wo", "*": "skip"})
    with pytest.raises(ArgumentError, match=r"does not multiply by the scale of .*: mxfp4-wo does without"):
        convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)


def test_gate_and_up_of_gemma4_in_one_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in published files."""

    def fused(key: str, value: torch.Tensor, _: str) -> dict[str, torch.Tensor]:
        leaf = "down" if "down_proj" in key else "gate_up"
        return {f"blk.{key.split('.')[2]}.ffn_{leaf}_exps.weight": value}

    monkeypatch.setattr(gguf_files, "experts", fused)
    model = write(tmp_path / "m.gguf", model_of(config_of("gemma4-experts")), KINDS)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(model, tmp_path / "out")


def test_keys_that_no_layer_uses(tmp_path: Path) -> None:
    """Published files have them, as the original models do."""
    more = {"blk.2.attn_k.weight": torch.ones(64, 256), "blk.3.attn_v.weight": torch.ones(128, 256)}
    more |= {"blk.3.attn_k_norm.weight": torch.ones(64)}
    model = write(tmp_path / "m.gguf", model_of(config_of("gemma4")), KINDS, vectors=more)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    told = "left out: keys and values of layers that use those of a layer before: blk.2.attn_k.weight, blk.3.attn_v"
    assert any(note.startswith(told) for note in done.notes)
    assert not any(".3.self_attn.k" in name for name in Own(tmp_path / "out").names())
    assert_same_answers(model, tmp_path / "out")
    written(config_of("gemma4"), tmp_path / "w", {"*q_proj": "int8", "*": "skip"})
    files, more_names = (
        Own(tmp_path / "w" / "q"),
        [f"model.layers.3.self_attn.{key}.weight" for key in ("k_proj", "k_norm")],
    )
    writer = Writer([*files.names(), *more_names], files.tied, dict(files.others({})))
    assert writer.left == set(more_names)
    with pytest.raises(ArgumentError, match=r"no place for model\.layers\.1\.self_attn\.k_proj\.bias"):
        Writer([*files.names(), "model.layers.1.self_attn.k_proj.bias"], files.tied, dict(files.others({})))


@pytest.mark.parametrize("name", CORRECTION)
def test_the_correction_of_scores_stays_in_float32(name: str, tmp_path: Path) -> None:
    model = model_of(config_of(name))
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if not key.endswith("_bias"):
                value.copy_(value.bfloat16())
    write(tmp_path / "m.gguf", model, {r".*attn_(q|q_a)\..*": "Q8_0"})
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    tensors = dict(Own(tmp_path / "out").items())
    found, wanted = tensors[CORRECTION[name]], model.state_dict()[CORRECTION[name]]
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert not torch.equal(wanted, wanted.bfloat16().float())
    assert torch.equal(found, wanted)


def test_layers_that_predict_more_are_not_written(tmp_path: Path) -> None:
    written(config_of("glm4moe"), tmp_path, {"*q_proj": "nvfp4-wo", "*": "skip"})
    source = edited(tmp_path / "q", tmp_path / "p", num_hidden_layers=2, num_nextn_predict_layers=1)
    done = convert(source, tmp_path / "m.gguf", to="gguf", progress=False)
    assert any(note.startswith("left out: layers that predict") and "model.layers.2." in note for note in done.notes)
    assert not any(name.startswith("model.layers.2.") for name in done.weights)
    header = read_header(tmp_path / "m.gguf")
    assert header.settings["glm4moe.block_count"] == 2
    assert not any(name.startswith("blk.2.") for name in header.tensors)
    kept = [name for name in Own(source).names() if not name.startswith("model.layers.2.")]
    assert len(done.weights) + done.others == len(kept)
    convert(tmp_path / "m.gguf", tmp_path / "back", progress=False)
    assert config_in(tmp_path / "back")["num_nextn_predict_layers"] == 0
    source = edited(tmp_path / "q", tmp_path / "r", num_hidden_layers=2, num_nextn_predict_layers=0)
    with pytest.raises(ArgumentError, match=r"no place for model\.layers\.2\."):
        convert(source, tmp_path / "n.gguf", to="gguf", progress=False)


def test_layers_that_predict_more_and_are_not_numbered(tmp_path: Path) -> None:
    """As in models of Qwen. One of the weights is quantized."""
    written(config_of("qwen35"), tmp_path)
    shard, weight = tmp_path / "hf" / "model.safetensors", "mtp.layers.0.self_attn.q_proj.weight"
    save_file(load_file(shard) | {weight: torch.randn(256, 256), "mtp.norm.weight": torch.ones(256)}, shard)
    recipe = {"*self_attn.q_proj": "int4-g32-sym", "*": "skip"}
    quantize_files(tmp_path / "hf", tmp_path / "p", recipe, dtype=torch.float16, progress=False)
    assert isinstance(dict(Own(tmp_path / "p").items())[weight], QTensor)
    done = convert(tmp_path / "p", tmp_path / "m.gguf", to="gguf", progress=False)
    (note,) = (note for note in done.notes if note.startswith("left out"))
    assert note == f"left out: layers that predict tokens after the next: {weight}, mtp.norm.weight"
    assert list(done.weights) == ["model.layers.1.self_attn.q_proj.weight"]
    convert(tmp_path / "m.gguf", tmp_path / "back", progress=False)
    assert set(Own(tmp_path / "back").names()) == {*Own(tmp_path / "p").names()} - {weight, "mtp.norm.weight"}


def test_layers_that_predict_more_are_not_read(tmp_path: Path) -> None:
    changes = {"glm4moe.block_count": (4, types.UINT32), "glm4moe.nextn_predict_layers": (1, types.UINT32)}
    more = {"blk.3.nextn.eh_proj.weight": torch.ones(4, 8), "blk.3.ffn_gate_exps.weight": torch.ones(8, 4, 8)}
    model = write(tmp_path / "m.gguf", model_of(config_of("glm4moe")), KINDS, changes=changes, vectors=more)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert [note for note in done.notes if note.startswith("left out")] == [
        "left out: layers that predict tokens after the next: blk.3.nextn.eh_proj.weight, blk.3.ffn_gate_exps.weight"
    ]
    assert_same_answers(model, tmp_path / "out")


def test_an_mlp_whose_size_follows(tmp_path: Path) -> None:
    """700 * 2 / 3, rounded up to a multiple of 256."""
    model = written(config_of("lfm2", block_auto_adjust_ff_dim=True, intermediate_size=700), tmp_path, RECIPE)
    assert model.get_parameter("model.layers.0.feed_forward.w1.weight").shape[0] == 512
    convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    assert read_header(tmp_path / "m.gguf").settings["lfm2.feed_forward_length"] == 512
    convert(tmp_path / "m.gguf", tmp_path / "back", progress=False)
    before, after = (logits(huggingface.load_model(tmp_path / name)) for name in ("q", "back"))
    # float16 keeps three digits.
    assert float((before - after).abs().max()) <= 2e-3 * float(before.abs().max())
