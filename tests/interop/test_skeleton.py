"""The parameters of models whose names or structure in transformers differ from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitport.checkpoint import quantize_files
from bitport.errors import CheckpointError
from bitport.interop import convert
from bitport.interop.skeleton import shapes_of
from bitport.tensor import QTensor

from .files import assert_same

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
huggingface = pytest.importorskip("bitport.integrations.huggingface")
pytest.importorskip("transformers.conversion_mapping", reason="this version of transformers builds models as files are")

SIZES = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
VISION = {
    **{"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64, "patch_size": 14},
    "fullatt_block_indexes": [0],
}
IDS = {f"{name}_token_id": 300 + at for at, name in enumerate(("image", "video", "vision_start", "vision_end"))}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def seeing() -> Any:
    config = transformers.Qwen2_5_VLConfig(
        text_config={**SIZES, **ENDS, "rope_parameters": ROPE}, vision_config=VISION, **IDS
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def mixture() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=2))


@pytest.mark.parametrize(("made", "has"), [(seeing, 6), (mixture, 0)])
def test_biases_of_zeros_that_autogptq_writes(made: Any, has: int, tmp_path: Path) -> None:
    """The model has biases of queries, keys and values in two layers (transformers: all zeros at first), or none."""
    torch.manual_seed(0)
    made().half().save_pretrained(tmp_path / "float")
    rules = {"*layers.*_proj": "int4-g32-sym"} if has else {"*experts*": "int4-g32-sym", "*_proj": "int4-g32-sym"}
    quantize_files(tmp_path / "float", tmp_path / "ours", rules, progress=False)
    convert(tmp_path / "ours", tmp_path / "gptq", to="gptq_v2", progress=False)
    file = tmp_path / "gptq" / "model.safetensors"
    tensors = load_file(file)
    biases = {
        name.replace("qweight", "bias"): torch.zeros(tensor.shape[1], dtype=torch.float16)
        for name, tensor in tensors.items()
        if name.endswith(".qweight")
    }
    assert len(biases.keys() & tensors.keys()) == has
    save_file(biases | tensors, file, {"format": "pt"})
    done = convert(tmp_path / "gptq", tmp_path / "back", progress=False)
    assert [note.partition(" that")[0] for note in done.notes] == ["left out: biases of zeros"]
    models = [huggingface.load_model(tmp_path / name).state_dict() for name in ("ours", "back")]
    assert any(isinstance(value, QTensor) for value in models[0].values())
    assert_same(*models)


def test_a_shape_by_the_name_in_the_files() -> None:
    config = json.loads(seeing().config.to_json_string())
    config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    shape_of = shapes_of(config, 50)
    for prefix in ("model", "model.language_model"):
        assert shape_of(f"{prefix}.layers.1.self_attn.k_proj.weight") == (32, 64)
        assert shape_of(f"{prefix}.layers.1.self_attn.o_proj.bias") is None
    assert shape_of("visual.blocks.0.attn.proj.bias") == (32,)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"num_labels": 10**12}, "num_labels 1000000000000; up to 1048576"),
        ({"audio": {"text": {"num_layers": 10**6}}}, "describes 1000000 layers, and its files have 50 tensors"),
    ],
)
def test_numbers_that_would_take_all_memory(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        shapes_of({"model_type": "llama", **SIZES, **more}, 50)
