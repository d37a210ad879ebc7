"""What the documentation says about formats, numbers and commands must match the code."""

from __future__ import annotations

import ast
import builtins
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitport
from bench.measure import RESULTS
from bench.results import lines_of, runs_of
from bitport import QTensor, Scheme, algorithms, interop
from bitport.cli import main as cli
from bitport.cli import quantize
from bitport.export import onnx_weight, xnnpack_weight
from bitport.interop.gguf.blocks import BLOCKS
from bitport.numerics import ACTIVATIONS, NUMBER_TYPES
from bitport.ops import OPS
from bitport.schemes import KINDS, Recipe
from bitport.schemes.elsewhere import named_elsewhere
from bitport.schemes.presets import SUFFIXES
from bitport.tensor.qtensor import PARTS

from .tree import PACKAGE, ROOT, files, table

DOCS = ROOT / "docs"


def table_keys(text: str, heading: str) -> set[str]:
    """Return what is in backquotes in the first column of the table after ``heading``."""
    rows = text.split(heading)[1].split("\n\n")
    table = next(block for block in rows if block.lstrip().startswith("|"))
    return {key for line in table.strip().splitlines()[2:] for key in re.findall(r"`([^`]+)`", line.split("|")[1])}


def test_every_number_type_is_described_as_it_is() -> None:
    rows = {line.split("|")[1].strip(): line for line in (DOCS / "numerics.md").read_text().splitlines() if "|" in line}
    for name, number in NUMBER_TYPES.items():
        if number.kind == "float" and number.signed:
            cells = [cell.strip() for cell in rows[name].split("|")[1:-1]]
            smallest = 2.0 ** int(cells[4][2:]) if cells[4].startswith("2^") else float(cells[4])
            assert (int(cells[1]), float(cells[3]), smallest) == (number.bits, number.max, number.smallest)
            assert f"bias {number.bias}" in cells[2]
        elif number.kind != "int":
            assert name in rows


def test_every_activation_is_described() -> None:
    text = (DOCS / "numerics.md").read_text()
    table = text.split("| activation |")[1].split("\n\n")[0]
    named = {name.strip() for line in table.splitlines()[2:] for name in line.split("|")[1].split(",")}
    assert named == set(ACTIVATIONS)


def test_the_manifest_is_as_described(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8))
    bitport.quantize_(model, "int4-g32", measure=False)
    bitport.save(model, tmp_path)
    manifest = json.loads((tmp_path / "bitport.json").read_text())
    text = (DOCS / "formats.md").read_text()
    assert set(manifest) == table_keys(text, "The manifest is one JSON object:")
    found = {key for entry in manifest["tensors"].values() for key in entry}
    assert found == table_keys(text, "An entry:")
    assert set(PARTS) == table_keys(text, "always in the plain layout")
    scheme = manifest["schemes"]["0"]
    assert {*scheme, *scheme["weight"]} == table_keys(text, "## A scheme")


def test_every_format_of_others_is_described() -> None:
    text = (DOCS / "interop.md").read_text()
    assert table_keys(text, "## What is read") == set(interop.READERS)
    assert table_keys(text, "## What is written") == set(interop.WRITERS)
    assert [kind for kind in BLOCKS if f"`{kind}`" not in text] == []


def test_the_recipe_that_is_shown_is_one() -> None:
    text = (DOCS / "formats.md").read_text()
    shown = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert [len(Recipe.from_json(each).rules) for each in shown] == [3]
    assert all(f"`{kind}`" in text for kind in KINDS)


def test_schemes_to_choose_from_are_as_large_as_is_said() -> None:
    for _, name, bits, inputs in table("choosing.md", "what for"):
        scheme = bitport.preset(name.strip("`"))
        assert f"{scheme.weight.bits_per_weight(4096, 4096):.2f}" == bits, name
        number = ACTIVATIONS[scheme.act].dtype.split("_")[0] if scheme.act else "as they are"
        assert number == inputs, name


def test_errors_to_expect_are_those_of_normal_numbers() -> None:
    """To a whole dB: a matrix of this size is within 0.1 dB of the others."""
    value = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for cell, said in table("evaluation.md", "rounded to"):
        error = bitport.quantize_tensor(value.float(), cell.strip("`")).dequantize() - value
        assert f"{20 * torch.log10(value.norm() / error.norm()):.0f}" == said, cell


def test_every_suffix_of_a_scheme_is_described() -> None:
    cells = [cell for cell, _ in table("choosing.md", "suffix")]
    assert set(re.findall(r"`-(.+?)`", " ".join(cells))) == set(SUFFIXES)


def test_inputs_are_rounded_as_the_readme_says() -> None:
    """One entry for all schemes of a row, or one for each."""
    for names, _, cell in table("../README.md", "name"):
        schemes = [bitport.preset(name) for name in re.findall(r"`(.+?)`", names)]
        said = cell.split("; ")
        for scheme, inputs in zip(schemes, said * len(schemes) if len(said) == 1 else said, strict=True):
            assert inputs == rounding_of_inputs(scheme), names


def rounding_of_inputs(scheme: Scheme) -> str:
    if not scheme.act:
        return "as it is"
    fmt = ACTIVATIONS[scheme.act]
    rows, columns = fmt.block
    shared = "tensor" if not rows else f"block of {rows}x{columns}" if columns else "token"
    return f"{fmt.dtype.split('_')[0]} per {shared}{', calibrated' if scheme.static else ''}"


def language_model(tied: bool) -> nn.Module:
    """A model with the parameter names of most transformers models."""
    block = nn.ModuleDict({"mlp": nn.ModuleDict({"up_proj": nn.Linear(64, 64)})})
    inner = nn.ModuleDict({"embed_tokens": nn.Embedding(96, 64), "layers": nn.ModuleList([block])})
    model = nn.ModuleDict({"model": inner, "lm_head": nn.Linear(64, 96, bias=False)})
    if tied:
        model.lm_head.weight = inner.embed_tokens.weight
    return model.bfloat16()


def recipes(page: str) -> list[dict[str, str]]:
    found = re.findall(r"\{\"[^{}]+\": \"[^{}]+\"\}", (ROOT / page).read_text())
    assert found
    return [ast.literal_eval(text) for text in found]


@pytest.mark.parametrize("tied", [False, True], ids=["a-head-of-its-own", "tied"])
@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/transformers.md"])
def test_recipes_that_are_shown_fit_models_with_a_tied_head_too(page: str, tied: bool) -> None:
    for recipe in recipes(page):
        bitport.quantize_(language_model(tied), recipe, measure=False)


@pytest.mark.parametrize("tied", [False, True], ids=["a-head-of-its-own", "tied"])
def test_recipes_for_embedding_and_head_do_what_is_said(tied: bool) -> None:
    alone = None if tied else "int8"
    wanted = [(None, None, "int4"), (None, None, "int4"), ("int8", "int8", "int3"), (alone, None, "int3")]
    for recipe, schemes in zip(recipes("docs/choosing.md"), wanted, strict=True):
        model = language_model(tied)
        bitport.quantize_(model, recipe, measure=False)
        weights = (model.lm_head.weight, model.model.embed_tokens.weight, model.model.layers[0].mlp.up_proj.weight)
        assert tuple(str(each.scheme) if isinstance(each, QTensor) else None for each in weights) == schemes


@pytest.mark.parametrize("tied", [False, True], ids=["a-head-of-its-own", "tied"])
@pytest.mark.parametrize(("runtime", "module"), [("onnx", onnx_weight), ("executorch", xnnpack_weight)])
def test_commands_for_other_runtimes_make_what_these_take(runtime: str, module: Any, tied: bool) -> None:
    block = (DOCS / "deploy.md").read_text().split(f"pip install 'bitport[{runtime}]'")[1].split("```")[0]
    words = shlex.split(next(line for line in block.splitlines() if line.startswith("bitport quantize")))
    model = language_model(tied)
    bitport.quantize_(model, quantize.recipe_of(cli.parser().parse_args(words[1:])), measure=False)
    assert module.refusal(model.model.embed_tokens.weight, "embedding") is None
    for layer in (model.lm_head, model.model.layers[0].mlp.up_proj):
        assert module.refusal(layer.weight, "linear") is None


def test_what_others_call_a_scheme_is_one_here() -> None:
    for _, scheme, row in named_elsewhere():
        assert bitport.preset(scheme)
        for name in filter(None, row.algorithms.split(" or ")):
            assert algorithms.algorithm(name)


def test_every_algorithm_is_offered_on_the_command_line() -> None:
    shown = next(line for line in (DOCS / "cli.md").read_text().splitlines() if line.startswith("- `--algorithm"))
    assert {*algorithms.ALGORITHMS, *algorithms.TRANSFORMS} <= set(re.findall(r"\w+", shown))


def python_of(text: str) -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    return blocks


OF_THE_READER = {"model", "build_model", "batches", "x", "inputs", "keys", "values", "q", "Adapted"} | {
    *("encoder", "decoder", "sound", "ids", "states")
}
"""Names that the samples use but cannot create."""
SAMPLES = [path for path in files(".md") if "```python" in path.read_text() and path.name != "reference.md"]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_in_samples_are_defined_before_their_use(path: Path) -> None:
    known = set(dir(builtins)) | OF_THE_READER
    for statement in (each for block in python_of(path.read_text()) for each in ast.parse(block).body):
        nodes = list(ast.walk(statement))
        used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        known |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        known |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
        known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert used - known == set(), ast.unparse(statement)


def take_first_steps(folder: Path) -> None:
    """Run the commands of the README that a reader tries first, with the model in the repository."""
    (folder / "models").symlink_to(ROOT / "models")
    block = (ROOT / "README.md").read_text().split("## First steps")[1].split("```sh\n")[1].split("```")[0]
    commands = [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("bitport ")]
    assert [cli.main(words[1:]) for words in commands] == [0] * 3


@pytest.mark.parametrize("text", ["README.md", "docs/transforms.md", "docs/training.md", "docs/optimizers.md"])
def test_python_that_is_shown_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each statement as it is, apart from the device; those that change a model get a fresh one."""
    families = pytest.importorskip("tests.algorithms.families", reason="needs the extra: pip install 'bitport[hf]'")
    monkeypatch.chdir(tmp_path)
    if text == "README.md":
        take_first_steps(tmp_path)
    names = {"build_model": lambda: families.model_of("gemma"), "batches": [families.batch_of("gemma")]}
    for block in python_of((ROOT / text).read_text()):
        for statement in ast.parse(block.replace('device="cuda"', 'device="cpu"')).body:
            if {"quantize_", "mixed"} & {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}:
                names["model"] = families.model_of("gemma")
            exec(compile(ast.Module([statement], []), text, "exec"), names)


def test_what_is_said_of_an_h100_is_what_was_recorded() -> None:
    """In the README, the changelog, docs/choosing.md and docs/transformers.md, in words: update these if this fails."""
    lines = lines_of(RESULTS / "gpu-methods.jsonl")
    run = [name for name, head in runs_of(lines).items() if "H100" in head["gpu"]["device"]][-1]
    timed = [line for line in lines if line["run"] == run and "speedup" in line]
    int4 = {line["method"]: line["speedup"] for line in timed if line["candidate"] == "int4"}
    assert int4["text_decode"] > 1
    assert int4["text_prefill"] < 1
    assert int4["audio_encoder"] < 1
    assert [line for line in timed if line["candidate"] in ("int8", "fp8-row") and line["speedup"] > 1.02] == []


OF_OTHERS = (
    "no file named model.safetensors",
    "Can't find a checkpoint index",
    "Weights only load failed",
    "Couldn't swap Linear.weight",
    "not enough values to unpack",
    "no rule registered for HOP ..",
    "KeyError",
)
"""Errors of PyTorch and transformers, in the first column of what to do about errors."""


def test_errors_of_bitport_that_are_quoted_are_raised() -> None:
    source = "\n".join(path.read_text() for path in files(".py") if path.is_relative_to(PACKAGE))
    quoted = [re.findall(r"`(.+?)`", cell)[0] for cell, _ in table("troubleshooting.md", "message")]
    for message in [each for each in quoted if each not in OF_OTHERS]:
        pieces = [piece.strip() for piece in re.split(r"\.\.|'x'|aten\.x", message)]
        assert [piece for piece in pieces if piece not in source] == [], message


def test_the_decision_for_few_ops_lists_them() -> None:
    text = (DOCS / "adr" / "0005-few-ops.md").read_text()
    named = [
        name for _, cell in table("adr/0005-few-ops.md", "what it computes") for name in re.findall(r"`(.+?)`", cell)
    ]
    assert sorted(named) == sorted(OPS)
    for name in OPS:
        overloads = set(getattr(torch.ops.bitport, name).overloads()) - {"default"}
        assert overloads == set(re.findall(r"`\.(\w+)`", text))


def test_decisions_are_numbered_and_listed() -> None:
    pages = sorted(path.name for path in (DOCS / "adr").glob("*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    index = (DOCS / "README.md").read_text()
    assert [name for name in pages if f"adr/{name})" not in index] == []


@pytest.mark.parametrize("path", [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in files(".md")])
def test_verbs_in_texts_exist(path: Path) -> None:
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    used = {verb for block in blocks for verb in re.findall(r"^(?:\$ )?bitport ([a-z]+)", block, re.MULTILINE)}
    assert used <= set(re.findall(r"^    (\w+)  ", cli.parser().format_help(), re.MULTILINE))
