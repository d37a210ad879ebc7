"""What transformers itself unpacks for gpt-oss."""

from __future__ import annotations

import pytest
import torch

from bitport.interop.mxfp4 import Reader

from .files import read

pytestmark = pytest.mark.peers
theirs = pytest.importorskip("transformers.integrations.mxfp4")


@pytest.mark.parametrize(("e", "n", "k"), [(1, 8, 32), (4, 96, 64), (2, 64, 320)])
def test_it_reads_as_transformers_unpacks_it(e: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(e + n + k)
    blocks = torch.randint(0, 256, (e, n, k // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 140, (e, n, k // 32), generator=generator, dtype=torch.uint8)
    tensors = {"l.experts.down_proj_blocks": blocks, "l.experts.down_proj_scales": scales}
    (q,) = read(Reader({"quant_method": "mxfp4"}, torch.bfloat16), tensors).values()
    for dtype in (torch.bfloat16, torch.float32):
        unpacked = theirs.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert q.dequantize(dtype).shape == unpacked.shape
        assert torch.equal(q.dequantize(dtype), unpacked)
