"""Unpacking of gpt-oss by transformers itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bitport.checkpoint import quantize_files
from bitport.interop import convert
from bitport.interop.mxfp4 import Reader
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .files import only

pytestmark = pytest.mark.peers
theirs = pytest.importorskip("transformers.integrations.mxfp4")


@pytest.mark.parametrize(("e", "n", "k"), [(1, 8, 32), (4, 96, 64), (2, 64, 320)])
def test_it_reads_as_transformers_unpacks_it(e: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(e + n + k)
    blocks = torch.randint(0, 256, (e, n, k // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 140, (e, n, k // 32), generator=generator, dtype=torch.uint8)
    tensors = {"l.experts.down_proj_blocks": blocks, "l.experts.down_proj_scales": scales}
    q = only(Reader({"quant_method": "mxfp4"}, torch.bfloat16), tensors)
    for dtype in (torch.bfloat16, torch.float32):
        unpacked = theirs.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert q.dequantize(dtype).shape == unpacked.shape
        assert torch.equal(q.dequantize(dtype), unpacked)


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    """On a CPU it unpacks experts to bfloat16 when loading a model."""
    models = pytest.importorskip("tests.integrations.models")
    transformers = models.transformers
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320, "head_dim": 16}
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**sizes, **counts, initializer_range=0.15, dtype=torch.bfloat16)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "float")
    quantize_files(tmp_path / "float", tmp_path / "q", {"*.experts.*": "mxfp4-wo", "*": "skip"}, progress=False)
    for to, target in (("mxfp4", "theirs"), ("float", "dense")):
        convert(tmp_path / "q", tmp_path / target, to=to, shard_size=30_000, progress=False)
    auto = transformers.AutoModelForCausalLM
    found, wanted = (auto.from_pretrained(tmp_path / target).eval() for target in ("theirs", "dense"))
    weights = {name: q for name, q in Own(tmp_path / "q").items() if isinstance(q, QTensor)}
    assert len(weights) == 4
    for name, q in weights.items():
        assert torch.equal(found.get_parameter(name), q.dequantize(torch.bfloat16)), name
    assert torch.equal(models.logits(found), models.logits(wanted))
