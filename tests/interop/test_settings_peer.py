"""The readers know all settings that the libraries write."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitport.interop import READERS

pytestmark = pytest.mark.peers
theirs = pytest.importorskip(
    "transformers.utils.quantization_config", reason="needs the extra: pip install 'bitport[hf]'"
)
library = pytest.importorskip("gptqmodel.quantization.config", reason="needs GPTQModel: pip install gptqmodel")
rounds = pytest.importorskip("auto_round.compressors.base", reason="needs AutoRound: pip install auto-round")
ao = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install torchao")

LAYERS = {"-:.*head": {}, "+:.*down": {"bits": 8, "group_size": 32}}
MADE: list[tuple[str, Callable[[], Any]]] = [
    ("gptq", lambda: theirs.GPTQConfig(4, dataset="c4", tokenizer="llama", modules_in_block_to_quantize=[["a"]])),
    ("gptq", lambda: library.GPTQConfig()),
    ("gptq", lambda: library.GPTQConfig(desc_act=True, lm_head=True, dynamic=LAYERS)),
    ("awq", lambda: theirs.AwqConfig()),
    ("awq", lambda: library.AWQConfig()),
    ("auto-round", lambda: theirs.AutoRoundConfig()),
    ("bitsandbytes", lambda: theirs.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head"])),
    ("bitsandbytes", lambda: theirs.BitsAndBytesConfig(load_in_8bit=True)),
    ("fp8", lambda: theirs.FineGrainedFP8Config(modules_to_not_convert=["lm_head"])),
    ("fp8", lambda: library.FP8Config()),
    ("fp8", lambda: library.FP8Config(weight_scale_method="block", weight_block_size=[128, 128])),
    ("fbgemm_fp8", lambda: theirs.FbgemmFp8Config()),
    ("mxfp4", lambda: theirs.Mxfp4Config(modules_to_not_convert=["lm_head"])),
    ("metal", lambda: theirs.MetalConfig()),
    ("hqq", lambda: theirs.HqqConfig()),
    ("quanto", lambda: theirs.QuantoConfig()),
    ("gemma", lambda: theirs.GemmaQuantizationConfig(quantize_embeddings=True, module_quant_configs={"a": {}})),
    ("bitnet", lambda: theirs.BitNetQuantConfig(modules_to_not_convert=["lm_head"])),
    ("torchao", lambda: theirs.TorchAoConfig(ao.Int4WeightOnlyConfig())),
]


@pytest.mark.parametrize(("method", "made"), MADE)
def test_settings_as_the_library_writes_them(method: str, made: Callable[[], Any]) -> None:
    text = json.dumps(made().to_dict(), default=lambda value: getattr(value, "value", str(value)))
    READERS[method](json.loads(text), torch.float16)


def test_settings_as_autoround_writes_them() -> None:
    said = dataclasses.asdict(rounds.SerializedCompressorConfig())
    said |= {"bits": 4, "group_size": 128, "sym": True, "data_type": "int", "supported_types": ["Linear"]}
    said |= {"autoround_version": "0.16.1", "block_name_to_quantize": "model.layers", "iters": 200, "lr": 0.005}
    for method, more in (("auto-round", {"packing_format": "auto_round:auto_gptq"}), ("gptq", {}), ("awq", {})):
        READERS[method]({**said, "quant_method": method, **more}, torch.float16)
    READERS["fp8"]({**said, "quant_method": "fp8", "data_type": "fp8", "act_bits": 8}, torch.float16)
