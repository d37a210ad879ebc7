"""Whole models in GGUF, written by the library ``gguf``: each gives the outputs of a model with the values of its
blocks."""

from __future__ import annotations

import importlib
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.checkpoint import read_manifest
from bitport.cli.main import main
from bitport.errors import BitportError, CheckpointError
from bitport.interop import convert
from bitport.interop.gguf import Gguf
from bitport.interop.gguf.header import read_header
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from . import gguf_files
from .files import assert_described, config_in
from .gguf_files import SIZES, gguf, model_of, transformers, write
from .gguf_models import EXPERTS, GEMMA, GPT_OSS, LLAMA3, MIXTRAL, MORE, NEAR_AND_FAR, SHARED, small

huggingface = pytest.importorskip("bitport.integrations.huggingface")
types = gguf.GGUFValueType

KINDS = {
    r"token_embd.*": "Q6_K",
    r"output\..*": "Q2_K",
    r".*_exps\..*": "Q4_0",
    r".*attn_kv_b\..*": "Q5_0",
    r".*attn_k_b\..*": "Q8_0",
    r".*attn_v_b\..*": "Q4_0",
    r".*attn_q\..*": "Q4_K",
    r".*attn_k\..*": "Q8_0",
    r".*attn_v\..*": "Q5_K",
    r".*attn_qkv\..*": "Q5_0",
    r".*attn_output\..*": "MXFP4",
    r".*shortconv\.in_proj\..*": "Q4_0",
    r".*shortconv\.out_proj\..*": "Q8_0",
    r".*ffn_down\..*": "Q4_0",
    r".*ffn_up\..*": "Q5_1",
    r".*ffn_gate\..*": "Q3_K",
}


def logits(model: Any) -> Tensor:
    ids = torch.arange(60).reshape(2, 30) * 7 % SIZES["vocab_size"]
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found


def llama3_factors(config: Any) -> Tensor:
    """The divisor of each frequency, as llama.cpp's converter computes it."""
    rope, found = config.rope_parameters, []
    for at in range(0, config.head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (at / config.head_dim)
        short, long = 8192 / 4.0, 8192 / 1.0
        if short <= wave <= long:
            smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        else:
            found.append(1.0 if wave < short else rope["factor"])
    return torch.tensor(found)


def assert_same_answers(model: Any, directory: Path) -> None:
    """Sums in another order and rounded zero points add up over the layers: float32 keeps five digits, and four and a
    half where linear attention sums over all tokens before."""
    before, after = logits(model), logits(huggingface.load_model(directory))
    budget = 3e-5 if hasattr(model.config, "linear_num_key_heads") else 1e-5
    assert float((before - after).abs().max()) <= budget * float(before.abs().max())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(lambda: small("LlamaConfig"), id="llama"),
        pytest.param(lambda: small("LlamaConfig", tie_word_embeddings=True, head_dim=32), id="llama-tied"),
        pytest.param(lambda: small("LlamaConfig", attention_bias=True, mlp_bias=True), id="llama-biases"),
        pytest.param(lambda: small("Qwen2Config"), id="qwen2"),
        pytest.param(lambda: small("Qwen3Config", head_dim=32, tie_word_embeddings=True), id="qwen3"),
        pytest.param(lambda: small("Qwen3MoeConfig", head_dim=64, **EXPERTS), id="qwen3moe"),
        pytest.param(lambda: small("GptOssConfig", **GPT_OSS), id="gpt-oss"),
        pytest.param(lambda: small("MixtralConfig", **MIXTRAL), id="mixtral"),
        pytest.param(lambda: small("Qwen2MoeConfig", **SHARED), id="qwen2moe"),
        pytest.param(lambda: small("Phi3Config"), id="phi3"),
        pytest.param(lambda: small("GemmaConfig", head_dim=32), id="gemma"),
        pytest.param(lambda: small("Gemma2Config", **GEMMA), id="gemma2"),
        *(pytest.param(lambda it=it: small(it[0], **it[1]), id=name) for name, it in MORE.items()),
    ],
)
def test_the_model_answers_as_its_blocks_say(config: Any, tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", model_of(config()), KINDS)
    if model.config.model_type == "llama" and model.config.attention_bias:
        assert any(name.endswith("o_proj.bias") for name in model.state_dict())
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert (done.read, done.written) == ("gguf", "bitport")
    assert {"int6-g16-sym", "int4-g32-sym"} <= set(done.weights.values())
    assert_same_answers(model, tmp_path / "out")


def test_gate_and_up_in_one_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's converter writes them with --fuse-gate-up-exps."""

    def fused(key: str, value: Tensor, _: str) -> dict[str, Tensor]:
        block = key.split(".")[2]
        return {f"blk.{block}.ffn_{'down' if 'down_proj' in key else 'gate_up'}_exps.weight": value}

    monkeypatch.setattr(gguf_files, "experts", fused)
    kinds = {r".*gate_up_exps\.weight": "NVFP4", **KINDS}
    model = write(tmp_path / "m.gguf", model_of(small("Qwen3MoeConfig", head_dim=64, **EXPERTS)), kinds)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert done.weights["model.layers.1.mlp.experts.gate_up_proj"] == "nvfp4-wo"
    assert_same_answers(model, tmp_path / "out")


def test_one_stack_and_two(tmp_path: Path) -> None:
    """The file contains the same parameter in both forms."""
    model = model_of(small("Qwen3MoeConfig", head_dim=64, **EXPERTS))
    write(tmp_path / "m.gguf", model, KINDS, vectors={"blk.0.ffn_gate_up_exps.weight": torch.ones(4, 128, 256)})
    with pytest.raises(CheckpointError, match=r"gate_up_exps\.weight and blk\.0\.ffn_gate_exps\.weight, .* twice"):
        Gguf(tmp_path / "m.gguf")


def test_llama_3(tmp_path: Path) -> None:
    """The frequencies of its long waves are divided by 8; the file contains only the divisors."""
    config = small("LlamaConfig", rope_parameters=dict(LLAMA3), max_position_embeddings=131072)
    model = model_of(config)
    write(tmp_path / "m.gguf", model, KINDS, vectors={"rope_freqs.weight": llama3_factors(config)})
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(model, tmp_path / "out")
    said = config_in(tmp_path / "out")["rope_parameters"]
    assert said == LLAMA3
    write(tmp_path / "n.gguf", model, KINDS, vectors={"rope_freqs.weight": llama3_factors(config) + 0.01})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        Gguf(tmp_path / "n.gguf")


def test_phi_3_with_a_long_context(tmp_path: Path) -> None:
    """Part of each head is rotated, with separate factors for short and long contexts."""
    half = 24
    short, long = (torch.linspace(1, end, half) for end in (2.0, 30.0))
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    rope |= {"short_factor": short.tolist(), "long_factor": long.tolist(), "original_max_position_embeddings": 16}
    config = small("Phi3Config", rope_parameters=rope, original_max_position_embeddings=16, sliding_window=20)
    model = write(
        tmp_path / "m.gguf",
        model_of(config),
        KINDS,
        vectors={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
        changes={
            "phi3.rope.scaling.original_context_length": (16, types.UINT32),
            "phi3.attention.sliding_window": (20, types.UINT32),
        },
    )
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(model, tmp_path / "out")


def test_gemma_3(tmp_path: Path) -> None:
    """Every sixth layer has full attention, with its own rotary embedding."""
    config = small("Gemma3TextConfig", num_hidden_layers=7, rope_parameters=dict(NEAR_AND_FAR), **GEMMA)
    scaling = {
        "gemma3.rope.scaling.type": ("linear", types.STRING),
        "gemma3.rope.scaling.factor": (8.0, types.FLOAT32),
    }
    model = write(tmp_path / "m.gguf", model_of(config), KINDS, changes=scaling)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(model, tmp_path / "out")


def test_yarn(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    scaling = {
        "qwen2.rope.scaling.type": ("yarn", types.STRING),
        "qwen2.rope.scaling.factor": (4.0, types.FLOAT32),
        "qwen2.rope.scaling.original_context_length": (32, types.UINT32),
    }
    model = write(tmp_path / "m.gguf", model_of(small("Qwen2Config", rope_parameters=rope)), KINDS, changes=scaling)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(model, tmp_path / "out")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "m.gguf"
    write(path, model_of(small("LlamaConfig")), KINDS)
    return path


def test_what_is_described_is_what_comes(llama: Path) -> None:
    files = Gguf(llama)
    assert_described(files)
    assert sum(stored.nbytes for piece in files.pieces for stored in piece.stored) == files.nbytes


def test_the_tokenizer_comes_along(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "out", progress=False)
    tokenizer = huggingface.load_tokenizer(tmp_path / "out")
    judge = transformers.PreTrainedTokenizerFast.from_pretrained(
        llama.parent,
        gguf_file=llama.name,
        add_bos_token=True,  # transformers 5.20 does not take this from the file
    )
    for text in ("abc cab", "Zwölf<|270|> 1234", ""):
        ids = tokenizer(text).input_ids
        assert ids == judge(text).input_ids
        assert ids[0] == SIZES["bos_token_id"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<|270|>", "")
    assert tokenizer.eos_token_id == SIZES["eos_token_id"]
    assert tokenizer.chat_template == judge.chat_template


def test_a_tokenizer_of_pieces(tmp_path: Path) -> None:
    """A sentencepiece tokenizer, whose merges follow from the scores."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{at:02X}>" for at in range(256)), "▁", "a", "b", "ab", "▁ab"]
    words += [f"<{at}>" for at in range(len(words), SIZES["vocab_size"])]
    changes = {
        "model": ("llama", types.STRING),
        "pre": ("default", types.STRING),
        "tokens": (words, types.ARRAY),
        "scores": ([-float(at) for at in range(len(words))], types.ARRAY),
        "token_type": ([2, 3, 3, *[6] * 256, *[1] * (len(words) - 259)], types.ARRAY),
        "merges": None,
        "bos_token_id": (1, types.UINT32),
        "eos_token_id": (2, types.UINT32),
        "unknown_token_id": (0, types.UINT32),
    }
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    write(tmp_path / "m.gguf", model_of(small("LlamaConfig")), KINDS, changes=changes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    tokenizer = huggingface.load_tokenizer(tmp_path / "out")
    assert tokenizer("ab ab").input_ids == [1, words.index("▁ab"), words.index("▁ab")]
    assert config_in(tmp_path / "out")["eos_token_id"] == 2


def test_words_that_transformers_may_split_otherwise(llama: Path, tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.pre": ("odd", types.STRING)}
    write(tmp_path / "m.gguf", model_of(small("LlamaConfig")), KINDS, changes=changes)
    assert any("'odd'" in note for note in Gguf(tmp_path / "m.gguf").notes)
    assert not any("words" in note for note in Gguf(llama).notes)


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.model": None}
    model = write(tmp_path / "m.gguf", model_of(small("LlamaConfig")), KINDS, changes=changes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert_same_answers(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("norms", "matrices", "dtype", "cast"),
    [
        ("bfloat16", "BF16", "bfloat16", "F32"),
        ("bfloat16", "Q8_0", "bfloat16", "F32"),
        ("bfloat16", "F16", "float16", "F32"),
        ("float32", "F16", "float32", "F16"),
        ("float32", "Q8_0", "float32", ""),
    ],
)
def test_the_dtype_holds_every_float(norms: str, matrices: str, dtype: str, cast: str, tmp_path: Path) -> None:
    model = model_of(small("LlamaConfig"))
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.copy_(value.to(getattr(torch, norms)))
    write(tmp_path / "m.gguf", model, {r"blk\.0\..*": "Q8_0", ".*": matrices})
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    tensors = dict(Own(tmp_path / "out").items())
    for name, value in model.state_dict().items():
        assert tensors[name].dtype == getattr(torch, dtype)
        if not isinstance(tensors[name], QTensor):
            assert torch.equal(tensors[name].float(), value), name
    assert bool(done.notes) == bool(cast)
    assert all(f"({cast}) are kept as torch.{dtype}" in note for note in done.notes)
    loaded = huggingface.load_model(tmp_path / "out")
    assert logits(loaded).isfinite().all()


def test_norms_less_one(tmp_path: Path) -> None:
    """Exact for every number of the form 1 + a float32; a note reports numbers that are finer than that."""
    path = tmp_path / "m.gguf"
    write(path, model_of(small("GemmaConfig", head_dim=32)), KINDS)
    assert not any("less 1" in note for note in Gguf(path).notes)
    data = bytearray(path.read_bytes())
    start = read_header(path).tensors["output_norm.weight"].start
    data[start : start + 4] = struct.pack("<f", 0.3 * 2.0**-20)
    path.write_bytes(data)
    assert any("less 1, are rounded to float32" in note and "model.norm.weight" in note for note in Gguf(path).notes)


@pytest.mark.parametrize(("split", "count"), [("llama-bpe", 1), ("tekken", 1), ("qwen2", 2)])
def test_words_that_are_tokens_need_no_merges(split: str, count: int, tmp_path: Path) -> None:
    """llama.cpp does so for these pre-tokenizers. No merge gives "abc" here."""
    said = {"pre": (split, types.STRING), "merges": (["a b"], types.ARRAY), "add_bos_token": (False, types.BOOL)}
    changes = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    write(tmp_path / "m.gguf", model_of(small("LlamaConfig")), KINDS, changes=changes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer("abc", add_special_tokens=False)["input_ids"]) == count


def test_the_verb(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(llama), "-o", str(tmp_path / "out")]) == 0
    assert "int6-g16-sym" in capsys.readouterr().out
    assert read_manifest(tmp_path / "out").tensors["lm_head.weight"].scheme is not None


def test_others_take_what_they_can_hold(tmp_path: Path) -> None:
    """Q4_0 is 4-bit GPTQ in groups of 32."""
    kinds = {r"blk.*": "Q4_0", "token_embd.*": "F16", "output.*": "F16"}
    model = write(tmp_path / "m.gguf", model_of(small("LlamaConfig")), kinds)
    convert(tmp_path / "m.gguf", tmp_path / "out", to="gptq_v2", progress=False)
    said = config_in(tmp_path / "out")["quantization_config"]
    assert (said["bits"], said["group_size"], said["sym"]) == (4, 32, True)
    convert(tmp_path / "out", tmp_path / "back", progress=False)
    assert_same_answers(model, tmp_path / "back")


ANOTHER = {"llama.rope.scaling.type": ("yarn", types.STRING)}
UNKNOWN = {"llama.expert_group_count": (8, types.UINT32), "llama.new": (1.0, types.FLOAT32)}
MERGED = {"tokenizer.ggml.merges": (["a b", "a c"], types.ARRAY)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (UNKNOWN, "llama.expert_group_count = 8, llama.new = 1.0"),
        (ANOTHER, "'yarn', without all"),
        ({"llama.rope.scaling.type": ("odd", types.STRING)}, "none, linear, yarn are read"),
        ({"llama.rope.dimension_count": (8, types.UINT32)}, "rope.dimension_count is 8; 64"),
        ({"llama.attention.value_length": (8, types.UINT32)}, "value_length is not key_length, 64"),
        ({"llama.block_count": (1, types.UINT32)}, r"blk\.1\..*of 1 layers"),
        ({"llama.block_count": None}, "block_count must be int, not absent"),
        ({"llama.block_count": (2.0, types.FLOAT32)}, "block_count must be int, not 2.0"),
        ({"llama.attention.head_count": (0, types.UINT32)}, "head_count is 0"),
        ({"llama.attention.layer_norm_rms_epsilon": (float("nan"), types.FLOAT32)}, "above 0"),
        ({"llama.tensor_data_layout": ("odd", types.STRING)}, "tensor_data_layout is 'odd'"),
        ({"general.architecture": ("mamba", types.STRING)}, "'mamba' is not read; llama, qwen2"),
        ({"tokenizer.ggml.eos_token_id": ("x", types.STRING)}, "eos_token_id is 'x'"),
        ({"tokenizer.ggml.padding_token_id": (288, types.UINT32)}, "pad_token_id 288 is none of 288 tokens"),
        ({"tokenizer.ggml.model": ("odd", types.STRING)}, "transformers cannot read the tokenizer"),
        (MERGED, "merges has 'a c', which makes no token"),
    ],
)
def test_settings_that_are_not_understood(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", model_of(small("LlamaConfig")), KINDS, changes=changes)
    with pytest.raises(CheckpointError, match=reason):
        convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_tensors_that_have_no_place(tmp_path: Path) -> None:
    model = model_of(small("LlamaConfig"))
    for at, (name, vector, reason) in enumerate(
        [
            ("blk.0.ssm_a", torch.ones(3), r"blk\.0\.ssm_a: a llama of 2 layers"),
            ("rope_freqs.weight", torch.ones(2, 2), "F32 of one dimension"),
            ("rope_freqs.weight", torch.ones(5), "has 5 numbers"),
            ("rope_factors_long.weight", torch.ones(32), r"not known here: rope_factors_long\.weight"),
            ("blk.0.\n.weight", torch.ones(3), "characters that cannot be shown"),
            ("blk.0.ffn_gate.scale", torch.ones(1), r"ffn_gate\.scale"),
        ]
    ):
        write(tmp_path / f"{at}.gguf", model, KINDS, vectors={name: vector})
        with pytest.raises(CheckpointError, match=reason):
            Gguf(tmp_path / f"{at}.gguf")


def test_experts_of_two_types(tmp_path: Path) -> None:
    model = model_of(small("Qwen3MoeConfig", head_dim=64, **EXPERTS))
    write(tmp_path / "m.gguf", model, {".*gate_exps.*": "Q4_0", ".*_exps.*": "Q8_0"})
    with pytest.raises(CheckpointError, match="one type and size"):
        Gguf(tmp_path / "m.gguf")


def test_a_file_that_is_not_quantized(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", model_of(small("LlamaConfig")), {".*": "F16"})
    with pytest.raises(CheckpointError, match="no quantized weight, only F16, F32"):
        convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_without_transformers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(BitportError, match=r"pip install 'bitport\[gguf\]'"):
        Gguf(llama)
