"""Linear attention in GGUF files of qwen3next: one matrix of the model is two in the file, which may have different
types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop import convert
from bitport.interop.gguf import Gguf
from bitport.interop.gguf.changes import Mixed
from bitport.interop.gguf.header import read_header
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from . import gguf_files
from .gguf_files import gguf, model_of, write
from .gguf_models import config_of
from .test_gguf import assert_same_answers
from .test_gguf_architectures import edited

types = gguf.GGUFValueType
MATRIX = "model.layers.0.linear_attn.in_proj_qkvz.weight"
QKV, GATES = "blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"


def model(**changes: Any) -> Any:
    return model_of(config_of("qwen3next", **changes))


def test_the_order_of_rows() -> None:
    """Two heads of keys a and b, of one row, which have two rows of values and of gates."""
    file = ["qa", "qb", "ka", "kb", "va0", "va1", "vb0", "vb1", "za0", "za1", "zb0", "zb1"]
    wanted = ["qa", "ka", "va0", "va1", "za0", "za1", "qb", "kb", "vb0", "vb1", "zb0", "zb1"]
    order = Mixed(2, 1, 2)
    assert order.parts == (8, 4)
    assert order.size == len(file)
    assert [file[at] for at in order.places()] == wanted


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
@pytest.mark.parametrize("values", [6, 2])
def test_one_type_there_and_back(kind: str, values: int, tmp_path: Path) -> None:
    """It stays quantized."""
    wanted = write(tmp_path / "m.gguf", model(linear_num_value_heads=values), {r".*attn_(qkv|gate)\..*": kind})
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    weight = dict(Own(tmp_path / "out").items())[MATRIX]
    assert isinstance(weight, QTensor)
    found, value = weight.dequantize(torch.float32), wanted.get_parameter(MATRIX).detach()
    # Two factors, or a zero point, of which one is rounded to float32.
    assert float((found - value).abs().max()) <= 2.0**-22 * float(value.abs().max())
    assert_same_answers(wanted, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "back.gguf", to="gguf", progress=False)
    before, after = (read_header(tmp_path / name).tensors for name in ("m.gguf", "back.gguf"))
    assert {name: (each.type, each.shape) for name, each in before.items()} == {
        name: (each.type, each.shape) for name, each in after.items()
    }
    if kind in ("Q8_0", "MXFP4"):
        assert all(torch.equal(before[name].read(), after[name].read()) for name in (QKV, GATES))
    convert(tmp_path / "back.gguf", tmp_path / "again", progress=False)
    again = dict(Own(tmp_path / "again").items())[MATRIX]
    assert isinstance(again, QTensor)
    assert torch.equal(again.dequantize(torch.float32), found)


@pytest.mark.parametrize(
    ("qkv", "gates", "dtype"),
    [("Q8_0", "Q4_0", torch.bfloat16), ("Q5_0", "F32", torch.float32), ("F16", "MXFP4", torch.float16)],
    ids=str,
)
def test_two_types_become_floats(qkv: str, gates: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rounded to the dtype of the model, which has all floats of the file."""
    made, others = model(), torch.float16 if dtype == torch.float16 else torch.bfloat16
    with torch.no_grad():
        for name, value in made.named_parameters():
            shifted = 1 if value.dim() == 1 and "linear_attn" not in name else 0
            if "qkvz" not in name:
                value.copy_((value + shifted).to(others) - shifted)
    kinds = {r".*attn_qkv\..*": qkv, r".*attn_gate\..*": gates, r".*ssm_out\..*": "Q8_0"}
    write(tmp_path / "m.gguf", made, kinds)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    (note,) = (note for note in done.notes if "kept as floats" in note)
    assert note.startswith(f"{MATRIX}, model.layers.2.linear_attn.in_proj_qkvz.weight: kept as floats")
    assert f"rounded to {dtype}, since the file has the rows of a matrix in two tensors, of different types" in note
    assert MATRIX not in done.weights
    found, wanted = dict(Own(tmp_path / "out").items())[MATRIX], made.get_parameter(MATRIX).detach()
    assert found.dtype == dtype
    assert torch.equal(found, wanted.to(dtype))


def test_two_scales(tmp_path: Path) -> None:
    """Each is multiplied into its own rows."""
    made = model(num_hidden_layers=2)
    scales = {QKV: 0.5, GATES: 3.0}
    vectors = {name.replace("weight", "scale"): torch.tensor([scale]) for name, scale in scales.items()}
    write(tmp_path / "m.gguf", made, {r".*attn_(qkv|gate)\..*": "NVFP4"}, vectors=vectors, scaled=False)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert any(note.startswith("made of two tensors with scales of their own") for note in done.notes)
    wanted = made.get_parameter(MATRIX).detach().unflatten(0, (2, -1)).clone()
    queries_keys_and_values = 2 * 64 + 3 * 64
    wanted[:, :queries_keys_and_values] *= 0.5
    wanted[:, queries_keys_and_values:] *= 3.0
    weight = dict(Own(tmp_path / "out").items())[MATRIX]
    assert isinstance(weight, QTensor)
    assert torch.equal(weight.dequantize(torch.float32), wanted.flatten(0, 1))


def older(path: Path, made: Any, **changes: Any) -> None:
    """A file with the matrix as it is, as llama.cpp wrote them in 2025."""
    parted = gguf_files.of_linear

    def whole(key: str, value: Tensor, config: Any) -> dict[str, Tensor]:
        block = key.split(".")[2]
        return {f"blk.{block}.ssm_in.weight": value} if "in_proj_qkvz" in key else parted(key, value, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "of_linear", whole)
        write(path, made, {r".*ssm_in\..*": "Q4_0"}, **changes)


def test_a_file_with_the_matrix_as_it_is(tmp_path: Path) -> None:
    made = model()
    older(tmp_path / "m.gguf", made, changes={"qwen3next.attention.recurrent_layers": None})
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert done.weights[MATRIX] == "int4-g32-sym"
    assert_same_answers(made, tmp_path / "out")


def test_the_matrix_twice(tmp_path: Path) -> None:
    older(tmp_path / "m.gguf", model(), vectors={QKV: torch.ones(640, 256), GATES: torch.ones(384, 256)})
    with pytest.raises(
        CheckpointError, match=r"attn_qkv\.weight and blk\.0\.ssm_in\.weight are the same weights twice"
    ):
        Gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({QKV: None}, r"attn_gate\.weight is there without blk\.0\.attn_qkv\.weight"),
        ({QKV: None, GATES: None}, r"lacks blk\.0\.attn_qkv\.weight, blk\.0\.attn_gate\.weight"),
        ({GATES: torch.ones(383, 256)}, r"attn_gate\.weight is \[383, 256\], and must be \[384, 256\]"),
        ({GATES: torch.ones(384, 255)}, r"attn_gate\.weight is \[384, 255\], and must be \[384, 256\]"),
        ({GATES: torch.ones(384)}, r"attn_gate\.weight is \[384\], and must be \[384, 256\]"),
        ({QKV: torch.ones(2, 640, 256)}, r"attn_qkv\.weight is \[2, 640, 256\], and must be \[640, 256\]"),
        ({"blk.0.ssm_ba.weight": None}, r"lacks blk\.0\.ssm_ba\.weight"),
        ({"blk.1.ssm_ba.weight": torch.ones(12, 256)}, r"blk\.1\.ssm_ba\.weight: a qwen3_next of 3 layers has no such"),
        ({"blk.0.ssm_alpha.weight": torch.ones(6, 256)}, r"ssm_alpha\.weight: a qwen3_next .* has no such"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit(changes: dict[str, Tensor | None], reason: str, tmp_path: Path) -> None:
    path = edited(tmp_path, model(), changes)
    with pytest.raises(CheckpointError, match=reason):
        Gguf(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ssm.group_count": (4, types.UINT32)}, "6 heads of values, 384 in all, for 4 of keys"),
        ({"ssm.state_size": (32, types.UINT32), "ssm.inner_size": (192, types.UINT32)}, r"must be \[320, 256\]"),
        ({"rope.dimension_sections": ([2, 1, 1, 0], types.ARRAY)}, "dimension_sections"),
        ({"expert_count": None}, "expert_count must be int, not absent"),
    ],
    ids=str,
)
def test_settings_that_are_not_read(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    named = {f"qwen3next.{key}": value for key, value in changes.items()}
    write(tmp_path / "m.gguf", model(), {".*ssm_out.*": "Q8_0"}, changes=named)
    with pytest.raises(CheckpointError, match=reason):
        Gguf(tmp_path / "m.gguf")
