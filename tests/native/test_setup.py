"""How ``setup.py`` compiles the native kernels, with a fake compiler that records its arguments; and that a library is
not used with sources other than its own."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setuptools

from bitport.backends.cpu import native
from bitport.backends.sources import fingerprint
from bitport.errors import KernelError

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "setup.py"
pytestmark = pytest.mark.skipif(not SETUP.is_file(), reason="the folder of the source is needed")
WRITES = """#!/bin/sh
case "$*" in *--version) exec echo 1.0;; esac
echo "$@" >> "$0.log"
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
Compiler = Callable[[str, str], Path]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(SETUP))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes fake compilers: scripts in a folder that comes first in PATH."""
    folder = tmp_path / "programs of mine"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CXX", raising=False)

    def make(name: str, script: str = WRITES) -> Path:
        path = folder / name
        path.write_text(script)
        path.chmod(0o755)
        return path

    return make


def test_the_library_says_which_sources_it_is_of(setup: dict[str, Any], compiler: Compiler, tmp_path: Path) -> None:
    used = compiler("c++")
    assert setup["compile_kernels"](tmp_path) is None
    assert (tmp_path / setup["LIBRARY"]).is_file()
    stamped = f'-DBITPORT_SOURCES="{fingerprint(ROOT / "native")}"'
    compiled = [line for line in used.with_name("c++.log").read_text().splitlines() if line.endswith("check.cpp")]
    assert len(compiled) == 1
    assert stamped in compiled[0]


def test_the_compiler_in_cxx_is_the_only_one(
    setup: dict[str, Any], compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, place = compiler("c++"), tmp_path / "place"
    for value, reason in (
        ("no-such-compiler", "no-such-compiler: [Errno 2] No such file or directory: 'no-such-compiler'"),
        (str(compiler("fails", "#!/bin/sh\necho wrong as ever >&2\nexit 1\n").name), "fails: wrong as ever\n"),
        ("fails -O1", "fails -O1: wrong as ever\n"),
    ):
        monkeypatch.setenv("CXX", value)
        assert setup["compile_kernels"](place) == reason
        assert not (place / setup["LIBRARY"]).exists()
    assert not usual.with_name("c++.log").exists()


def test_what_a_compiler_says_may_be_in_any_encoding(setup: dict[str, Any], compiler: Compiler, tmp_path: Path) -> None:
    for name in ("c++", "g++", "clang++"):
        compiler(name, "#!/bin/sh\nprintf 'wrong \\377 as ever' >&2\nexit 1\n")
    assert setup["compile_kernels"](tmp_path) == "clang++: wrong \ufffd as ever"


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_options_that_compilers_for_windows_refuse(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    used = compiler("c++")
    with monkeypatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        patch.setattr(sys, "platform", system)
        setup = runpy.run_path(str(SETUP))
    assert setup["compile_kernels"](tmp_path) is None
    *compiled, linked = used.with_name("c++.log").read_text().splitlines()
    assert all((" -fPIC " in line) == (system == "linux") for line in compiled)
    assert linked.endswith(" -ldl") == (system == "linux")


@pytest.mark.parametrize("called", ["{path}", "mine", "'{path}' -O1", "mine -O1"])
def test_a_path_with_blanks_and_options(
    setup: dict[str, Any], compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str
) -> None:
    mine = compiler("mine")
    monkeypatch.setenv("CXX", called.format(path=mine))
    assert setup["compile_kernels"](tmp_path) is None
    lines = mine.with_name("mine.log").read_text().splitlines()
    assert all(line.startswith("-O1 ") == called.endswith("-O1") for line in lines)


def test_a_library_stays_until_the_next_one_is_whole(setup: dict[str, Any], compiler: Compiler, tmp_path: Path) -> None:
    """An interrupted build leaves the old library in place, and a program that has it open keeps reading the old
    file."""
    library, archive = tmp_path / setup["LIBRARY"], tmp_path / setup["ARCHIVE"]
    for path in (library, archive):
        path.parent.mkdir(parents=True)
        path.write_text("the one before")
    compiler("c++", WRITES.replace("\n", f"\ntest -s '{library}' -a -s '{archive}' || exit 1\n", 1))
    with open(library) as opened:
        assert setup["compile_kernels"](tmp_path) is None
        assert opened.read() == "the one before"
    assert library.read_bytes() == b""
    assert sorted(path.name for path in library.parent.iterdir()) == [library.name]


@pytest.mark.parametrize("same", [True, False])
def test_after_a_failure_a_library_of_other_sources_goes(
    setup: dict[str, Any], compiler: Compiler, tmp_path: Path, same: bool
) -> None:
    library, archive = tmp_path / setup["LIBRARY"], tmp_path / setup["ARCHIVE"]
    for path in (library, archive):
        path.parent.mkdir(parents=True)
        path.write_text(f"code {fingerprint(ROOT / 'native') if same else 'f' * 64} code")
    for name in ("c++", "g++", "clang++"):
        compiler(name, "#!/bin/sh\necho no room >&2\nexit 1\n")
    reason = setup["compile_kernels"](tmp_path)
    assert reason is None if same else reason == "clang++: no room\n"
    assert library.exists() == archive.exists() == same


def test_another_extra_does_not_compile_again(
    setup: dict[str, Any], compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compiled stays only if the same would be compiled now."""
    stamped = WRITES.replace(": > ", f"echo {fingerprint(ROOT / 'native')} > ")
    log = compiler("c++", stamped).with_name("c++.log")
    compiler("ar", '#!/bin/sh\n: > "$2"\n')
    library, archive = tmp_path / setup["LIBRARY"], tmp_path / setup["ARCHIVE"]

    def compiles(checkout: bool = True) -> bool:
        log.unlink(missing_ok=True)
        setup["install_kernels"](tmp_path, checkout)
        return log.exists()

    assert compiles()
    assert not compiles()
    for undone in (library, archive, library.with_suffix(".made")):
        undone.unlink()
        assert compiles()
        assert not compiles()
    library.write_text("f" * 64)  # of other sources
    assert compiles()
    compiler("c++", stamped.replace("1.0", "1.1"))
    assert compiles()
    assert not compiles()
    monkeypatch.setenv("CXX", "c++ -O1")
    assert compiles()
    assert not compiles()
    assert compiles(checkout=False)
    assert not library.with_suffix(".made").exists()  # which would be packed into a wheel
    monkeypatch.setenv("CXX", "no-such-compiler")
    setup["install_kernels"](tmp_path, True)
    assert library.exists()  # of the same sources
    assert not library.with_suffix(".made").exists()  # but not by this compiler


def test_why_there_is_no_library_is_left_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip hides the warning of an installation that succeeded without the library."""
    environment = {**os.environ, "CXX": "no-such-compiler"}
    command = [sys.executable, SETUP, "-q", "build_py", "--build-lib", tmp_path]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "warning: bitport is installed without its native CPU kernels: no-such-compiler: " in ran.stderr
    monkeypatch.setattr(native, "PATH", tmp_path / "bitport" / "backends" / "cpu" / native.PATH.name)
    assert "not compiled when bitport was installed: no-such-compiler: [Errno 2]" in str(native.load())


def test_a_wheel_is_of_a_platform_and_for_any_python(tmp_path: Path) -> None:
    """Files are at the root of the wheel. Those in ``.data/purelib`` would be installed too, but auditwheel refuses
    them."""
    folders = ["build", "--build-base", tmp_path, "egg_info", "--egg-base", tmp_path]
    command = [sys.executable, SETUP, "-q", *folders, "bdist_wheel", "--dist-dir", tmp_path / "dist"]
    environment = {**os.environ, "CXX": "no-such-compiler"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert re.fullmatch(r"bitport-.*-py3-none-(?!any).*\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as files:
        assert {"bitport/__init__.py", "bitport/backends/cpu/libbitport_kernels.txt"} <= set(files.namelist())


def test_a_library_of_other_sources_is_an_error(tmp_path: Path) -> None:
    sources = tmp_path / "native"
    for folder in ("kernels", "torch", "shim", "runner"):
        (sources / folder).mkdir(parents=True)
    header, kernel = sources / "kernels" / "bitport_kernels.h", sources / "torch" / "calls.cpp"
    header.write_text("one")
    kernel.write_text("two")
    compiled = fingerprint(sources)
    for path in ("runner/main.cpp", "kernels/README.md"):  # not part of the fingerprint
        (sources / path).write_text("three")
    native.check_sources(compiled, sources)

    def refused() -> None:
        with pytest.raises(
            KernelError, match=rf"other sources than those in {sources}: run pip install --no-deps -e \."
        ):
            native.check_sources(compiled, sources)

    kernel.write_text("too")
    refused()
    native.check_sources("", sources)
    kernel.rename(kernel.with_name("call.cpp")).write_text("two")
    refused()
    kernel.with_name("call.cpp").rename(kernel)
    native.check_sources(compiled, sources)
    (sources / "shim" / "ops.cpp").write_text("")
    refused()
    header.unlink()  # without it, the folder is not that of the sources
    native.check_sources(compiled, sources)
