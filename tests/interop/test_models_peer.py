"""Whole models quantized and saved by AutoRound: the weights that it computed with are those of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.interop import convert
from bitport.interop.sources import Own
from bitport.tensor import QTensor

pytestmark = pytest.mark.peers
autoround = pytest.importorskip("auto_round", reason="needs AutoRound: pip install auto-round")
models = pytest.importorskip("tests.integrations.models")
huggingface = pytest.importorskip("bitport.integrations.huggingface")

BF16 = 2.0**-9
"""The rounding of a number to bfloat16: AutoRound does that to a scale, to a product with it, and in files of float8 to
the scale as well; in others it is in float16."""
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gptq": ("auto_gptq", {"bits": 4, "group_size": 32, "sym": True}, "int4-g32-sym"),
    "gptq, asymmetric": ("auto_gptq", {"bits": 4, "group_size": 64, "sym": False}, "int4-g64"),
    "awq": ("auto_awq", {"bits": 4, "group_size": 32, "sym": False}, "int4-g32"),
    "auto-round, 2 bits": ("auto_round", {"bits": 2, "group_size": 32, "sym": False}, "int2-g32"),
    "auto-round, 8 bits": ("auto_round", {"bits": 8, "group_size": 32, "sym": True}, "int8-g32"),
    "mxfp4": ("llm_compressor", {"scheme": "MXFP4"}, "mxfp4"),
    "nvfp4": ("llm_compressor", {"scheme": "NVFP4"}, "nvfp4-static"),
    "int8": ("llm_compressor", {"scheme": "INT8_W8A8"}, "int8-dyn"),
    "mxfp4 of its own": ("auto_round", {"scheme": "MXFP4"}, "mxfp4"),
    "mxfp8 of its own": ("auto_round", {"scheme": "MXFP8"}, "mxfp8"),
    "nvfp4 of its own": ("auto_round", {"scheme": "NVFP4"}, "nvfp4-static"),
    "float8 by rows": ("auto_round", {"scheme": "FP8_STATIC"}, "fp8-channel-static"),
    "float8 by blocks": ("auto_round", {"scheme": "FP8_BLOCK"}, "fp8-block"),
    "mlx": ("mlx", {"bits": 3, "group_size": 32, "sym": True}, "int3-g32-sym"),
    "mlx, to be read by AutoRound": ("auto_round:mlx", {"bits": 6, "group_size": 64, "sym": True}, "int6-g64-sym"),
    "float8": ("auto_round", {"scheme": "FPW8A16"}, "fp8-wo-tensor"),
}
"""Name -> (format, settings, the resulting scheme)."""


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_directory(tmp_path_factory.mktemp("float"))


@pytest.mark.parametrize("name", CASES)
def test_models_of_autoround(name: str, float_model: Path, tmp_path: Path) -> None:
    form, settings, scheme = CASES[name]
    its = {"iters": 0, "device_map": "cpu", "seqlen": 32, "nsamples": 2, "dataset": [models.TEXT] * 2, **settings}
    model, tokenizer = huggingface.load_model(float_model), huggingface.load_tokenizer(float_model)
    made = autoround.AutoRound(model, tokenizer, disable_opt_rtn=True, **its)
    quantized, _ = made.quantize()
    parameters = {name.replace(".orig_layer", ""): value for name, value in quantized.named_parameters()}
    computed = {name: value.detach().clone() for name, value in parameters.items()}
    made.save_quantized(str(tmp_path / "theirs"), format=form)
    (theirs,) = {path.parent for path in (tmp_path / "theirs").rglob("config.json")}
    done = convert(theirs, tmp_path / "ours", progress=False)
    assert set(done.weights.values()) == {scheme}
    for name, tensor in Own(tmp_path / "ours").items():
        if isinstance(tensor, QTensor):
            ours, judge = tensor.dequantize(torch.float32), computed[name].float()
            roundings = 3 if scheme.startswith("fp8") else 2
            assert bool(((ours - judge).abs() <= roundings * BF16 * judge.abs()).all()), name
    answers = models.logits(huggingface.load_model(tmp_path / "ours"))
    assert bool(answers.isfinite().all())
