"""Settings that no reader knows: one rule for all formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitport.errors import CheckpointError
from bitport.interop import READERS, gptq

SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
EXPORT = {"weight_format": "real_quantized", "pack_method": "reorder"}
WHOLE: dict[str, dict[str, Any]] = {
    **{method: {"bits": 4, "group_size": 128} for method in ("gptq", "awq", "auto-round", "intel/auto-round")},
    "compressed-tensors": {"config_groups": {}},
    "modelopt": {"quant_algo": "NVFP4"},
    "quark": {"export": EXPORT, "global_quant_config": {"weight": SPEC}},
}
"""The least that each format must say."""


def reader(method: str, **more: Any) -> None:
    READERS[method]({"quant_method": method, **WHOLE.get(method, {}), **more}, torch.float16)


@pytest.mark.parametrize("value", [None, False, 0, "", []], ids=repr)
@pytest.mark.parametrize("method", READERS)
def test_a_new_setting_that_asks_for_nothing(method: str, value: Any) -> None:
    reader(method, new=value)


@pytest.mark.parametrize("method", READERS)
def test_a_new_setting_that_asks_for_something(method: str) -> None:
    with pytest.raises(CheckpointError, match=r"config: new is not understood; known are .*Here it is 'more': remove"):
        reader(method, new="more")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_setting_with_the_value_that_is_read(method: str) -> None:
    reader(method, pack_dtype="int32", data_type="int", act_bits=16)
    for key, value in (("pack_dtype", "int16"), ("data_type", "mx_fp"), ("act_bits", 8)):
        with pytest.raises(CheckpointError, match=f"{key} is not understood"):
            reader(method, **{key: value})


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("gptq", {"dynamic": {"+:a": {"bits": 8, "adapter": {"name": "lora"}}}}),
        ("auto-round", {"extra_config": {"a": {"bits": 8, "rotation_config": {"block_size": 32}}}}),
        ("fp8", {"dynamic": {"a": {"weight_scale_semantics": "inverse"}}}),
        ("mlx", {"a": {"bits": 4, "rotated": 1}}),
        ("compressed-tensors", {"config_groups": {"a": {"targets": [], "weights": {"rotated": 1}}}}),
        ("quark", {"layer_quant_config": {"a": {"weight": {**SPEC, "rotated": 1}}}}),
    ],
    ids=str,
)
def test_a_new_setting_of_a_layer(method: str, said: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"(adapter|rotation_config|weight_scale_semantics|rotated) is not under"):
        reader(method, **said)


def test_layers_that_are_left_out_have_no_settings() -> None:
    reader("fp8", dynamic={"-:lm_head": {}})
    reader("gptq", dynamic={"-:lm_head": {}, "+:a": {"bits": 8, "mse": 2.0, "adapter": None}})
    assert len({*gptq.CHOOSING}) == len(gptq.CHOOSING)
