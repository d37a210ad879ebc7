"""What other libraries call a scheme: the closest match for each of their settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Elsewhere(NamedTuple):
    library: str
    setting: str
    """In Markdown: names in backquotes."""
    schemes: str
    """One for all names of the setting, or one for each."""
    algorithms: str = ""
    """Those that the library uses with it."""


ELSEWHERE = (
    Elsewhere("bitsandbytes", '`load_in_4bit`, `bnb_4bit_quant_type="nf4"`', "nf4"),
    Elsewhere("bitsandbytes", "`load_in_8bit` (bitport keeps no columns in 16 bits)", "int8-dyn"),
    Elsewhere("torchao", "`Int8WeightOnlyConfig`", "int8"),
    Elsewhere("torchao", "`Int8DynamicActivationInt8WeightConfig`", "int8-dyn"),
    Elsewhere("torchao", "`Int4WeightOnlyConfig`", "int4"),
    Elsewhere("torchao", "`Int8DynamicActivationIntxWeightConfig` of int4", "int4-int8-g32"),
    Elsewhere("torchao", "`Float8DynamicActivationInt4WeightConfig`", "int4-fp8"),
    Elsewhere("torchao", "`Float8WeightOnlyConfig`", "fp8-wo"),
    Elsewhere("torchao", "`Float8DynamicActivationFloat8WeightConfig`", "fp8"),
    Elsewhere("torchao", "the same with `PerRow()`", "fp8-row"),
    Elsewhere("torchao", "`MXDynamicActivationMXWeightConfig` of float8", "mxfp8"),
    Elsewhere("torchao", "the same of float4", "mxfp4"),
    Elsewhere("torchao", "`NVFP4DynamicActivationNVFP4WeightConfig`", "nvfp4"),
    Elsewhere("llm-compressor", "`W4A16`", "int4-sym", "gptq or awq"),
    Elsewhere("llm-compressor", "`W4A16_ASYM`", "int4", "gptq or awq"),
    Elsewhere("llm-compressor", "`W8A16`", "int8-g128"),
    Elsewhere("llm-compressor", "`W3A16`, `W2A16`", "int3-sym, int2-sym", "gptq"),
    Elsewhere("llm-compressor", "`W8A8`, `INT8`", "int8-dyn", "smooth+gptq"),
    Elsewhere("llm-compressor", "`W4A8`", "int4-int8", "gptq"),
    Elsewhere("llm-compressor", "`W4AFP8`", "int4-fp8", "gptq"),
    Elsewhere("llm-compressor", "`FP8`", "fp8-static"),
    Elsewhere("llm-compressor", "`FP8_DYNAMIC`", "fp8-row"),
    Elsewhere("llm-compressor", "`FP8_BLOCK`", "fp8-block"),
    Elsewhere("llm-compressor", "`NVFP4`, `NVFP4A16`", "nvfp4-static, nvfp4-wo"),
    Elsewhere("llm-compressor", "`MXFP4`, `MXFP4A16`", "mxfp4, mxfp4-wo"),
    Elsewhere("llm-compressor", "`MXFP6A8`, `MXFP6A16`", "mxfp6, mxfp6-wo"),
    Elsewhere("llm-compressor", "`MXFP8`, `MXFP8A16`", "mxfp8, mxfp8-wo"),
    Elsewhere("GPTQModel", "`gptq`, `QuantizeConfig(bits=4, group_size=128)`", "int4-sym", "gptq"),
    Elsewhere("AutoAWQ", "`awq`, `w_bit=4`, `q_group_size=128`, `zero_point=True`", "int4", "awq"),
    Elsewhere("AutoRound", "`auto_round`, `W4A16`", "int4-sym", "signround"),
    Elsewhere("HQQ", "`hqq`, `HqqConfig(nbits=4, group_size=64)`", "int4-g64-fzero", "hqq"),
    Elsewhere("optimum-quanto", "`qint8`, `qfloat8`", "int8, fp8-wo"),
    Elsewhere("optimum-quanto", "`qint4`, `qint2`", "int4-fzero, int2-fzero"),
    Elsewhere("ModelOpt", "`FP8_DEFAULT_CFG`, `NVFP4_DEFAULT_CFG`", "fp8-static, nvfp4-static"),
    Elsewhere("ModelOpt", "`INT4_AWQ_CFG`", "int4-sym", "awq"),
    Elsewhere("MLX", "4 bits, groups of 64", "int4-g64-fzero"),
    Elsewhere("llama.cpp", "`Q8_0`, `Q4_0`", "int8-g32, int4-g32-sym"),
    Elsewhere("llama.cpp", "`Q4_K_M`, `Q5_K_M`, `Q6_K`", "int4-g32, int5-g32, int6-g16-sym"),
    Elsewhere("DeepSeek", "as it is published", "fp8-block"),
    Elsewhere("gpt-oss", "as it is published", "mxfp4-wo"),
)


def named_elsewhere() -> Iterator[tuple[str, str, Elsewhere]]:
    """Each name of another library, and the scheme."""
    for row in ELSEWHERE:
        names, schemes = re.findall("`(.+?)`", row.setting), row.schemes.split(", ")
        for name, scheme in zip(names, schemes * (len(names) if len(schemes) == 1 else 1), strict=True):
            yield name, scheme, row


def meant_elsewhere(name: str) -> str:
    """For an error about ``name``: what it is called here, if another library has that name; else empty."""
    for theirs, ours, row in named_elsewhere():
        if theirs.lower() == name.strip().lower().replace("-", "_"):
            by = f", with the algorithm {row.algorithms}" if row.algorithms else ""
            return f" ({theirs} of {row.library} is {ours!r} here{by})"
    return ""
