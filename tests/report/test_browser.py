"""Report pages in a real browser: how it parses them, and what it renders."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import bitport as bp
from bitport.report import Report
from bitport.report.page import page

from .hostile import NAMES
from .hostile import REPORT as HOSTILE
from .png import read_png
from .test_page import Model

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium (make browser)")

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
DARK = "--blink-settings=preferredColorScheme=0"
WIDTH, HEIGHT = 700, 900


def browse(content: str, folder: Path, *options: str) -> str:
    """Return what chromium prints; each run uses its own profile."""
    path = folder / "page.html"
    path.write_text(content, encoding="utf-8")
    command = [BROWSER or "", *QUIET, f"--user-data-dir={folder / 'profile'}", *options, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    return bp.quantize_(Model(), {"head": "int8", "layers.1.up": "skip", "*": "int3-g32"}, algorithm="hqq")


def test_the_browser_builds_every_row_and_cell(report: Report, tmp_path: Path) -> None:
    built = browse(page(report, "some model", "bitport quantize"), tmp_path, "--dump-dom")
    rows = re.findall(r"<td>([^<]*)</td>", built.split("Every weight")[-1])
    assert [name for name in rows if name.endswith(".weight")] == [layer.name for layer in report.layers]
    assert built.count('<g class="cell shade-') == len(report.quantized)
    assert built.count('<g class="cell kept"') == len(report.skipped)


def test_hostile_names_stay_text_in_the_browser(tmp_path: Path) -> None:
    """Checked in the DOM that the browser built: no script, no image, no event handler."""
    built = browse(page(HOSTILE, NAMES[2], NAMES[0]), tmp_path, "--dump-dom")
    assert not re.search(r"<(script|img|a|b|iframe|link|object)\b", built)
    tags = re.findall(r"<\w+[^>]*>", re.sub(r'"[^"]*"', '""', built))
    assert tags
    assert not [tag for tag in tags if re.search(r"\son\w+=", tag)]
    assert html.escape(NAMES[0], quote=False) in built


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_painted(report: Report, tmp_path: Path, dark: bool) -> None:
    """The page is not blank, follows the colour scheme, and contains the shades of the heat map."""
    picture = tmp_path / "page.png"
    options = [f"--screenshot={picture}", f"--window-size={WIDTH},{HEIGHT}", *([DARK] if dark else [])]
    browse(page(report, "some model"), tmp_path, *options)
    pixels = read_png(picture)
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    corner = pixels[0, 0].float().mean()
    assert (corner < 64) if dark else (corner > 192)
    different = (pixels != pixels[0, 0]).any(-1)
    assert different.float().mean() > 0.2, "cards and what is in them"
    colours = pixels.reshape(-1, 3).unique(dim=0)
    assert len(colours) > 100, "text, bars and cells"
    painted = {tuple(colour) for colour in colours.tolist()}
    style = (Path(bp.__file__).parent / "report" / "style.css").read_text()
    themes = [re.findall(r"--shade-\d: #(\w{6})", part) for part in style.split("@media", 1)]
    wanted = {tuple(bytes.fromhex(shade)) for shade in themes[dark]}
    assert len(wanted) == 10
    assert len(painted & wanted) >= 3
