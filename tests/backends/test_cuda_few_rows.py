"""kernels/few_rows.cu on machines without a GPU: its numbers, from the same source compiled as C++ on an emulated
device; what is refused; which size is chosen; and that each compiles. Tests marked gpu run the real kernel."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.backends.cuda import capability, compiled, few_rows
from bitport.backends.cuda.few_rows import DEEP, MIDDLE, NARROW, WIDE, Form, Size, size_of, source
from bitport.ops import Sample, Weight
from tests.backends.emulated import Emulated, emulated, every_code_and_zero, in_place_of_a_device, in_stream
from tests.backends.products import products, shortfall
from tests.native.builds import assembled
from tests.turns import slow

BF16, FP16 = torch.bfloat16, torch.float16
MEMORY = 227 << 10
"""Bytes of shared memory available to a block on sm90."""
HOPPER, AMPERE, ADA = (132, True, MEMORY), (108, False, 163 << 10), (128, False, 99 << 10)
"""(multiprocessors, whether blocks form clusters, bytes of shared memory)"""


def arguments(scheme: str, dtype: torch.dtype = BF16, m: int = 5, k: int = 256) -> list[Any]:
    (sample,) = products(scheme, dtype, "plain", 40, k, m=m)
    return list(sample.args)


def refuses(x: torch.Tensor, *rest: Any) -> str | None:
    return few_rows.refuses(Weight(*rest[:10]).dtype, x, *rest)


def of_memory(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "of", lambda device: (9, 0))
    monkeypatch.setattr(capability, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(capability, "shared_memory", lambda device: memory)
    monkeypatch.setattr(few_rows, "missing", lambda: None)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    of_memory(MEMORY, monkeypatch)


@pytest.fixture
def emulator(
    compiler: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, hopper: None
) -> Callable[[Size, Form], Emulated]:
    def build(size: Size, form: Form) -> Emulated:
        return emulated("few_rows", source(size, form), compiler, tmp_path_factory.getbasetemp())

    monkeypatch.setattr(few_rows, "_function", lambda size, form, device: build(size, form))
    in_place_of_a_device(monkeypatch)
    return build


def product(sample: Sample, size: Size) -> torch.Tensor:
    x, *rest = sample.args
    return few_rows.product(x, Weight(*rest[:10]), rest[10], size)


CASES = (
    (WIDE, "int4", 64, 1280, 8, BF16, True),
    (WIDE, "int4-g384-sym", 67, 768, 3, BF16, False),
    (WIDE._replace(splits=2), "int4-channel", 33, 640, 5, BF16, True),
    (WIDE._replace(splits=4), "int4", 132, 1280, 2, BF16, True),
    (WIDE._replace(splits=8), "int4-g256-sym", 65, 1024, 8, FP16, True),
    (WIDE._replace(steps=1, stages=3), "int4-g64", 40, 2048, 6, FP16, True),
    (DEEP, "int4-sym", 64, 3328, 4, BF16, False),
    (DEEP._replace(splits=2), "int4-g32", 71, 2304, 7, BF16, True),
    (DEEP._replace(splits=4), "int4", 64, 3072, 1, BF16, True),
    (DEEP._replace(steps=1, stages=3, splits=8), "int4-g64-sym", 50, 2048, 8, BF16, False),
    (MIDDLE, "int4-g32-sym", 37, 1152, 1, BF16, True),
    (MIDDLE._replace(splits=4), "int4-channel-sym", 36, 2176, 8, FP16, True),
    (NARROW, "int4", 17, 6400, 8, BF16, True),
    (NARROW._replace(steps=1, stages=2), "int4-g64", 18, 4224, 2, BF16, False),
    (NARROW._replace(splits=8), "int4-g32", 1, 1152, 3, FP16, True),
    (MIDDLE._replace(splits=2), "int4-g96", 20, 1152, 4, BF16, False),
    (WIDE, "int8", 64, 1280, 8, BF16, True),
    (WIDE._replace(splits=4), "int8-g128", 132, 640, 2, BF16, True),
    (DEEP._replace(splits=2), "int8-g32", 71, 1152, 7, BF16, False),
    (DEEP._replace(steps=1, stages=2), "int8-g64-sym", 50, 1024, 8, FP16, True),
    (MIDDLE._replace(splits=8), "int8-g16", 36, 576, 1, FP16, True),
    (NARROW, "int8-g48", 17, 3264, 5, BF16, True),
    (NARROW._replace(splits=4), "int8", 1, 2112, 3, FP16, False),
)
"""Columns that are not a multiple of 4 or of a block's, and fewer and more stages of K than are prefetched; with 9 and
10 steps, some of 8 and 4 blocks get fewer than others, or none. Scale blocks of a whole row, of several steps, of one,
of several lanes' columns and of one lane's."""


@pytest.mark.parametrize(("size", "scheme", "n", "k", "m", "dtype", "bias"), CASES)
def test_numbers(
    emulator: Callable[[Size, Form], Emulated],
    size: Size,
    scheme: str,
    n: int,
    k: int,
    m: int,
    dtype: torch.dtype,
    bias: bool,
) -> None:
    (sample,) = products(scheme, dtype, "plain", n, k, m=m, with_bias=bias)
    assert refuses(*sample.args) is None
    y = product(sample, size)
    assert y.dtype == dtype
    assert shortfall(sample, y) <= 0
    assert torch.equal(y, product(sample, size)), "other threads come first, and the sums are the same"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("number", ["int4", "int8"])
def test_every_code_and_zero(emulator: Callable[[Size, Form], Emulated], number: str, dtype: torch.dtype) -> None:
    """Their values are exact."""
    weights, exact = every_code_and_zero(number, dtype)
    for weight in weights:
        for begin in range(0, 256, 64):
            x = torch.eye(256, dtype=dtype)[begin : begin + 64].view(8, 8, 256)
            y = torch.cat([few_rows.product(rows, weight, None, WIDE) for rows in x])
            assert torch.equal(y.double(), exact.T[begin : begin + 64])


@pytest.mark.parametrize("scheme", ["int4", "int4-g32-sym", "int8", "int8-g32"])
def test_numbers_before_sm90(
    emulator: Callable[[Size, Form], Emulated], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(capability, "of", lambda device: (8, 0))
    (sample,) = products(scheme, BF16, "plain", 35, 1280, m=5)
    assert shortfall(sample, product(sample, MIDDLE)) <= 0
    assert shortfall(sample, product(sample, MIDDLE)) <= 0
    weight = Weight(*sample.args[1:11])
    group = 0 if weight.block_k == weight.k else weight.block_k
    launched = emulator(MIDDLE, Form(4 if weight.dtype == "int4" else 8, 0, group, BF16, False)).launches
    assert launched == [(0, False)] * 2


def test_parts_that_are_views(emulator: Callable[[Size, Form], Emulated]) -> None:
    (sample,) = products("int4-g32", BF16, "plain", 20, 256, m=2)
    x, data, scale, zero, *rest = sample.args
    strided = [torch.cat([part, part], 1)[:, : part.shape[1]] for part in (x, data, scale, zero)]
    shifted = torch.cat([data.new_zeros(1), data.flatten()])[1:].view_as(data)
    for views in (strided, [x, shifted, scale, zero], [x.view(2, 1, 1, 256), data, scale, zero]):
        y = few_rows.product(views[0], Weight(*views[1:], *rest[:-1]), rest[-1].double(), WIDE)
        assert y.shape == (*views[0].shape[:-1], 20)
        assert shortfall(sample, y.view(2, 20)) <= 0


def test_what_wrote_a_weight_has_ended_before_it_is_read_early(emulator: Callable[[Size, Form], Emulated]) -> None:
    (sample,) = products("int4", BF16, "plain", 24, 256, m=1)
    _, data, scale, zero, *_ = sample.args
    early = emulator(WIDE, Form(4, 0, 128, BF16, True)).launches
    early.clear()

    def next_is_early() -> bool:
        product(sample, WIDE)
        return early[-1][1]

    assert [next_is_early() for _ in range(3)] == [False, True, True]
    for part in (data, scale, zero):
        part.copy_(part.clone())
        assert [next_is_early() for _ in range(2)] == [False, True]
    assert not few_rows.unchanged(data, scale, zero.clone()), "another, which nobody has waited for"
    with torch.inference_mode():
        counted_by_nobody = data.clone()
    few_rows.waited_for(counted_by_nobody)
    assert not few_rows.unchanged(counted_by_nobody)


FIRST, SECOND, GRAPH, FORK = (1, False), (2, False), (3, True), (4, True)
"""Streams, and whether a graph captures them."""


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        pytest.param([FIRST, SECOND, SECOND], [False, False, True], id="the second stream may have written it"),
        pytest.param([FIRST, GRAPH, GRAPH, FORK], [False, True, True, True], id="the graph has not written it"),
        pytest.param([GRAPH, GRAPH, FORK], [False, True, False], id="the fork may have written it"),
        pytest.param([GRAPH, (3, False), (3, False)], [False, False, True], id="the captured call has not run"),
    ],
)
def test_what_another_stream_wrote_is_waited_for(
    emulator: Callable[[Size, Form], Emulated],
    monkeypatch: pytest.MonkeyPatch,
    lines: list[tuple[int, bool]],
    early: list[bool],
) -> None:
    (sample,) = products("int4", BF16, "plain", 24, 256, m=1)
    launches = emulator(WIDE, Form(4, 0, 128, BF16, True)).launches
    launches.clear()
    for line in lines:
        in_stream(monkeypatch, *line)
        product(sample, WIDE)
    assert [each for _, each in launches] == early


def test_a_call_that_failed_has_waited_for_nothing(
    emulator: Callable[[Size, Form], Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    (sample,) = products("int4", BF16, "plain", 24, 256, m=1)
    launches = emulator(WIDE, Form(4, 0, 128, BF16, True)).launches
    launches.clear()

    def fails(*args: Any) -> None:
        raise RuntimeError("CUDA: cuModuleLoadData failed")

    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "_function", fails)
        with pytest.raises(RuntimeError, match="cuModuleLoadData"):
            product(sample, WIDE)
    product(sample, WIDE)
    assert launches == [(0, False)]


def test_copies_of_a_weight_are_not_read_early(emulator: Callable[[Size, Form], Emulated]) -> None:
    (sample,) = products("int4", BF16, "plain", 24, 256, m=1)
    x, *rest = sample.args
    weight = Weight(*rest[:10])
    strided = weight._replace(scale=torch.cat([weight.scale, weight.scale], 1)[:, :2])
    early = emulator(WIDE, Form(4, 0, 128, BF16, True)).launches
    early.clear()
    for _ in range(3):
        few_rows.product(x, strided, None, WIDE)
    assert early == [(0, False)] * 3


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "scheme", ["int4", "int4-sym", "int4-g32", "int4-g64", "int4-g256", "int4-channel", "int8", "int8-g16"]
)
def test_what_it_takes(scheme: str) -> None:
    for dtype in (BF16, FP16):
        for m in (1, 8):
            assert refuses(*arguments(scheme, dtype, m)) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheme": "nf4"}, "must be int4 in layout plain or signed_int8, not nf4"),
        ({"scheme": "int8"}, "must be int4 in layout plain or signed_int8, not int8"),
        ({"scheme": "int4", "dtype": torch.float32}, "bfloat16 or both float16"),
        ({"scheme": "int4-g32", "k": 192}, "a multiple of 128"),
        ({"scheme": "int4-g16"}, "a multiple of 32 columns"),
        ({"scheme": "int4", "m": 9}, "1 to 8 rows"),
        ({"scheme": "int4", "m": 0}, "x has no rows"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], reason: str) -> None:
    assert reason in str(few_rows.refuses("int4", *arguments(**change)))


@pytest.mark.usefixtures("hopper")
def test_what_it_refuses_of_a_weight() -> None:
    x, *rest = arguments("int4")
    weight = Weight(*rest[:10])
    for changed, reason in (
        (weight._replace(layout="tile_packed_2"), "in layout plain or signed_int8, not int4 in tile_packed_2"),
        (weight._replace(zero=weight.scale), "zeros must be uint8"),
        (weight._replace(scale2=weight.scale), "a scale of the scales"),
        (weight._replace(scale=weight.scale.float()), "the scale must both"),
        (weight._replace(block_n=2), "of one row"),
        (weight._replace(block_k=96), "of the scale's blocks"),
        (weight._replace(n=0), "the weight has no rows"),
    ):
        assert reason in str(refuses(x, *changed, *rest[10:]))
    assert refuses(x[:, :0], *weight._replace(k=0, block_k=0), *rest[10:]) == "x has no columns"
    x, *rest = arguments("int8", k=96)
    assert "K must be a multiple of 64" in str(refuses(x, *rest))


def test_other_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments("int4")
    of_memory(1 << 10, monkeypatch)
    assert "too little shared memory for K = 256" in str(refuses(*given))
    monkeypatch.setattr(few_rows, "missing", lambda: "no compiler")
    assert refuses(*given) == "no compiler"
    monkeypatch.setattr(capability, "of", lambda device: (7, 5))
    assert "sm80" in str(refuses(*given))
    monkeypatch.setattr(capability, "of", lambda device: capability.ROCM)
    assert "ROCm" in str(refuses(*given))


@pytest.mark.parametrize(
    ("chip", "known", "made"), [((12, 1), (100, 120), "120"), ((12, 1), (100, 121), "121"), ((9, 0), (), "90a")]
)
def test_chips_newer_than_the_compiler(
    chip: tuple[int, int], known: tuple[int, ...], made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch for CUDA 12.8 computes on sm121, but its NVRTC knows only sm120."""
    of_memory(99 << 10, monkeypatch)
    monkeypatch.setattr(capability, "of", lambda device: chip)
    monkeypatch.setattr(compiled, "_architectures", lambda: known)
    targets = []
    monkeypatch.setattr(compiled, "binary", lambda text, architecture: targets.append(architecture))
    monkeypatch.setattr(few_rows, "Function", lambda *given: None)
    assert refuses(*arguments("int4")) is None
    few_rows._function.__wrapped__(NARROW, Form(4, 0, 128, BF16, True), torch.device("cuda", 0))
    assert targets == [made]


def test_chips_that_the_compiler_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    of_memory(MEMORY, monkeypatch)
    monkeypatch.setattr(capability, "of", lambda device: (11, 0))
    monkeypatch.setattr(compiled, "_architectures", lambda: (100, 101, 120))
    assert "compiles nothing for cpu, which is sm110" in str(refuses(*arguments("int4")))


@pytest.mark.parametrize("chip", [HOPPER, AMPERE, ADA], ids=["hopper", "ampere", "ada"])
def test_sizes_fit(chip: tuple[int, bool, int]) -> None:
    multiprocessors, clusters, memory = chip
    for n in (1, 1024, 4096, 14336, 152064):
        for k in (128, 640, 4096, 14336, 65536):
            for m in (1, 8):
                for bits, group in itertools.product((4, 8), (0, 32, 64, 128)):
                    form = Form(bits, 0, group, BF16, clusters)
                    size = size_of(m, n, k, form, multiprocessors, memory)
                    if size is None:
                        assert k > 14000, "the scales of all of K, which no cluster shares"
                        assert group
                        assert not clusters
                        continue
                    assert size.shared(m, k, form) <= memory
                    steps = k // form.step
                    assert -(-steps // size.splits) * (size.splits - 1) < steps, "each block has some of K"
                    assert clusters or size.splits == 1


MEASURED = {
    (4096, 4096): WIDE._replace(splits=4),
    (5120, 1280): WIDE._replace(splits=4),
    (1024, 4096): WIDE._replace(splits=8),
    (3072, 8192): DEEP._replace(splits=4),
    (4096, 14336): DEEP._replace(splits=2),
    (8192, 3072): DEEP,
    (14336, 4096): DEEP,
}
"""(N, K) -> the fastest size on an H100 for 1, 2, 4 and 8 rows, or one within 9 % of it."""


def test_sizes_are_those_that_were_fastest() -> None:
    form = Form(4, 0, 128, BF16, True)
    for m in (1, 2, 4, 8):
        assert {(n, k): size_of(m, n, k, form, 132, MEMORY) for n, k in MEASURED} == MEASURED
        alone = [size_of(m, n, 4096, form._replace(clusters=False), 132, MEMORY) for n in (1024, 4096, 8192)]
        assert alone == [NARROW, MIDDLE, WIDE]


@pytest.mark.parametrize("shift", [0, *slow(1, 2, 3)])
@pytest.mark.parametrize("architecture", ["80", "90a"])
def test_registers_are_enough(architecture: str, shift: int, tmp_path: Path) -> None:
    """Each size with one of the forms, of which every shift selects another."""
    clusters = architecture == "90a"
    forms = ((8, 0x80, 32, FP16), (4, 0, 128, BF16), (4, 0, 32, FP16), (8, 0, 0, BF16))
    for at, size in enumerate((WIDE, DEEP, MIDDLE, NARROW)):
        form = Form(*forms[(at + shift) % 4], clusters)
        said = assembled(source(size._replace(splits=4 if clusters else 1), form), architecture, tmp_path)
        assert re.findall(r"(\d+) bytes spill", said) == ["0", "0"]


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    why_not = capability.below(device, 8, 0) or few_rows.missing()
    if why_not is not None:
        pytest.skip(why_not)
    return device


def there(sample: Sample, device: torch.device) -> Sample:
    args = tuple(part.to(device) if torch.is_tensor(part) else part for part in sample.args)
    return dataclasses.replace(sample, args=args)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "scheme", "n", "k", "m", "dtype", "bias"), CASES)
def test_numbers_on_a_gpu(
    cuda: torch.device, size: Size, scheme: str, n: int, k: int, m: int, dtype: torch.dtype, bias: bool
) -> None:
    if size.splits > 1 and capability.of(cuda) < (9, 0):
        pytest.skip("needs blocks in clusters: sm90")
    (sample,) = products(scheme, dtype, "plain", n, k, m=m, with_bias=bias)
    sample = there(sample, cuda)
    waited, *early = (product(sample, size) for _ in range(3))
    assert shortfall(sample, waited) <= 0
    assert all(torch.equal(waited, each) for each in early)


@pytest.mark.gpu
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(
    ("scheme", "n", "k"),
    [
        *(("int4", 8192, 3072), ("int4-g32-sym", 1024, 4096), ("int4-channel", 4096, 1280), ("int4-g64", 152, 14336)),
        *(("int8", 4096, 4096), ("int8-g128", 1024, 4096), ("int8-g32-sym", 152, 14336)),
    ],
)
def test_sizes_on_a_gpu(
    cuda: torch.device, scheme: str, n: int, k: int, clusters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chosen sizes; also as on devices without clusters."""
    if not clusters:
        monkeypatch.setattr(few_rows, "_clusters", lambda device: False)
    for m in (1, 8):
        (sample,) = products(scheme, BF16, "plain", n, k, m=m)
        sample = there(sample, cuda)
        assert refuses(*sample.args) is None
        for _ in range(2):
            assert shortfall(sample, few_rows.run(*sample.args)) <= 0


def chain(m: int, device: torch.device) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Layers each of which reads what the previous one has just written. The results of 24 layers are around 1e22."""
    weights = []
    for n, k in ((1280, 1280), (4096, 1280), (1024, 4096), (1280, 1024)):
        (sample,) = products("int4", BF16, "plain", n, k, m=m)
        weights.append(there(sample, device).args[1:])

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        made = [x]
        for weight in weights * 6:
            made.append(few_rows.run(made[-1], *weight))
        return made

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8])
def test_what_begins_early_reads_what_the_one_before_wrote(
    cuda: torch.device, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, run = torch.randn(m, 1280, device=cuda).to(BF16), chain(m, cuda)
    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "unchanged", lambda *parts: False)
        expected = run(x)
    run(x)
    for _ in range(20):
        assert all(map(torch.equal, run(x), expected))


@pytest.mark.gpu
def test_in_a_graph(cuda: torch.device) -> None:
    x, run = torch.randn(4, 1280, device=cuda).to(BF16), chain(4, cuda)
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(x)
    for _ in range(3):
        x.copy_(torch.randn(4, 1280, device=cuda))
        graph.replay()
        assert all(map(torch.equal, made, run(x)))


@pytest.mark.gpu
def test_first_work_of_a_thread(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of the runtime has bound it to the device; those that ask for the stream's capture might."""
    monkeypatch.setattr(few_rows, "_clusters", lambda device: False)
    (sample,) = products("int4", BF16, "plain", 4096, 4096, m=2)
    sample = there(sample, cuda)
    expected = few_rows.run(*sample.args)
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(few_rows.run, *sample.args).result(), expected)


@pytest.mark.gpu
def test_a_weight_that_was_just_written(cuda: torch.device) -> None:
    (sample,) = products("int4", BF16, "plain", 4096, 4096, m=2, with_bias=False)
    sample = there(sample, cuda)
    x, data, *rest = sample.args
    first, other = data.clone(), data.bitwise_not()
    expected = [few_rows.run(x, each, *rest) for each in (first, other)]
    for turn in range(40):
        data.copy_((first, other)[turn % 2])
        assert torch.equal(few_rows.run(x, data, *rest), expected[turn % 2])
