"""Models written as GGUF files: the library ``gguf`` reads their numbers and the settings of llama.cpp's converter, and
bitport reads the same model back."""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.checkpoint import quantize_files
from bitport.checkpoint.source import Source
from bitport.cli.main import main
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import convert
from bitport.interop.gguf import Writer
from bitport.interop.gguf.header import read_header
from bitport.interop.gguf.output import UNFINISHED, Output
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .files import config_in, edited
from .gguf_files import (
    NAMES,
    experts,
    gguf,
    in_file,
    keys_and_values,
    model_of,
    name_in_file,
    names_of,
    of_linear,
    settings,
)
from .gguf_models import EXPERTS, GEMMA, GPT_OSS, LLAMA3, LONG, MIXTRAL, MORE, NEAR_AND_FAR, SHARED, YARN, small
from .test_gguf import llama3_factors, logits

huggingface = pytest.importorskip("bitport.integrations.huggingface")
models = pytest.importorskip("tests.integrations.models")

RECIPE = {
    "*experts*": "int4",
    "*embed_tokens": "int6-g32-sym",
    "*q_proj": "int4-g32-sym",
    "*k_proj": "int4",
    "*qkv_proj": "int8",
    "*o_proj": "mxfp4-wo",
    "*up_proj": "int3",
    "*gate_proj": "int5-g64",
    "*layers.0*down_proj": "int8",
    "*w2": "int8",
    "*in_proj": "int4-g32-sym",
    "*kv_a_proj_with_mqa": "int8",
    "*": "skip",
}


def written(config: Any, path: Path, recipe: Any = None, zero: tuple[str, ...] = (), **changes: Any) -> Any:
    """Build the model and write it to ``path``, in float (hf) and quantized (q). ``zero``: weights to set to zero, or
    only their first expert; ``changes`` to its config.json."""
    model = model_of(config)
    with torch.no_grad():
        for name in zero:
            weight = model.get_parameter(name)
            (weight[0] if weight.dim() == 3 else weight).zero_()
    model.save_pretrained(path / "hf")
    models.make_tokenizer(path / "hf")
    said = config_in(path / "hf") | changes
    (path / "hf" / "config.json").write_text(json.dumps(said))
    modules = [name.rpartition(".")[0] for name in Source(path / "hf").stored]
    fits = {rule: scheme for rule, scheme in RECIPE.items() if fnmatch.filter(modules, rule)}
    quantize_files(path / "hf", path / "q", recipe or fits, dtype=torch.float16, progress=False)
    return model


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(lambda: small("LlamaConfig"), id="llama"),
        pytest.param(lambda: small("LlamaConfig", tie_word_embeddings=True, head_dim=32), id="llama-tied"),
        pytest.param(lambda: small("LlamaConfig", attention_bias=True, mlp_bias=True), id="llama-biases"),
        pytest.param(lambda: small("LlamaConfig", rope_parameters=LLAMA3, max_position_embeddings=131072), id="llama3"),
        pytest.param(lambda: small("MistralConfig", sliding_window=None), id="mistral"),
        pytest.param(lambda: small("Qwen2Config", rope_parameters=YARN), id="qwen2-yarn"),
        pytest.param(lambda: small("Qwen3Config", head_dim=32, tie_word_embeddings=True), id="qwen3"),
        pytest.param(lambda: small("Qwen3MoeConfig", head_dim=64, **EXPERTS), id="qwen3moe"),
        pytest.param(lambda: small("GptOssConfig", **GPT_OSS), id="gpt-oss"),
        pytest.param(lambda: small("MixtralConfig", **MIXTRAL), id="mixtral"),
        pytest.param(lambda: small("Qwen2MoeConfig", **SHARED), id="qwen2moe"),
        pytest.param(lambda: small("Phi3Config", sliding_window=20), id="phi3"),
        pytest.param(
            lambda: small("Phi3Config", rope_parameters=LONG, original_max_position_embeddings=64), id="phi3-long"
        ),
        pytest.param(lambda: small("GemmaConfig", head_dim=32), id="gemma"),
        pytest.param(lambda: small("Gemma2Config", **GEMMA), id="gemma2"),
        pytest.param(
            lambda: small("Gemma3TextConfig", num_hidden_layers=7, rope_parameters=NEAR_AND_FAR, **GEMMA), id="gemma3"
        ),
        *(pytest.param(lambda it=it: small(it[0], **it[1]), id=name) for name, it in MORE.items()),
    ],
)
def test_the_file_holds_the_model(config: Any, tmp_path: Path) -> None:
    model = written(config(), tmp_path)
    done = convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    assert (done.read, done.written) == ("bitport", "gguf")
    tensors = dict(Own(tmp_path / "q").items())
    assert len(done.weights) + done.others == len(tensors)
    assert_holds(tmp_path / "m.gguf", tensors, model.config)
    assert_says(tmp_path / "m.gguf", model)
    convert(tmp_path / "m.gguf", tmp_path / "back", progress=False)
    before, after = (logits(huggingface.load_model(tmp_path / name)) for name in ("q", "back"))
    # The same numbers in other schemes, whose sums may be taken in another order: float16 keeps three digits.
    assert float((before - after).abs().max()) <= 2e-3 * float(before.abs().max())


def assert_holds(path: Path, tensors: dict[str, Tensor], config: Any) -> None:
    """Every number, using the library's own names and arithmetic."""
    found = {each.name: each for each in gguf.GGUFReader(path).tensors}
    architecture = NAMES.get(config.model_type, config.model_type)
    names = names_of(architecture, config.num_hidden_layers)
    stacked: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        value = tensor.dequantize(torch.float32) if isinstance(tensor, QTensor) else tensor.float()
        stem = name.rpartition(".")[0]
        if ".experts.down_proj" in name or ".experts.gate_up_proj" in name:
            for target, each in experts(name, value, architecture).items():
                assert_equal(found, target, each)
            continue
        if ".experts." in name:
            block, leaf = stem.split(".")[2], stem.split(".")[-1].removesuffix("_proj")
            leaf = {"w1": "gate", "w2": "down", "w3": "up"}.get(leaf, leaf)
            stacked.setdefault(f"blk.{block}.ffn_{leaf}_exps.weight", []).append(value)
            continue
        if ".linear_attn." in name:
            for target, each in of_linear(name, value, config).items():
                assert_equal(found, target, -each.double().exp().float() if name.endswith("A_log") else each)
            continue
        target = name_in_file(name, names)
        if stem.endswith("kv_b_proj"):
            for each, part in keys_and_values(target, value, config).items():
                assert_equal(found, each, part)
            continue
        assert_equal(found, target, in_file(name, value, config))
    for name, each in stacked.items():
        assert_equal(found, name, torch.stack(each))
    assert {name for name in found if not name.startswith("rope_f")} == set()


def assert_equal(found: dict[str, Any], name: str, value: Tensor) -> None:
    """Remove the tensor from ``found`` and compare it. With a scale of its matrix it is the product of three numbers,
    which bitport rounds twice."""
    stored = found.pop(name)
    wanted, scaled = value_of(stored), stored.tensor_type == gguf.GGMLQuantizationType.NVFP4
    scale = found.pop(name.replace("weight", "scale"), None) if scaled else None
    if scale is None:
        assert torch.equal(wanted, value), name
        return
    exact = wanted.double() * torch.tensor(scale.data).double().reshape(*wanted.shape[:-2], 1, 1)
    assert bool(((value - exact).abs() <= 2.0**-23 * (1 + 2.0**-20) * exact.abs()).all()), name


def value_of(tensor: Any) -> Tensor:
    shape = tuple(int(size) for size in tensor.shape[::-1])
    return torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).float().reshape(shape)


def assert_says(path: Path, model: Any) -> None:
    """Every setting of llama.cpp's converter is there, with the same value."""
    name = NAMES.get(model.config.model_type, model.config.model_type)
    fields = gguf.GGUFReader(path).fields
    found = {key: field.contents() for key, field in fields.items()}
    for key, (value, kind) in settings(model, name).items():
        if not key.startswith("tokenizer"):
            assert found[key] == pytest.approx(value, rel=1e-7), key
            assert fields[key].types[0] == kind, key
    assert found["general.architecture"] == name
    assert found["tokenizer.ggml.bos_token_id"] == 258
    assert len(found["tokenizer.ggml.tokens"]) == 288


def test_factors_of_waves(tmp_path: Path) -> None:
    config = small("LlamaConfig", rope_parameters=dict(LLAMA3), max_position_embeddings=131072)
    written(config, tmp_path)
    convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    found = read_header(tmp_path / "m.gguf").tensors["rope_freqs.weight"].read()
    assert torch.allclose(found, llama3_factors(config), rtol=1e-6, atol=0)


def test_from_a_file_to_a_file(tmp_path: Path) -> None:
    """In between, the experts of both projections are one tensor."""
    written(small("Qwen3MoeConfig", head_dim=64, **EXPERTS), tmp_path)
    convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    convert(tmp_path / "m.gguf", tmp_path / "n.gguf", to="gguf", progress=False)
    one, other = (read_header(tmp_path / name).tensors for name in ("m.gguf", "n.gguf"))
    assert one.keys() == other.keys()
    for name, stored in one.items():
        assert (stored.type, stored.shape) == (other[name].type, other[name].shape)
        assert torch.equal(stored.read(), other[name].read())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(lambda: small("LlamaConfig"), id="llama"),
        pytest.param(lambda: small("Qwen3MoeConfig", head_dim=64, **EXPERTS), id="qwen3moe"),
        pytest.param(lambda: small("MixtralConfig", **MIXTRAL), id="mixtral"),
    ],
)
def test_scales_of_tensors(config: Any, tmp_path: Path) -> None:
    """Converting back gives the same parts, unless one tensor consists of two with their own scales."""
    model = written(config(), tmp_path, {"*_proj": "nvfp4-wo", "lm_head": "nvfp4-wo", "*": "skip"})
    done = convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    assert set(done.weights.values()) == {"nvfp4-wo"}
    tensors = dict(Own(tmp_path / "q").items())
    assert_holds(tmp_path / "m.gguf", tensors, model.config)
    convert(tmp_path / "m.gguf", tmp_path / "back", progress=False)
    for name, tensor in Own(tmp_path / "back").items():
        if isinstance(tensor, QTensor) and name in tensors:
            for one, other in zip(tensor.plain(), tensors[name].plain(), strict=True):
                assert one is other is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
    before, after = (logits(huggingface.load_model(tmp_path / name)) for name in ("q", "back"))
    assert float((before - after).abs().max()) <= 2e-3 * float(before.abs().max())  # see above


def test_an_embedding_has_no_scale(tmp_path: Path) -> None:
    written(small("LlamaConfig"), tmp_path, {"*embed_tokens": "nvfp4-wo", "*": "skip"})
    with pytest.raises(ArgumentError, match="knows no scale of an embedding: mxfp4-wo"):
        convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)


def test_experts_of_mxfp4(tmp_path: Path) -> None:
    """From the published form of gpt-oss, and back to the same bytes."""
    recipe = {"*experts.*_proj": "mxfp4-wo", "*": "skip"}
    written(small("GptOssConfig", **GPT_OSS), tmp_path, recipe)
    convert(tmp_path / "q", tmp_path / "a", to="mxfp4", progress=False)
    done = convert(tmp_path / "a", tmp_path / "m.gguf", to="gguf", progress=False)
    assert any("limits of yarn" in note for note in done.notes)
    types = {name: each.type for name, each in read_header(tmp_path / "m.gguf").tensors.items() if "_exps" in name}
    assert {kind for name, kind in types.items() if name.endswith("weight")} == {"MXFP4"}
    assert {kind for name, kind in types.items() if name.endswith("bias")} == {"F32"}
    convert(tmp_path / "m.gguf", tmp_path / "b", to="mxfp4", progress=False)
    one, other = (everything(tmp_path / name) for name in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)) for name, value in one.items())


def everything(path: Path) -> dict[str, Tensor]:
    source = Source(path, quantized=True)
    return dict(source.read(source.stored))


def test_an_expert_that_a_smaller_type_would_hold(tmp_path: Path) -> None:
    """All experts are in one tensor, which has a single type."""
    zero = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")
    written(small("Qwen3MoeConfig", head_dim=64, **EXPERTS), tmp_path, zero=zero)
    convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    tensors = read_header(tmp_path / "m.gguf").tensors
    assert {each.type for name, each in tensors.items() if "_exps" in name} == {"Q5_0"}


def test_floats_keep_their_dtype(tmp_path: Path) -> None:
    written(small("LlamaConfig"), tmp_path)
    for dtype, kind in ((torch.bfloat16, "BF16"), (torch.float32, "F32")):
        recipe = {"*o_proj": "mxfp4-wo", "*": "skip"}
        quantize_files(tmp_path / "hf", tmp_path / kind, recipe, dtype=dtype, progress=False)
        convert(tmp_path / kind, tmp_path / f"{kind}.gguf", to="gguf", progress=False)
        tensors = read_header(tmp_path / f"{kind}.gguf").tensors
        assert {each.type for each in tensors.values() if len(each.shape) == 2} == {kind, "MXFP4"}
        assert {each.type for each in tensors.values() if len(each.shape) == 1} == {"F32"}


def test_from_a_format_of_others(tmp_path: Path) -> None:
    written(small("LlamaConfig"), tmp_path, {"*_proj": "int4-g32-sym", "*": "skip"})
    convert(tmp_path / "q", tmp_path / "gptq", to="gptq", progress=False)
    for name in ("q", "gptq"):
        convert(tmp_path / name, tmp_path / f"{name}.gguf", to="gguf", progress=False)
    one, other = (read_header(tmp_path / f"{name}.gguf").tensors for name in ("q", "gptq"))
    assert {name: each.type for name, each in one.items()} == {name: each.type for name, each in other.items()}
    assert all(torch.equal(each.read(), other[name].read()) for name, each in one.items())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    written(small("LlamaConfig"), path)
    return path


def test_the_verb(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "m.gguf"
    assert main(["convert", str(llama / "q"), "--to", "gguf", "-o", str(out)]) == 0
    assert "-> gguf" in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["m.gguf"]
    before = out.read_bytes()
    assert main(["convert", str(llama / "q"), "--to", "gguf", "-o", str(out)]) != 0
    assert "--overwrite" in capsys.readouterr().err
    assert main(["convert", str(llama / "q"), "--to", "gguf", "-o", str(out), "--overwrite"]) == 0
    assert out.read_bytes() == before


def test_where_it_may_write(llama: Path, tmp_path: Path) -> None:
    convert(llama / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    (tmp_path / f"n.gguf{UNFINISHED}").write_text("")
    (tmp_path / "o.gguf").mkdir()
    for source, target, reason in (
        (llama / "q", tmp_path / "dir", r"give its name, such as .*dir\.gguf"),
        (llama / "q", tmp_path / "o.gguf", "give its name"),
        (tmp_path / "m.gguf", tmp_path / "m.gguf", "is the source"),
        (llama / "q", tmp_path / "m.gguf", "--overwrite replaces it"),
        (llama / "q", tmp_path / "n.gguf", "ended early"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            convert(source, target, to="gguf", progress=False)
    assert (tmp_path / f"n.gguf{UNFINISHED}").exists()


def test_what_fails_leaves_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_files(llama / "hf", tmp_path / "q", {"*down_proj": "int8", "*": "skip"}, progress=False)
    target = tmp_path / "out" / "m.gguf"
    with pytest.raises(ArgumentError, match=r"down_proj\.weight \(int8\) .*float16"):
        convert(tmp_path / "q", target, to="gguf", progress=False)
    assert list(target.parent.iterdir()) == []

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Output, "publish", full)
    with pytest.raises(CheckpointError, match="no space; free some space"):
        convert(llama / "q", target, to="gguf", progress=False)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        (
            "int4",
            "Q5_0, as GGUF's whole numbers have no zero points: a model quantized as int4-g32-sym takes Q4_0, which is "
            "smaller",
        ),
        ("int3", "Q4_0, the smallest type that holds its numbers"),
        ("int4-g32-sym", ""),
        ("int8", ""),
    ],
)
def test_a_type_that_is_larger_than_the_scheme_is_told(scheme: str, told: str, llama: Path, tmp_path: Path) -> None:
    quantize_files(llama / "hf", tmp_path / "q", {"*down_proj": scheme, "*": "skip"}, progress=False)
    notes = convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", scales="float16", progress=False).notes
    assert [note for note in notes if " takes " in note] == ([f"{scheme} takes {told}"] if told else [])


def test_what_has_no_type_is_told_before(llama: Path, tmp_path: Path) -> None:
    recipe = {"*q_proj": "nf4", "*k_proj": "int8-dyn", "*v_proj": "int4-g16", "*": "skip"}
    quantize_files(llama / "hf", tmp_path / "q", recipe, progress=False)
    with pytest.raises(ArgumentError) as told:
        convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    assert not (tmp_path / "m.gguf").exists()
    for part in (
        "no type for nf4",
        "inputs as they are",
        "blocks of 32 columns, not of 16",
        "layers.1.self_attn.q_proj",
    ):
        assert part in str(told.value)


def test_what_weights_may_not_have(llama: Path) -> None:
    files = dict(Own(llama / "q").others({}))
    writer = Writer(Own(llama / "q").names(), {}, files)
    q = next(iter(Own(llama / "q").described()))
    assert "perm" in str(writer.refuses(dataclasses.replace(q, parts=q.parts | {"perm"})))
    assert "pre_scale" in str(writer.refuses(dataclasses.replace(q, parts=q.parts | {"pre_scale"})))
    assert "matrices" in str(writer.refuses(dataclasses.replace(q, shape=(2, 3, 4, 32))))


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.norm.weight", torch.ones(2, 2), "no place in output_norm"),
        ("model.layers.0.self_attn.v_proj.weight", torch.ones(0, 256), "no place in blk.0.attn_v"),
        ("model.layers.0.self_attn.q_proj.weight", torch.ones(12, 256), "no pairs of 4 heads"),
        ("lm_head.weight", torch.ones(287, 256), "287 rows"),
        ("model.norm.weight", torch.ones(256, dtype=torch.int8), "torch.int8, which GGUF"),
    ],
)
def test_tensors_that_have_no_place(name: str, tensor: Tensor, reason: str, llama: Path, tmp_path: Path) -> None:
    files = Own(llama / "q")
    writer = Writer(files.names(), {}, dict(files.others({})))
    with pytest.raises(BitportError, match=reason), writer.output(tmp_path / "m.gguf", []) as out:
        writer.write(out, name, tensor)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not written as GGUF; llama, mixtral.*mistral"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"new": 1}, "new = 1"),
        ({"rms_norm_eps": 1e-300}, "layer_norm_rms_epsilon"),
        ({"rms_norm_eps": 0.1 + 1e-12}, r"rms_norm_eps = 0\.100.* \(it would be 0\.1\)"),
        ({"rms_norm_eps": None}, "layer_norm_rms_epsilon"),
        ({"hidden_size": "x"}, "hidden_size 'x'"),
        ({"vocab_size": 1 << 40}, "vocab_size 1099511627776"),
        ({"intermediate_size": 1.5}, "feed_forward_length must be int"),
        ({"attention_bias": True}, r"attention_bias = True \(it would be False\)"),
        ({"rope_parameters": {"rope_type": "odd", "rope_theta": 1.0}}, "'odd'"),
        ({"rope_parameters": {"rope_type": "default"}}, "None where a number"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "None where a number"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "rope_parameters = "),
        ({"rope_parameters": {**YARN, "beta_fast": 16}}, "rope_parameters = "),
        ({"rope_parameters": 3}, "rope_parameters 3"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "inf where a number"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window = 64"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"eos_token_id": 288}, "288 as a token, of 288"),
        ({"eos_token_id": ["x"]}, "'x' as a token"),
        ({"num_hidden_layers": 1}, r"no place for model\.layers\.1"),
        ({"num_hidden_layers": 3}, r"lacks what would be blk\.2\."),
        ({"num_attention_heads": 3}, "heads"),
        ({"vocab_size": 287}, "288 rows, and config.json a vocab_size of 287|288 as|token 287"),
    ],
)
def test_a_config_that_no_file_can_say(changes: dict[str, Any], reason: str, llama: Path, tmp_path: Path) -> None:
    source = edited(llama / "q", tmp_path / "q", **changes)
    with pytest.raises(BitportError, match=reason):
        convert(source, tmp_path / "m.gguf", to="gguf", progress=False)
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 4096},
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": False},
        {"rope_parameters": None, "rope_theta": 10000, "rope_scaling": None},
        {"head_dim": None, "torch_dtype": "bfloat16", "pretraining_tp": 1},
        {"pad_token_id": -1},
    ],
)
def test_other_words_for_the_same(changes: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    convert(llama / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    source = edited(llama / "q", tmp_path / "q", **changes)
    convert(source, tmp_path / "n.gguf", to="gguf", progress=False)
    assert (tmp_path / "n.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


def test_tokens_that_end_a_text(llama: Path, tmp_path: Path) -> None:
    source = edited(llama / "q", tmp_path / "q", eos_token_id=[5, 6, 7])
    convert(source, tmp_path / "m.gguf", to="gguf", progress=False)
    said = read_header(tmp_path / "m.gguf").settings
    assert [said[f"tokenizer.ggml.{end}_token_id"] for end in ("eos", "eot", "eom")] == [5, 6, 7]
    convert(tmp_path / "m.gguf", tmp_path / "back", progress=False)
    assert config_in(tmp_path / "back")["eos_token_id"] == [5, 6, 7]
    source = edited(llama / "q", tmp_path / "r", eos_token_id=[5, 6, 7, 8])
    assert any("the first 3" in note for note in convert(source, tmp_path / "n.gguf", to="gguf", progress=False).notes)


def test_a_head_that_is_not_there(tmp_path: Path) -> None:
    written(small("LlamaConfig", tie_word_embeddings=True), tmp_path, tie_word_embeddings=False)
    with pytest.raises(ArgumentError, match=r"no lm_head\.weight"):
        convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)


def test_a_directory_without_a_config(llama: Path, tmp_path: Path) -> None:
    source = edited(llama / "q", tmp_path / "q")
    (source / "config.json").unlink()
    with pytest.raises(ArgumentError, match=r"no config\.json"):
        convert(source, tmp_path / "m.gguf", to="gguf", progress=False)


def test_norms_that_are_rounded(tmp_path: Path) -> None:
    """1 + a small float16 has more bits than float32; the model adds them in float32 too."""
    written(small("GemmaConfig", head_dim=32), tmp_path)
    done = convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    tensors = dict(Own(tmp_path / "q").items())
    finer = [
        name
        for name, value in tensors.items()
        if name.endswith("norm.weight") and bool((value.double() + 1 != (value.float() + 1).double()).any())
    ]
    assert bool(finer) == any("plus 1" in note for note in done.notes)
