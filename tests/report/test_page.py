"""The page of a report: complete, self-contained, and safe against hostile names."""

from __future__ import annotations

import html.parser
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import bitport as bp
from bitport.algorithms import GPTQ, HQQ, Rotate
from bitport.algorithms.solving import uses_data
from bitport.report import LayerReport, Report
from bitport.report.bars import REST, STAY, bytes_by_scheme
from bitport.report.html import Html, el, text
from bitport.report.layer_map import SHADES, Place, Scale, heat_maps, place_of
from bitport.report.page import figures, page, python_of, readable

from .hostile import NAMES
from .hostile import REPORT as HOSTILE

VOID = {"meta"}
MAY = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "div", "span", "p", "i"),
    *("h1", "h2", "h3", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "figure"),
    *("figcaption", "pre", "code", "svg", "g", "rect", "text", "line", "circle"),
}


class Reader(html.parser.HTMLParser):
    """Checks that elements are closed in order; collects elements, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= set(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def read(content: str) -> Reader:
    reader = Reader()
    reader.feed(content)
    reader.close()
    assert reader.open == []
    return reader


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    batches = [torch.randn(16, 64) for _ in range(4)]
    rules = {"head": "int8", "layers.1.up": "skip", "*": "int3-g32"}
    return bp.quantize_(Model(), rules, algorithm=GPTQ(damping=0.05), calibrate=batches)


def test_a_page_tells_everything(report: Report) -> None:
    reader = read(page(report, "some model", "bitport quantize some", perplexity=(10.0, 11.0)))
    words = "\n".join(reader.words)
    for layer in report.layers:
        assert words.count(layer.name) >= 2, "in its cell and in the table"
    for figure in ("some model", "bitport quantize some", "int3-g32", "rule 'layers.1.up' says skip", "+10.00 %"):
        assert figure in words
    for layer in report.quantized:
        assert f"SQNR of the output: {layer.output_sqnr:.1f} dB, to nearest {layer.output_sqnr_rtn:.1f}" in words


def test_a_page_needs_nothing_else(report: Report) -> None:
    """No script, and nothing that a browser would fetch; a policy in the page forbids both."""
    for content in (page(report), page(HOSTILE, NAMES[0], NAMES[1])):
        reader = read(content)
        assert reader.seen <= MAY
        names = {name for name, _ in reader.attributes}
        assert not names & {"src", "href", "srcset", "action", "style", "xlink:href"}
        assert not [name for name in names if name.startswith("on")]
        assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in reader.attributes
        css = re.findall(r"<style>(.*?)</style>", content, re.DOTALL)
        assert len(css) == 1
        assert "url(" not in css[0]
        assert "@import" not in css[0]


def test_hostile_names_are_text() -> None:
    content = page(HOSTILE, NAMES[2], NAMES[0])
    words = "".join(read(content).words)
    for name in NAMES[:3]:
        assert name in words
    assert "&lt;b&gt; &amp; model" in words
    assert "right\\u202eto left\\x00\\x1b[31m\\ud800.3.weight" in words
    content.encode("utf-8")


def test_it_is_written_as_a_file(report: Report, tmp_path: Path) -> None:
    report.to_html(tmp_path / "report.html", title="ein Mädchen")
    content = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert content == page(report, "ein Mädchen")
    assert content == page(report, "ein Mädchen"), "the same bytes for the same report"


def test_an_empty_report_is_a_page_too() -> None:
    assert "nothing quantized" in "".join(read(page(Report((), 0, 0))).words)


RECIPES = {
    "name": ("int4", "rtn", 'bp.quantize_(model, "int4")'),
    "algorithm": ("int3-g32", "hqq", 'bp.quantize_(model, "int3-g32", algorithm="hqq")'),
    "settings": ("int4", HQQ(), 'algorithm="hqq"'),
    "rules": ({"head": "int8", "*": "int4"}, "rtn", "bp.Recipe.from_json("),
    "steps": ("int4-g32", "smooth+hqq", 'algorithm="smooth+hqq", calibrate=batches)'),
    "steps with settings": ("int4-g32", (Rotate(seed=1), HQQ(steps=2)), "import Chain, HQQ, Rotate"),
    "static": ("int8-static", "rtn", '"int8-static", calibrate=batches)'),
}


@pytest.mark.parametrize("case", RECIPES)
def test_what_it_says_does_the_same_again(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the Python that the page shows, with the recipe that it shows."""
    recipe, algorithm, shown = RECIPES[case]
    torch.manual_seed(0)
    model, again = Model(), Model()
    again.load_state_dict(model.state_dict())
    batches = [torch.randn(9, 64)] if uses_data(algorithm, recipe) else None
    report = bp.quantize_(model, recipe, algorithm=algorithm, calibrate=batches)
    assert shown in python_of(report)
    (tmp_path / "recipe.json").write_text(readable(report.recipe))
    monkeypatch.chdir(tmp_path)
    exec(python_of(report), {"model": again, "batches": batches})
    pairs = list(zip(_quantized(model), _quantized(again), strict=True))
    assert all(torch.equal(mine.dequantize(), its.dequantize()) for mine, its in pairs)
    assert bp.Recipe.from_json(readable(report.recipe)) == bp.Recipe.from_json(report.recipe)
    assert len(pairs) == 7


def _quantized(model: nn.Module) -> list[bp.QTensor]:
    return [param for param in model.parameters() if isinstance(param, bp.QTensor)]


def test_layers_that_are_exact_gain_nothing() -> None:
    layers = [
        LayerReport(f"{at}.weight", "int4", "", 2, 1, output_sqnr=ours, output_sqnr_rtn=20.0)
        for at, ours in enumerate((21.0, 22.0))
    ]
    exact = LayerReport("3.weight", "int4", "", 2, 1, output_sqnr=math.inf, output_sqnr_rtn=math.inf)
    assert figures(Report((exact, *layers), 4, 2))[-1][:2] == ("Gain", "+1.0 dB")


def test_notes_are_apart_from_reasons() -> None:
    """A pattern may hold what separates the two in the text."""
    model = Model()
    model.tied = model.head
    rules = [("re:head|a; b", "int8"), ("re:tied|c; d", "int8"), ("layers.*", "int3-g32")]
    report = bp.quantize_(model, rules, algorithm="gptq", calibrate=[torch.randn(16, 64)])
    few = "calibrated on only 16 rows of 64 numbers: on other inputs its output is worse than shown here"
    told = {layer.name: (layer.reason, layer.note) for layer in report.layers}
    assert told["head.weight"] == ("rule 're:head|a; b'", few)
    assert told["tied.weight"] == ("rule 're:tied|c; d'", few)
    assert f"rule 're:head|a; b'; {few}" in str(report)
    words = read(page(report)).words
    assert "b'" not in words
    assert few in words


def test_settings_of_an_algorithm_are_told(report: Report) -> None:
    assert "from bitport.algorithms import GPTQ" in python_of(report)
    call = "GPTQ(damping=0.05, block=128, sort=True, clip=True, shrinkage=0.3)"
    assert f"algorithm={call}, calibrate=batches)" in python_of(report)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.mlp.up_proj.weight", Place("model.layers", 3, "mlp.up_proj")),
        ("h.11.attn.c_attn.weight", Place("h", 11, "attn.c_attn")),
        ("model.layers.0.mlp.experts.7.w1.weight", Place("model.layers", 0, "mlp.experts.*.w1")),
        ("lm_head.weight", Place("", None, "lm_head")),
        ("layers.2.weight", Place("layers", 2, "weight")),
        ("0.weight", Place("", 0, "weight")),
        ("a.99999999999999999999.weight", Place("", None, "a.99999999999999999999")),
    ],
)
def test_where_a_weight_stands(name: str, place: Place) -> None:
    assert place_of(name) == place


def test_shades_go_from_the_best_to_the_worst() -> None:
    layers = [LayerReport(f"layers.{at}.weight", "int4", "", 2, 1, sqnr=10.0 + at) for at in range(11)]
    scale = Scale.of([*layers, LayerReport("head.weight", "int8", "", 2, 1, sqnr=60.0)], output=False)
    assert (scale.low, scale.high) == (10, 20)
    shades = [scale.shade(10.0 + at) for at in range(11)]
    assert shades == sorted(shades, reverse=True)
    assert (shades[0], shades[-1], scale.shade(60), scale.shade(float("inf"))) == (SHADES - 1, 0, 0, 0)


def test_layers_that_are_alike_look_alike() -> None:
    layers = [LayerReport(f"layers.{at}.weight", "int4", "", 2, 1, sqnr=20 + 0.1 * at) for at in range(2)]
    scale = Scale.of(layers, output=False)
    assert abs(scale.shade(20.0) - scale.shade(20.1)) <= 1
    assert 0 < scale.shade(20.0) < SHADES - 1


def test_a_cell_for_every_weight_and_the_worst_of_experts() -> None:
    names = [f"layers.{block}.{kind}.weight" for block in range(3) for kind in ("a", "experts.0.w", "experts.1.w")]
    layers = [LayerReport(name, "int4", "", 2, 1, sqnr=10.0 + at) for at, name in enumerate([*names, "head.weight"])]
    maps = heat_maps(layers, False, Scale.of(layers, False))
    assert len(maps) == 2
    assert [drawing.count("<rect") for drawing in maps] == [6, 1]
    assert "layers.0.experts.0.w.weight" in maps[0]
    assert "layers.0.experts.1.w.weight" not in maps[0], "that one is better"
    assert "the worst of 2" in maps[0]


def test_bytes_are_all_accounted_for() -> None:
    layers = (
        LayerReport("a.weight", "int4", "", 800, 200),
        LayerReport("embed.weight", None, "", 100, 100),
        LayerReport("head.weight", None, "", 100, 100, tied=True),
    )
    assert bytes_by_scheme(Report(layers, 950, 350)) == {"int4": (800, 200), STAY: (100, 100), REST: (50, 50)}


def test_a_tied_weight_is_marked() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 64)
            self.head = nn.Linear(64, 32, bias=False)
            self.head.weight = self.embed.weight

    report = bp.quantize_(Tied(), {"*": "int8"})
    assert [layer.tied for layer in report.layers] == [False, True]
    parts = bytes_by_scheme(report)
    assert parts == {"int8": (report.bytes_before, report.bytes_after)}


def test_markup_is_made_by_functions_alone() -> None:
    assert el("p", "<b>", el("i", "&"), class_='"x"') == '<p class="&quot;x&quot;">&lt;b&gt;<i>&amp;</i></p>'
    assert el("rect", x=1.23456, stroke_width=2.0, rx=None) == '<rect x="1.23" stroke-width="2"></rect>'
    assert isinstance(text("a"), Html)
    assert text("tab\tbell\x07 ½ 日本") == "tab\\tbell\\x07 ½ 日本"
