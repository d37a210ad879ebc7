"""quantize_ on common architectures: every linear layer and expert is found and computes its own values."""

import copy

import pytest
import torch
import torch.nn.functional as F

import bitport as bp
from bitport.numerics import sqnr
from bitport.tensor import quantize_tensor

from .sizes import SMALL

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

BERT = {key: size for key, size in SMALL.items() if key not in ("num_key_value_heads", "head_dim")}
QWEN_MOE = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT_OSS = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES = {
    "llama": ("LlamaConfig", SMALL, {}, 15),
    "gemma-tied-head": ("GemmaConfig", SMALL, {}, 14),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 4}, {}, 13),
    "qwen3-moe-eager": ("Qwen3MoeConfig", QWEN_MOE, {"experts_implementation": "eager"}, 13),
    "qwen3-moe-grouped": ("Qwen3MoeConfig", QWEN_MOE, {"experts_implementation": "grouped_mm"}, 13),
    "qwen3-moe-batched": ("Qwen3MoeConfig", QWEN_MOE, {"experts_implementation": "batched_mm"}, 13),
    "gpt-oss-transposed-experts": ("GptOssConfig", GPT_OSS, {}, 13),
    "gpt2-transposed-linear": ("GPT2Config", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}, {}, 8),
    "bert": ("BertConfig", BERT, {}, 13),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
def test_quantized_model_computes_its_dequantized_values(name: str, scheme: str) -> None:
    config, fields, options, count = ARCHITECTURES[name]
    kind = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(getattr(transformers, config)(**fields), **options).float().eval()
    report = bp.quantize_(model, scheme)
    assert len(report.quantized) == count, str(report)
    ids = torch.arange(22).reshape(2, 11)
    dense = bp.dequantize_(copy.deepcopy(model))
    with torch.no_grad():
        quantized, expected = model(input_ids=ids)[0], dense(input_ids=ids)[0]
    assert sqnr(expected, quantized) > 100  # float32 throughout: only the order of sums may differ


def test_compiled_experts() -> None:
    """transformers has its own op for them in dtypes other than bfloat16."""
    grouped = pytest.importorskip("transformers.integrations.moe")._grouped_mm
    x, ends = torch.randn(9, 64, requires_grad=True), torch.tensor([2, 2, 7], dtype=torch.int32)
    q = quantize_tensor(torch.randn(3, 32, 64), "int4-g32").mT
    wanted = F.grouped_mm(x, q, offs=ends)
    torch.compiler.reset()
    y = torch.compile(grouped, fullgraph=True, backend="aot_eager")(x, q, ends)
    torch.testing.assert_close(y, wanted)
    grads = [torch.autograd.grad(each, x, torch.ones_like(each))[0] for each in (y, wanted)]
    torch.testing.assert_close(*grads)
