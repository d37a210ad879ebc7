"""What users give by mistake: each ends in an error that says what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitport as bp
from bitport.algorithms import AWQ, GPTQ, HQQ, SignRound, Smooth
from bitport.arguments import bytes_of, counts_of, floats_of, path_of
from bitport.cache import KeyValueStore, cache_format
from bitport.checkpoint import ModelState, Writer, quantize_files
from bitport.errors import ArgumentError, BitportError, DeviceError, KernelError, RecipeError, SchemeError
from bitport.evaluate import perplexity
from bitport.export import Method, package
from bitport.interop import convert
from bitport.nn import QuantizedLinear
from bitport.numerics import Format
from bitport.schemes import Rule, Scheme
from bitport.train import convert_, release_
from bitport.train.optim import AdamW

DATA = [torch.ones(3, 64)]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def quantized() -> nn.Sequential:
    made = model()
    bp.quantize_(made, "int4-g32", measure=False)
    return made


def store() -> KeyValueStore:
    made = KeyValueStore("int8")
    made.append(torch.randn(1, 2, 5, 64), torch.randn(1, 2, 5, 64))
    return made


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (1, 1),
        (4_000_000_001, 4_000_000_001),
        (5e9, 5 * 10**9),
        ("5GB", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        ("1.5KiB", 1536),
        ("500MiB", 500 << 20),
        ("17", 17),
        ("3b", 3),
    ],
)
def test_amounts_of_bytes(given: object, nbytes: int) -> None:
    """As transformers and huggingface_hub read them: powers of 1000, with an i of 1024."""
    assert bytes_of(given, "size") == nbytes


@pytest.mark.parametrize("given", [0, -1, 0.5, None, True, "", "5TBx", "GB", "-5GB", "1e9", float("nan"), 1 << 63])
def test_what_is_no_amount_of_bytes(given: object) -> None:
    with pytest.raises(ArgumentError, match=r"^size must be an amount of bytes, such as .*, not "):
        bytes_of(given, "size")


@pytest.mark.parametrize("given", [None, "", 3, b"name", nn.Linear(3, 3), ["a"]], ids=str)
def test_what_is_no_path(given: object) -> None:
    with pytest.raises(ArgumentError, match=r"^target must be a path, as text or pathlib.Path, not .{1,60}$"):
        path_of(given, "target")
    assert path_of("a/b", "target") == path_of(Path("a/b"), "target") == Path("a/b")


def test_numbers_of_rows_and_dtypes() -> None:
    assert counts_of(3) == counts_of([3]) == (3,)
    assert floats_of(None, "dtype") is None
    assert floats_of(torch.bfloat16, "dtype") == torch.bfloat16
    assert bp.explain(quantized(), rows=3).rows == (3,)


def test_shards_of_a_size_in_words(tmp_path: Path) -> None:
    bp.save(quantized(), tmp_path, shard_size="2.2kB")
    assert len([*tmp_path.glob("*.safetensors")]) == 2


MISTAKES: dict[str, tuple[Callable[[], Any], type[BitportError], str]] = {
    "rows": (lambda: bp.explain(quantized(), rows="12"), ArgumentError, "rows must be numbers of rows .* not '12'"),
    "negative rows": (lambda: bp.explain(quantized(), rows=(-1,)), ArgumentError, "rows must be"),
    "directory": (lambda: bp.save(quantized(), None), ArgumentError, "directory must be a path.*not None"),
    "shard size": (lambda: bp.save(quantized(), "x", shard_size="big"), ArgumentError, "shard_size must be .* 'big'"),
    "to load": (lambda: bp.load(model, None), ArgumentError, "directory must be a path"),
    "no algorithm": (
        lambda: bp.quantize_(model(), "int4", algorithm=None),
        ArgumentError,
        "an algorithm is .* not None",
    ),
    "a class": (lambda: bp.quantize_(model(), "int4", algorithm=HQQ), ArgumentError, r"such as GPTQ\(\), not <class"),
    "calibrate": (
        lambda: bp.quantize_(model(), "int4", algorithm="gptq", calibrate=5),
        ArgumentError,
        "calibrate is a list of batches, or a function .* not 5",
    ),
    "device": (lambda: bp.quantize_(model(), "int4", device="gpu"), DeviceError, "no device gpu here"),
    "no device": (lambda: bp.quantize_(model(), "int4", device=1.5), DeviceError, "no device 1.5 here"),
    "dtype": (lambda: bp.dequantize_(quantized(), "bfloat16"), ArgumentError, "stands for a float tensor, not for bfl"),
    "tensor": (lambda: bp.quantize_tensor([[1.0]], "int4"), ArgumentError, "only a dense tensor .* not <class 'list'>"),
    "sparse": (lambda: bp.quantize_tensor(torch.eye(64).to_sparse(), "int4"), ArgumentError, "not torch.sparse_coo"),
    "scheme": (lambda: bp.quantize_tensor(torch.eye(64), 4), SchemeError, "as a Scheme or by name, .* not as 4"),
    "pre-scale": (
        lambda: bp.quantize_tensor(torch.eye(64), "int4", pre_scale=[1.0] * 64),
        ArgumentError,
        "pre_scale must be a tensor, not a list",
    ),
    "preset": (lambda: bp.preset(None), SchemeError, "not as None"),
    "kernel": (lambda: bp.use_kernel(None).__enter__(), KernelError, "kernel setting None"),
    "kernel of no op": (lambda: bp.use_kernel("=generic").__enter__(), KernelError, "kernel setting '=generic'"),
    "bits": (lambda: bp.mixed(model(), calibrate=DATA, bits="4"), ArgumentError, "a number above 0, not '4'"),
    "candidates": (
        lambda: bp.mixed(model(), None, calibrate=DATA, bits=5),
        ArgumentError,
        "several schemes.* not None",
    ),
    "rules": (lambda: bp.mixed(model(), calibrate=DATA, bits=5, rules={"0": "int8"}), RecipeError, "of bitport.Rule"),
    "together": (
        lambda: bp.mixed(model(), calibrate=DATA, bits=5, together=["0", "2"]),
        ArgumentError,
        "together holds lists of globs",
    ),
    "no numbers": (
        lambda: bp.mixed(model().to("meta"), calibrate=DATA, bits=5),
        ArgumentError,
        "0.weight is on the meta device",
    ),
    "sample": (lambda: bp.mixed(model(), calibrate=DATA, bits=5, sample="2"), ArgumentError, "sample='2'"),
    "source": (lambda: quantize_files(None, "x", "int4"), ArgumentError, "source must be a path"),
    "part": (lambda: Writer("x").add("a", [1]), ArgumentError, "tensors by name, not a list by 'a'"),
    "name": (lambda: Writer("x").add(None, torch.ones(1)), ArgumentError, "not a Tensor by None"),
    "state": (lambda: ModelState(None), ArgumentError, "a model is a torch.nn.Module"),
    "to convert": (lambda: convert("x", None), ArgumentError, "target must be a path"),
    "no model": (lambda: convert_(None), ArgumentError, "a model is a torch.nn.Module"),
    "no model again": (lambda: release_(None), ArgumentError, "a model is a torch.nn.Module"),
    "learning rate": (lambda: AdamW(model().parameters(), lr=None), ArgumentError, "lr=None: must be a number"),
    "betas": (lambda: AdamW(model().parameters(), betas=(0.9,)), ArgumentError, r"betas=\(0.9,\): must be two numbers"),
    "cache": (lambda: cache_format(8), SchemeError, "cache format"),
    "crop": (lambda: store().crop(1.5), ArgumentError, "cut to 0 to 5, not to 1.5"),
    "select": (lambda: store().select([0]), ArgumentError, r"a tensor of their numbers, int32 or int64, not \[0\]"),
    "repeat": (lambda: store().repeat(0), ArgumentError, "at least 1, not 0"),
    "move": (lambda: store().to("gpu"), DeviceError, "no device gpu here"),
    "sizes": (lambda: QuantizedLinear("64", 32), ArgumentError, "are sizes, not '64' and 32"),
    "layer": (lambda: QuantizedLinear.from_linear(nn.Conv1d(3, 3, 1), "int8"), ArgumentError, "not a Conv1d"),
    "codes": (
        lambda: QuantizedLinear(64, 32).load_quantized_weight(None, None),
        ArgumentError,
        "weight must be a tens",
    ),
    "text": (lambda: perplexity(model(), "hello"), ArgumentError, "at least two token ids .* not a str"),
    "no module": (lambda: package(Method(None, ()), "a.pt2"), ArgumentError, "of a torch.nn.Module, not of a NoneType"),
    "option": (lambda: GPTQ(block=0), ArgumentError, r"GPTQ\(block=0\): must be a whole number of at least 1"),
    "damping": (lambda: GPTQ(damping=-1), ArgumentError, r"GPTQ\(damping=-1\): must be a number of at least 0"),
    "steps of a search": (lambda: AWQ(steps=0), ArgumentError, r"AWQ\(steps=0\): must be a whole number of at least 1"),
    "steps below zero": (lambda: Smooth(steps=-3), ArgumentError, r"Smooth\(steps=-3\): must be a whole number"),
    "gain of a search": (
        lambda: AWQ(least_gain=math.nan),
        ArgumentError,
        r"least_gain=nan\): must be a number of at least 0",
    ),
    "rows of a search": (
        lambda: Smooth(rows=0),
        ArgumentError,
        r"rows=0\): must be a whole number of at least 1",
    ),
    "steps": (lambda: SignRound(steps="x"), ArgumentError, r"steps='x'\): must be a whole number"),
    "weight": (lambda: Scheme(weight="int4"), SchemeError, "a scheme's weight is a Format, not 'int4'"),
    "act": (lambda: Scheme(weight=Format(dtype="int8"), act=None), SchemeError, "unknown activation None"),
    "acts": (lambda: Scheme(weight=Format(dtype="int8"), act=["int8"]), SchemeError, "unknown activation \\['int8'\\]"),
    "json": (lambda: Scheme.from_json(None), SchemeError, "the scheme is not JSON"),
    "kinds": (lambda: Rule("*", "int4", 3), RecipeError, "kinds is a tuple of names, not 3"),
    "meta": (lambda: package(Method(model(), ()), "a.pt2", meta=3), ArgumentError, "meta is a dictionary"),
    "weights": (
        lambda: package(Method(model(), ()), "a.pt2", weights=3),
        ArgumentError,
        "weights is the name of a file",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, error, words = MISTAKES[name]
    with pytest.raises(error, match=words):
        call()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """unfinished cannot be written: Not a directory. Free some space, then resume."""
    bp.save(model(), tmp_path / "model")
    (shard,) = (tmp_path / "model").glob("*.safetensors")
    with pytest.raises(ArgumentError, match=r"bitport.json is a file; give a directory"):
        quantize_files(shard, tmp_path / "model" / "bitport.json", "int4")


def test_an_arrangement_without_a_model(tmp_path: Path) -> None:
    bp.save(model(), tmp_path / "model")
    (shard,) = (tmp_path / "model").glob("*.safetensors")
    with pytest.raises(ArgumentError, match="give model= too"):
        quantize_files(shard, tmp_path / "out", "int4", arrangement=lambda held: held)  # type: ignore[arg-type]
