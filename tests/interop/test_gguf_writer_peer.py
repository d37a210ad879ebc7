"""GGUF files written by bitport, read by transformers and llama.cpp themselves."""

from __future__ import annotations

import ctypes
import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.checkpoint import quantize_files
from bitport.checkpoint.source import Source
from bitport.interop import convert
from bitport.interop.gguf.header import read_header
from bitport.interop.gguf.output import Output
from bitport.interop.gguf.vocabulary import GPT4O, LLAMA3, TEKKEN, vocabulary

from .gguf_files import NAMES, SIZES, model_of, transformers, write
from .gguf_models import EXPERTS, GEMMA, GPT_OSS, MIXTRAL, MORE, NEAR_AND_FAR, SHARED, YARN, small
from .gguf_models import LLAMA3 as LLAMA3_ROPE
from .test_gguf_vocabulary import SIZE, TEXTS, files_of, of_bytes, of_pieces
from .test_gguf_writer import written

pytestmark = pytest.mark.peers
huggingface = pytest.importorskip("bitport.integrations.huggingface")
TINY = Path(__file__).parents[2] / "models" / "tinylm"
IDS = [at * 7 % SIZES["vocab_size"] for at in range(60)]
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75} | {
    "short_factor": [1.0 + at / 24 for at in range(24)],
    "long_factor": [1.08 + at for at in range(24)],
    "original_max_position_embeddings": 512,
}
LONGER = {"original_max_position_embeddings": 512, "max_position_embeddings": 1024}
WHOLE_LIMITS = {"rope_type": "yarn", "rope_theta": 5.0, "factor": 4.0, "truncate": False} | {
    "original_max_position_embeddings": 200
}
"""Yarn starts before the first wavelength and ends after the last, so that there is nothing to round."""
BUDGETS = dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), 3e-5) | dict.fromkeys(
    ("starcoder2", "gemma4", "gemma4-values", "gemma4-experts"), 2**-10
)
"""Linear attention sums over all tokens before; for gelu see below."""
TIED = {"tie_word_embeddings": True}


def logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.tensor([ids])).logits[0].float()
    return found


@pytest.mark.parametrize(
    ("kind", "changes", "whole"),
    [
        ("LlamaConfig", {}, True),
        ("LlamaConfig", TIED, True),
        ("Qwen2Config", {}, True),
        ("Qwen3Config", {"head_dim": 128}, True),
        ("Qwen3MoeConfig", {"head_dim": 64, **EXPERTS}, False),
        ("Qwen2MoeConfig", SHARED, False),
        ("Starcoder2Config", {"norm_epsilon": 1e-5}, False),
        ("Phi3Config", {}, False),
        ("Gemma2Config", {**GEMMA, "head_dim": 64, "query_pre_attn_scalar": 64}, False),
    ],
)
def test_transformers_reads_the_same_model(kind: str, changes: dict[str, Any], whole: bool, tmp_path: Path) -> None:
    """``whole``: transformers reads the config too. For other models its config would lack values that llama.cpp
    assumes. Both use the same numbers in float32, which keeps five digits when sums are taken in another order."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF with it: pip install accelerate")
    written(small(kind, **changes), tmp_path)
    convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    ours = huggingface.load_model(tmp_path / "q", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, **({} if whole else {"config": ours.config})
    )
    found, wanted = logits(theirs, IDS), logits(ours, IDS)
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    return pytest.importorskip("llama_cpp", reason="compiles llama.cpp: pip install llama-cpp-python")


def answers(llama_cpp: Any, path: Path, ids: list[int]) -> Tensor:
    """Logits, with a float32 KV cache."""
    kept = {"type_k": 0, "type_v": 0, "flash_attn": False}
    model = llama_cpp.Llama(str(path), logits_all=True, n_ctx=256, verbose=False, **kept)
    model.eval(ids)
    found = torch.from_numpy(np.array(model.scores[: len(ids)]))
    model.close()
    return found


@pytest.mark.parametrize(
    ("kind", "changes", "budget"),
    [
        pytest.param("LlamaConfig", {}, 1e-5, id="llama"),
        pytest.param("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, 1e-5, id="llama-biases"),
        pytest.param("LlamaConfig", {**TIED, "head_dim": 32}, 1e-5, id="llama-tied"),
        pytest.param(
            "LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 131072}, 1e-5, id="llama3"
        ),
        pytest.param("LlamaConfig", {"rope_parameters": YARN}, 1e-5, id="llama-yarn"),
        pytest.param("MistralConfig", {"sliding_window": None}, 1e-5, id="mistral"),
        pytest.param("Qwen2Config", {}, 1e-5, id="qwen2"),
        pytest.param("Qwen3Config", {**TIED, "head_dim": 32}, 1e-5, id="qwen3"),
        pytest.param("Qwen3MoeConfig", {"head_dim": 64, **EXPERTS}, 1e-5, id="qwen3moe"),
        pytest.param("GptOssConfig", {**GPT_OSS, "rope_parameters": WHOLE_LIMITS}, 2e-5, id="gpt-oss"),
        pytest.param("GraniteConfig", {"attention_bias": True, "mlp_bias": True}, 1e-5, id="granite-biases"),
        pytest.param("MixtralConfig", MIXTRAL, 1e-5, id="mixtral"),
        pytest.param("Qwen2MoeConfig", SHARED, 1e-5, id="qwen2moe"),
        pytest.param("Phi3Config", {}, 1e-5, id="phi3"),
        pytest.param("Phi3Config", {"rope_parameters": LONG, **LONGER}, 1e-5, id="phi3-long"),
        pytest.param("GemmaConfig", {**TIED, "head_dim": 32}, 2**-10, id="gemma"),
        pytest.param("Gemma2Config", {**TIED, **GEMMA}, 2**-10, id="gemma2"),
        pytest.param(
            "Gemma3TextConfig",
            {**TIED, **GEMMA, "num_hidden_layers": 7, "rope_parameters": NEAR_AND_FAR},
            2**-10,
            id="gemma3",
        ),
        *(pytest.param(kind, changes, BUDGETS.get(name, 1e-5), id=name) for name, (kind, changes) in MORE.items()),
    ],
)
def test_llama_cpp_answers_as_the_model(
    kind: str, changes: dict[str, Any], budget: float, llama_cpp: Any, tmp_path: Path
) -> None:
    """In float32, except for a weight of zeros, since llama.cpp rounds the inputs of quantized weights. Over a few
    layers five digits of float32 remain; its gelu is a table from float16 to float16: 2^-11 for each."""
    model = in_float32(small(kind, **changes), tmp_path)
    wanted, found = logits(model, IDS), answers(llama_cpp, tmp_path / "m.gguf", IDS)
    assert float((found - wanted).abs().max()) <= budget * float(wanted.abs().max())


def in_float32(config: Any, path: Path) -> Any:
    """Write a model to m.gguf in ``path``, and return it."""
    zero = f"model.layers.1.self_attn.{'out_proj' if config.model_type.startswith('lfm2') else 'o_proj'}"
    model = written(config, path, zero=(f"{zero}.weight",))
    recipe = {zero: "mxfp4-wo", "*": "skip"}
    quantize_files(path / "hf", path / "zero", recipe, dtype=torch.float32, progress=False)
    convert(path / "zero", path / "m.gguf", to="gguf", progress=False)
    return model


def test_llama_cpp_rounds_the_limits_of_yarn(llama_cpp: Any, tmp_path: Path) -> None:
    """It does exactly what the note says."""
    model = in_float32(small("GptOssConfig", **GPT_OSS), tmp_path)
    rope = {**GPT_OSS["rope_parameters"], "truncate": True}
    rounded = type(model)(small("GptOssConfig", **{**GPT_OSS, "rope_parameters": rope})).eval()
    rounded.load_state_dict(model.state_dict())
    found = answers(llama_cpp, tmp_path / "m.gguf", IDS)
    wanted, others = logits(rounded, IDS), logits(model, IDS)
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert float((found - others).abs().max()) > 1e-2 * float(others.abs().max())


LITE_LAYERS = 26
"""llama.cpp tells models that compute queries as usual by their number of layers."""


@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_llama_cpp_computes_queries_as_usual(name: str, llama_cpp: Any, tmp_path: Path) -> None:
    """The budget is that of a few layers for each three of them."""
    kind, changes = MORE[name]
    config = small(kind, **{**changes, "q_lora_rank": None, "num_hidden_layers": LITE_LAYERS})
    wanted = logits(in_float32(config, tmp_path), IDS)
    found = answers(llama_cpp, tmp_path / "m.gguf", IDS)
    assert float((found - wanted).abs().max()) <= 1e-5 * LITE_LAYERS / 3 * float(wanted.abs().max())


def test_llama_cpp_chooses_groups_by_their_two_best(llama_cpp: Any, tmp_path: Path) -> None:
    """As the note says: so a model that chooses by the best of each answers otherwise."""
    kind, changes = MORE["deepseek2"]
    groups = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
    wanted = logits(in_float32(small(kind, **{**changes, **groups}), tmp_path), IDS)
    found = answers(llama_cpp, tmp_path / "m.gguf", IDS)
    assert float((found - wanted).abs().max()) > 1e-2 * float(wanted.abs().max())


def test_llama_cpp_computes_mistral_large_as_mistral4(
    llama_cpp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files of deepseek2, which bitport reads so, but does not write."""
    monkeypatch.setitem(NAMES, "mistral4", "deepseek2")
    kind, changes = MORE["mistral4"]
    model = write(tmp_path / "m.gguf", model_of(small(kind, **changes)), {})
    wanted, found = logits(model, IDS), answers(llama_cpp, tmp_path / "m.gguf", IDS)
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


WIDER = {"shared_expert_intermediate_size": 128}
PROJECTIONS, ATTENTION = ("*_proj", "*experts*"), ("*self_attn.*_proj",)


@pytest.mark.parametrize(
    ("kind", "changes", "rules"),
    [
        pytest.param("LlamaConfig", {}, PROJECTIONS, id="llama"),
        pytest.param("Qwen3Config", {"head_dim": 32}, PROJECTIONS, id="qwen3"),
        pytest.param("Qwen3MoeConfig", {"head_dim": 64, **EXPERTS}, PROJECTIONS, id="qwen3moe"),
        pytest.param("MixtralConfig", MIXTRAL, PROJECTIONS, id="mixtral"),
        pytest.param(*MORE["mistral3"], PROJECTIONS, id="mistral3"),
        pytest.param(*MORE["cohere2"], PROJECTIONS, id="cohere2"),
        pytest.param(*MORE["qwen35"], (*PROJECTIONS, "*in_proj_qkv", "*in_proj_z"), id="qwen35"),
        pytest.param(MORE["qwen35moe"][0], {**MORE["qwen35moe"][1], **WIDER}, PROJECTIONS, id="qwen35moe"),
        pytest.param(
            MORE["qwen3next"][0],
            {**MORE["qwen3next"][1], **WIDER},
            (*ATTENTION, "*experts*", "*shared_expert.*_proj"),
            id="qwen3next",
        ),
        pytest.param(*MORE["gemma4"], ("*q_proj", "*o_proj", "*mlp*"), id="gemma4"),
        pytest.param(*MORE["gemma4-experts"], ("*k_proj", "*experts.gate_up_proj"), id="gemma4-experts"),
        *(
            pytest.param(*MORE[name], ATTENTION, id=name)
            for name in ("glm4", "glm4moe", "minimax-m2", "lfm2", "olmo2", "starcoder2")
        ),
    ],
)
def test_llama_cpp_multiplies_by_scales(
    kind: str, changes: dict[str, Any], rules: tuple[str, ...], llama_cpp: Any, tmp_path: Path
) -> None:
    """Those of NVFP4, some 2^-12 here. Inputs are rounded to 8 bits, which changes logits by some percent."""
    written(small(kind, **changes), tmp_path)
    modules = [name.rpartition(".")[0] for name in Source(tmp_path / "hf").stored]
    fits = {rule: "nvfp4-wo" for rule in rules if fnmatch.filter(modules, rule)}
    quantize_files(tmp_path / "hf", tmp_path / "nvfp4", {**fits, "*": "skip"}, progress=False)
    convert(tmp_path / "nvfp4", tmp_path / "m.gguf", to="gguf", progress=False)
    wanted = logits(huggingface.load_model(tmp_path / "nvfp4", dtype=torch.float32), IDS)
    found = answers(llama_cpp, tmp_path / "m.gguf", IDS)
    assert float((found - wanted).norm()) <= 0.25 * float(wanted.norm())


NVFP4 = {"*embed_tokens": "mxfp4-wo", "lm_head": "mxfp4-wo", "*": "nvfp4-wo"}


@pytest.mark.parametrize(
    "scheme",
    [
        *("int4-g32-sym", "int4", "int8", "mxfp4-wo"),
        pytest.param(NVFP4, id="nvfp4-wo"),
    ],
)
def test_llama_cpp_says_the_same_tokens(scheme: Any, llama_cpp: Any, tmp_path: Path) -> None:
    """Its inputs are int8 in blocks, which changes a logit of 20 by a few tenths; where the best token leads by more
    than 1, as in most of the text, it stays the best."""
    quantize_files(TINY, tmp_path / "q", scheme, progress=False)
    convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    tokenizer = huggingface.load_tokenizer(tmp_path / "q")
    text = (TINY / "eval.txt").read_text()[:800]
    ids = tokenizer(text).input_ids
    model = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    assert model.tokenize(text.encode(), add_bos=True) == ids
    ours = logits(huggingface.load_model(tmp_path / "q", dtype=torch.float32), ids)
    theirs = answers(llama_cpp, tmp_path / "m.gguf", ids[:250])
    best = ours[:250].topk(2)
    sure = best.values[:, 0] - best.values[:, 1] > 1
    assert int(sure.sum()) > 60
    assert torch.equal(theirs.argmax(-1)[sure], best.indices[:, 0][sure])


@pytest.mark.parametrize(
    "kind",
    [
        *("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("IQ4_NL", "IQ4_XS", "TQ2_0"),
    ],
)
def test_files_of_llama_cpp_come_back_byte_for_byte(kind: str, llama_cpp: Any, tmp_path: Path) -> None:
    """bitport reads what llama.cpp quantizes, and writes it again."""
    recipe = {"model.layers.6.self_attn.v_proj": "mxfp4-wo", "*": "skip"}
    quantize_files(TINY, tmp_path / "q", recipe, dtype=torch.float32, progress=False)
    convert(tmp_path / "q", tmp_path / "float.gguf", to="gguf", progress=False)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.allow_requantize = True
    paths = (str(tmp_path / name).encode() for name in ("float.gguf", "theirs.gguf"))
    assert llama_cpp.llama_model_quantize(*paths, ctypes.byref(settings)) == 0
    convert(tmp_path / "theirs.gguf", tmp_path / "ours.gguf", to="gguf", progress=False)
    theirs, ours = (read_header(tmp_path / name).tensors for name in ("theirs.gguf", "ours.gguf"))
    assert theirs.keys() == ours.keys()
    for name, stored in theirs.items():
        assert (ours[name].type, ours[name].shape) == (stored.type, stored.shape), name
        assert torch.equal(ours[name].read(), stored.read()), name


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(of_bytes, id="gpt-2"),
        pytest.param(lambda: of_bytes(LLAMA3, ignore_merges=True), id="llama-bpe"),
        pytest.param(lambda: of_bytes(LLAMA3.replace("{1,3}", "")), id="qwen2"),
        pytest.param(lambda: of_bytes(TEKKEN, ignore_merges=True), id="tekken"),
        pytest.param(lambda: of_bytes(LLAMA3), id="smaug-bpe"),
        pytest.param(lambda: of_bytes(GPT4O), id="gpt-4o"),
        pytest.param(of_pieces, id="pieces"),
        pytest.param(lambda: of_pieces("none"), id="pieces-without-a-space"),
    ],
)
def test_llama_cpp_makes_the_same_tokens(make: Any, llama_cpp: Any, tmp_path: Path) -> None:
    made = make()
    said, _ = vocabulary(files_of(made), SIZE, None, None)
    with Output(tmp_path / "m.gguf", {"general.architecture": "llama", **said}, {}) as out:
        out.publish()
    model = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    for text in (*TEXTS, "the abab thing", "singing then"):
        found = model.tokenize(text.encode(), add_bos=True, special=True)
        assert found == made.encode(text).ids, text
