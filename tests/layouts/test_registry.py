"""Which layout a device prefers, what a layout refuses and why, and the table of layouts."""

from __future__ import annotations

import types

import pytest
import torch

from bitport.errors import LayoutError
from bitport.layouts import LAYOUTS, Layout, Matrix, layout, preferred, register_layout, repack
from bitport.layouts.base import WHOLE
from bitport.layouts.plain import Plain
from bitport.layouts.plain_int32 import PlainInt32
from bitport.numerics import Quantized


def parts(scale: torch.dtype = torch.bfloat16) -> Quantized:
    return Quantized(torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 4, dtype=scale))


GOOD = Matrix("int4", 8, 128, 1, 32)


@pytest.mark.parametrize(
    ("name", "matrix", "scale", "reason"),
    [
        pytest.param(
            "tile_packed_2", GOOD._replace(dtype="int8"), torch.bfloat16, "it holds int4, not int8", id="tile-int8"
        ),
        pytest.param(
            "tile_packed_2", GOOD._replace(dtype="nf4"), torch.bfloat16, "it holds int4, not nf4", id="tile-nf4"
        ),
        pytest.param(
            "tile_packed_2",
            GOOD._replace(block_k=16),
            torch.bfloat16,
            r"group of \(32, 64, 128, 256\), not per 1x16",
            id="tile-group",
        ),
        pytest.param("tile_packed_2", GOOD._replace(block_n=8), torch.bfloat16, "not per 8x32 block", id="tile-rows"),
        pytest.param(
            "tile_packed_2",
            GOOD._replace(k=96, block_k=64),
            torch.bfloat16,
            "K=96 must be a multiple of the group 64",
            id="tile-short-group",
        ),
        pytest.param(
            "tile_packed_8",
            GOOD._replace(k=192),
            torch.bfloat16,
            "K=192 must be a multiple of the group 32 and of 128",
            id="tile-inner",
        ),
        pytest.param(
            "tile_packed_2", GOOD, torch.float16, "scales must be bfloat16, not torch.float16", id="tile-scale"
        ),
        pytest.param(
            "plain_int32", GOOD._replace(dtype="int3"), torch.bfloat16, "it holds int4, not int3", id="int32-int3"
        ),
        pytest.param("plain_int32", GOOD._replace(k=124), torch.bfloat16, "multiple of 8 .*, not 124", id="int32-k"),
    ],
)
def test_a_refusal_says_what_is_allowed(name: str, matrix: Matrix, scale: torch.dtype, reason: str) -> None:
    with pytest.raises(
        LayoutError, match=f"layout '{name}' cannot hold this {matrix.dtype} {matrix.n}x{matrix.k} matrix: .*{reason}"
    ):
        repack(matrix, parts(scale), "plain", name)


def test_an_unknown_layout_names_those_known() -> None:
    with pytest.raises(LayoutError, match=f"unknown layout 'nope'; known: {', '.join(LAYOUTS)}"):
        layout("nope")
    with pytest.raises(LayoutError, match="unknown layout 'nope'"):
        repack(GOOD, parts(), "nope", "plain")


def test_what_each_device_prefers() -> None:
    assert preferred(torch.device("cuda"), GOOD, parts()).startswith("tile_packed_")
    assert preferred(torch.device("xpu"), GOOD, parts()) == "plain_int32"
    assert preferred(torch.device("meta"), GOOD, parts()) == "plain"
    assert preferred(torch.device("mps"), GOOD, parts()) == "int4_pairs"
    assert preferred(torch.device("hpu"), GOOD, parts()) == "plain"


def test_the_next_best_where_the_best_refuses() -> None:
    wide, narrow = GOOD._replace(k=128), GOOD._replace(k=64)
    assert preferred(torch.device("cuda"), wide, parts()) == "tile_packed_8"
    assert preferred(torch.device("cuda"), narrow, parts()) == "tile_packed_4"
    assert preferred(torch.device("cuda"), narrow._replace(k=32), parts()) == "tile_packed_2"
    assert preferred(torch.device("cuda"), GOOD._replace(dtype="int8"), parts()) == "plain"


@pytest.mark.parametrize(("device", "name"), [("cuda", "tile_packed_8"), ("mps", "int4_pairs")])
def test_a_layout_for_weights_alone_is_not_taken_for_more(device: str, name: str) -> None:
    """A weight-only layout is chosen neither for a weight whose inputs are rounded nor for experts: no kernel would
    take it there."""
    wide, held = GOOD._replace(k=128), parts()
    assert preferred(torch.device(device), wide, held) == name
    assert preferred(torch.device(device), wide, held, "int8") == "plain"
    experts = held._replace(data=held.data[None], scale=held.scale[None])
    assert preferred(torch.device(device), wide, experts) == "plain"


@pytest.mark.usefixtures("own_tables")
def test_a_layout_that_does_not_say_weight_only_is_for_all() -> None:
    """The attribute is optional: a layout without it takes every weight."""
    silent = types.SimpleNamespace(**{name: getattr(Plain(), name) for name in WHOLE})
    silent.name, silent.devices = "silent", ("cpu",)
    register_layout(silent)  # type: ignore[arg-type]
    assert preferred(torch.device("cpu"), GOOD, parts(), "int8") == "silent"


def test_the_members_of_a_layout_are_those_of_its_protocol() -> None:
    assert {*WHOLE, "weight_only"} == {name for name in dir(Layout) if name[0] != "_"} | set(Layout.__annotations__)
    assert [name for name, each in LAYOUTS.items() if not isinstance(each.weight_only, bool)] == []


class Mine(Plain):
    name = "mine"
    devices = ("cpu",)


@pytest.mark.usefixtures("own_tables")
def test_a_layout_from_outside_is_used_on_its_device() -> None:
    before = preferred(torch.device("cpu"), GOOD, parts())
    register_layout(Mine())
    assert before != "mine"
    assert preferred(torch.device("cpu"), GOOD, parts()) == "mine"
    assert repack(GOOD, parts(), "plain", "mine").data.shape == (8, 64)


@pytest.mark.usefixtures("own_tables")
def test_a_name_is_taken_by_one_class() -> None:
    class Other(PlainInt32):
        name = "plain"

    with pytest.raises(LayoutError, match=r"'plain' exists already, of bitport\.layouts\.plain; choose another name"):
        register_layout(Other())
    register_layout(Plain())  # a module imported twice registers twice
    assert type(LAYOUTS["plain"]) is Plain


def test_the_canonical_layout_holds_everything_and_changes_nothing() -> None:
    mine = parts()
    assert repack(GOOD, mine, "plain", "plain") is mine
    assert layout("plain").devices == ()


def test_a_layout_that_lacks_something_is_refused_at_once() -> None:
    """At registration, not when the first tensor has been packed in it."""

    class Half:
        name, devices = "half", ("cpu",)

    with pytest.raises(LayoutError, match="Half lacks data_ndim, expects, refuses, pack, unpack"):
        register_layout(Half())  # type: ignore[arg-type]


def test_devices_are_no_text() -> None:
    """Every character of a string would count as a device."""

    class Single(Plain):
        name, devices = "single", "cuda"  # type: ignore[assignment]

    with pytest.raises(LayoutError, match=r"devices is a tuple of names, \('cuda',\)"):
        register_layout(Single())
    assert "single" not in LAYOUTS


def test_devices_are_types() -> None:
    """No tensor on cuda:0 would find this layout."""

    class Numbered(Plain):
        name, devices = "numbered", ("cuda:0",)

    with pytest.raises(LayoutError, match="devices are types, as 'cuda', not 'cuda:0'"):
        register_layout(Numbered())
    assert "numbered" not in LAYOUTS


@pytest.mark.usefixtures("own_tables")
@pytest.mark.parametrize("answer", [False, True, ""])
def test_a_refusal_is_none_or_a_text(answer: object) -> None:
    """False is no refusal to its author: the layout was never used, without a word."""

    class Unsure(Mine):
        def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
            return answer  # type: ignore[return-value]

    register_layout(Unsure())
    with pytest.raises(LayoutError, match=rf"refuses of layout 'mine' has answered {answer!r}, which counts as"):
        preferred(torch.device("cpu"), GOOD, parts())
    with pytest.raises(LayoutError, match=r"it must return None where the layout can hold the weight"):
        repack(GOOD, parts(), "plain", "mine")
