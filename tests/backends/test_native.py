"""The native CPU kernels, in every variant that this processor can run, against float64; and bitport without them."""

from __future__ import annotations

import itertools
import platform
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import bitport as bp
from bitport.backends import cpu
from bitport.backends.cpu import native
from bitport.backends.cpu.crossovers import CPUINFO
from bitport.backends.cpu.dispatcher import TORCH
from bitport.backends.cpu.native import Library
from bitport.errors import KernelError
from bitport.numerics import NUMBER_TYPES, dequantize, pack_bits, quantize, sqnr
from bitport.ops import OPS, Impl, decide, samples, use_kernel
from bitport.ops.reference import value_of
from bitport.ops.select import IMPLS
from bitport.schemes import preset
from bitport.tensor import QTensor, from_parts
from tests.backends.products import products, shortfall
from tests.backends.taken import compiled
from tests.scripts import printed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIBRARY = cpu.LIBRARY

SCHEMES = (
    *(
        "int4",
        "int4-sym",
        "int4-g32",
        "int4-g64-fzero",
        "int4-channel-sym",
        "int4-g48",
        "int4-tensor",
        "int4-b8x16",
        "nf4",
    ),
    *("int2", "int2-g16", "int3", "int5", "int6-g32", "int7-sym", "int8", "int8-asym", "int8-g64-fzero"),
    *("fp8-wo", "fp8-block-wo", "mxfp8-wo", "mxfp6-wo", "mxfp4-wo", "nvfp4-wo"),
)
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])


VARIANTS = {
    "avx2": "avx2 fma f16c",
    "avx512_vnni": "avx512f avx512bw avx512vl avx512dq avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx": "amx_tile amx_int8 amx_bf16",
}
"""Variant for x86 -> what it needs besides the ones before it, in the words of Linux."""


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPUINFO.is_file(), reason="for x86 on Linux")
@pytest.mark.skipif(not isinstance(LIBRARY, Library), reason="the native kernels are not compiled")
def test_variants_are_those_that_linux_lists() -> None:
    flags = set(re.findall(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)[0].split())
    able = itertools.takewhile(lambda variant: flags.issuperset(VARIANTS[variant].split()), VARIANTS)
    assert LIBRARY.available == ("scalar", *able)


def kernel(op: str) -> Impl:
    return next(impl for impl in IMPLS[op, "cpu"] if impl.name == "native")


@DTYPES
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_kind_of_input(isa: str, scheme: str, dtype: torch.dtype) -> None:
    for sample in products(scheme, dtype, "cpu_tiles", n=48, k=256):
        assert kernel("linear").supports(*sample.args) is None
        assert shortfall(sample, OPS["linear"].overload(*sample.args)) <= 0, sample.name


@DTYPES
@pytest.mark.parametrize("m", [1, 2, 3, 5, 16, 17, 31, 33, 64, 65, 100])
@pytest.mark.parametrize("scheme", ["int4", "int4-g96", "int8-asym", "mxfp4-wo", "nvfp4-wo"])
def test_rows_that_fill_no_tile(isa: str, scheme: str, m: int, dtype: torch.dtype) -> None:
    """The code path depends on the number of rows and on the groups: one per row, groups split by a stretch of K,
    groups smaller than a step. N and K do not fill tiles either."""
    for n, k in ((1, 128), (33, 384), (50, 100), (40, 608)):
        for sample in products(scheme, dtype, "cpu_tiles", n=n, k=k, m=m):
            assert shortfall(sample, OPS["linear"].overload(*sample.args)) <= 0, (n, k)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8"])
def test_more_rows_than_are_worked_off_at_once(isa: str, scheme: str) -> None:
    for sample in products(scheme, BF16, "cpu_tiles", n=40, k=320, m=1100):
        assert shortfall(sample, OPS["linear"].overload(*sample.args)) <= 0


@pytest.mark.parametrize(("scheme", "k"), [("int4", 4544), ("int4-int8", 8800), ("fp8-block", 4520)])
def test_rows_so_long_that_only_a_span_of_them_stays_in_the_cache(isa: str, scheme: str, k: int) -> None:
    op = "linear" if scheme == "int4" else "dyn_linear"
    for sample in products(scheme, BF16, "cpu_tiles", n=17 * 32, k=k, m=130):
        assert shortfall(sample, OPS[op].overload(*sample.args)) <= 0


@pytest.mark.parametrize(("scheme", "m"), [("int4", 1400), ("int4-int8", 2800)])
def test_more_of_x_than_is_laid_out_at_once(isa: str, scheme: str, m: int) -> None:
    """16 MiB, of two bytes per number or of one."""
    op = "linear" if scheme == "int4" else "dyn_linear"
    n = 3 if isa == "scalar" else 250  # slow, and the same whatever n is
    for sample in products(scheme, BF16, "cpu_tiles", n=n, k=6200, m=m):
        assert shortfall(sample, OPS[op].overload(*sample.args)) <= 0


@pytest.mark.parametrize("scheme", ["int4", "int4-int8"])
def test_results_that_go_past_the_caches(isa: str, scheme: str) -> None:
    """Two megabytes of y with rows one page apart; with one more output the rows do not fill cache lines."""
    op = "linear" if scheme == "int4" else "dyn_linear"
    for n in (2048, 2049):
        for sample in products(scheme, BF16, "cpu_tiles", n=n, k=64, m=520):
            assert shortfall(sample, OPS[op].overload(*sample.args)) <= 0


def weight_of(scheme: str, k: int = 512) -> tuple[QTensor, torch.Tensor]:
    """A packed weight and its float64 value."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(64, k, generator=generator).to(BF16)
    quantized = bp.quantize_tensor(weight, scheme)
    return quantized.to_layout("cpu_tiles"), quantized.dequantize(torch.float32).double()


@pytest.mark.parametrize("size", [20, 100, 400, 3e3, 1e5])
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_one_number_far_above_the_others(isa: str, scheme: str, m: int, size: float) -> None:
    """Outputs with zero weight for the outlier keep 50 dB."""
    generator = torch.Generator().manual_seed(8)
    weight, x = torch.randn(64, 512, generator=generator), torch.randn(m, 512, generator=generator)
    weight[:32, 77] = 0
    x[:, 77] = size
    packed, x = bp.quantize_tensor(weight.to(BF16), scheme).to_layout("cpu_tiles"), x.to(BF16)
    exact = x.double() @ packed.dequantize(torch.float32).double().T
    y = F.linear(x, packed)
    assert sqnr(exact[:, :32], y[:, :32]) > 50
    assert sqnr(exact, y) > 50


@DTYPES
@pytest.mark.parametrize("scheme", ["int8-asym", "int4-fzero", "int2-g32"])
def test_rows_of_zeros(isa: str, scheme: str, dtype: torch.dtype) -> None:
    """Their scale is 1, far above that of any other row: the difference of two sums of numbers up to 128 times as large
    as those of x would be seen beside other outputs."""
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(40, 4096, generator=generator) / 64
    weight[3] = weight[35] = 0
    packed = bp.quantize_tensor(weight.to(dtype), scheme).to_layout("cpu_tiles")
    for m in (1, 3, 5, 20, 70):
        y = F.linear(torch.randn(m, 4096, generator=generator).to(dtype), packed)
        assert not y[:, [3, 35]].any()


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("scheme", ["int8-asym", "int4-channel-asym"])
def test_zeros_of_long_rows(isa: str, scheme: str, m: int) -> None:
    """Inputs about 1: sums of codes times them, from which those times the zero point are subtracted, grow with K, and
    what is left with its root."""
    generator = torch.Generator().manual_seed(11)
    packed = bp.quantize_tensor(torch.randn(64, 4096, generator=generator), scheme).to_layout("cpu_tiles")
    x = 1 + torch.randn(m, 4096, generator=generator) / 10
    exact = x.double() @ packed.dequantize(torch.float32).double().T
    assert sqnr(exact, F.linear(x, packed)) > samples.product_budget(FP32, 4096, m * 64)


@pytest.mark.parametrize("size", [100, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("k", [16, 48, 64, 128, 512, 4096])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_some_numbers_far_above_the_others(isa: str, scheme: str, k: int, size: float) -> None:
    """The same for outliers in up to a fifth of a row, however short. With many numbers of 1e5, float32 sums from which
    their product with the zero point is subtracted have too few digits left."""
    generator = torch.Generator().manual_seed(k)
    for share in (k, 128, 100, 32, 16 if size == 1e5 else 6):
        large = torch.randperm(k, generator=generator)[: max(k // share, 1)]
        weight, x = torch.randn(64, k, generator=generator), torch.randn(4, k, generator=generator)
        weight[:32, large] = 0
        x[:, large] = size * torch.randn(4, len(large), generator=generator).sign()
        packed, x = bp.quantize_tensor(weight.to(BF16), scheme).to_layout("cpu_tiles"), x.to(BF16)
        value = packed.dequantize(torch.float32).double()
        assert not value[:32, large].any()
        for m in (1, 2, 4):
            exact, y = x[:m].double() @ value.T, F.linear(x[:m], packed)
            assert sqnr(exact[:, :32], y[:, :32]) > 50, (share, m)
            assert sqnr(exact, y) > 50, (share, m)


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_a_row_that_is_not_finite_spoils_no_other(isa: str, scheme: str, m: int) -> None:
    packed, exact = weight_of(scheme)
    x = torch.randn(m, 512, generator=torch.Generator().manual_seed(9)).to(BF16)
    x[0, 5] = float("inf")
    y = F.linear(x, packed)
    assert not y[0].isfinite().any()
    assert all(sqnr(x[row].double() @ exact.T, y[row]) > 50 for row in range(1, m))


@pytest.mark.parametrize("exponents", [(27, 228), (0, 238)], ids=["usual", "ends"])
@pytest.mark.parametrize("scheme", ["mxfp8-wo", "mxfp6-wo", "mxfp4-wo"])
def test_every_code_by_every_power_of_two(isa: str, scheme: str, exponents: tuple[int, int]) -> None:
    """Identity rows give the weight itself: exact in bfloat16, unless it is subnormal there."""
    chosen, k = preset(scheme), 256
    parts = quantize(torch.zeros(k, k), chosen.weight)
    bits = NUMBER_TYPES[chosen.weight.dtype].bits
    codes = torch.arange(1 << bits).repeat(k >> bits).expand(k, k).contiguous()
    if bits == 8:
        codes[codes & 127 == 127] = 126  # a NaN would enter every sum
    powers = torch.arange(k).clamp(*exponents)[:, None].expand(parts.scale.shape).contiguous()
    stored = pack_bits(codes.to(torch.uint8), bits) if bits < 8 else codes.to(torch.uint8)
    made = parts._replace(data=stored.view(parts.data.dtype), scale=powers.to(torch.uint8).view(parts.scale.dtype))
    weight = from_parts(made, chosen, shape=(k, k), dtype=BF16).to_layout("cpu_tiles")
    exact = value_of(made, chosen.weight.dtype, k, k, *chosen.weight.block_shape(k, k)).T
    got = F.linear(torch.eye(k, dtype=BF16), weight).double()
    normal = (exact.abs() >= 2.0**-126) | (exact == 0)
    assert normal.double().mean() > 0.4
    assert torch.equal(got[normal], exact[normal])
    assert bool((got[~normal].abs() <= 2.0**-126).all())


def test_a_weight_that_is_no_number_spoils_its_own_output_alone(isa: str) -> None:
    chosen, n, k = preset("mxfp8-wo"), 64, 256
    parts = quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(11)), chosen.weight)
    codes = parts.data.view(torch.uint8).clone()
    codes[3, 5], codes[40, 200] = 127, 255  # both NaN
    made = parts._replace(data=codes.view(parts.data.dtype))
    weight = from_parts(made, chosen, shape=(n, k), dtype=BF16).to_layout("cpu_tiles")
    for m in (1, 8, 64, 256):
        nan = F.linear(torch.ones(m, k, dtype=BF16), weight).isnan()
        assert nan[:, [3, 40]].all()
        assert int(nan.sum()) == 2 * m


@pytest.mark.parametrize("scale", [0.0, 2.0**-118, 2.0**-100, 2.0**100], ids=["zeros", "tiny", "small", "huge"])
def test_rows_at_the_ends_of_the_range(isa: str, scale: float) -> None:
    packed, exact = weight_of("int4-sym")
    x = (torch.randn(1, 512, generator=torch.Generator().manual_seed(10)) * scale).to(BF16)
    y, expected = F.linear(x, packed), x.double() @ exact.T
    assert torch.equal(y, torch.zeros_like(y)) if scale == 0 else sqnr(expected, y) > 50


@DTYPES
@pytest.mark.parametrize("scheme", ["int4-int8", "int4-fp8"])
def test_rounded_inputs(isa: str, scheme: str, dtype: torch.dtype) -> None:
    for sample in products(scheme, dtype, "cpu_tiles", n=48, k=256):
        assert kernel("dyn_linear").supports(*sample.args) is None
        assert shortfall(sample, OPS["dyn_linear"].overload(*sample.args)) <= 0, sample.name


@DTYPES
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 16, 17, 33, 65, 520])
@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-block-g64", "fp8-block-channel"])
def test_inputs_with_a_scale_per_128_columns(isa: str, scheme: str, m: int, dtype: torch.dtype) -> None:
    """With float32 scales, a code times its scale does not fit bfloat16, so scales are applied to the sums."""
    for n, k in ((1, 128), (33, 300), (40, 608)):
        for sample in products(scheme, dtype, "cpu_tiles", n=n, k=k, m=m):
            assert sample.args[11] == "fp8-128"
            assert shortfall(sample, OPS["dyn_linear"].overload(*sample.args)) <= 0, (n, k)


@pytest.mark.parametrize("m", [1, 4, 40])
@pytest.mark.parametrize(("group", "k"), [(96, 257), (112, 300), (128, 257), (144, 250)])
def test_as_many_groups_as_scales_of_x(isa: str, group: int, k: int, m: int) -> None:
    """x has a scale per 128 columns; that groups of the weight are as many does not mean that they are as long."""
    assert -(-k // group) == -(-k // 128)
    for sample in products(f"fp8-block-g{group}", BF16, "cpu_tiles", n=33, k=k, m=m):
        assert shortfall(sample, OPS["dyn_linear"].overload(*sample.args)) <= 0


@pytest.mark.parametrize(
    ("n", "k", "m"), [(250, 384, 40), (250, 384, 100), (40, 384, 700), (2100, 384, 70), (250, 3100, 260)]
)
@pytest.mark.parametrize("scheme", ["int4", "int4-int8"])
def test_threads_change_nothing(isa: str, scheme: str, n: int, k: int, m: int) -> None:
    """Threads share the rows of the weight, and those of x if the weight has few, but never split a sum."""
    op = OPS["linear" if scheme == "int4" else "dyn_linear"].overload
    sample = next(iter(products(scheme, BF16, "cpu_tiles", n=n, k=k, m=m)))
    alone = op(*sample.args)
    torch.set_num_threads(2)
    try:
        assert torch.equal(op(*sample.args), alone)
    finally:
        torch.set_num_threads(1)


@compiled
@DTYPES
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantize_gives_the_numbers_of_torch(scheme: str, dtype: torch.dtype) -> None:
    """Bit for bit, since other tests take these for the values of the codes. A float zero point first has the midpoint
    of the codes subtracted, which is one more rounding."""
    for *experts, n, k in ((70, 208), (33, 256), (3, 40, 96)):
        kind = "experts" if experts else "linear"
        q = bp.quantize_tensor(torch.randn(*experts, n, k).to(dtype), scheme, kind=kind)
        assert q.bits_layout == "cpu_tiles"
        wanted = dequantize(q.plain(), q.scheme.weight, n, k, dtype)
        with use_kernel("dequantize=native"):
            got = q.dequantize()
        if scheme.endswith("fzero") and dtype == FP32:
            assert float(sqnr(wanted, got)) > 130
        else:
            assert torch.equal(got, wanted)


@compiled
def test_weights_take_the_layout_and_explain_names_the_kernel() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(96, 64, dtype=BF16))
    bp.quantize_(model, "int4-g32", measure=False)
    assert isinstance(model[0].weight, QTensor)
    assert model[0].weight.bits_layout == "cpu_tiles"
    (layer,) = bp.explain(model, rows=(1, 64)).layers
    assert {decision.kernel for decision in layer.decisions.values()} == {"native"}


@compiled
def test_a_tied_head_and_embedding_share_one_table() -> None:
    """A lookup gathers rows from the tiles, also across their borders; the product reads the same bits."""
    q = bp.quantize_tensor(torch.randn(70, 96), bp.preset("int4-g32"))
    ids = torch.tensor([[0, 15, 16, 31], [32, 63, 69, 32]])
    assert torch.equal(F.embedding(ids, q), q.dequantize()[ids])
    args = (ids, *q.parts, *q.matrix, q.bits_layout, FP32)
    assert decide("embedding", *args).kernel == "native"


@compiled
def test_experts_are_multiplied_one_by_one() -> None:
    experts = bp.quantize_tensor(torch.randn(3, 40, 64), bp.preset("int4-g32"))
    x, ends = torch.randn(7, 64), torch.tensor([2, 2, 6], dtype=torch.int32)
    y = F.grouped_mm(x, experts.transpose(-1, -2), offs=ends)
    with use_kernel("generic"):
        expected = F.grouped_mm(x, experts.transpose(-1, -2), offs=ends)
    assert float(sqnr(expected, y)) > 120
    assert not y[6:].any()


@compiled
@pytest.mark.parametrize("act", ["fp8", "fp8-tensor", "fp8-128", "mxfp8", "mxfp4", "nvfp4", "int8", "int8-tensor"])
def test_experts_with_rounded_rows(act: str) -> None:
    """A per-tensor scale of x is measured over the rows of all experts."""
    experts = bp.quantize_tensor(torch.randn(3, 40, 64), bp.preset("int4-g32"))
    x, ends = torch.randn(7, 64), torch.tensor([2, 2, 7], dtype=torch.int32)
    x[:2] *= 100
    args = (x, ends, *experts.parts, *experts.matrix, experts.bits_layout, act)
    assert float(sqnr(OPS["dyn_grouped_linear"].generic(*args), OPS["dyn_grouped_linear"].overload(*args))) > 120


@compiled
def test_refusals() -> None:
    args = list(next(iter(products("int4-g32", BF16, "plain", n=48, k=256, m=5))).args)
    supports = kernel("linear").supports
    assert supports(*args) == "the weight must be in layout cpu_tiles, not plain"
    args[10] = "cpu_tiles"
    args[9] = 40
    assert supports(*args) == "a group must be a multiple of 16 columns or the whole row, not 40 of 256"
    args[9], args[2] = 32, args[2].double()
    assert "not torch.float64" in str(supports(*args))


@compiled
def test_variants_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="BITPORT_CPU_ISA=sse9: this processor runs scalar"):
        Library(native.PATH, "sse9")
    monkeypatch.setenv("BITPORT_CPU_ISA", "scalar")
    loaded = native.load()
    assert isinstance(loaded, Library)
    assert loaded.isa_name == "scalar"


@compiled
def test_a_library_of_another_version_is_an_error() -> None:
    """Any other library lacks functions, as one of another version would."""
    says = "has no bitport_error: it was compiled from another version of bitport; reinstall"
    with pytest.raises(KernelError, match=says):
        Library(TORCH)


@compiled
@pytest.mark.parametrize("asked", ["", "scalar"])
def test_a_processor_without_vectors_leaves_products_to_pytorch(tmp_path: Path, asked: str) -> None:
    """Weights stay plain for PyTorch, unless the scalar loops are requested by name."""
    script = f"""
import importlib.util, sys, torch
import bitport as bp
from bitport import plugins
from bitport.ops import decide
from bitport.ops.convert import format_json
real = importlib.util.spec_from_file_location("bitport.backends.cpu.native", {native.__file__!r})
module = importlib.util.module_from_spec(real)
sys.modules["bitport.backends.cpu.native"] = module
real.loader.exec_module(module)
class Plain(module.Library):
    def __init__(self, *args):
        super().__init__(*args)
        self.available = ("scalar",)
module.Library = Plain
w, x = torch.randn(64, 96), torch.randn(3, 96)
q = bp.quantize_tensor(w, bp.preset("int4-g32"))
y = torch.nn.functional.linear(x, q)
assert float(bp.numerics.sqnr(x.double() @ q.dequantize().double().T, y)) > 100
print(q.bits_layout, decide("quantize", w, format_json(bp.preset("int4-g32").weight)).kernel)
print(plugins.describe()["cpu"])
"""
    said = printed(script, BITPORT_CPU_ISA=asked)
    assert said.startswith("cpu_tiles native" if asked else "plain native")
    assert ("no native products and attention" in said) == (not asked)


@pytest.mark.parametrize("broken", [False, True], ids=["missing", "broken"])
def test_without_the_library(tmp_path: Path, broken: bool) -> None:
    """The layout stays readable, weights stay plain, and doctor says what is missing."""
    path = tmp_path / "libbitport_kernels.so"
    if broken:
        path.write_bytes(b"not a library")
    script = f"""
import importlib.util, pathlib, sys, torch
import bitport as bp
from bitport import plugins
source = pathlib.Path(bp.__file__).parent / "backends" / "cpu" / "native.py"
real = importlib.util.spec_from_file_location("bitport.backends.cpu.native", {str(tmp_path / "native.py")!r})
pathlib.Path({str(tmp_path / "native.py")!r}).write_text(source.read_text())
module = importlib.util.module_from_spec(real)
sys.modules["bitport.backends.cpu.native"] = module
real.loader.exec_module(module)
q = bp.quantize_tensor(torch.randn(64, 96), bp.preset("int4-g32"))
assert q.bits_layout == "plain", q
packed = q.to_layout("cpu_tiles")
assert torch.equal(packed, q)
x = torch.randn(3, 96)
assert torch.equal(torch.nn.functional.linear(x, packed), torch.nn.functional.linear(x, q))
print(plugins.describe()["cpu"])
"""
    said = printed(script)
    assert "no native kernels: " + ("libbitport_kernels.so does not load" if broken else "not compiled when") in said
    assert "pip install" in said
