"""Models whose structure in transformers differs from their files: separate experts, separate projections, other
prefixes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitport import quantize_
from bitport.checkpoint import quantize_files, read_manifest
from bitport.cli.main import main
from bitport.errors import CheckpointError
from bitport.integrations.huggingface import load_model
from bitport.integrations.transformers_names import _natural, arrangement
from bitport.interop import convert
from bitport.numerics import sqnr
from bitport.tensor import QTensor, quantize_tensor

from .models import make_tokenizer
from .sizes import SMALL

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
pytest.importorskip("transformers.conversion_mapping", reason="this version of transformers builds models as files are")
from bitport.integrations.transformers import BitportConfig  # noqa: E402

SIZES = {**SMALL, "vocab_size": 320, "intermediate_size": 96}
IDS = torch.arange(14).reshape(2, 7)
CONFIGS = {
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 12}),
    "qwen3-moe": ("Qwen3MoeConfig", {**SIZES, "num_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**SIZES, "num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32},
    ),
    "olmoe": ("OlmoeConfig", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
}


def original(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    config, fields = CONFIGS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields)).to(dtype)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def rounded(source: Path, checkpoint: Path, folder: Path, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """The model that transformers loads from files with each tensor rounded separately."""
    entries = read_manifest(checkpoint).tensors
    values = {
        name: quantize_tensor(value, entries[name].scheme).dequantize() if entries[name].scheme else value  # type: ignore[arg-type]
        for name, value in load_file(source / "model.safetensors").items()
    }
    folder.mkdir()
    save_file(
        {name: value.contiguous() for name, value in values.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    shutil.copy(source / "config.json", folder)
    return kind.from_pretrained(folder)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8", "nf4", "fp8-wo", "mxfp4-wo", "nvfp4-wo", "fp8-block-wo"])
@pytest.mark.parametrize("name", CONFIGS)
def test_quantized_file_by_file(name: str, scheme: str, tmp_path: Path) -> None:
    source = original(tmp_path / "model", name)
    quantize_files(source, tmp_path / "out", scheme, progress=False)
    model = load_model(tmp_path / "out")
    experts = [param for key, param in model.named_parameters() if key.endswith("gate_up_proj")]
    assert len(experts) == 2
    assert all(isinstance(param, QTensor) and param.batched for param in experts)
    with torch.no_grad():
        want = rounded(source, tmp_path / "out", tmp_path / "rounded")(input_ids=IDS).logits
        assert float(sqnr(want, model(input_ids=IDS).logits)) > 90


@pytest.mark.parametrize(
    ("config", "fields", "prefix", "older"),
    [
        ("LlamaConfig", SIZES, "", "model.layers.{}.self_attn.rotary_emb.inv_freq"),  # as Llama 2 was published
        ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320}, "transformer.", "h.{}.attn.bias"),
    ],
)
def test_tensors_that_transformers_passes_over(
    config: str, fields: dict[str, Any], prefix: str, older: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields)).eval()
    model.save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {name.removeprefix(prefix): value for name, value in load_file(file).items()}
    save_file(tensors | {older.format(at): torch.ones(2) for at in range(2)}, file, {"format": "pt"})
    quantize_files(tmp_path / "model", tmp_path / "out", "int8", progress=False)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        assert float(sqnr(logits, load_model(tmp_path / "out")(input_ids=IDS).logits)) > 25
    text = tmp_path / "text.txt"
    text.write_text("once upon a time " * 9)
    arguments = ["--scheme", "int8", "--algorithm", "gptq", "--data", str(text), "--data-tokens", "64", "-o"]
    assert main(["quantize", str(tmp_path / "model"), *arguments, str(tmp_path / "streamed")]) == 0
    assert read_manifest(tmp_path / "streamed").tensors.keys() <= model.state_dict().keys()


def test_experts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """The tenth comes after the ninth rather than after the first."""
    source = original(tmp_path / "model", "mixtral")
    quantize_files(source, tmp_path / "out", "int8", progress=False)
    stored = load_file(source / "model.safetensors")
    model = load_model(tmp_path / "out")
    down = dict(model.named_parameters())["model.layers.1.mlp.experts.down_proj"]
    for at in range(12):
        one = stored[f"model.layers.1.block_sparse_moe.experts.{at}.w2.weight"]
        assert torch.equal(down[at].dequantize(), quantize_tensor(one, "int8").dequantize())


def test_any_name_can_be_sorted() -> None:
    """What int() does not read is a name: other digits, and more of them than it takes."""
    names = ["layers.10.w", "layers.\N{SUPERSCRIPT TWO}.w", f"layers.{'1' * 5000}.w", "layers.9.w"]
    assert sorted(names, key=_natural)[:2] == ["layers.9.w", "layers.10.w"]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_calibrated_block_by_block(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The resulting checkpoint uses the model's names, although the source files do not."""
    source = original(tmp_path / "model", name)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    arguments = ["--scheme", "int4-g32", "--algorithm", "gptq", "--data", str(tmp_path / "text.txt")]
    arguments += ["--data-tokens", "256", "-o", str(tmp_path / "out")]
    assert main(["quantize", str(source), *arguments[:-2], "--dry-run"]) == 0
    assert main(["quantize", str(source), *arguments]) == 0
    assert "model.layers.0.mlp.experts.gate_up_proj" in read_manifest(tmp_path / "out").tensors
    model = load_model(tmp_path / "out")
    floats = load_model(source)
    with torch.no_grad():
        assert float(sqnr(floats(input_ids=IDS).logits, model(input_ids=IDS).logits)) > 10
    capsys.readouterr()


def test_quantized_by_others(tmp_path: Path) -> None:
    """GPTQ files also store experts separately."""
    source = original(tmp_path / "model", "mixtral", torch.float16)
    quantize_files(source, tmp_path / "out", "int4-g32", progress=False)
    convert(tmp_path / "out", tmp_path / "gptq", to="gptq")
    convert(tmp_path / "gptq", tmp_path / "back")
    ours, theirs = load_model(tmp_path / "out"), load_model(tmp_path / "back")
    with torch.no_grad():
        assert float(sqnr(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits)) > 40


def test_notes_say_nothing_of_names_that_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = original(tmp_path / "model", "mixtral")
    assert main(["quantize", str(source), "--scheme", "int4-g32", "-o", str(tmp_path / "out")]) == 0
    assert "load_model" not in capsys.readouterr().err


def test_models_under_their_own_names_are_left_alone(tmp_path: Path) -> None:
    config, fields = CONFIGS["mixtral"]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
    manifest = read_manifest(_saved(model, tmp_path))
    assert arrangement(model)(manifest) is manifest


def _saved(model: Any, folder: Path) -> Path:
    from bitport.checkpoint import save

    save(model, folder)
    return folder


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        (
            {"*experts.3.w1": "int8", "*": "int4-g32"},
            "is one tensor in the model, but .* give all of its pieces one scheme",
        ),
        ({"*experts.3.w2": "skip", "*": "int4-g32"}, "is one tensor in the model, but"),
    ],
)
def test_pieces_of_different_schemes(recipe: dict[str, str], match: str, tmp_path: Path) -> None:
    source = original(tmp_path / "model", "mixtral")
    quantize_files(source, tmp_path / "out", recipe, progress=False)
    with pytest.raises(CheckpointError, match=match):
        load_model(tmp_path / "out")


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    source = original(tmp_path / "model", "mixtral")
    values = load_file(source / "model.safetensors")
    del values["model.layers.0.block_sparse_moe.experts.5.w3.weight"]
    save_file(values, source / "model.safetensors", {"format": "pt"})
    quantize_files(source, tmp_path / "out", "int8", progress=False)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.gate_up_proj lacks pieces"):
        load_model(tmp_path / "out")


@pytest.mark.parametrize("name", ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
def test_a_tensor_that_is_there_twice(name: str, tmp_path: Path) -> None:
    """Stored both whole and as the pieces that it is made of: neither is dropped."""
    config, fields = CONFIGS["mixtral"]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
    quantize_files(original(tmp_path / "model", "mixtral"), tmp_path / "out", "int8", progress=False)
    manifest, name = read_manifest(tmp_path / "out"), f"model.layers.0.{name}"
    first = next(iter(manifest.tensors.values()))
    manifest.tensors[name] = dataclasses.replace(first, name=name)
    with pytest.raises(CheckpointError, match=f"are both {name} of the model"):
        arrangement(model)(manifest)


def test_experts_that_lie_the_other_way_round_in_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of Qwen3-VL: [experts, K, N], which transformers transposes while reading."""
    decoder = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    vision = {"hidden_size": 64, "depth": 1, "num_heads": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    kind = transformers.Qwen3VLMoeForConditionalGeneration
    torch.manual_seed(0)
    kind(transformers.Qwen3VLMoeConfig(text_config=decoder, vision_config=vision)).save_pretrained(tmp_path / "float")
    file = tmp_path / "float" / "model.safetensors"
    values = load_file(file)
    turned = {name: value.mT.contiguous() if ".experts." in name else value for name, value in values.items()}
    save_file(turned, file, {"format": "pt"})
    right = kind.from_pretrained(tmp_path / "float")
    quantize_(right, "int4-g32")
    assert main(["quantize", str(tmp_path / "float"), "--scheme", "int4-g32", "-o", str(tmp_path / "out")]) == 0
    assert "note: " not in capsys.readouterr().err
    loaded = kind.from_pretrained(tmp_path / "out")
    direct = kind.from_pretrained(tmp_path / "float", quantization_config=BitportConfig("int4-g32"))
    for name, param in right.named_parameters():
        for mine in (loaded.get_parameter(name), direct.get_parameter(name)):
            assert isinstance(mine, QTensor) == isinstance(param, QTensor), name
            assert torch.equal(mine, param), name
    assert isinstance(loaded.model.language_model.layers[1].mlp.experts.gate_up_proj, QTensor)


def test_convolutions_apart_in_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OLMo hybrid stores separate ones for queries, keys and values, which transformers merges. A rule for everything
    includes them."""
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_value_head_dim": 16, "pad_token_id": 0}
    kinds = {"linear_key_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    torch.manual_seed(0)
    kind = transformers.OlmoHybridForCausalLM
    kind(transformers.OlmoHybridConfig(**SIZES, **linear, **kinds)).save_pretrained(tmp_path / "float")
    right = kind.from_pretrained(tmp_path / "float")
    quantize_(right, {"*": "int4-g32"})
    assert main(["quantize", str(tmp_path / "float"), "--rule", "*=int4-g32", "-o", str(tmp_path / "out")]) == 0
    assert "note: " not in capsys.readouterr().err
    loaded = kind.from_pretrained(tmp_path / "out")
    assert isinstance(loaded.model.layers[0].linear_attn.conv1d.weight, QTensor)
    for name, param in right.named_parameters():
        assert torch.equal(loaded.get_parameter(name), param), name


def test_parts_that_are_not_equal(tmp_path: Path) -> None:
    """NomicBert stores queries, keys and values as one matrix, which has a row too many here."""
    kind = transformers.NomicBertModel
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = kind(transformers.NomicBertConfig(**sizes, vocab_size=96))
    model.save_pretrained(tmp_path / "float")
    values = load_file(tmp_path / "float" / "model.safetensors")
    (name,) = (name for name in values if name.endswith("Wqkv.weight"))
    values[name] = torch.randn(3 * 64 + 1, 64)
    save_file(values, tmp_path / "float" / "model.safetensors", {"format": "pt"})
    quantize_files(tmp_path / "float", tmp_path / "out", "int8", progress=False)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight .* a part of .*Wqkv\.weight \[193, 64\]"):
        arrangement(model)(read_manifest(tmp_path / "out"))


SARVAM = {**SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize("scheme", ["int4-g32", "int8", "nvfp4-wo"])
def test_parts_of_the_sizes_that_the_model_has(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sarvam stores queries, keys and values as one matrix, in which there are more queries."""
    config = getattr(transformers, "SarvamMoEConfig", None) or pytest.skip("a model that this version does not know")
    kind = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    kind.from_config(config(**SARVAM)).save_pretrained(tmp_path / "float")
    make_tokenizer(tmp_path / "float")
    stored = load_file(tmp_path / "float" / "model.safetensors")["model.layers.1.attention.query_key_value.weight"]
    assert stored.shape == (64 + 32 + 32, 64)
    assert main(["quantize", str(tmp_path / "float"), "--scheme", scheme, "-o", str(tmp_path / "out")]) == 0
    assert "note: " not in capsys.readouterr().err
    model = kind.from_pretrained(tmp_path / "out")
    attention, whole = model.model.layers[1].self_attn, quantize_tensor(stored, scheme).dequantize()
    found = [getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    assert all(isinstance(each, QTensor) for each in found)
    for each, wanted in zip(found, whole.split([64, 32, 32]), strict=True):
        assert torch.equal(each.dequantize(), wanted)
    with torch.no_grad():
        want = rounded(tmp_path / "float", tmp_path / "out", tmp_path / "rounded")(input_ids=IDS).logits
        assert float(sqnr(want, model(input_ids=IDS).logits)) > 90
    manifest = read_manifest(tmp_path / "out")
    name = "model.layers.1.attention.query_key_value.weight"
    manifest.tensors[name] = dataclasses.replace(manifest.tensors[name], shape=(127, 64))
    with pytest.raises(CheckpointError, match=r"a part of .* \[127, 64\]: .* have \[64, 32, 32\] rows"):
        arrangement(model)(manifest)


ATTENTION = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "max_position_embeddings": 128}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
NEAR = {f"swa_{key}": value for key, value in ATTENTION.items() if key.endswith(("heads", "head_dim"))}
INKLING = {**ATTENTION, **NEAR, **ROUTED, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16}
MOVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kimi-k2.5": (
        "Kimi_K25ForConditionalGeneration",
        "Kimi_K25Config",
        {
            "text_config": {**ATTENTION, **ROUTED, **LATENT, "model_type": "deepseek_v3", "intermediate_size": 96}
            | {"num_hidden_layers": 2, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "pad_token_id": 0}
            | {"first_k_dense_replace": 1},
            "vision_config": {**VISION, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
        },
    ),
    "step-3.7": (
        "Step3p7ForConditionalGeneration",
        "Step3p7Config",
        {
            "text_config": {**ATTENTION, **ROUTED, "num_local_experts": 4, "intermediate_size": 96}
            | {"num_hidden_layers": 3, "share_expert_dim": 48, "sliding_window": 8, "num_sliding_attention_heads": 4}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
            "vision_config": {**VISION, "image_size": 32, "patch_size": 8, "mlp_ratio": 1.5},
            "image_token_id": 5,
        },
    ),
    "inkling": (
        "InklingForCausalLM",
        "InklingTextConfig",
        {**INKLING, "num_hidden_layers": 3, "intermediate_size": 96},
    ),
    "inkling2": (
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        {**INKLING, "num_hidden_layers": 4, "n_layers_per_attn_res_block": 2, "unpadded_vocab_size": 90},
    ),
}
"""Models in whose files outputs lie in another order: of rotary embeddings, of gate and up projections; or that have
more of them."""


@pytest.mark.parametrize("name", MOVED)
def test_outputs_in_another_order(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    its, config, fields = MOVED[name]
    kind = getattr(transformers, its, None) or pytest.skip("a model that this version does not know")
    torch.manual_seed(0)
    kind(getattr(transformers, config)(**fields)).save_pretrained(tmp_path / "float")
    assert main(["quantize", str(tmp_path / "float"), "--scheme", "int4-g32", "-o", str(tmp_path / "out")]) == 0
    assert "note: " not in capsys.readouterr().err
    model = kind.from_pretrained(tmp_path / "out")
    wanted = rounded(tmp_path / "float", tmp_path / "out", tmp_path / "rounded", kind)
    for each, param in model.named_parameters():
        found = param.dequantize() if isinstance(param, QTensor) else param
        assert torch.equal(found, wanted.get_parameter(each)), each
    quantized = {each.rpartition(".")[2] for each, param in model.named_parameters() if isinstance(param, QTensor)}
    assert {"weight", "gate_up_proj"} <= quantized


def test_conversions_that_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversion with a transpose: reported before anything is quantized, and on loading."""
    source = original(tmp_path / "model", "mixtral")
    config = json.loads((source / "config.json").read_text())
    assert config["model_type"] == "mixtral"
    mapping = importlib.import_module("transformers.conversion_mapping")
    table = mapping.get_checkpoint_conversion_mapping("mixtral")
    changed = [each for each in table if not hasattr(each, "operations")]
    loading = transformers.core_model_loading
    changed.append(
        loading.WeightConverter(
            source_patterns=[".experts.*.w2.weight"],
            target_patterns=[".experts.down_proj"],
            operations=[loading.MergeModulelist(dim=0), loading.Transpose(1, 2)],
        )
    )
    mapping.register_checkpoint_conversion_mapping("mixtral", changed, overwrite=True)
    try:
        assert main(["quantize", str(source), "--scheme", "int8", "-o", str(tmp_path / "out")]) == 0
        assert (
            "by MergeModulelist, Transpose of transformers, which is done to whole models alone"
            in capsys.readouterr().err
        )
        with pytest.raises(CheckpointError, match="by MergeModulelist, Transpose of transformers"):
            load_model(tmp_path / "out")
    finally:
        mapping.register_checkpoint_conversion_mapping("mixtral", table, overwrite=True)
