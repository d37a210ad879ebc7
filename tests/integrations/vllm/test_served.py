"""vLLM itself on checkpoints of bitport, compared with transformers on the same checkpoint, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitport.checkpoint import quantize_files, read_manifest
from bitport.schemes import Rule
from tests.integrations.vllm.served import serve

pytest.importorskip("vllm")
pytestmark = [pytest.mark.peers, pytest.mark.xdist_group("vllm")]
transformers = pytest.importorskip("transformers")

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 250, "max_position_embeddings": 128},
}
"""250: vLLM pads a vocabulary to a multiple of 64. Heads of 32: the smallest that its CPU attention supports."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: transformers.LlamaConfig(**SIZES, **more),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=32),
    "gpt2": lambda: transformers.GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=250, n_positions=128),
    "opt": lambda: transformers.OPTConfig(
        **{key: SIZES[key] for key in SIZES.keys() & {"hidden_size", "vocab_size", "max_position_embeddings"}},
        **{"ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 128},
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{**SIZES, "num_key_value_heads": 4}),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, **EXPERTS),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=32, moe_intermediate_size=128, decoder_sparse_step=1
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "falcon": lambda: transformers.FalconConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=250
    ),
}
MIXED = {
    **{"*q_proj": "int4-g32", "*k_proj": "int8", "*v_proj": "skip", "*gate_proj": "nf4", "*up_proj": "fp8-block"},
    "*": "int4-g32-sym",
}
IDS = torch.randint(5, 250, (24,), generator=torch.Generator().manual_seed(0)).tolist()
TOLERANCE = 2e-5
"""For log-probabilities: float32 sums of 256 products in another order, in two layers. A wrong row changes them by
their own spread, about 0.7."""


def checkpoint(folder: Path, config: Any, scheme: Any) -> Path:
    """Quantize a model with weights three times their initial size, so that they matter."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3 if param.dim() > 1 else 1)
    model.save_pretrained(folder / "in")
    quantize_files(folder / "in", folder / "out", scheme, overwrite=True, progress=False)
    return folder / "out"


def right(directory: Path) -> torch.Tensor:
    from bitport.integrations.huggingface import load_model

    with torch.no_grad():
        predicted = load_model(directory)(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return predicted[range(len(IDS) - 1), IDS[1:]]


def distance(directory: Path, **given: Any) -> float:
    found, said = serve(directory, IDS, **given)
    assert found is not None, said
    return float((torch.tensor(found[0]) - right(directory)).abs().max())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "falcon"])
def test_models(tmp_path: Path, name: str) -> None:
    assert distance(checkpoint(tmp_path, CONFIGS[name](), "int4-g32")) < TOLERANCE


@pytest.mark.parametrize("scheme", ["int8-dyn", "fp8", "nvfp4", "mxfp8", "int3"])
def test_schemes(tmp_path: Path, scheme: str) -> None:
    assert distance(checkpoint(tmp_path, CONFIGS["llama"](), scheme)) < TOLERANCE


def test_matrices_of_several_schemes_in_one_layer(tmp_path: Path) -> None:
    assert distance(checkpoint(tmp_path, CONFIGS["qwen2"](), MIXED)) < TOLERANCE


@pytest.mark.parametrize(
    "skipped",
    [
        {"*experts*": "skip", "*": "int4-g32"},
        {"*experts*": "int4-g32", "*": "skip"},
        {"*.w2": "skip", "*": "int4-g32"},
    ],
)
def test_what_is_left_in_float(tmp_path: Path, skipped: dict[str, str]) -> None:
    assert distance(checkpoint(tmp_path, CONFIGS["mixtral"](), skipped)) < TOLERANCE


@pytest.mark.parametrize("tied", [False, True])
def test_compiled(tmp_path: Path, tied: bool) -> None:
    made = checkpoint(tmp_path, CONFIGS["llama"](tie_word_embeddings=tied), "int4-g32")
    assert distance(made, enforce_eager=False) < TOLERANCE


@pytest.mark.parametrize(("name", "scheme"), [("llama", "int4-g32"), ("llama", "int8-dyn"), ("mixtral", "int4-g32")])
def test_in_two_processes(tmp_path: Path, name: str, scheme: str) -> None:
    """In layers split along K, an input rounded per token gets a scale for each half of it: see docs/distributed.md.
    The rounded inputs differ by at most half a step of 1/127 of the largest input."""
    made = checkpoint(tmp_path, CONFIGS[name](), scheme)
    allowed = TOLERANCE if scheme == "int4-g32" else 0.05
    assert distance(made, tensor_parallel_size=2) < allowed


def test_experts_shared_out(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, CONFIGS["mixtral"](), "int4-g32")
    assert distance(made, tensor_parallel_size=2, enable_expert_parallel=True) < TOLERANCE


def test_what_vllm_keeps_in_float_is_named(tmp_path: Path) -> None:
    rules = [Rule("*router.layer", "int8", ("other",)), Rule("*", "int4-g32", ("linear", "experts"))]
    made = checkpoint(tmp_path, CONFIGS["granitemoe"](), rules)
    routers = [name for name, entry in read_manifest(made).tensors.items() if "router" in name and entry.scheme]
    _, said = serve(made, IDS)
    assert len(routers) == 2
    assert f"vLLM keeps these in float, their values are dequantized: {', '.join(routers)}" in said


def test_what_a_model_changes_while_it_loads_is_refused(tmp_path: Path) -> None:
    found, said = serve(checkpoint(tmp_path, CONFIGS["falcon"](), "int4-g32"), IDS)
    assert found is None
    assert "FalconForCausalLM of vLLM cannot take transformer.h.0.self_attention.query_key_value.weight" in said
    assert "{'transformer.h.0.self_attention.query_key_value': 'skip', ..}" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"load_format": "auto"}, "give --load-format bitport too"),
        ({"model_loader_extra_config": {"very": True}}, "the extra config of load format bitport is"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    found, said = serve(checkpoint(tmp_path, CONFIGS["llama"](), "int4-g32"), IDS, **given)
    assert found is None
    assert message in said


def test_a_directory_that_does_not_say_how_it_is_quantized(tmp_path: Path) -> None:
    """As where bp.save wrote beside the config.json of a float model."""
    made = checkpoint(tmp_path, CONFIGS["llama"](), "int4-g32")
    said = json.loads((made / "config.json").read_text())
    assert said.pop("quantization_config") == {"quant_method": "bitport"}
    (made / "config.json").write_text(json.dumps(said))
    found, told = serve(made, IDS)
    assert found is None
    assert "give --quantization bitport too" in told
    assert distance(made, quantization="bitport") < TOLERANCE


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, CONFIGS["llama"](), "int4-g32")
    (file,) = (tmp_path / "in").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, file)
    quantize_files(tmp_path / "in", made, "int4-g32", overwrite=True, progress=False)
    found, said = serve(made, IDS)
    assert found is None
    assert "the checkpoint does not have 64 of the 256 rows of model.layers.1.self_attn.qkv_proj" in said


def test_damaged_data_is_refused(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, CONFIGS["llama"](), "int4-g32")
    (shard,) = made.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found, said = serve(made, IDS)
    assert found is None
    assert "is damaged" in said
    assert serve(made, IDS, model_loader_extra_config={"verify": False})[0] is not None


def test_another_checkpoint_in_the_same_place_is_another_configuration(tmp_path: Path) -> None:
    """vLLM caches compiled programs under a hash of the configuration."""
    from vllm.engine.arg_utils import EngineArgs

    def hashed() -> str:
        given = EngineArgs(model=str(made), load_format="bitport", skip_tokenizer_init=True)
        return given.create_engine_config().compute_hash()

    made = checkpoint(tmp_path, CONFIGS["llama"](), "int4-g32")
    first = hashed()
    assert hashed() == first
    checkpoint(tmp_path, CONFIGS["llama"](), "int8")
    assert hashed() != first


def test_the_manifest_is_what_vllm_reads(tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    made = checkpoint(tmp_path, CONFIGS["llama"](), "int4-g32")
    quantization = get_quantization_config("bitport")
    (name,) = quantization.get_config_filenames()
    assert quantization.from_config(json.loads((made / name).read_text())).get_name() == "bitport"
