"""Triton's kernels on an absent chip: which one is chosen for each scheme, number of rows and chip, beside PyTorch's
own; and that the host code around a launch never synchronizes, so that all of it can be captured in a CUDA graph. Fake
tensors only, launches are recorded; run by test_devices.py, like on_fake_chips.py."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from bitport.backends.cuda import capability, compiled, few_rows, many_rows
from bitport.backends.triton import configs, kernels
from bitport.numerics import ACTIVATIONS
from bitport.ops import IMPLS, Impl, Weight, decide, register_kernel
from bitport.ops.attention import AttentionArgs
from bitport.ops.convert import format_json
from bitport.schemes import preset
from tests.backends import on_fake_chips
from tests.backends.on_fake_chips import DEVICE, arguments, check_chosen, chosen, waits

FAULTS: list[str] = []
kernels.register(DEVICE, lambda: next(iter(FAULTS), None))

CHOSEN = """
scheme           rows  sm80             sm90               sm100              rocm          xpu
int4             1     triton_tiles     triton_gemv        triton_tiles       triton_gemv   int4pack_mm
int4             64    triton_tiles     triton_tiles       triton_tiles       triton_tiles  int4pack_mm
int4             4096  triton_dense     triton_dense       triton_dense       triton_dense  int4pack_mm
int4-g48         1     triton_tiles     triton_gemv        triton_tiles       triton_gemv   triton_gemv
int4-g48         2     triton_tiles     triton_gemv        triton_tiles       triton_tiles  triton_tiles
int4-g48         1024  triton_dense     triton_dense       triton_dense       triton_dense  triton_dense
int3             16    triton_tiles     triton_tiles       triton_tiles       triton_tiles  triton_tiles
int8             1     triton_gemv      triton_gemv        triton_gemv        triton_gemv   int8pack_mm
nf4              200   triton_dense     triton_dense       triton_tiles       triton_dense  triton_dense
mxfp4-wo         1     triton_tiles     triton_gemv        triton_tiles       triton_gemv   triton_gemv
int8-dyn         1     triton_gemv      triton_gemv        triton_gemv        triton_gemv   triton_gemv
int8-dyn         64    int_mm           int_mm             int_mm             triton_tiles  int_mm
int4-int8        64    triton_tiles     triton_tiles       triton_tiles       triton_tiles  triton_tiles
fp8-row          64    triton_tiles     scaled_mm          scaled_mm          triton_tiles  scaled_mm
fp8-block        64    triton_tiles     scaled_mm_blocks   triton_tiles       triton_tiles  triton_tiles
mxfp8            64    triton_tiles     triton_tiles       scaled_mm_mx       triton_tiles  triton_tiles
mxfp4            1     triton_tiles     triton_gemv        triton_scaled      triton_gemv   triton_gemv
mxfp4            64    triton_tiles     triton_tiles       triton_scaled      triton_tiles  triton_tiles
nvfp4            64    triton_tiles     triton_tiles       scaled_mm_mx       triton_tiles  triton_tiles
experts:int4     64    triton_tiles     triton_tiles       triton_tiles       triton_tiles  triton_tiles
experts:int4     4096  triton_tiles     grouped_mm         grouped_mm         triton_tiles  triton_tiles
experts:int8-dyn 64    triton_tiles     triton_tiles       triton_tiles       triton_tiles  triton_tiles
experts:mxfp8    64    triton_tiles     triton_tiles       triton_scaled      triton_tiles  triton_tiles
experts:mxfp4    64    triton_tiles     triton_tiles       triton_scaled      triton_tiles  triton_tiles
"""


def be(monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    """Make the chip's table and abilities the current ones, besides what PyTorch says of it."""
    on_fake_chips.be(monkeypatch, chip)
    file = configs.FOLDER / f"{chip}.json"
    content = json.loads((file if file.exists() else configs.FOLDER / "default.json").read_text())
    name = "gfx942" if chip == "rocm" else chip
    config = configs.for_architecture(content, name)
    monkeypatch.setattr(configs, "of", lambda device: config)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """(kernel, its arguments by name) of every launch; none is executed."""
    found: list[tuple[str, dict[str, Any]]] = []

    def write_down(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(type(size) is int for size in grid)
        found.append((self.__name__, {**dict(zip(self.arg_names, args, strict=False)), **options}))

    monkeypatch.setattr(JITFunction, "run", write_down)
    monkeypatch.setattr(kernels, "on", lambda device: contextlib.nullcontext())
    be(monkeypatch, "xpu" if DEVICE == "xpu" else "sm90")
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield found


@pytest.mark.parametrize(("scheme", "rows", "chip", "kernel"), chosen(CHOSEN))
def test_chosen(scheme: str, rows: int, chip: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, chip)
    check_chosen(scheme, rows, kernel)


CHOSEN_COMPILED = """
scheme      rows  sm80           sm90            sm100
int4        1     few_rows       few_rows        few_rows
int4        8     few_rows       few_rows        few_rows
int4        9     triton_tiles   triton_tiles    triton_tiles
int4        64    triton_tiles   many_rows       triton_tiles
int4        375   triton_dense   many_rows       triton_dense
int4        1024  triton_dense   many_rows       triton_dense
int4        1025  triton_dense   triton_dense    triton_dense
int4-g48    1     triton_tiles   triton_gemv     triton_tiles
int8        8     few_rows_int8  few_rows_int8   few_rows_int8
int8        9     triton_tiles   many_rows_int8  triton_tiles
int8        375   triton_dense   many_rows_int8  triton_dense
int8-g128   1     few_rows_int8  few_rows_int8   few_rows_int8
nf4         1     triton_tiles   triton_gemv     triton_tiles
"""


@pytest.mark.parametrize(("scheme", "rows", "chip", "kernel"), chosen(CHOSEN_COMPILED))
def test_chosen_where_cuda_compiles(
    scheme: str, rows: int, chip: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, chip)
    for its in (few_rows, many_rows):
        monkeypatch.setattr(its, "missing", lambda: None)
    monkeypatch.setattr(compiled, "_architectures", lambda: (80, 90, 100))
    monkeypatch.setattr(capability, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(capability, "shared_memory", lambda device: 163 << 10)
    op, args = arguments(scheme, rows)
    assert decide(op, *args).kernel == kernel


def test_where_triton_compiles_nothing_the_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the crossovers between the others and Triton's do not count."""
    check_chosen("int8-dyn", 1, "triton_gemv")
    monkeypatch.setattr(sys.modules[__name__], "FAULTS", ["triton compiles nothing"])
    check_chosen("int8-dyn", 1, "int_mm")
    op, args = arguments("nf4", 1)
    assert dict(decide(op, *args).refused)["triton_gemv"] == "triton compiles nothing"


SCHEMES = {
    "linear": ("int4-g48", "int4-fzero", "int3", "int8", "nf4", "fp8-wo", "mxfp4-wo", "nvfp4-wo"),
    "dyn_linear": ("int8-dyn", "int8-dyn-asym", "int4-int8", "fp8", "fp8-row", "fp8-block", "mxfp8", "mxfp4", "nvfp4"),
    "grouped_linear": ("experts:int4", "experts:mxfp4-wo"),
    "dyn_grouped_linear": ("experts:int8-dyn", "experts:fp8-row", "experts:mxfp4"),
}


def test_a_table_of_int4_is_read_by_rows() -> None:
    """A lookup dequantizes its rows, not the whole table."""
    _, args = arguments("int4", 1)
    ids = torch.empty(3, dtype=torch.int64, device=DEVICE)
    assert decide("embedding", ids, *args[1:11], torch.bfloat16).kernel == "triton_rows"
    assert decide("dequantize", *args[1:11], torch.bfloat16).kernel == "triton_rows"


def cached(width: int) -> tuple[Any, ...]:
    """Attention arguments: one query over 37 int4 tokens and one bfloat16 token."""

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(1, *sizes, dtype=dtype, device=DEVICE)

    side = Weight(
        *(empty(2, 37, width // 2, dtype=torch.uint8), empty(2, 37, width // 32), None, None),
        *("int4", 37, width, 1, 32, "plain"),
    )
    return AttentionArgs(empty(4, 1, width), side, side, *(empty(2, 1, width),) * 2, 0, None, True, 1.0).args()


@pytest.mark.parametrize(("width", "kernel"), [(128, "triton_tokens"), (512, "generic")])
def test_attention_over_a_quantized_cache(width: int, kernel: str) -> None:
    assert decide("attention", *cached(width)).kernel == kernel


def test_tiles_are_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cuda":
        pytest.skip("tiles are for CUDA")
    be(monkeypatch, "sm90")
    op, args = arguments("int4", 16, layout="tile_packed_8")
    assert decide(op, *args).kernel == "int4pack_mm"


@pytest.mark.parametrize("op", ["linear", "dyn_linear", "grouped_linear", "dyn_grouped_linear"])
def test_pytorchs_kernels_are_asked_first_whatever_came_first(op: str, own_tables: None) -> None:
    late = Impl(op, "late", DEVICE, lambda *args: None, lambda *args: None)
    register_kernel(late)
    names = [impl.name for impl in IMPLS[op, DEVICE]]
    assert names == sorted(names, key=lambda name: name.startswith("triton"))


LEAST = {"int_mm": "int8-dyn", "scaled_mm": "fp8-row", "int4pack_mm": "int4", "int8pack_mm": "int8"}


@pytest.mark.parametrize("kernel", LEAST)
@pytest.mark.parametrize("least", [None, 1, 5])
def test_the_table_says_from_how_many_rows_on_pytorchs_kernels_run(
    kernel: str, least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cuda" and kernel.endswith("pack_mm"):
        pytest.skip("on CUDA it has a layout of its own, or is not used")
    table = configs.of(torch.device(DEVICE))
    content = {**table.content, "least_rows": {kernel: least}}
    monkeypatch.setattr(configs, "of", lambda device: configs.Config(content, table.float8, table.scaled))
    for rows in (1, 4, 5, 64):
        op, args = arguments(LEAST[kernel], rows)
        assert (decide(op, *args).kernel == kernel) == (least is not None and rows >= least)


def candidates() -> list[Any]:
    return [
        pytest.param(op, run, refuses, id=f"{op}-{name}") for op, name, run, refuses in kernels.KERNELS if op in SCHEMES
    ]


@pytest.mark.parametrize(("op", "run", "refuses"), candidates())
def test_nobody_waits(
    op: str,
    run: Callable[..., Tensor],
    refuses: Callable[..., str | None],
    launched: list[tuple[str, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host code around launches uses only device tensors and integers that were not read from the device."""
    be(monkeypatch, "sm100")
    taken = 0
    for scheme in SCHEMES[op]:
        for rows in (1, 7, 1024):
            _, args = arguments(scheme, rows, layout="plain")
            if refuses(*args) is None:
                taken += 1
                assert waits(run, *args) == []
    assert taken
    assert launched
    given = [arg for _, args in launched for arg in args.values()]
    assert {arg.device.type for arg in given if isinstance(arg, Tensor)} == {DEVICE}
    assert {type(arg) for arg in given if not isinstance(arg, Tensor)} <= {int, float, str, bool, type(None), *DOTS}


DOTS = {type(each) for each in kernels.linear.TYPES.values()}
"""Triton's types in which tiles can multiply."""


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_nobody_waits_for_rounded_inputs(act: str, launched: list[tuple[str, dict[str, Any]]]) -> None:
    x = torch.empty(7, 256, dtype=torch.bfloat16, device=DEVICE)
    assert waits(lambda x: kernels.quantize_input(x, act, None), x) == []
    assert {"by_row", "by_block"} & {name for name, _ in launched}


@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4", "mxfp4"])
def test_nobody_waits_for_rounded_weights(scheme: str, launched: list[tuple[str, dict[str, Any]]]) -> None:
    x = torch.empty(7, 256, dtype=torch.bfloat16, device=DEVICE)
    assert waits(kernels.round_matrices, x, format_json(preset(scheme).weight)) == []
    assert [name for name, _ in launched] == ["blocks_of_rows"]


@pytest.mark.parametrize("op", ["dequantize", "embedding"])
def test_nobody_waits_for_rows(op: str, launched: list[tuple[str, dict[str, Any]]]) -> None:
    _, args = arguments("int4", 1, layout="plain")
    weight = args[1:11]
    if op == "dequantize":
        assert waits(kernels.dequantize, *weight, torch.bfloat16) == []
    else:
        ids = torch.empty(3, dtype=torch.int64, device=DEVICE)
        assert waits(kernels.embedding, ids, *weight, torch.bfloat16) == []
    assert [name for name, _ in launched] == ["_rows"]


def test_nobody_waits_for_attention(launched: list[tuple[str, dict[str, Any]]]) -> None:
    q, *rest = cached(128)
    assert waits(kernels.attend, q, *rest) == []
    assert [name for name, _ in launched] == ["attend", "attend", "join"]


def test_a_wait_would_be_seen() -> None:
    def asks(x: Tensor) -> Tensor:
        return kernels.quantize_input(x * x.amax().item(), "int8", None)[0]

    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        waits(asks, torch.empty(7, 256, dtype=torch.bfloat16, device=DEVICE))
