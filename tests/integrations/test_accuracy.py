"""What each scheme costs on a real language model: the figures of docs/accuracy.json are remeasured and checked."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

from bitport.evaluate.golden import SCHEMES, Golden, as_markdown, rows
from bitport.evaluate.yardstick import Yardstick

pytestmark = pytest.mark.xdist_group("accuracy")  # measured once, by one worker
ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs" / "accuracy.json").read_text())
GOLDEN = {row["scheme"]: Golden(**row) for row in RECORD["rows"]}

REPEATED = ("bf16", "int8", "int8-dyn", "int4", "fp8-row", "mxfp8", "nvfp4")
LOSS_ROUNDING = 2.0**-19
"""A token's loss is a float32 number computed from logits below 32: it is off by up to 2^-24 * 32."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Golden]:
    yardstick = Yardstick(ROOT / RECORD["model"])
    return {row.scheme: row for row in rows(yardstick, REPEATED, with_noise=False)}


@pytest.mark.parametrize("scheme", REPEATED)
def test_perplexity_is_the_recorded_one(measured: dict[str, Golden], scheme: str) -> None:
    """A kernel may be off by ``noise`` both here and in the record, and everything outside linear layers by as much."""
    golden = GOLDEN[scheme]
    apart = abs(math.log(measured[scheme].perplexity / golden.perplexity))
    assert apart <= 4 * golden.noise + LOSS_ROUNDING
    assert measured[scheme].bits_per_weight == pytest.approx(golden.bits_per_weight, rel=1e-12)


AT_MOST = {
    "int8": 0.5,
    "int8-dyn": 0.5,
    "fp8": 0.5,
    "fp8-row": 0.5,
    "fp8-block": 0.5,
    "mxfp8": 0.5,
    "int6": 0.5,
    "int4": 5.0,
}
"""The largest acceptable increase in perplexity, in percent."""


@pytest.mark.parametrize("scheme", AT_MOST)
def test_cost_is_within_its_limit(scheme: str) -> None:
    assert GOLDEN[scheme].change_percent <= AT_MOST[scheme]


ORDERED = {
    "bits": ("int2", "int3", "int4"),
    "groups of int2": ("int2", "int2-g32"),
    "groups of int3": ("int3", "int3-g32"),
    "zero points": ("int4-sym", "int4"),
    "rounded inputs": ("mxfp4", "nvfp4", "mxfp8"),
    "static scale": ("int8-static", "int8-dyn"),
}


@pytest.mark.parametrize("what", ORDERED)
def test_coarser_numbers_cost_more(what: str) -> None:
    """Ordered from coarsest to finest."""
    costs = [GOLDEN[scheme].change_percent for scheme in ORDERED[what]]
    assert costs == sorted(costs, reverse=True)


def test_the_yardstick_is_sensitive() -> None:
    """Three bits show clearly and two bits hurt: a model that tolerates everything would not be a useful yardstick."""
    costs = {scheme: GOLDEN[scheme].change_percent for scheme in ("int4", "int3", "int2")}
    assert costs["int3"] > 2 * costs["int4"] > 0
    assert costs["int2"] > 5 * costs["int3"]


def test_the_record_is_complete_and_its_page_is_its_own() -> None:
    assert tuple(GOLDEN) == SCHEMES
    assert (ROOT / "docs" / "accuracy.md").read_text() == as_markdown(RECORD)
