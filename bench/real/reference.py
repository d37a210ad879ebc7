"""The same by llm-compressor's own pipelines, on the same model and tokens: ``python -m bench.real.reference``.

Its settings are those by default, but that nothing is copied to pinned memory, which needs a GPU. Rows that the record
has already are kept.
"""

from __future__ import annotations

import copy
import dataclasses
from importlib.metadata import version
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bench.real.plan import MSE, REFERENCE_PLAN
from bench.real.record import measure, opened, yardstick_of_texts
from bitport.evaluate.yardstick import WINDOW
from bitport.schemes import preset

PACKAGES = ("llmcompressor", "compressed-tensors")


def quantized(model: Any, scheme: str, algorithm: str, batches: list[Tensor]) -> nn.Module:
    """Quantize ``model`` in place."""
    fmt = preset(scheme).weight
    name = algorithm.removeprefix(MSE)
    arguments = QuantizationArgs(
        num_bits=fmt.number.bits,
        type="int",
        symmetric=False,
        strategy="group",
        group_size=fmt.block_shape(1, WINDOW)[1],
        observer="minmax" if name == algorithm else "mse",
    )
    options = {
        "config_groups": {"all": QuantizationScheme(targets=["Linear"], weights=arguments)},
        "ignore": ["lm_head"],
    }
    last = GPTQModifier(**options) if name.endswith("gptq") else QuantizationModifier(**options)
    before = [AWQModifier(offload_device=None)] if name.startswith("awq") else []
    calls = [{"input_ids": ids[0], "attention_mask": torch.ones_like(ids[0])} for ids in batches]
    oneshot(
        model=model,
        dataset=DataLoader(calls, batch_size=1),
        recipe=[*before, last],
        max_seq_length=WINDOW,
        num_calibration_samples=len(calls),
    )
    return model.eval()


def main() -> None:
    Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    yardstick = yardstick_of_texts()
    versions = {package: version(package) for package in PACKAGES}

    def row(scheme: str, algorithm: str) -> dict[str, Any]:
        model = quantized(copy.deepcopy(yardstick.base), scheme, algorithm, yardstick.batches)
        figures = dataclasses.asdict(yardstick.stretches(model))
        return {"scheme": scheme, "algorithm": algorithm, "versions": versions} | figures

    measure(opened(yardstick), "reference", REFERENCE_PLAN, row)


if __name__ == "__main__":
    main()
