"""Weights quantized by comfy-kitchen, the library of ComfyUI, are read with the values that it computes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bitport.interop import convert
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .diffusion_files import ORIGINALS, described, mapped, random, shapes_of
from .test_comfy_formats import saying

pytestmark = pytest.mark.peers
kitchen = pytest.importorskip("comfy_kitchen.tensor", reason="needs its library: pip install comfy-kitchen")

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "float8_e4m3fn": ("TensorCoreFP8Layout", {}),
    "nvfp4": ("TensorCoreNVFP4Layout", {}),
    "mxfp8": ("TensorCoreMXFP8Layout", {}),
    "int8_tensorwise": ("TensorWiseINT8Layout", {}),
    "int8_tensorwise by rows": ("TensorWiseINT8Layout", {"per_channel": True}),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_it_quantizes(kind: str, tmp_path: Path) -> None:
    layout, options = LAYOUTS[kind]
    original = ORIGINALS["sd3"]
    model = original.model()
    file, values = {}, {}
    for at, (key, shape) in enumerate(original.names(shapes_of(model)).items()):
        value = random(*shape, seed=at) * 0.1
        if key.endswith(".weight") and len(shape) == 2 and shape[0] % 32 == shape[1] % 32 == 0:
            q = kitchen.QuantizedTensor.from_float(value, layout, **options)
            file |= {name: tensor.clone() for name, tensor in q.state_dict(key).items()}
            file[key.removesuffix("weight") + "comfy_quant"] = saying(format=kind.split()[0])
            value = q.dequantize()
        else:
            file[key] = value
        values[key] = value
    save_file(file, tmp_path / "m.safetensors")
    config = described(model, tmp_path / "config")
    convert(tmp_path / "m.safetensors", tmp_path / "out", config=config, progress=False)
    for key, wanted in mapped(model, values).items():
        found = dict(Own(tmp_path / "out").items())[key]
        found = found.dequantize(torch.float32) if isinstance(found, QTensor) else found.float()
        torch.testing.assert_close(found, wanted, rtol=2**-22, atol=0)
