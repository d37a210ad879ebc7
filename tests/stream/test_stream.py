"""A streamed run gives the same weights as quantize_, holds no more than one block, and reports what it cannot do."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bitport.algorithms.solving import uses_data
from bitport.calibrate.processes import Processes
from bitport.calibrate.store import GIVEN
from bitport.checkpoint import read_manifest
from bitport.errors import ArgumentError, CheckpointError
from bitport.stream import Stream

from ..checkpoint.models import assert_same
from ..turns import turns
from .models import WIDTH, Block, Model, Tied, batches, built, empty, write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path)


RUNS: dict[str, tuple[Any, str]] = {
    "gptq": ("int3-g32", "gptq"),
    "embedding and head": ({"embed": "int8", "head": "int8", "*": "int4-g32"}, "gptq"),
    "blocks alone": ({"layers.*": "int4-g32"}, "gptq"),
    "one block": ({"layers.1.*": "int4-g32"}, "gptq"),
    "no data needed": ("int4-g32", "hqq"),
    "awq": ("int3-g32", "awq+gptq"),
    "smooth": ({"embed": "int8-dyn", "*": "int8-dyn"}, "smooth"),
    "static": ("int8-static", "rtn"),
    "static by gptq": ("fp8-static", "gptq"),
    "static by clip": ({"embed": "int8-static", "head": "int8-static", "*": "nvfp4-static"}, "clip"),
    "static in one block": ({"layers.1.*": "fp8-channel-static"}, "rtn"),
    "static and dynamic": ({"layers.1.*": "int8-static", "*": "int4-g32"}, "gptq"),
    "static after awq": ("int8-static", "awq+gptq"),
    "static after smooth": ("nvfp4-static", "smooth"),
}
MODELS = {"model": Model, "tied": Tied}


@pytest.mark.parametrize(("run", "activations", "make"), turns(RUNS, ["memory", "disk"], MODELS))
def test_the_result_is_that_of_quantize(tmp_path: Path, run: str, activations: str, make: str) -> None:
    recipe, algorithm = RUNS[run]
    model, source = built(MODELS[make]), write(tmp_path, MODELS[make])
    data = batches() if uses_data(algorithm, recipe) else None
    expected = bp.quantize_(model, recipe, algorithm=algorithm, calibrate=data)
    stream = Stream(
        empty(MODELS[make]),
        source,
        tmp_path / "out",
        recipe,
        batches=batches(),
        algorithm=algorithm,
        activations=activations,
    )
    report = stream.run()
    assert report.layers == expected.layers
    assert (report.recipe, report.algorithm) == (expected.recipe, expected.algorithm)
    assert report.bytes_before == expected.bytes_before
    assert report.bytes_after == expected.bytes_after
    assert_same(bp.load(MODELS[make], tmp_path / "out"), model)
    assert (tmp_path / "out" / "tokenizer" / "words.txt").read_text() == "words"
    assert not (tmp_path / "out" / "unfinished").exists()
    assert list(read_manifest(tmp_path / "out").tensors) == list(stream.files.tensors)


class Sends(Model):
    """Reads the device of an embedding before calling it, as Llama 4 does."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.to(self.embed.weight.device))


class Takes(Model):
    """Uses the weight of an embedding that it never calls, as DeBERTa does, and passes it to its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x, shift = self.embed(ids), self.table.weight
        for layer in self.layers:
            x = layer(x, shift)[0]
        return self.head(self.norm(x))


class Reaches(Model):
    """Uses a weight of a block from outside."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.layers[1].up.weight.sum()


@pytest.mark.parametrize("make", [Sends, Takes])
def test_weights_outside_of_blocks_are_there(tmp_path: Path, make: type[Model]) -> None:
    model, source = built(make), write(tmp_path, make)
    bp.quantize_(model, "int3-g32", algorithm="gptq", calibrate=batches())
    Stream(empty(make), source, tmp_path / "out", "int3-g32", batches=batches()).run()
    assert_same(bp.load(make, tmp_path / "out"), model)


def test_tied_weights_that_are_on_a_device_stay_tied(tmp_path: Path) -> None:
    """They are filled from the files: each of their names got a parameter of its own."""
    model = Tied()
    Stream(model, write(tmp_path, Tied), tmp_path / "out", "int4-g32", batches=batches(), algorithm="hqq")
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, built(Tied).head.weight)


def test_weights_of_blocks_are_not_there_outside(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"Reaches cannot be .*: outside a block it uses .* \(in sum\)"):
        Stream(empty(Reaches), write(tmp_path, Reaches), tmp_path / "out", "int3-g32", batches=batches())


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_static_scales_are_those_of_the_float_model(tmp_path: Path, algorithm: str) -> None:
    """For float8 the largest input over 448, here measured by hooks in a run of the whole model. One layer is used in
    two blocks, and the head is the embedding."""
    model, largest = built(Tied), dict[int, torch.Tensor]()

    def note(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        key = id(module.weight)
        largest[key] = torch.maximum(largest.get(key, torch.tensor(0.0)), args[0].abs().max())

    watched = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in watched:
        model.get_submodule(name).register_forward_pre_hook(note)
    with torch.no_grad():
        for batch in batches():
            model(batch)
    options = {"batches": batches(), "algorithm": algorithm}
    Stream(empty(Tied), write(tmp_path, Tied), tmp_path / "out", {"*": "fp8-static"}, **options).run()
    loaded = bp.load(Tied, tmp_path / "out")
    found = {name: loaded.get_submodule(name).weight.act_scale.item() for name in watched}
    assert found == {name: (largest[id(model.get_submodule(name).weight)] / 448).item() for name in watched}
    assert loaded.embed.weight is loaded.head.weight


@pytest.mark.parametrize("run", ["awq", "smooth"])
def test_blocks_are_changed_before(source: Path, tmp_path: Path, run: str) -> None:
    """The norm of each block, which is not quantized, absorbs scales; the files contain the changed norm."""
    recipe, algorithm = RUNS[run]
    report = Stream(
        empty(), source, tmp_path / "out", recipe, batches=batches(), algorithm=algorithm, activations="disk"
    ).run()
    notes = {layer.name: layer.note for layer in report.layers}
    loaded, before = bp.load(Model, tmp_path / "out"), built()
    for at in range(3):
        assert "norm.weight takes a scale" in notes[f"layers.{at}.experts"]
        norm, old = (model.layers[at].norm.weight for model in (loaded, before))
        assert not torch.equal(norm, old)


def test_an_expert_that_saw_no_token_is_told(source: Path, tmp_path: Path) -> None:
    report = Stream(empty(), source, tmp_path / "out", "int4-g32", batches=batches()).run()
    notes = {layer.name: layer.note for layer in report.layers}
    assert "1 of 3 matrices saw no input in calibration" in notes["layers.1.experts"]


@pytest.mark.parametrize(
    ("activations", "recipe"), [("memory", "int4-g32"), ("disk", "int4-g32"), ("disk", "int8-static")]
)
def test_one_block_at_a_time(
    source: Path, tmp_path: Path, activations: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a block runs, no other has weights; at the end none has. Activations are on disk on demand alone, and of
    three steps at most: what blocks are given besides, the outputs of the previous block, and those of this one."""
    model, seen, files = empty(), [], []
    forward = Block.forward

    def watched(block: Block, *args: Any) -> Any:
        seen.append([name for name, param in model.named_parameters() if param.device.type != "meta"])
        files.append({path.name: path.stat().st_size for path in tmp_path.glob("out/unfinished/activations-*")})
        return forward(block, *args)

    monkeypatch.setattr(Block, "forward", watched)
    Stream(model, source, tmp_path / "out", recipe, batches=batches(), activations=activations).run()
    blocks = [{name.split(".")[1] for name in names if name.startswith("layers")} for names in seen]
    assert {len(each) for each in blocks} == {1}
    assert max(len({name.split("-")[1] for name in held}) for held in files) == (3 if activations == "disk" else 0)
    if activations == "disk":  # most of what blocks are given are the embedded tokens, which only the first one gets
        step = f"activations-{zlib.crc32(GIVEN.encode()):08x}-"
        given = [sum(size for name, size in held.items() if name.startswith(step)) for held in files]
        assert 0 < given[-1] < max(given) / 2
    assert all(param.device.type == "meta" for param in model.parameters())


def test_a_checkpoint_that_is_there_is_replaced_and_other_files_stay(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bp.save(nn.Linear(4, 4), out)
    (out / "notes.txt").write_text("mine")
    Stream(empty(), source, out, "int4-g32", batches=batches(), overwrite=True).run()
    assert_same(bp.load(Model, out), _quantized("int4-g32"))
    assert (out / "notes.txt").read_text() == "mine"
    assert {path.name for path in out.glob("*.safetensors")} == set(read_manifest(out).shards)


def _quantized(recipe: str) -> Model:
    model = built()
    bp.quantize_(model, recipe, algorithm="gptq", calibrate=batches())
    return model


def test_the_estimate_counts_what_there_is(source: Path, tmp_path: Path) -> None:
    given = batches()
    told = {}
    for keep in ("memory", "disk"):
        told[keep] = Stream(empty(), source, tmp_path / keep, "int4-g32", batches=given, activations=keep).memory
    tokens = sum(batch.numel() for batch in given)
    block = sum(param.numel() for param in Block().parameters()) * 4
    between = tokens * (WIDTH + WIDTH + 1) * 4  # what blocks pass on; the embedded tokens and the shift they are given
    assert told["memory"].weights == block
    assert told["memory"].activations == between
    assert told["memory"].disk == 0
    assert told["disk"].disk == 2 * between
    assert told["disk"].activations < between
    grams = 2 * WIDTH**2 + 96**2 + 3 * WIDTH**2 - WIDTH**2
    assert told["memory"].grams == 4 * grams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"memory_limit": 1000}, "1.0 kB are allowed", id="memory"),
        pytest.param({"batches": []}, "no batch", id="no data"),
        pytest.param({"activations": "tape"}, "memory or disk, not 'tape'", id="activations"),
        pytest.param({"dtype": torch.int8}, "dtype must be a dtype of floats, .* not torch.int8", id="dtype"),
        pytest.param({"model": Model(lambda x: x + 1)}, "cannot be calibrated block by block", id="between"),
        pytest.param({"target": "model/out"}, "lies in the source", id="inside"),
        pytest.param({"algorithm": "rotate"}, "rotate changes the model as a whole.*--in-memory", id="rotate"),
        pytest.param({"algorithm": "rotate+gptq"}, "rotate changes the model as a whole", id="rotate and more"),
        pytest.param(
            {"algorithm": "awq+gptq", "processes": Processes(0, 2)},
            "awq looks at all inputs of a block, which 2 processes share",
            id="awq in two processes",
        ),
    ],
)
def test_what_cannot_be_done_is_told_before(
    source: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    given = {"model": empty(), "target": "out", "recipe": "int4-g32", "batches": batches(), **options}
    model, target, recipe = (given.pop(name) for name in ("model", "target", "recipe"))
    with pytest.raises(ArgumentError, match=message):
        Stream(model, source, tmp_path / target, recipe, **given)


class Unused(Model):
    """Its second block has a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].spare = nn.Linear(WIDTH, WIDTH)


class FirstKept(Model):
    """The head also gets the output of the first block."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        shift = x.mean(-1, keepdim=True)
        outputs = []
        for layer in self.layers:
            x = layer(x, shift)[0]
            outputs.append(x)
        return self.head(self.norm(x + outputs[0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(Unused, r"calibration never reached layers\.1\.spare\.weight; give batches that use", id="unused"),
        pytest.param(
            FirstKept, "FirstKept uses the outputs of more blocks than its last: load the whole model", id="kept"
        ),
    ],
)
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_static_scales_that_cannot_be_measured(
    tmp_path: Path, make: type[Model], message: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before any weight is rounded, and leaves no files."""
    stream = Stream(
        empty(make), write(tmp_path, make), tmp_path / "out", "int8-static", batches=batches(), algorithm=algorithm
    )
    monkeypatch.setattr(stream, "_quantize", lambda *args: pytest.fail("too late"))
    with pytest.raises(ArgumentError, match=message):
        stream.run()
    assert list((tmp_path / "out").iterdir()) == []


class Broken(Model):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.layers[2].down.weight[3], float("nan"))


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_a_weight_that_holds_nan_is_told(tmp_path: Path, algorithm: str) -> None:
    source = write(tmp_path, Broken)
    stream = Stream(empty(), source, tmp_path / "out", "int4-g32", batches=batches(), algorithm=algorithm)
    with pytest.raises(ArgumentError, match=r"layers\.2\.down\.weight holds NaN or infinity"):
        stream.run()


def test_a_model_that_keeps_the_output_of_a_block_is_not_streamed(tmp_path: Path) -> None:
    stream = Stream(empty(FirstKept), write(tmp_path, FirstKept), tmp_path / "out", "int4-g32", batches=batches())
    with pytest.raises(
        ArgumentError, match="FirstKept uses the outputs of more blocks than its last: load the whole model"
    ):
        stream.run()


class Shown(Model):
    """A hook shows the head what the first block computes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Tensor] = []
        self.layers[0].down.register_forward_hook(lambda _, x, y: self.shown.append(y))  # type: ignore[union-attr]

    def forward(self, ids: Tensor) -> Tensor:
        self.shown.clear()
        x = self.embed(ids)
        shift = x.mean(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x, shift)[0]
        return self.head(self.norm(x + sum(self.shown)))


def test_a_model_whose_blocks_hand_on_more_than_they_return_is_not_streamed(tmp_path: Path) -> None:
    source = write(tmp_path, Shown)
    with pytest.raises(ArgumentError, match="Shown cannot be calibrated block by block: a block gives others more"):
        Stream(empty(Shown), source, tmp_path / "out", "int4-g32", batches=batches())


def test_files_of_another_model(source: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"Only in the model: 0.weight, 0.bias; only in the files: .*quantize_\("):
        Stream(other, source, tmp_path / "out", "int4-g32", batches=batches())
    assert not (tmp_path / "out" / "unfinished").exists()


class Rotary(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(WIDTH) / WIDTH, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.angles.cos().mean()


def test_computed_buffers_without_numbers_are_told(tmp_path: Path) -> None:
    """No file holds them. It said that the model used weights of a block outside of it."""
    source = write(tmp_path, Rotary)
    with pytest.raises(ArgumentError, match=r"buffers that Rotary computes .* on meta: angles\. Only its parameters"):
        Stream(empty(Rotary), source, tmp_path / "out", "int4-g32", batches=batches())


DIFFERENT: dict[str, tuple[Callable[[Model], Any], str]] = {
    "less": (
        lambda model: model.layers.pop(2),
        "model: -; only in the files: layers.2.down.bias, .*of another shape: -",
    ),
    "more": (
        lambda model: model.add_module("more", nn.Linear(2, 2)),
        "model: more.weight, more.bias; only in the files: -",
    ),
    "other": (
        lambda model: model.add_module("norm", nn.LayerNorm(3)),
        "files: -; of another shape: norm.weight, norm.bi",
    ),
}


@pytest.mark.parametrize("how", DIFFERENT)
def test_files_of_a_model_that_differs(how: str, source: Path, tmp_path: Path) -> None:
    model, (change, said) = empty(), DIFFERENT[how]
    with torch.device("meta"):
        change(model)
    with pytest.raises(CheckpointError, match=said):
        Stream(model, source, tmp_path / "out", "int4-g32", batches=batches())


class Counts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.head(self.shift)


def test_floats_are_cast_first(tmp_path: Path) -> None:
    model, source = built(Counts).bfloat16(), write(tmp_path, Counts)
    (source / "config.json").write_text('{"dtype": "float32"}')
    bp.quantize_(model, "int3-g32", algorithm="gptq", calibrate=batches())
    Stream(empty(Counts), source, tmp_path / "out", "int3-g32", batches=batches(), dtype=torch.bfloat16).run()
    assert_same(bp.load(Counts, tmp_path / "out"), model)
    entries = read_manifest(tmp_path / "out").tensors
    assert [entries[name].dtype for name in ("steps", "shift", "norm.weight")] == [torch.int64, *[torch.bfloat16] * 2]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_sizes_of_weights_do_not_change(source: Path, tmp_path: Path) -> None:
    report = Stream(empty(), source, tmp_path / "out", "int4-g32", batches=batches(), dtype=torch.bfloat16).run()
    assert report.bytes_after == read_manifest(tmp_path / "out").nbytes
    assert math.isclose(report.bytes_before, sum(param.nbytes for param in built().parameters()))


def test_errors_are_measured_on_demand(source: Path, tmp_path: Path) -> None:
    report = Stream(empty(), source, tmp_path / "out", "int4-g32", batches=batches(), measure=False).run()
    assert {(layer.sqnr, layer.output_sqnr) for layer in report.layers} == {(None, None)}


@pytest.mark.parametrize(
    ("recipe", "steps", "weights"),
    [("int8-static", 4, 10), ({"layers.*": "fp8-static"}, 3, 9), ({"layers.1.*": "fp8-channel-static"}, 2, 3)],
)
def test_progress_ends_when_all_is_done(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], recipe: Any, steps: int, weights: int
) -> None:
    """The three blocks and what comes after them, of which it only runs those up to the last static scale."""
    Stream(empty(), source, tmp_path / "out", recipe, batches=batches(), algorithm="rtn", progress=True).run()
    lines = capfd.readouterr().err.replace("\r", "\n").splitlines()
    full = "#" * 24
    for what, total in (("measuring inputs", steps), ("quantizing", weights)):
        last = [line for line in lines if line.startswith(what)][-1]
        assert last.startswith(f"{what} [{full}] {total}/{total}, 0 s left")
