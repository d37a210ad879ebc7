"""Attention in GGUF files whose keys and values are computed from one short vector (deepseek2 and others): the matrix
that makes them is in two parts, one of them transposed. In some an indexer chooses what it attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop import convert
from bitport.interop.gguf import Gguf
from bitport.interop.gguf.header import read_header
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .files import config_in
from .gguf_files import NAMES, gguf, model_of, write
from .gguf_models import DEEPSEEK, MORE, config_of, small
from .test_gguf import KINDS, assert_same_answers, logits
from .test_gguf_architectures import edited
from .test_gguf_writer import written

types = gguf.GGUFValueType
MATRIX = "model.layers.1.self_attn.kv_b_proj.weight"
LITE = {"q_lora_rank": None}
"""Queries are computed as usual."""
GROUPS = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
OLDER = {
    "deepseek2.attention.key_length_mla": None,
    "deepseek2.attention.value_length_mla": None,
    "deepseek2.attention.key_length": (48, types.UINT32),
    "deepseek2.attention.value_length": (64, types.UINT32),
    "deepseek2.attention.head_count_kv": (4, types.UINT32),
    "deepseek2.expert_gating_func": None,
}
"""Settings of files until April 2025."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [("deepseek2", LITE), ("deepseek3", LITE), ("deepseek2", GROUPS)],
    ids=["2-lite", "3-lite", "groups"],
)
def test_queries_and_groups(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """In a file, and in one that is written from it again, with the same tensors."""
    model = write(tmp_path / "m.gguf", model_of(config_of(name, **changes)), {**KINDS, r".*attn_[kv]_b\..*": "F32"})
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(model, tmp_path / "out")
    done = convert(tmp_path / "m.gguf", tmp_path / "n.gguf", to="gguf", progress=False)
    assert any("chooses groups of experts by their two best" in note for note in done.notes) == (changes is GROUPS)
    one, other = (read_header(tmp_path / name).tensors for name in ("m.gguf", "n.gguf"))
    assert {name: each.shape for name, each in one.items()} == {name: each.shape for name, each in other.items()}
    convert(tmp_path / "n.gguf", tmp_path / "back", progress=False)
    assert_same_answers(model, tmp_path / "back")


def test_a_file_with_the_matrix_as_it_is(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", model_of(config_of("deepseek2")), KINDS, changes=OLDER)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert done.weights[MATRIX] == "int5-g32-sym"
    assert not any("transposed" in note for note in done.notes)
    assert_same_answers(model, tmp_path / "out")


def test_the_parts_of_a_quantized_matrix_become_floats(tmp_path: Path) -> None:
    """Rounded to the dtype of the model, of 8 significant bits."""
    model = model_of(config_of("deepseek3"))
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if not key.endswith("_bias"):
                value.copy_(value.bfloat16())
    write(tmp_path / "m.gguf", model, {r".*attn_[kv]_b\..*": "Q8_0", r".*attn_q_b\..*": "Q4_0"})
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert [note for note in done.notes if "kept as floats, rounded to torch.bfloat16" in note]
    assert MATRIX not in done.weights
    found, wanted = dict(Own(tmp_path / "out").items())[MATRIX], model.state_dict()[MATRIX]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted.bfloat16())
    assert not torch.equal(found.float(), wanted)


def test_a_quantized_matrix_is_written_as_floats(tmp_path: Path) -> None:
    written(config_of("deepseek3"), tmp_path, {"*kv_b_proj": "nvfp4-wo", "*": "skip"})
    done = convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    assert [note for note in done.notes if "kv_b_proj is written as floats, rounded to torch.float16" in note]
    wanted = dict(Own(tmp_path / "q").items())[MATRIX]
    assert isinstance(wanted, QTensor)
    keys, values = (read_header(tmp_path / "m.gguf").tensors[f"blk.1.attn_{part}_b.weight"] for part in "kv")
    assert (keys.type, keys.shape, values.shape) == ("F16", (4, 64, 32), (4, 64, 64))
    heads = wanted.dequantize(torch.float16).unflatten(0, (4, 96))
    assert torch.equal(keys.read(), heads[:, :32].mT)
    assert torch.equal(values.read(), heads[:, 32:])


def test_glm_flash_is_read_as_deepseek(tmp_path: Path) -> None:
    """GLM 4.7 Flash computes the same, under another name. Its norms have two epsilons, which a file cannot say."""
    config = small("Glm4MoeLiteConfig", **{**DEEPSEEK, "q_lora_rank": 96, "rms_norm_eps": 1e-5})
    model = write(tmp_path / "m.gguf", model_of(config), KINDS)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert config_in(tmp_path / "out")["model_type"] == "deepseek_v3"
    assert_same_answers(model, tmp_path / "out")
    written(config, tmp_path / "w", {"*o_proj": "int4-g32-sym", "*": "skip"})
    done = convert(tmp_path / "w" / "q", tmp_path / "n.gguf", to="gguf", progress=False)
    assert "llama.cpp's norms of q_a and kv_a have 1e-05 too, where the model has 1e-06" in done.notes
    one, other = (read_header(tmp_path / name).settings for name in ("m.gguf", "n.gguf"))
    ours = {key for key in one if key.startswith("deepseek2.")}
    assert {key: one[key] for key in ours} == {key: other[key] for key in ours}


YARN = {
    "rope.scaling.type": ("yarn", types.STRING),
    "rope.scaling.factor": (4.0, types.FLOAT32),
    "rope.scaling.original_context_length": (16, types.UINT32),
    "rope.scaling.yarn_log_multiplier": (0.1, types.FLOAT32),
}


def test_indexers_and_layers_that_predict_more(tmp_path: Path) -> None:
    """A file says which layers have an indexer of those alone that the model has."""
    changes = {"glm-dsa.block_count": (4, types.UINT32), "glm-dsa.nextn_predict_layers": (1, types.UINT32)}
    more = {"blk.3.nextn.eh_proj.weight": torch.ones(4, 8), "blk.3.indexer.k_norm.bias": torch.ones(8)}
    model = write(tmp_path / "m.gguf", model_of(config_of("glm-dsa")), KINDS, changes=changes, vectors=more)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert any(note.startswith("left out: layers that predict") for note in done.notes)
    assert config_in(tmp_path / "out")["indexer_types"] == ["full", "shared", "full"]
    assert_same_answers(model, tmp_path / "out")


def test_mistral_without_a_temperature(tmp_path: Path) -> None:
    """llama.cpp's converter leaves it out, and which function scores experts."""
    lost = ("attention.temperature_scale", "attention.temperature_length", "expert_gating_func")
    rope = {**MORE["mistral4"][1]["rope_parameters"], "llama_4_scaling_beta": 0.0}
    model = model_of(config_of("mistral4", rope_parameters=rope))
    write(tmp_path / "m.gguf", model, KINDS, changes=dict.fromkeys(f"mistral4.{key}" for key in lost))
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    (note,) = (note for note in done.notes if "temperature_scale" in note)
    assert note.endswith("(llama_4_scaling_beta), it differs after 16 tokens")
    assert config_in(tmp_path / "out")["rope_parameters"]["llama_4_scaling_beta"] == 0
    assert_same_answers(model, tmp_path / "out")
    convert(tmp_path / "m.gguf", tmp_path / "n.gguf", to="gguf", progress=False)
    assert not any("temperature" in key for key in read_header(tmp_path / "n.gguf").settings)
    convert(tmp_path / "n.gguf", tmp_path / "back", progress=False)
    assert_same_answers(model, tmp_path / "back")


def test_mistral_large_is_a_deepseek2_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So llama.cpp converts Mistral's own format: with the temperature."""
    monkeypatch.setitem(NAMES, "mistral4", "deepseek2")
    model = write(tmp_path / "m.gguf", model_of(config_of("mistral4")), KINDS)
    assert read_header(tmp_path / "m.gguf").settings["deepseek2.attention.temperature_length"] == 16
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert not any("temperature" in note for note in done.notes)
    assert config_in(tmp_path / "out")["model_type"] == "mistral4"
    assert_same_answers(model, tmp_path / "out")
    convert(tmp_path / "m.gguf", tmp_path / "n.gguf", to="gguf", progress=False)
    one, other = (read_header(tmp_path / name).settings for name in ("m.gguf", "n.gguf"))
    ours = {key.partition(".")[2]: value for key, value in one.items() if key.startswith("deepseek2.")}
    assert ours == {key: other[f"mistral4.{key}"] for key in ours}


def test_the_indexer_chooses(tmp_path: Path) -> None:
    """Otherwise the tests of whole models would not see it."""
    model = model_of(config_of("deepseek32"))
    before = logits(model)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.indexer.wk.weight").neg_()
    assert float((before - logits(model)).abs().max()) > 1e-2 * float(before.abs().max())


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("deepseek2", {"attention.key_length": (64, types.UINT32)}, "key_length is 64; 80 is read, as follows"),
        ("deepseek2", {"attention.value_length": (80, types.UINT32)}, "value_length is 80; 64 is read, as follows"),
        ("deepseek2", {"attention.head_count_kv": (4, types.UINT32)}, "head_count_kv is 4; 1 is read, as follows"),
        ("deepseek2", {"attention.value_length_mla": None}, "value_length_mla must be int, not absent"),
        ("deepseek2", {"attention.key_length_mla": (16, types.UINT32)}, "16 numbers of a key, of which 16 are turned"),
        ("deepseek2", {"attention.key_length_mla": (64, types.UINT32)}, r"\[heads, rank, 48\] .*k_b.* \[4, 64, 32\]"),
        ("deepseek2", {"rope.dimension_count": None}, "dimension_count must be int, not absent"),
        ("deepseek2", {"attention.kv_lora_rank": None}, "kv_lora_rank must be int, not absent"),
        ("deepseek2", {"attention.q_lora_rank": None}, r"blk\.0\.attn_q_a\.weight: .* has no such"),
        ("deepseek2", {"rope.scaling.yarn_log_multiplier": None}, "yarn_log_multiplier must be float, not absent"),
        ("deepseek2", {"expert_weights_norm": (True, types.BOOL)}, "read with expert_gating_func 2 alone"),
        ("deepseek2", {"expert_gating_func": (3, types.UINT32)}, "expert_gating_func is 3; 1 is read"),
        ("deepseek2", {"attention.temperature_scale": (0.1, types.FLOAT32)}, "temperature_length must be int, not abs"),
        ("deepseek3", {"expert_gating_func": (1, types.UINT32)}, "expert_weights_norm is True"),
        ("deepseek32", {"attention.indexer.top_k": None}, "top_k must be int, not absent"),
        ("deepseek32", {"attention.q_lora_rank": None}, "q_lora_rank must be int, not absent"),
        ("deepseek32", {"rope.scaling.yarn_log_multiplier": (0.0707, types.FLOAT32)}, "0.0707; 0.1 is read"),
        ("deepseek32", {"attention.indexer.types": ([True] * 3, types.ARRAY)}, "indexer.types = "),
        ("glm-dsa", {"attention.indexer.types": ([1, 0, 1], types.ARRAY)}, "not true or false for 3 layers"),
        (
            "glm-dsa",
            {"attention.indexer.types": ([False] * 3, types.ARRAY)},
            "begins with a layer that uses the choice",
        ),
        ("glm-dsa", {"attention.indexer.types": ([True, False, False], types.ARRAY)}, r"blk\.2\.indexer.* has no such"),
        ("glm-dsa", {"attention.indexer.types": None}, r"lacks blk\.1\.indexer\.attn_q_b\.weight"),
        (
            "mistral4",
            {"attention.temperature_length": (32, types.UINT32)},
            "temperature_length is 32; the original con",
        ),
        ("mistral4", {"attention.temperature_length": None}, "temperature_length must be int, not absent"),
        ("mistral4", {"rope.scaling.yarn_log_multiplier": (0.05, types.FLOAT32)}, "0.05; 0.1 is read"),
        ("mistral4", {"expert_gating_func": (2, types.UINT32)}, "expert_gating_func is 2; 1 is read"),
        ("mistral4", dict.fromkeys(YARN), "mistral4.rope.scaling.type is 'default'; yarn is read"),
        ("glm-dsa", YARN, "glm-dsa.rope.scaling.type is 'yarn'; none is read"),
    ],
)
def test_settings_that_are_not_read(name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    its = "deepseek2" if name in ("deepseek2", "deepseek3") else name
    changes = {f"{its}.{key}": value for key, value in changes.items()}
    write(tmp_path / "m.gguf", model_of(config_of(name)), KINDS, changes=changes)
    with pytest.raises(CheckpointError, match=reason):
        Gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"blk.1.attn_v_b.weight": None}, r"attn_k_b\.weight is there without blk\.1\.attn_v_b\.weight"),
        ({"blk.1.attn_v_b.weight": torch.ones(4, 63, 64)}, r"v_b\.weight is \[4, 63, 64\]"),
        ({"blk.1.attn_v_b.weight": torch.ones(3, 64, 64)}, r"v_b\.weight is \[3, 64, 64\]"),
        ({"blk.1.attn_k_b.weight": torch.ones(128, 64)}, r"k_b\.weight is \[128, 64\]"),
        ({"blk.1.attn_kv_b.weight": torch.ones(384, 64)}, "are the same weights twice"),
    ],
)
def test_parts_that_do_not_fit(change: dict[str, Tensor | None], reason: str, tmp_path: Path) -> None:
    path = edited(tmp_path, model_of(config_of("deepseek2")), change)
    with pytest.raises(CheckpointError, match=reason):
        Gguf(path)


def test_parts_with_a_scale(tmp_path: Path) -> None:
    model = model_of(config_of("deepseek2", qk_nope_head_dim=64))
    write(tmp_path / "m.gguf", model, {r".*attn_[kv]_b\..*": "NVFP4"})
    with pytest.raises(CheckpointError, match=r"attn_k_b\.scale is a scale, which .* has in no file"):
        Gguf(tmp_path / "m.gguf")
