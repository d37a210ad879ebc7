"""Linear attention in GGUF files (qwen35): the order of heads, the decay, and layers of two types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import convert
from bitport.interop.gguf import Gguf
from bitport.interop.gguf.changes import Change, Order, logarithm, misfit
from bitport.interop.gguf.header import read_header
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .gguf_files import gguf, model_of, write
from .gguf_models import LINEAR, small
from .test_gguf import assert_same_answers, huggingface
from .test_gguf_writer import written

types = gguf.GGUFValueType
OUT = "model.layers.0.linear_attn.out_proj.weight"
DECAY = "model.layers.0.linear_attn.A_log"


def model(**changes: Any) -> Any:
    return model_of(small("Qwen3_5TextConfig", **{**LINEAR, **changes}))


def test_the_order_of_heads() -> None:
    """Of keys a and b, and values of two rows after one of something else: the file has a0 b0 a1 b1 a2 b2."""
    file = ["first", *(f"{key}{at}{row}" for at in range(3) for key in "ab" for row in "xy")]
    wanted = ["first", *(f"{key}{at}{row}" for key in "ab" for at in range(3) for row in "xy")]
    order = Order(1, 2, 3, 2)
    assert order.size == len(file)
    assert [file[at] for at in order.places()] == wanted


def test_columns_are_those_of_a_matrix() -> None:
    """A file may say any shape for a tensor."""
    change = Change(columns=Order(0, 2, 3, 2))
    assert misfit((5, 12), change) == ""
    for shape in ((12,), (5, 1, 12), (5, 10)):
        assert str([*shape]) in misfit(shape, change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_decay_of_16_bits_is_found_again(dtype: torch.dtype) -> None:
    """exp is rounded to float32, and may be off by another unit in the last place."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[(every.abs() >= 2**-6) & (every.abs() <= 40)]
    stored = torch.from_numpy(np.exp(every.double().numpy()).astype(np.float32))
    for ulp in (-1, 0, 1):
        moved = (stored.view(torch.int32) + ulp).view(torch.float32)
        assert torch.equal(logarithm(moved), every)
    fine = every + 2.0**-17
    found = logarithm(fine.double().exp().float())
    # exp and the result are rounded, to 24 bits.
    assert float((found - fine).abs().max()) <= 2.0**-23 + 2.0**-24 * 40


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "Q5_1", "MXFP4", "NVFP4", "IQ4_XS"])
def test_columns_of_each_type_there_and_back(kind: str, tmp_path: Path) -> None:
    kinds = {r".*ssm_out\..*": kind, r".*attn_qkv\..*": kind, ".*ffn_down.*": "Q8_0"}
    wanted = write(tmp_path / "m.gguf", model(linear_num_value_heads=8), kinds)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    weight = dict(Own(tmp_path / "out").items())[OUT]
    assert isinstance(weight, QTensor)
    found, value = weight.dequantize(torch.float32), wanted.get_parameter(OUT).detach()
    # Two factors, or a zero point, of which one is rounded to float32.
    assert float((found - value).abs().max()) <= 2.0**-22 * float(value.abs().max())
    convert(tmp_path / "out", tmp_path / "back.gguf", to="gguf", progress=False)
    before, after = (read_header(tmp_path / name).tensors for name in ("m.gguf", "back.gguf"))
    for name, tensor in after.items():
        assert before[name].type == tensor.type
        if kind in ("Q8_0", "MXFP4", "NVFP4") and not name.endswith("ssm_a"):
            assert torch.equal(before[name].read(), tensor.read()), name


def test_a_scale_of_columns_that_do_not_stay_together(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", model(linear_num_value_heads=8), {r".*ssm_out\..*": "TQ2_0"})
    with pytest.raises(CheckpointError, match=r"ssm_out.*a scale is of 256 columns, and heads of 64 columns change"):
        convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)


def test_it_is_refused_in_writing_too(tmp_path: Path) -> None:
    written(small("Qwen3_5TextConfig", **LINEAR), tmp_path, {"*out_proj": "int4-sym", "*": "skip"})
    with pytest.raises(ArgumentError, match=r"out_proj.*a scale is of 128 columns, and heads of 64"):
        convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    assert not (tmp_path / "m.gguf").exists()


def test_as_many_heads_of_keys(tmp_path: Path) -> None:
    """Then nothing changes places, and a scale may be of any columns."""
    made = write(
        tmp_path / "m.gguf", model(linear_num_key_heads=8, linear_num_value_heads=8), {r".*ssm_out.*": "TQ2_0"}
    )
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(made, tmp_path / "out")


def test_a_decay_in_float32_leaves_the_model_its_dtype(tmp_path: Path) -> None:
    made = model()
    with torch.no_grad():
        for name, value in made.named_parameters():
            shifted = 1 if value.dim() == 1 and "linear_attn" not in name else 0
            if not name.endswith(("A_log", "dt_bias")):
                value.copy_((value + shifted).bfloat16() - shifted)
    write(tmp_path / "m.gguf", made, {r".*attn_q\..*": "Q8_0"})
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    tensors = dict(Own(tmp_path / "out").items())
    assert tensors[DECAY].dtype == tensors["model.layers.0.linear_attn.dt_bias"].dtype == torch.float32
    assert tensors["model.norm.weight"].dtype == tensors[OUT].dtype == torch.bfloat16
    assert torch.allclose(tensors[DECAY], made.get_parameter(DECAY).detach(), rtol=0, atol=2.0**-21)
    assert bool(huggingface.load_model(tmp_path / "out")(input_ids=torch.arange(9)[None]).logits.isfinite().all())


MIXED = ["full_attention", "full_attention", "linear_attention"]


def test_layers_of_two_types_in_any_order(tmp_path: Path) -> None:
    """And in a file that is written from it; the period says something else, which llama.cpp ignores too."""
    changes = {"qwen35.full_attention_interval": (4, types.UINT32)}
    made = write(tmp_path / "m.gguf", model(layer_types=MIXED), {r".*ffn_up.*": "Q8_0"}, changes=changes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(made, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "n.gguf", to="gguf", progress=False)
    assert read_header(tmp_path / "n.gguf").settings["qwen35.attention.recurrent_layers"] == [False, False, True]
    convert(tmp_path / "n.gguf", tmp_path / "back", progress=False)
    assert_same_answers(made, tmp_path / "back")


@pytest.mark.parametrize(("every", "count"), [(2, 3), (None, 4)])
def test_older_files_have_a_period(every: int | None, count: int, tmp_path: Path) -> None:
    """Of 4, if they do not say it."""
    said = {"attention.recurrent_layers": None, "full_attention_interval": every and (every, types.UINT32)}
    types_of = {"num_hidden_layers": count, "full_attention_interval": every or 4}
    changes = {f"qwen35.{key}": value for key, value in said.items()}
    made = write(tmp_path / "m.gguf", model(**types_of), {r".*ffn_up.*": "Q8_0"}, changes=changes)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert_same_answers(made, tmp_path / "out")


def test_layers_that_predict_more_are_left_out(tmp_path: Path) -> None:
    recurrent = ([True, False, True, False], types.ARRAY)
    changes = {"qwen35.block_count": (4, types.UINT32), "qwen35.nextn_predict_layers": (1, types.UINT32)}
    changes |= {"qwen35.attention.recurrent_layers": recurrent}
    more = {"blk.3.nextn.eh_proj.weight": torch.ones(4, 8), "blk.3.attn_norm.weight": torch.ones(8)}
    kinds = {r".*ffn_up.*": "Q8_0"}
    made = write(tmp_path / "m.gguf", model(), kinds, changes=changes, vectors=more)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    (note,) = (note for note in done.notes if note.startswith("left out"))
    assert note == (
        "left out: layers that predict tokens after the next: blk.3.nextn.eh_proj.weight, blk.3.attn_norm.weight"
    )
    assert_same_answers(made, tmp_path / "out")


WITHOUT: dict[str, Any] = {"attention.recurrent_layers": None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nextn_predict_layers": (3, types.UINT32)}, "nextn_predict_layers is 3, which leaves no layer"),
        ({"ssm.inner_size": (380, types.UINT32)}, "6 heads of values, 380 in all, for 2 of keys"),
        ({"ssm.group_count": (4, types.UINT32)}, "6 heads of values, 384 in all, for 4 of keys"),
        ({"ssm.conv_kernel": None}, "conv_kernel must be int, not absent"),
        ({"rope.dimension_sections": None}, "dimension_sections must be list"),
        ({"rope.dimension_sections": ([2, 1, 1], types.ARRAY)}, "three sizes and 0 are read"),
        ({"rope.dimension_sections": ([2, 1, 1, 1], types.ARRAY)}, "three sizes and 0 are read"),
        ({"rope.dimension_count": (34, types.UINT32)}, "dimension_count is 34, and must be 1 to 32"),
        ({"rope.dimension_count": (7, types.UINT32)}, "dimension_count is 7; dimensions are turned in pairs"),
        ({"block_count": (4, types.UINT32)}, r"recurrent_layers is \[True, False, True\], not .* for 4 layers"),
        ({"attention.recurrent_layers": ([1, 0, 1], types.ARRAY)}, r"\[1, 0, 1\], not true or false for 3 layers"),
        ({"attention.recurrent_layers": ([True] * 3, types.ARRAY)}, r"blk\.1\.attn_.*has no such"),
        ({**WITHOUT, "block_count": (4, types.UINT32)}, r"lacks blk\.3\.attn_norm\.weight, blk\.3\.attn_q\.weight"),
        ({**WITHOUT, "full_attention_interval": (3, types.UINT32)}, r"blk\.1\.attn_.*has no such"),
        ({"ssm.state_size": (32, types.UINT32), "ssm.inner_size": (192, types.UINT32)}, "belong where"),
    ],
    ids=str,
)
def test_settings_that_are_not_understood(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    named = {f"qwen35.{key}": value for key, value in changes.items()}
    write(tmp_path / "m.gguf", model(), {".*ffn_up.*": "Q8_0"}, changes=named)
    with pytest.raises(CheckpointError, match=reason):
        Gguf(tmp_path / "m.gguf")


def test_a_model_that_a_file_cannot_say(tmp_path: Path) -> None:
    config = small("Qwen3_5TextConfig", **{**LINEAR, "linear_value_head_dim": 32})
    written(config, tmp_path, {"*up_proj": "int8", "*": "skip"})
    with pytest.raises(CheckpointError, match="6 heads of values, 192 in all, for 2 of keys; read are a multiple"):
        convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)


def test_a_convolution_of_another_form(tmp_path: Path) -> None:
    made = model()
    write(tmp_path / "m.gguf", made, {".*ffn_up.*": "Q8_0"}, vectors={"blk.2.ssm_conv1d.bias": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"blk\.2\.ssm_conv1d\.bias: a qwen3_5_text of 3 layers has no such"):
        Gguf(tmp_path / "m.gguf")


def test_schemes_that_are_chosen_for_files(tmp_path: Path) -> None:
    """A model quantized here is the same in a file and back."""
    made = written(
        small("Qwen3_5TextConfig", **LINEAR),
        tmp_path,
        {"*conv1d": "skip", "*linear_attn*": "int8-g32", "*": "int4-g32-sym"},
    )
    assert made is not None
    convert(tmp_path / "q", tmp_path / "m.gguf", to="gguf", progress=False)
    convert(tmp_path / "m.gguf", tmp_path / "back", progress=False)
    before, after = (dict(Own(tmp_path / name).items()) for name in ("q", "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        one, other = (
            each.dequantize(torch.float32) if isinstance(each, QTensor) else each.float()
            for each in (tensor, after[name])
        )
        assert torch.equal(one, other), name
