"""A compiled package compared with the modules that it was built from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

import bitport as bp
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.errors import ArgumentError, ExportError
from bitport.export import Method, Program, load, package
from bitport.export.archive import ALIGNMENT as PAGE
from bitport.export.archive import ArchiveReader
from bitport.export.compile import options
from bitport.export.constants import SPANS
from bitport.export.level import best_level
from bitport.export.load import _bounds, compare
from bitport.export.names import Names
from bitport.export.package import WEIGHTS_ENTRY
from bitport.export.weights import ALIGNMENT, PAD
from bitport.tensor import QTensor
from tests.scripts import printed

from .conftest import SCHEMES, arguments
from .needs import needs_packages
from .test_pieces import ROWS, Lookups, Pieces

pytestmark = [pytest.mark.xdist_group("package"), needs_packages]  # made once, by one worker


@pytest.mark.parametrize("rows", [1, 2, 6, 64])
def test_every_scheme_gives_what_eager_gives(rows: int, program: Program, modules: dict[str, nn.Module]) -> None:
    args = arguments(rows)["every"]
    with torch.no_grad():
        wanted = modules["every"](*args)
    got = program.every(*args)
    names = ["lookup", *SCHEMES, "no kernel", "experts", "convolution"]
    for name, one, other in zip(names, got, wanted, strict=True):
        assert torch.equal(one, other), name


def test_another_method_shares_the_weights(program: Program, modules: dict[str, nn.Module]) -> None:
    args = arguments(5)["half"]
    with torch.no_grad():
        wanted = modules["half"](*args)
    memory = torch.zeros_like(args[1])
    assert torch.equal(program.half(args[0], memory), wanted)
    torch.testing.assert_close(memory, args[1], rtol=2**-7, atol=0)  # a sum of 5 in bfloat16, in either order
    half, every = (
        {tensor.data_ptr() for tensor in program.methods[name].constants.values()} for name in ("half", "every")
    )
    assert half < every


def test_what_is_only_looked_up_lies_by_row(program: Program, modules: dict[str, nn.Module]) -> None:
    """Stored once for both methods; a head tied to the embedding stays in tiles (test_a_tied_head)."""
    plain = modules["every"].table.weight.to_layout("plain")
    assert torch.equal(program.weights["table.weight.qdata"], plain.qdata)
    assert torch.equal(program.weights["table.weight.scale"], plain.scale)


def test_a_library_is_handed_spans(program: Program) -> None:
    """One span per dtype for the weights that a method shares and one for the rest, rather than a tensor for each part
    of each weight."""
    half, every = (program.methods[name].constants for name in ("half", "every"))
    assert all(name.startswith(SPANS) for name in half)
    assert sorted(str(tensor.dtype) for tensor in half.values()) == ["torch.bfloat16", "torch.float32", "torch.uint8"]
    of_ops = [name for name in every if name.startswith(SPANS)]
    assert len(of_ops) <= 2 * len({every[name].dtype for name in of_ops})
    assert len(program.weights) > 3 * len(every)


class Tied(nn.Module):
    def __init__(self, bits: str) -> None:
        super().__init__()
        self.words = nn.Embedding(48, 64)
        self.head = nn.Linear(64, 48, bias=False)
        self.head.weight = self.words.weight
        self.other = nn.Embedding(33, 64)
        bp.quantize_(self.bfloat16(), {"*": bits}, measure=False, progress=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids) + self.other(ids)
        return x, self.head(x)


class BothTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.four, self.three = Tied("int4-g32"), Tied("int3-g32")

    def forward(self, ids: Tensor) -> list[Tensor]:
        return [*self.four(ids), *self.three(ids)]


LEVELS = [level for level in ("x86-64-v3", best_level()) if level]


@pytest.fixture(scope="module")
def tied() -> nn.Module:
    return BothTied().eval()


@pytest.fixture(scope="module")
def beside(tied: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same methods for two instruction sets with one weight file, and a table with another. Precompiling torch's
    headers would only serve one package of the lower level here, and take longer than it."""
    folder, ids = tmp_path_factory.mktemp("beside"), torch.tensor([1, 2, 3])
    for at, level in enumerate(LEVELS):
        with config.patch({"aot_inductor.precompile_headers": level == best_level()}):
            method = Method(tied, (ids,))
            package(method, folder / f"{at}.pt2", weights="tied.weights", level=level, examples=False)
    rows = torch.export.Dim("rows", min=1, max=64)
    table = nn.Embedding(40, 128).bfloat16().eval()
    bp.quantize_(nn.ModuleDict({"table": table}), {"table": "int8"}, measure=False)
    package(Method(table, (ids,), ({0: rows},)), folder / "lookup.pt2", weights="other.weights", examples=False)
    return folder


def test_one_weight_file_for_two_packages(beside: Path, tied: nn.Module, tmp_path: Path) -> None:
    ids = torch.tensor([0, 32, 7])
    for at in range(len(LEVELS)):
        for one, other in zip(load(beside / f"{at}.pt2").forward(ids), tied(ids), strict=True):
            assert torch.equal(one, other)
    shutil.copyfile(beside / "0.pt2", tmp_path / "0.pt2")
    shutil.copyfile(beside / "other.weights", tmp_path / "tied.weights")
    with pytest.raises(ExportError, match=r"tied\.weights"):
        load(tmp_path / "0.pt2")


def test_a_tied_head(beside: Path) -> None:
    """With 4 bits and with 3; equality with eager mode is tested above."""
    weights = load(beside / "0.pt2").weights
    for name in ("four", "three"):
        assert weights[f"{name}.words.weight.qdata"].dim() == 3
        assert weights[f"{name}.other.weight.qdata"].dim() == 2


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4).t())
        self.register_buffer("table", torch.randn(5, 4).t())
        self.register_buffer("row", torch.randn(1, 5).expand(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x + self.weight) * self.table - self.row
        return y


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("never", torch.tensor([False, True, False, True]))
        self.register_buffer("idle", torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.linear(x).masked_fill(self.never, float("-inf"))
        return y, y - y


def fixed(x: Tensor) -> nn.Module:
    """Layers that round their inputs with a static scale."""
    layers = [nn.Linear(64, 64).bfloat16() for _ in range(3)]
    for layer, scheme in zip(layers, ("int8-static", "fp8-static", "nvfp4-static"), strict=True):
        bp.quantize_(nn.Sequential(layer), scheme, calibrate=[x], measure=False, progress=False)
    return nn.Sequential(*layers)


class Various(nn.Module):
    """Unrelated modules in one library, since compiling takes seconds per library, whatever it contains."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, given: dict[str, Tensor]) -> dict[str, Any]:
        return {name: part(given[name]) for name, part in self.parts.items()}


@pytest.fixture(scope="module")
def various() -> tuple[nn.Module, dict[str, Tensor]]:
    given = {
        "masked": torch.ones(2, 8),
        "turned": torch.randn(1, 5, 8)[:, -1:],
        "strided": torch.randn(4, 5),
        "fixed": torch.randn(3, 64).bfloat16(),
        "pieces": torch.randn(3, 128).bfloat16(),
        "lookups": torch.tensor([3, 0, 31]),
    }
    parts = {"masked": Masked(), "turned": Turned(), "strided": Strided()}
    parts |= {"pieces": Pieces("int4-g32"), "lookups": Lookups()}
    return Various(**parts, fixed=fixed(given["fixed"])).eval(), given


@pytest.fixture(scope="module")
def of_various(various: tuple[nn.Module, dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory) -> Program:
    module, given = various
    path = tmp_path_factory.mktemp("of various") / "some modules.pt2"  # with spaces
    package(Method(module, (given,), ({**dict.fromkeys(given), "pieces": {0: ROWS}},)), path)
    return load(path)


def test_arguments_of_other_strides_are_exported_dense(
    of_various: Program, various: tuple[nn.Module, dict[str, Tensor]]
) -> None:
    """torch considers x[:, -1:] contiguous, but the stride of its first dimension, of size 1, is that of all of x; a
    program must not assume it for every argument."""
    row = various[1]["turned"]
    assert row.is_contiguous()
    assert row.stride() == (40, 8, 1)
    dense = torch.randn(1, 1, 8)
    assert of_various.forward({**various[1], "turned": dense})["turned"].stride() == dense.transpose(0, 1).stride()


@pytest.mark.parametrize("name", ["strided", "fixed", "pieces", "lookups"])
def test_constants_of_every_kind(name: str, of_various: Program, various: tuple[nn.Module, dict[str, Tensor]]) -> None:
    """Constants with other strides, which are stored dense and which generated code must know; scales of inputs; pieces
    of weights, for a different number of rows."""
    module, given = various
    x = torch.randn(7, 128).bfloat16() if name == "pieces" else given[name] * 2
    wanted, got = (run({**given, name: x})[name] for run in (module, of_various.forward))
    exact = {"rtol": 0.0, "atol": 0.0} if name != "strided" else {}
    torch.testing.assert_close(got, wanted, **exact)


def test_weights_of_one_name_in_several_methods_are_apart() -> None:
    """The second method has a weight named like one of the first; prefixed with the method's name, it is named like
    another."""
    one, other = nn.Module(), nn.Module()
    one.w, one.b, other.w = nn.Parameter(torch.zeros(3)), nn.Module(), nn.Parameter(torch.full((3,), 2.0))
    one.b.w = nn.Parameter(torch.ones(3))
    names = Names({"a": one, "b": other})
    named = {names.name_of("b", "w", each): each for each in (one.w, one.b.w, other.w, torch.full((3,), 3.0))}
    assert len(named) == 4
    assert {name: names.tensors[name] for name in named} == named
    assert names.name_of("a", "other.w", other.w) in named


def test_dictionaries_are_taken_by_key(of_various: Program, various: tuple[nn.Module, dict[str, Tensor]]) -> None:
    module, given = various
    turned = of_various.forward(dict(reversed(given.items())))
    assert torch.equal(turned["fixed"], module(given)["fixed"])
    for wrong in (list(given.values()), {**given, "other": given["fixed"]}):
        with pytest.raises(ArgumentError, match=r"exported with the arguments \(\{'masked': 'given_masked'"):
            of_various.forward(wrong)


def test_infinities_and_nan_are_compared_too(of_various: Program) -> None:
    """They must match exactly, and the tolerance of the other numbers is unaffected by them."""
    atol = of_various.manifest["methods"]["forward"]["example"]["atol"]
    assert 0 < atol["output.0"] < 1e-2
    assert of_various.check()["forward"] <= 1
    for key, off in (("output.0", "inf off"), ("output.1", "nan off")):
        example = of_various.examples("forward")
        example[key][0, 1] = 0
        with pytest.raises(ExportError, match=off):
            compare("forward", of_various.methods["forward"], example, atol)


def test_a_buffer_that_nothing_reads(of_various: Program) -> None:
    assert "parts.masked.never" in of_various.weights
    assert "parts.masked.idle" not in of_various.weights


def test_weights_lie_in_the_file_alone(packed: Path, program: Program, modules: dict[str, nn.Module]) -> None:
    """Stored once, aligned, and mapped: the libraries contain no weights and point into the mapped file."""
    with ArchiveReader(packed) as archive:
        start, size = archive.place(WEIGHTS_ENTRY)
    assert start % PAGE == 0
    with SafetensorsReader(packed, start=start, size=size) as file:
        stored = {name: span for name, span in file.tensors.items() if not name.startswith(PAD)}
        assert all((span.start - start) % ALIGNMENT == 0 for span in stored.values())
    inside = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(packed) in line
    ]
    spans = [(int(low, 16), int(high, 16)) for low, high in inside]
    for tensor in program.weights.values():
        assert any(low <= tensor.data_ptr() < high for low, high in spans)
    named = dict(modules["every"].named_parameters())
    plain = [name for name in program.weights if name in named]
    assert plain
    assert all(torch.equal(program.weights[name], named[name]) for name in plain)
    bare = sum(value.nbytes for value in program.weights.values())
    assert size < bare + ALIGNMENT * len(program.weights) + 200 * len(program.weights) + 4096


def test_libraries_carry_what_their_method_calls(packed: Path, beside: Path, program: Program, tmp_path: Path) -> None:
    """And export no other symbols."""
    lookup = load(beside / "lookup.pt2").manifest["methods"]["forward"]["code"]
    half = program.manifest["methods"]["half"]["code"]
    assert lookup["size"] < half["size"] / 2, "products are in a library that only looks up"
    library = tmp_path / "half.so"
    with ArchiveReader(packed) as archive:
        library.write_bytes(archive.read(half["entry"]))
    found = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    shown = {line.split()[-1] for line in found.splitlines()}
    assert shown
    assert all(name.startswith("AOTInductor") for name in shown)


def test_the_manifest_says_what_is_taken_and_given(program: Program) -> None:
    half = program.manifest["methods"]["half"]
    assert half["inputs"] == [
        {"name": "ids", "dtype": "I64", "shape": ["rows"], "mutated": False},
        {"name": "memory", "dtype": "BF16", "shape": [2, 48], "mutated": True},
    ]
    assert half["outputs"] == [{"name": "output0", "dtype": "BF16", "shape": ["rows", 48]}]
    assert program.manifest["dims"] == {"rows": [1, 64]}
    assert program.manifest["meta"] == {"kind": "test"}
    assert program.manifest["target"]["level"] == best_level()


def test_recorded_examples_are_met(program: Program) -> None:
    assert set(program.examples("half")) == {"input.0", "output.0", "after.1"}  # input.1 is zeros
    assert all(part <= 1 for part in program.check().values())


def test_wrong_arguments_are_refused(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including sizes outside the exported range, and tensors of another device."""
    ids, ends = arguments(4)["every"]
    for wrong in (
        (ids,),
        (ids.int(), ends),
        (ids[:, None], ends),
        (ids, ends[:2]),
        (ids.repeat(2)[::2], ends),
        (ids.repeat(17), ends),
        (ids[:0], ends),
        (ids.tolist(), ends),
        (ids.to("meta"), ends),
    ):
        with pytest.raises(ArgumentError):
            program.every(*wrong)
    with pytest.raises(ArgumentError, match=r"of the sizes \[1 to 64\], not torch\.int64 \[68\]"):
        program.every(ids.repeat(17), ends)
    from_seven = [_bounds("rows", {"rows": [7, None]})]
    monkeypatch.setattr(program.every, "bounds", [from_seven, *program.every.bounds[1:]])
    with pytest.raises(ArgumentError, match=r"of the sizes \[7 or more\], not torch\.int64 \[4\]"):
        program.every(ids, ends)


def test_no_op_library_and_no_python_are_needed(packed: Path) -> None:
    """torch's own loader works in a process without bitport and its registered ops."""
    script = (
        "import sys, torch; loader = torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], 'half', False, 1, -1); "
        "assert not hasattr(torch.ops.bitport, 'linear'); print(len(loader.get_constant_fqns()))"
    )
    assert int(printed(script, packed)) > 0


def test_programs_are_compiled_with_one_command_line(tmp_path: Path) -> None:
    """Apart from the output path: torch precompiles its headers for each command line, and keeps 140 MB."""
    one, other = (options(tmp_path / name, best_level()) for name in ("one", "other"))
    assert {key for key in one if one[key] != other[key]} == {"aot_inductor.output_path"}


def test_nothing_of_the_process_is_changed(program: Program) -> None:
    for name, value in options(Path("x"), best_level()).items():
        assert config.get_config_copy()[name] != value or name == "max_autotune"


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.cache.add_(x)
        return self.cache + 1


def test_methods_that_cannot_be_packed(tmp_path: Path) -> None:
    linear, x = nn.Linear(4, 4), torch.ones(1, 4)
    with pytest.raises(ExportError, match="writes into its buffers"):
        package(Method(Keeps(), (torch.ones(3),)), tmp_path / "a.pt2")
    with pytest.raises(ArgumentError, match="identifier"):
        package({"no name": Method(linear, (x,))}, tmp_path / "a.pt2")
    with pytest.raises(ArgumentError, match="takes tensors"):
        package(Method(linear, (3,)), tmp_path / "a.pt2")
    with pytest.raises(ArgumentError, match=r"\.pt2"):
        package(Method(linear, (x,)), tmp_path / "a.zip")
    with pytest.raises(ArgumentError, match="name of a file"):
        package(Method(linear, (x,)), tmp_path / "a.pt2", weights="../x")
    with pytest.raises(ArgumentError, match="level"):
        package(Method(linear, (x,)), tmp_path / "a.pt2", level="x86-64-v9")
    with pytest.raises(ArgumentError, match=r"Method\(module, args\), or a dictionary of some by name, not Linear"):
        package(linear, tmp_path / "a.pt2")
    with pytest.raises(ArgumentError, match=r"some by name, not \{\}"):
        package({}, tmp_path / "a.pt2")
    with pytest.raises(ArgumentError, match="args a tuple, not a Linear"):
        package({"one": linear}, tmp_path / "a.pt2")
    with pytest.raises(ArgumentError, match="args a tuple, not args a Tensor"):
        package(Method(linear, x), tmp_path / "a.pt2")
    with pytest.raises(ArgumentError, match=r"such as 0\.01, not -1"):
        package(Method(linear, (x,)), tmp_path / "a.pt2", tolerance=-1)
    with pytest.raises(ArgumentError, match=r"JSON can hold.*Tensor"):
        package(Method(linear, (x,)), tmp_path / "a.pt2", meta={"mean": x})
    assert list(tmp_path.iterdir()) == []


def test_missing_kernels_are_told_before_anything_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitport.export.compile.ARCHIVE", tmp_path / "libbitport_deploy.a")
    monkeypatch.setattr(sys.modules[package.__module__], "exported", lambda method: pytest.fail("it was exported"))
    with pytest.raises(ExportError, match=r"were not compiled when bitport was installed. Install g\+\+"):
        package(Method(nn.Linear(4, 4), (torch.ones(1, 4),)), tmp_path / "m.pt2")


def test_packages_are_not_made_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitport.export.compile.sys.platform", "win32")
    with pytest.raises(ExportError, match="not made on Windows: export the model on Linux"):
        package(Method(nn.Linear(4, 4), (torch.ones(1, 4),)), tmp_path / "m.pt2")


def test_exporting_leaves_the_model_as_it_was(program: Program, modules: dict[str, nn.Module]) -> None:
    every = modules["every"]
    assert all(isinstance(layer.weight, QTensor) for layer in every.layers)
    assert bp.explain(every, (1,)).layers
