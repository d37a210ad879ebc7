"""Every kernel compiled to machine code for absent GPUs: the interpreter accepts code that a compiler may reject. Run
by test_triton.py in a separate process. TRITON_TARGETS names the targets; TRITON_ALL=1 takes every scheme."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from bench.gpu import instructions
from bench.gpu.absent import SHARED, TARGETS, Absent, compiling
from bitport.backends.triton import configs, kernels, probe, scaled
from bitport.numerics import ACTIVATIONS, NUMBER_TYPES, Format, quantize
from bitport.ops.attention import AttentionArgs, sample
from bitport.ops.convert import format_json, to_list
from bitport.schemes import PRESETS, Scheme, preset
from tests.backends.products import products

BINARY = {"cuda": "cubin", "hip": "hsaco"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = ("largest", "by_row", "by_block", "blocks_of_rows")
ASKED = os.environ["TRITON_TARGETS"].split(",")
EVERY = "TRITON_ALL" in os.environ
SOME = (
    *(("int4", BF16, 1), ("int4-g32-sym", FP16, 16), ("int3-channel", BF16, 64), ("mxfp4-wo", FP32, 64)),
    *(("nf4-g32", BF16, 16), ("fp8-wo", BF16, 16)),
    *(
        ("int8-dyn", BF16, 64),
        ("int4-int8", BF16, 16),
        ("fp8-block", BF16, 1),
        ("nvfp4", BF16, 16),
        ("fp8-row", BF16, 64),
    ),
)
ALL = tuple(
    (name, dtype, m)
    for name in (*PRESETS, "int4-g32", "int4-g20", "int4-g32-fzero", "int8-dyn-g64-asym", "int4-tensor", "mxfp8-wo")
    for dtype in (BF16, FP16, FP32)
    for m in (1, 16, 64)
)


@pytest.fixture(params=ASKED)
def made(request: pytest.FixtureRequest) -> Iterator[list[CompiledKernel]]:
    """Collects the kernels compiled for the target instead of launched, and checks each."""
    with compiling(request.param) as compiled:
        yield compiled
    target = TARGETS[request.param]
    for kernel in compiled:
        assert kernel.asm[BINARY[target.backend]]
        assert not getattr(kernel.metadata, "global_scratch_size", 0), (
            f"{kernel.name}: memory that a graph's pool does not hold"
        )
        assert kernel.metadata.shared <= SHARED[request.param], kernel.name
        assert kernel.metadata.enable_fp_fusion == (kernel.name not in ROUNDING), kernel.name


@pytest.mark.parametrize(
    ("scheme", "dtype", "m", "k"),
    [
        pytest.param(scheme, dtype, m, k, id=f"{scheme}-{str(dtype)[6:]}-{m}x{k}")
        for scheme, dtype, m in (ALL if EVERY else SOME)
        for k in ((1024, 1003) if m == 16 else (1024,))
    ],
)
def test_products(scheme: str, dtype: torch.dtype, m: int, k: int, made: list[CompiledKernel]) -> None:
    (sample,) = products(scheme, dtype, "plain", n=128, k=k, m=m)
    kernel = kernels.linear.gemv if m == 1 and scheme != "fp8-block" else kernels.linear.tiles
    (kernels.run_dyn if preset(scheme).act else kernels.run_linear)(kernel)(*sample.args)
    assert kernel.__name__ in [each.name for each in made]


def test_the_probe_finds_a_compiler_for_the_chip(made: list[CompiledKernel]) -> None:
    probe.fault.cache_clear()
    assert probe.fault() is None
    assert made


class Without(Absent):
    """A driver that fails, since Triton compiles its own in C first."""

    def get_current_target(self) -> GPUTarget:
        raise RuntimeError("Failed to find C compiler.")


@pytest.mark.parametrize(
    ("driver", "reason"),
    [(Absent(GPUTarget("hip", "gfx803", 64)), "PassManager"), (Without(TARGETS["sm90"]), "Failed to find C compiler")],
)
def test_the_probe_says_why_triton_is_of_no_use(driver: Absent, reason: str) -> None:
    """The generic kernels run instead; otherwise every product on a chip that Triton does not know would end in a
    traceback."""
    triton.runtime.driver.set_active(driver)
    probe._store.device_caches.clear()
    probe.fault.cache_clear()
    fault = probe.fault()
    assert fault is not None
    assert "compiles nothing for this device" in fault
    assert reason in fault


def test_the_probe_names_the_oldest_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.4.0+rocm")
    assert "3.6 or later is needed" in str(probe.missing())


@pytest.mark.parametrize(
    "scheme",
    ["int3", "int4-g32", "int8-dyn", *(["int2", "int4", "nf4", "int8", "int4-int8", "fp8-row"] if EVERY else [])],
)
def test_one_output(scheme: str, made: list[CompiledKernel]) -> None:
    """For example a head that gives a score. The compiler takes an argument of 1 as a constant."""
    for m in (1, 4):
        (sample,) = products(scheme, BF16, "plain", n=1, k=1024, m=m)
        (kernels.run_dyn if preset(scheme).act else kernels.run_linear)(kernels.linear.tiles)(*sample.args)
    assert [each.name for each in made].count("tiles") == 2


def test_numbers_of_rows_share_a_kernel(made: list[CompiledKernel]) -> None:
    """Compiling takes seconds: a number that 16 divides, or a split of a single step, must not compile another
    kernel."""
    for m in (9, 11, 16):
        (sample,) = products("int4", BF16, "plain", n=128, k=1024, m=m)
        kernels.run_linear(kernels.linear.tiles)(*sample.args)
    assert [each.name for each in made] == ["tiles", "combine"] * 3
    assert len({each.hash for each in made if each.name == "tiles"}) == 1


def test_long_steps_take_no_more_memory(made: list[CompiledKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are measured with their own step sizes; scales per 128 columns of x make longer steps. Steps are whole, so
    sizes match only roughly."""
    tile = {"rows": None, "BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4, "programs": 1}
    config = configs.Config({**configs.of(torch.device("cpu")).content, "tiles": [tile]})
    monkeypatch.setattr(configs, "of", lambda device: config)
    for scheme in ("fp8-row", "fp8-block"):
        (sample,) = products(scheme, FP32, "plain", n=256, k=1024, m=300)
        kernels.run_dyn(kernels.linear.tiles)(*sample.args)
    short, long = (each.metadata.shared for each in made if each.name == "tiles")
    if not {"sm70", "sm75"} & set(ASKED):  # they do not prefetch
        assert long <= 1.25 * short


@pytest.mark.parametrize("scheme", ["int4", "nvfp4-wo"])
def test_rows(scheme: str, made: list[CompiledKernel]) -> None:
    (sample,) = products(scheme, BF16, "plain", n=128, k=1024, m=1)
    weight = sample.args[1:11]
    kernels.dequantize(*weight, BF16)
    kernels.embedding(torch.zeros(3, dtype=torch.int64), *weight, BF16)
    assert [each.name for each in made] == ["_rows", "_rows"]


def experts(scheme: str) -> list[Any]:
    """Arguments for eight experts with the same weight."""
    (sample,) = products(scheme, BF16, "plain", n=128, k=1024, m=64)
    x, *rest = sample.args
    parts = [None if part is None else torch.stack([part.view(torch.uint8)] * 8).view(part.dtype) for part in rest[:4]]
    ends = torch.arange(8, 72, 8, dtype=torch.int32)
    return [x, ends, *parts, *rest[4:10], *((preset(scheme).act,) if preset(scheme).act else ())]


@pytest.mark.parametrize("scheme", ["int4", "int8-dyn", "mxfp4"])
def test_experts(scheme: str, made: list[CompiledKernel]) -> None:
    kernels.grouped(*experts(scheme))
    assert "tiles" in [each.name for each in made]


LENGTHS = (1024, 1003)
"""Of a row: one that a word divides, and one that it does not."""


@pytest.mark.parametrize(
    ("dtype", "act", "k"),
    [
        pytest.param(dtype, act, k, id=f"{str(dtype)[6:]}-{act}-{k}")
        for at, act in enumerate(ACTIVATIONS)
        for dtype in ((BF16, FP32) if EVERY or act == "nvfp4" else (BF16,))
        for k in (LENGTHS if EVERY else (LENGTHS[at % len(LENGTHS)],))
    ],
)
def test_inputs(dtype: torch.dtype, act: str, k: int, made: list[CompiledKernel]) -> None:
    kernels.quantize_input(torch.randn(4, k, dtype=dtype), act, None)
    first = ["largest"] if ACTIVATIONS[act].block == (0, 0) or ACTIVATIONS[act].global_scale else []
    by = "by_row" if not all(ACTIVATIONS[act].block) else "by_block"
    assert [each.name for each in made] == [*first, by]


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("int4-g32", BF16),
        ("int8", BF16),
        ("nf4", BF16),
        ("mxfp4", FP32),
        *([("fp8-wo", FP32), ("int2-g16-fzero", BF16)] if EVERY else []),
    ],
)
def test_rounding_tokens(scheme: str, dtype: torch.dtype, made: list[CompiledKernel]) -> None:
    """The next token, and more of them, compile nothing new."""
    fmt = preset(scheme).weight
    whole = [
        part if part.numel() else None for part in to_list(quantize(torch.randn(8, 512, 128, dtype=dtype), fmt))[:3]
    ]
    for first, tokens in ((100, 1), (101, 1), (128, 16)):
        assert kernels.round_into(torch.randn(8, tokens, 128, dtype=dtype), format_json(fmt), first, *whole)
    assert [each.name for each in made] == ["blocks_of_rows"] * 3
    assert len({each.hash for each in made}) == 1


@pytest.mark.parametrize(
    ("format", "rows", "dtype", "mask"),
    [
        ("int4-g32", 1, FP32, ""),
        ("int8", 70, BF16, "bool"),
        *([("int4-g32", 1, BF16, "bool"), ("int8", 70, FP32, "")] if EVERY else []),
    ],
)
def test_attention(format: str, rows: int, dtype: torch.dtype, mask: str, made: list[CompiledKernel]) -> None:
    """Over quantized and dense tokens. One more token, in memory with room for it, compiles nothing new. With half the
    rows operands would always be in registers, but each row would take 11 % more instructions (sm90, float32, 128
    wide): moving operands to local memory and back must stay below a tenth of a loop."""
    sizes: dict[str, Any] = {"shape": (1, 8, 2, 128), "value_width": 128, "rows": rows, "dense": 70}
    of = sample("", torch.device("cpu"), dtype, format, format, tokens=201, causal=not mask, mask=mask, **sizes)
    call = AttentionArgs.of(*of.args)
    for tokens in (200, 201):
        sides = (
            side._replace(n=tokens, **{part: getattr(side, part)[:, :, :tokens] for part in ("data", "scale")})
            for side in (call.keys._replace(zero=None), call.values._replace(zero=None))
        )
        shown = None if call.mask is None else call.mask[..., : tokens + 70]
        kernels.attend(*call._replace(mask=shown, **dict(zip(("keys", "values"), sides, strict=True))).args())
    assert [each.name for each in made] == ["attend", "attend", "join"] * 2
    assert [each.hash for each in made[:3]] == [each.hash for each in made[3:]]
    if ASKED == ["sm90"]:
        for each in made[:2]:
            loop = instructions.inner_loop(instructions.disassembled(each)[0])
            assert sum(opcode.startswith(("LDL", "STL")) for opcode in loop) < 0.1 * len(loop)


UNIT_TAKES_SCALES = {
    **dict.fromkeys(("sm100", "sm103"), ("ptx", re.compile(r"tcgen05\.mma\S*block_scale"))),
    "sm120": ("ptx", re.compile(r"mma\.sync\S*block_scale")),
    "gfx950": ("amdgcn", re.compile(r"v_mfma_scale")),
}


@pytest.mark.parametrize("act", scaled.BLOCKS)
def test_scales_go_to_the_unit(act: str, made: list[CompiledKernel], request: pytest.FixtureRequest) -> None:
    """The weight is not decoded: the instruction takes scales, wherever the predicate says there is one."""
    target = request.node.callspec.params["made"]
    for k in (1024, 992):
        (sample,) = products(act, BF16, "plain", n=256, k=k, m=200)
        refused = kernels.refuses_scaled(*sample.args)
        assert (refused is None) == (act in configs.multiplies_scaled(target))
        if refused is not None:
            continue
        kernels.run_scaled(*sample.args)
        kernel = next(each for each in made[::-1] if each.name == "scaled")
        form, instruction = UNIT_TAKES_SCALES[target]
        assert instruction.search(kernel.asm[form])


E5M2 = Format(dtype="float8_e5m2", block=(1, 32), scale="e8m0", scale_rule="rceil")
UNLIKE = {
    "mxfp4 by mxfp8": (dataclasses.replace(preset("mxfp4"), act="mxfp8"), configs.multiplies_mixed),
    "mxfp8 by mxfp4": (dataclasses.replace(preset("mxfp8"), act="mxfp4"), configs.multiplies_mixed),
    "e5m2 by mxfp8": (Scheme(weight=E5M2, act="mxfp8"), configs.multiplies_scaled),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_scales_of_unlike_sides_go_to_the_unit(
    name: str, made: list[CompiledKernel], request: pytest.FixtureRequest
) -> None:
    target = request.node.callspec.params["made"]
    scheme, has = UNLIKE[name]
    (sample,) = products(scheme, BF16, "plain", n=256, k=1024, m=200)
    refused = kernels.refuses_scaled(*sample.args)
    assert (refused is None) == bool(has(target))
    if refused is not None:
        return
    kernels.run_scaled(*sample.args)
    form, instruction = UNIT_TAKES_SCALES[target]
    assert instruction.search(next(each for each in made[::-1] if each.name == "scaled").asm[form])


@pytest.mark.parametrize("scheme", scaled.BLOCKS)
def test_scales_of_experts_go_to_the_unit(
    scheme: str, made: list[CompiledKernel], request: pytest.FixtureRequest
) -> None:
    target = request.node.callspec.params["made"]
    args = experts(scheme)
    refused = kernels.refuses_grouped_scaled(*args)
    assert (refused is None) == (scheme in configs.multiplies_scaled(target))
    if refused is not None:
        return
    kernels.run_grouped_scaled(*args)
    form, instruction = UNIT_TAKES_SCALES[target]
    assert instruction.search(next(each for each in made[::-1] if each.name == "scaled").asm[form])


INT8 = {
    "cuda": ("ptx", re.compile(r"mma\S*\.s8\.s8|mma\S*kind::i8")),
    "hip": ("amdgcn", re.compile(r"v_mfma_i32_\S*i8")),
}
FLOAT8 = ("ptx", re.compile(r"mma\S*\.e4m3\.e4m3|mma\S*kind::f8f6f4"))


@pytest.mark.parametrize(
    ("scheme", "m"),
    [
        *(("int8-dyn", 16), ("int8-dyn", 300), ("int8-dyn-g64", 300), ("int4-int8", 300), ("int4-int8-g32-sym", 16)),
        *([("int8-dyn-g64", 16), ("int4-int8", 16), ("int4-int8-g32-sym", 300)] if EVERY else ()),
    ],
)
def test_int8_is_multiplied_as_such(
    scheme: str, m: int, made: list[CompiledKernel], request: pytest.FixtureRequest
) -> None:
    """Groups too, whose scales are applied to sums of a group; before sm80 the compiler would not use the unit."""
    target = request.node.callspec.params["made"]
    (sample,) = products(scheme, BF16, "plain", n=256, k=1024, m=m)
    kernels.run_dyn(kernels.linear.tiles)(*sample.args)
    form, instruction = INT8[TARGETS[target].backend]
    found = instruction.search(next(each for each in made if each.name == "tiles").asm[form])
    assert bool(found) == configs.multiplies_int8(target)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_float8_is_multiplied_as_such(scheme: str, made: list[CompiledKernel], request: pytest.FixtureRequest) -> None:
    """Where the chip supports it; elsewhere it has been converted to bfloat16."""
    target = request.node.callspec.params["made"]
    (sample,) = products(scheme, BF16, "plain", n=256, k=1024, m=300)
    kernels.run_dyn(kernels.linear.tiles)(*sample.args)
    if TARGETS[target].backend == "cuda":
        form, instruction = FLOAT8
        found = instruction.search(next(each for each in made if each.name == "tiles").asm[form])
        assert bool(found) == configs.multiplies_float8(target)


@pytest.mark.parametrize("target", ["sm89", "sm90", "sm120"])
def test_steps_of_float8_are_added_in_float32(target: str) -> None:
    """Matrix units keep some 13 bits of a sum. The compiler may not leave the sum over steps to them too."""
    if "sm90" not in ASKED:
        pytest.skip("compiled for targets of its own, beside sm90")
    for m in (16, 300):
        (sample,) = products("fp8-row", BF16, "plain", n=256, k=1024, m=m)
        with compiling(target) as made:
            kernels.run_dyn(kernels.linear.tiles)(*sample.args)
        (code,) = (each.asm["ttgir"] for each in made if each.name == "tiles")
        assert re.search(r"dot .*f8E4M3FN", code)
        assert "arith.addf" in code


def test_codes_of_one_row_are_read_in_vectors(made: list[CompiledKernel], request: pytest.FixtureRequest) -> None:
    """16 bytes per thread where the sizes divide; x, which is smaller, is read 8 bytes at a time. Read from PTX."""
    widths = []
    for k in (4096, 4100):
        (sample,) = products("int4-channel", BF16, "plain", n=256, k=k, m=1)
        kernels.run_linear(kernels.linear.gemv)(*sample.args)
        target = TARGETS[request.node.callspec.params["made"]]
        if target.backend != "cuda" or target.arch < 80:
            return  # it has no asynchronous copies to shared memory
        text = [each for each in made if each.name == "gemv"][-1].asm["ptx"]
        widths.append(set(re.findall(r"cp\.async\.c\S+ \[[^\]]+\], \[[^\]]+\], (0x\w+)", text)))
    assert "0x10" in widths[0]
    assert "0x10" not in widths[1], "rows that start between words are read byte by byte"


ROOM = (
    *(("int4-g32", BF16, 16), ("int8", BF16, 1)),
    *(("fp8-wo", BF16, 16), ("int4-int8", BF16, 16)),
)
"""Schemes that need few, with the blocks measured on an H100; for int4, blocks that need more were the fastest."""


@pytest.mark.parametrize(
    ("scheme", "dtype", "m"), [pytest.param(*each, id=f"{each[0]}-{str(each[1])[6:]}-{each[2]}") for each in ROOM]
)
def test_few_rows_wait_for_memory_alone(scheme: str, dtype: torch.dtype, m: int) -> None:
    """On H100, with a goal of 85 % of the bandwidth: 3.35e12 B/s of int4 with a scale (2 B) and a zero (1 B) per 128
    are 5.4e12 weights a second, 23.5 per clock and multiprocessor (132 at 1.755 GHz). A loop that keeps its pipes 70 %
    busy may then take 3.8 instructions per weight (128 a clock), 1.9 of them on integers (64); this is asserted pipe by
    pipe, for the bytes that each scheme moves. Bytes in flight must cover the memory latency. Codes are read 16 bytes
    at a time, or 8 where a unit has no more."""
    if "sm90" not in ASKED:
        pytest.skip("counted for sm90")
    loop = instructions.of("sm90", scheme, dtype, m)
    assert loop.has_room(), loop
    assert not loop.spilled
    chip = instructions.CHIPS["sm90"]
    assert loop.ahead >= chip.bandwidth * instructions.LATENCY / chip.multiprocessors
    copies = {name for name in loop.opcodes if name.startswith("LDGSTS") and name.endswith((".128", ".64"))}
    assert copies >= (
        {"LDGSTS.E.64"} if NUMBER_TYPES[preset(scheme).weight.dtype].bits == 8 else {"LDGSTS.E.BYPASS.128"}
    )


@pytest.mark.parametrize(
    ("target", "scheme", "m"),
    [
        *(("sm90", "nf4", 1), ("sm90", "nvfp4-wo", 16), ("sm90", "int3", 16)),
        *([("sm90", "nf4", 64), ("sm90", "mxfp4-wo", 1)] if EVERY else []),
        *([("sm90", "int4-g32-fzero", 1), ("sm90", "int7", 1)] if EVERY else []),
        *(("sm80", "nf4", 1), ("sm80", "fp8-wo", 1), ("sm80", "mxfp8-wo", 16), ("sm80", "fp8-e5m2-wo", 1)),
    ],
)
def test_no_scheme_takes_so_many_instructions_that_bf16_is_faster(target: str, scheme: str, m: int) -> None:
    """A bfloat16 product waits for two bytes per weight. Pipes that are 70 % busy must process as many weights in that
    time."""
    if target not in ASKED:
        pytest.skip(f"counted for {target}")
    loop, chip = instructions.of(target, scheme, BF16, m), instructions.CHIPS[target]
    assert instructions.SHARE * loop.ceiling >= instructions.GOAL * chip.bandwidth / 2, loop
    assert not loop.spilled
