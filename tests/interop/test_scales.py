"""Scales rounded during conversion: every number stays within the derived bound, the loss is reported, and nothing else
changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.checkpoint import quantize_files, read_manifest
from bitport.cli.main import main
from bitport.errors import ArgumentError
from bitport.interop import convert
from bitport.interop.scales import NARROW, Narrowed
from bitport.interop.sources import Own, description
from bitport.numerics import Format, dequantize
from bitport.ops import by_rows
from bitport.schemes import Scheme
from bitport.tensor import QTensor, quantize_tensor

from .files import assert_same

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
TINY = 2.0**-25
"""Half the spacing of the smallest float16 numbers."""
SHAPES = {
    "int4-g32-fzero": (40, 96),
    "int6-g16-sym": (3, 24, 64),
    "int4-g128": (33, 256),
    "nf4": (8, 64),
    "int8": (9, 33),
}

BLOCKS = Scheme(weight=Format(dtype="int8", block=(16, 32), scale="float32"))


class Weights:
    """A source for a conversion."""

    format, path, nbytes, tied = "these", Path("these"), 0, {}

    def __init__(self, **weights: Tensor) -> None:
        self.weights, self.notes = weights, ["a note of theirs"]

    def names(self) -> list[str]:
        return list(self.weights)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()

    def described(self) -> Iterator[Any]:
        for name, tensor in self.weights.items():
            if isinstance(tensor, QTensor):
                yield description(name, tensor)

    def others(self, quantization: dict[str, Any]) -> Iterator[Any]:
        yield from ()


def weight(scheme: str | Scheme, shape: tuple[int, ...] = (40, 96), size: float = 0.1) -> QTensor:
    """A weight with float32 scales of all magnitudes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * size
    return quantize_tensor(x * torch.logspace(-3, 1, shape[-1]), scheme, kind="linear").to_layout("plain")


def spread(q: QTensor, part: Tensor) -> Tensor:
    """Repeat a value of each group for each number in it."""
    return part.double().repeat_interleave(q.matrix.block_k, -1)[..., : q.matrix.k]


def steps(q: QTensor) -> Tensor:
    """The distance of each number from 0 in steps of its scale."""
    ones = q.parts._replace(scale=torch.ones_like(q.scale))
    return dequantize(ones, q.scheme.weight, q.matrix.n, q.matrix.k).double()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scheme", SHAPES)
def test_each_number_is_off_by_no_more_than_the_rounding(scheme: str, dtype: str) -> None:
    q = weight(scheme, SHAPES[scheme])
    files = Narrowed(Weights(w=q), dtype)
    ((_, made),) = files.items()
    assert isinstance(made, QTensor)
    assert made.scale.dtype == NARROW[dtype]
    assert torch.equal(made.qdata, q.qdata)

    part, off = ROUNDING[dtype], (made.dequantize(torch.float32).double() - q.dequantize(torch.float32).double()).abs()
    most = steps(q).abs() * (part * spread(q, q.scale) + TINY)
    if scheme.endswith("fzero"):
        assert made.zero is not None
        assert q.zero is not None
        assert made.zero.dtype == NARROW[dtype]
        most += (part * spread(q, q.zero).abs() + TINY) * spread(q, made.scale)
    in_float32 = 2.0**-22 * (spread(q, q.scale) * (steps(q).abs() + 1))
    assert bool((off <= most + in_float32).all())

    level = 10 * math.log10(float(q.dequantize(torch.float32).double().square().sum() / off.square().sum()))
    told = f"scales of 1 weights were rounded to {dtype}: {level:.1f} dB at worst, for w"
    assert files.notes == ["a note of theirs", told]


def test_it_is_told_of_the_weight_that_changed_most() -> None:
    """Scales below 2^-14 are coarse in float16."""
    files = Narrowed(Weights(fine=weight("int8"), coarse=weight("int8", size=1e-5), bias=torch.ones(3)), "float16")
    assert [type(tensor) for _, tensor in files.items()] == [QTensor, QTensor, Tensor]
    assert files.levels["coarse"] < files.levels["fine"] - 20
    assert files.notes[-1].endswith(f"{files.levels['coarse']:.1f} dB at worst, for coarse")


def test_rows_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = []
    for chunk in (1 << 24, 1000):
        monkeypatch.setattr(by_rows, "numbers_at_once", lambda device, chunk=chunk: chunk)
        files = Narrowed(Weights(a=weight("int4-g32-fzero", (3, 40, 96)), b=weight(BLOCKS, (70, 96))), "bfloat16")
        list(files.items())
        levels.append([files.levels["a"], files.levels["b"]])
    assert levels[0] == pytest.approx(levels[1], rel=1e-12)


@pytest.mark.parametrize("scheme", ["mxfp4-wo", "nvfp4-wo", "int4"])
def test_where_no_scale_is_wider_nothing_changes(scheme: str) -> None:
    q = weight(scheme, (32, 128))
    q = q.replace(q.parts._replace(scale=q.scale.bfloat16())) if scheme == "int4" else q
    files = Narrowed(Weights(w=q), "bfloat16")
    ((_, made),) = files.items()
    assert isinstance(made, QTensor)
    assert made.scheme == q.scheme
    assert made.scale.dtype == q.scale.dtype
    assert torch.equal(made.dequantize(), q.dequantize())
    assert files.notes[-1] == "every scale is a bfloat16 already, or has 8 bits: no number was changed"


def test_a_scheme_that_names_its_scales_names_the_new_ones() -> None:
    q = weight(BLOCKS)
    assert q.scheme.weight.scale == "float32"
    files = Narrowed(Weights(w=q), "float16")
    ((_, made),) = files.items()
    assert isinstance(made, QTensor)
    assert [made.scheme.weight.scale, *(each.scheme.weight.scale for each in files.described())] == ["float16"] * 2


def test_what_is_too_large_is_an_error() -> None:
    q = weight("int4-g32-fzero")
    assert q.zero is not None
    for parts, what in (
        (q.parts._replace(scale=q.scale * 1e9), r"w: a scale of [\d.e+]+ is too large for float16.*bfloat16"),
        (q.parts._replace(zero=q.zero - 7e4), r"w: a zero point of (69|70)[\d.]+ is too large"),
    ):
        with pytest.raises(ArgumentError, match=what):
            list(Narrowed(Weights(w=q.replace(parts)), "float16").items())
    with pytest.raises(ArgumentError, match="'float16' or 'bfloat16', not to 'float8'"):
        Narrowed(Weights(), "float8")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32."""
    models = pytest.importorskip("tests.integrations.models", reason="needs the extra: pip install 'bitport[hf]'")
    source, target = (tmp_path_factory.mktemp(name) for name in ("float", "wide"))
    models.make_directory(source)
    quantize_files(source, target, "int4-g32", dtype=torch.float32, progress=False)
    return target


def test_a_checkpoint_becomes_a_smaller_one(wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgumentError, match="bitport already"):
        convert(wide, tmp_path / "small", progress=False)
    assert main(["convert", str(wide), "--scales", "float16", "-o", str(tmp_path / "small")]) == 0
    assert "were rounded to float16" in capsys.readouterr().out
    before, after = (read_manifest(path).tensors for path in (wide, tmp_path / "small"))
    for name, entry in before.items():
        saved = sum(part.nbytes for part in entry.parts.values()) - sum(p.nbytes for p in after[name].parts.values())
        assert saved == (entry.parts["scale"].nbytes // 2 if entry.scheme else 0)


def test_k_quants_become_smaller(tmp_path: Path) -> None:
    files = pytest.importorskip("tests.interop.gguf_files")
    kinds = {r"token_embd.*": "Q6_K", r".*attn_.*": "Q4_K", r".*ffn_.*": "Q5_K", r"output\..*": "Q2_K"}
    files.write(tmp_path / "m.gguf", files.model_of(files.transformers.LlamaConfig(**files.SIZES)), kinds)
    bits = []
    for to in (None, "float16"):
        convert(tmp_path / "m.gguf", tmp_path / str(to), scales=to, progress=False)
        tensors = read_manifest(tmp_path / str(to)).tensors
        held = [tensors[f"model.{name}.weight"] for name in ("embed_tokens", "layers.0.self_attn.q_proj")]
        held += [tensors[name] for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight")]
        bits.append([8 * sum(p.nbytes for p in each.parts.values()) / math.prod(each.shape) for each in held])
    assert bits == [[8, 6, 7, 6], [7, 5, 6, 4]]


def test_formats_that_want_other_scales_can_be_written(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is no float16; --scales float16 rounds it"):
        convert(wide, tmp_path / "exact", to="gptq_v2", progress=False)
    done = convert(wide, tmp_path / "rounded", to="gptq_v2", scales="float16", progress=False)
    assert any("rounded to float16" in note for note in done.notes)
    convert(wide, tmp_path / "small", scales="float16", progress=False)
    convert(tmp_path / "rounded", tmp_path / "back", progress=False)
    assert_same(*(dict(Own(tmp_path / name).items()) for name in ("small", "back")))
