"""Triton's attention over quantized keys and values, against float64. Run by test_triton.py, like on_triton.py, which
covers the samples of the op."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.backends.triton import attention, configs, kernels
from bitport.cache import KeyValueStore
from bitport.ops import OPS, Impl, Sample, Weight, register_kernel, unregister_kernel, use_kernel
from bitport.ops.attention import AttentionArgs, sample
from tests.backends.products import shortfall
from tests.turns import turns

DEVICE, CPU = torch.device(os.environ["TRITON_DEVICE"]), torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

if DEVICE.type == "cpu":
    from tests.backends import interpreter

    interpreter.correct()


def moved(call: AttentionArgs, device: torch.device) -> list[Any]:
    """The arguments on ``device``; a tensor already there keeps its strides."""
    return [arg.to(device) if isinstance(arg, Tensor) else arg for arg in call.args()]


def run(call: AttentionArgs) -> Tensor:
    args = moved(call, DEVICE)
    assert kernels.refuses_attention(*args) is None
    return kernels.attend(*args).cpu()


def missing(of: Sample) -> float:
    return shortfall(of, run(AttentionArgs.of(*of.args)))


FORMATS = (
    ("int8", "int8-asym", 16),
    ("int4-g16", "int6-channel", 16),
    ("int4-g32", "int4-g64-fzero", 128),
    ("int2-b32x1", "int2-g32", 64),
    ("int2-b32x1-sym", "int3-g16", 80),
    ("fp8-wo", "fp8-wo-g32", 33),
    ("fp8-e5m2-wo", "mxfp8-wo", 160),
    ("mxfp4-wo", "nf4-g48", 24),
    ("int6-channel", "int5-g16", 256),
    ("int5-b8x20", "int4-b3x5", 44),
)


@pytest.mark.parametrize(("keys", "values", "width", "dtype"), turns(FORMATS, [FP32, BF16, FP16]))
def test_formats_and_widths(keys: str, values: str, width: int, dtype: torch.dtype) -> None:
    shape = (2, 6, 2, width)
    of = sample(f"{width}", CPU, dtype, keys, values, shape=shape, value_width=width, tokens=70, causal=True)
    assert missing(of) <= 0


class Launches:
    """Records the grids and constants with which a kernel is launched; without a kernel nothing runs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.grids: list[tuple[int, ...]] = []
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self.grids.append(grid)
            self.constants.append(constants)
            if self.kernel is not None:
                self.kernel[grid](*args, **constants)

        return launch


def test_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA starts up to 2^31 - 1 programs along the first axis, and 65535 along the others. Float32 of 256 columns is
    read in the smallest tiles, of 16 rows."""
    launches = Launches(None)
    monkeypatch.setattr(attention, "attend", launches)
    monkeypatch.setattr(attention, "join", Launches(None))
    call = AttentionArgs.of(*sample("", CPU, FP32, "int8", "int8", shape=(1, 8, 1, 256), value_width=256).args)
    rows = 1 << 17
    attention.attention(call._replace(q=torch.empty(1, 8, rows, 256, device="meta")), configs.of(DEVICE))
    assert launches.grids == [(8 * rows // 16, 1)]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("width", [3, 16, 128, 256])
def test_no_sum_is_shorter_than_threads_read(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product sums over a key's columns, then over tokens. Triton 3.6 lets each of four threads read eight 4-bit
    codes in a row, so sums of fewer than 32 are wrong on a GPU, though not in the interpreter."""
    launches = Launches(attention.attend)
    monkeypatch.setattr(attention, "attend", launches)
    of = sample("", CPU, dtype, "int4", "int5-g16", shape=(1, 2, 1, width), value_width=width, tokens=40, dense=5)
    assert missing(of) <= 0
    assert len(launches.constants) == 2
    for each in launches.constants:
        summed = min(each["KEYS"].width.value, each["BT"])
        assert summed >= (32 if configs.of(DEVICE).bfloat16 else 16)


@pytest.mark.parametrize(
    ("heads", "rows"),
    [(heads, rows) for heads in ((1, 1), (3, 1), (20, 1), (5, 5)) for rows in (1, 7, 70) if heads[0] * rows < 500],
)
def test_heads_and_rows(heads: tuple[int, int], rows: int) -> None:
    of = sample("", CPU, FP32, "int8", "int4-g16", shape=(2, *heads, 32), rows=rows, tokens=80, causal=True)
    assert missing(of) <= 0


@pytest.mark.parametrize(("tokens", "programs"), turns([1, 127, 128, 129, 400], [20, 1, 1000]))
def test_stretches_of_any_length(tokens: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all tokens, up to as many as there are steps."""
    content = configs.of(DEVICE).content
    config = configs.Config({**content, "gemv": {**content["gemv"], "programs": programs}})
    monkeypatch.setattr(configs, "of", lambda device: config)
    for first, dense in ((0, 0), (5, 300), (3, 3)):
        of = sample("", CPU, FP32, "int8", "int8", rows=1 + dense % 2, tokens=tokens, first=first, dense=dense)
        assert missing(of) <= 0


def test_budgets_can_fail() -> None:
    """One of 2368 codes off by half the range is noticed."""
    of = sample("", CPU, FP32, "int8", "int8")
    call = AttentionArgs.of(*of.args)
    call.values.data[0, 0, 5, 7] ^= 128
    assert missing(of) > 30


def changed(**fields: Any) -> tuple[Tensor, Tensor]:
    """(the result, that of the generic kernel) of a call with ``fields`` replaced."""
    call = AttentionArgs.of(*sample("changed", CPU, FP32, "int8", "int8", rows=4, mask="float").args)._replace(**fields)
    return run(call), OPS["attention"].generic(*moved(call, CPU))


def test_masks_may_lie_anyhow() -> None:
    mask = torch.randn(2, 1, 37, 4).transpose(2, 3)
    for each in (mask, mask > 0, mask[:, :, :1], mask[:1].to(BF16), mask[..., :1]):
        got, wanted = changed(mask=each)
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_nothing_is_zeros() -> None:
    mask = torch.ones(1, 1, 4, 37, dtype=torch.bool)
    mask[:, :, 2] = False
    got, wanted = changed(mask=mask)
    assert not got[:, :, 2].any()
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_tokens_that_a_mask_hides_from_all_rows_are_not_read() -> None:
    """Those of whole steps of the loop, which are of 32 tokens here, and of whole splits."""
    call = AttentionArgs.of(*sample("hidden", CPU, FP32, "int8", "int8", rows=4, tokens=320).args)
    mask = torch.zeros(1, 1, 4, 320, dtype=torch.bool)
    mask[..., :20], mask[..., 200:207], mask[:, :, 1, 210] = True, True, True
    spoiled = torch.where(mask.any(2).view(10, 32).any(1), 1.0, torch.nan).repeat_interleave(32)[:, None]
    hidden = call._replace(
        mask=mask,
        keys=call.keys._replace(scale=call.keys.scale * spoiled),
        values=call.values._replace(scale=call.values.scale * spoiled),
    )
    wanted = OPS["attention"].generic(*moved(call._replace(mask=mask), CPU))
    assert torch.allclose(run(hidden), wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_a_mask_may_lie_far_apart() -> None:
    """Beyond 2^31 elements, as in the mask of a text of 46,341 tokens. On a CPU, untouched pages take no memory. The
    mask is created on the device, since to(device) would pack it."""
    step = 1 << 30
    mask = torch.empty(3 * step + 37, dtype=torch.bool, device=DEVICE).as_strided((1, 1, 4, 37), (0, 0, step, 1))
    mask[:] = torch.rand(4, 37, device=DEVICE) > 0.5
    assert mask.to(DEVICE).stride(2) == step
    got, wanted = changed(mask=mask)
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_scores_far_apart_and_masks_of_the_largest_size() -> None:
    """Vanishing weights become zero, and nothing overflows; -3.4e38 everywhere gives the mean of all values."""
    mask = torch.zeros(1, 1, 4, 37)
    mask[..., 20:] = torch.finfo(FP32).min
    got, wanted = changed(mask=mask, scale=3000.0)
    assert got.isfinite().all()
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4)
    got, wanted = changed(mask=torch.full((1, 1, 1, 37), -3.4e38))
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_not_a_number_stays_in_its_row() -> None:
    mask = torch.zeros(1, 1, 4, 37)
    mask[:, :, 1, 30] = float("nan")
    got, _ = changed(mask=mask)
    assert got[:, :, 1].isnan().all()
    assert got[:, :, (0, 2, 3)].isfinite().all()


def test_a_store_is_read_as_it_lies() -> None:
    """With the spare room behind its rows, which is not copied away."""
    store = KeyValueStore("int4")
    for tokens in (150, 1):
        store.append(*torch.randn(2, 2, 2, tokens, 64, device=DEVICE))
    seen: list[AttentionArgs] = []

    def watched(*args: Any) -> Tensor:
        seen.append(AttentionArgs.of(*args))
        return kernels.attend(*args)

    impl = Impl("attention", "watched", DEVICE.type, watched, kernels.refuses_attention)
    register_kernel(impl)
    q = torch.randn(2, 4, 1, 64, device=DEVICE)
    try:
        with use_kernel("attention=watched"):
            got = store.attend(q)
    finally:
        unregister_kernel(impl)
    (call,) = seen
    parts = attention.of_codes(call.keys)[0]
    assert not call.keys.data.is_contiguous()
    assert (parts.data.data_ptr(), parts.scale.data_ptr()) == (call.keys.data.data_ptr(), call.keys.scale.data_ptr())
    assert torch.allclose(got, OPS["attention"].generic(*call.args()), rtol=1e-5, atol=1e-5)


def test_words_are_loaded_where_they_begin() -> None:
    """Memory of another library begins anywhere, and its tensor at the beginning of that."""
    for begin in range(8):
        data = torch.frombuffer(bytearray(72), dtype=torch.uint8, offset=begin, count=64).view(1, 1, 4, 16)
        assert data.storage_offset() == 0
        _, fixed = attention.of_codes(Weight(data, torch.ones(1, 1, 4, 1), None, None, "int4", 4, 32, 1, 32, "plain"))
        assert fixed.words.value == (data.data_ptr() % 4 == 0)


def test_what_is_not_taken_is_said() -> None:
    wide = AttentionArgs.of(*sample("", CPU, FP32, "int8", "int8", shape=(1, 1, 1, 300)).args)
    assert attention.refuses(wide) == "keys may be 256 wide, not 300"
    call = AttentionArgs.of(*sample("", CPU, FP32, "int8", "int8").args)
    assert attention.refuses(call._replace(q=call.q[:, :, :0])) == "there is nothing to compute"
