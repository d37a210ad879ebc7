"""Build the CPU kernels, which pyproject.toml cannot express, using only setuptools and a compiler.

The kernels are plain C++ behind a C ABI and locate torch at run time, so neither torch nor the Python headers are
needed to build them. If there is no compiler, or compilation fails, the installation continues without them: every op
remains correct, and ``bitport doctor`` says what is lost and why.
"""

import hashlib
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
LIBRARY = Path("bitport", "backends", "cpu", "libbitport_kernels.so")
REASON = LIBRARY.with_suffix(".txt")  # why there is no library; pip shows nothing of what was said on the way
MADE = LIBRARY.with_suffix(".made")  # in a checkout: ingredients() of the library, so that no extra compiles it again
ARCHIVE = Path("bitport", "export", "libbitport_deploy.a")
SOURCES = runpy.run_path(str(ROOT / "src" / "bitport" / "backends" / "sources.py"))
WINDOWS = sys.platform == "win32"
OPTIONS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections"]
OPTIONS += [] if WINDOWS else ["-fPIC"]
"""Separate sections, so that an exported program links only the functions that it can call."""
LINKED_WITH = [] if WINDOWS else ["-ldl"]
PATIENCE = 1800
"""Seconds allowed per file. Some take half a minute, and many times that on a busy or emulated machine."""
LINKED = ("attention", "calls", "weight", "ask")
"""The parts of native/torch that exported programs link (ARCHIVE); the rest looks torch up by name and registers with
it."""


def compilers() -> list[list[str]]:
    """Return the compiler named in CXX and no other, or else the usual ones that exist."""
    if named := os.environ.get("CXX", "").strip():
        return [[named] if shutil.which(named) else shlex.split(named)]
    return [[usual] for usual in ("c++", "g++", "clang++") if shutil.which(usual)]


def compile_kernels(place: Path, made: str = "") -> str | None:
    """Compile native/kernels, native/torch and native/shim into LIBRARY, and the part that exported programs link into
    ARCHIVE; return the reason if that fails. ``made``: what to write to MADE.

    Running programs may use the existing files, so these stay until their replacements are complete. After a failure
    they are removed, so that they cannot pass for the new build, unless they were built from the same sources.
    """
    sources = {folder: sorted((ROOT / "native" / folder).glob("*.cpp")) for folder in SOURCES["FOLDERS"]}
    if not all(sources.values()):
        put(None, place / ARCHIVE)
        put(None, place / LIBRARY)
        return "native/kernels, native/torch and native/shim are not there"
    reason = "no C++ compiler was found (c++, g++, clang++, or another in CXX)"
    for compiler in compilers():
        with tempfile.TemporaryDirectory() as folder:
            try:
                library, archive = build(compiler, sources, Path(folder))
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or str(error)
                reason = f"{shlex.join(compiler)}: {said[-4000:]}"
                continue
            put(archive, place / ARCHIVE)
            put(library, place / LIBRARY)  # last, for it alone is asked which sources it is of
            put(None, place / REASON)
            if made:
                (place / MADE).write_text(made, encoding="utf-8")
            return None
    if is_of_these_sources(place):
        print(f"warning: the native CPU kernels stay as they were, of the same sources: {reason}", file=sys.stderr)
        return None
    put(None, place / ARCHIVE)
    put(None, place / LIBRARY)
    return reason


def put(made: Path | None, target: Path) -> None:
    """Replace ``target`` atomically, so that whoever has the old file open keeps it. With None, only remove it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if made is None:
        return target.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".bitport-") as folder:
        os.replace(shutil.copyfile(made, Path(folder, target.name)), target)


def stamp() -> str:
    """The fingerprint of the sources that a library reports through ``bitport_sources``."""
    return SOURCES["fingerprint"](ROOT / "native")


def ingredients() -> str:
    """Fingerprint of all that determines LIBRARY and ARCHIVE: sources, compilers, options and machine."""
    known = [stamp(), platform.machine(), shutil.which("ar"), Path(__file__).read_bytes()]
    for compiler in compilers():
        try:
            said = subprocess.run([*compiler, "--version"], capture_output=True, timeout=PATIENCE).stdout
        except (OSError, subprocess.SubprocessError):
            said = b""  # compiling says why
        known += [compiler, said]
    return hashlib.sha256(repr(known).encode()).hexdigest()


def is_of_these_sources(place: Path) -> bool:
    library = place / LIBRARY
    return library.is_file() and stamp().encode() in library.read_bytes()


def is_current(place: Path, made: str) -> bool:
    """Whether LIBRARY and ARCHIVE in ``place`` are there and were made of these ingredients."""
    record, whole = place / MADE, (place / ARCHIVE).is_file() or not shutil.which("ar")
    return whole and record.is_file() and record.read_text(encoding="utf-8") == made and is_of_these_sources(place)


def build(compiler: list[str], sources: dict[str, list[Path]], folder: Path) -> tuple[Path, Path | None]:
    """Compile every source once, into the library and the archive; the latter is None without ``ar``."""
    define = f'-DBITPORT_SOURCES="{stamp()}"'

    def run(*command: object) -> None:
        words = [str(word) for word in command]
        subprocess.run(words, check=True, capture_output=True, encoding="utf-8", errors="replace", timeout=PATIENCE)

    def compiled(source: Path) -> Path:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        run(*compiler, *OPTIONS, define, "-c", "-o", target, source)
        return target

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        objects = {name: list(pool.map(compiled, paths)) for name, paths in sources.items()}
    library, archive = folder / LIBRARY.name, folder / ARCHIVE.name
    run(*compiler, "-shared", "-o", library, *objects["kernels"], *objects["torch"], *LINKED_WITH)
    if not shutil.which("ar"):
        return library, None
    linked = [path for path in objects["torch"] if path.stem.removeprefix("torch-") in LINKED]
    run("ar", "rcs", archive, *objects["kernels"], *linked, *objects["shim"])
    return library, archive


def install_kernels(place: Path, checkout: bool) -> None:
    """``checkout``: the place is kept, with what an earlier installation compiled there."""
    made = ingredients() if checkout else ""
    if checkout and is_current(place, made):
        return print("the native CPU kernels are up to date")
    put(None, place / MADE)
    if reason := compile_kernels(place, made):
        (place / REASON).write_text(reason, encoding="utf-8")
        print(f"warning: bitport is installed without its native CPU kernels: {reason}", file=sys.stderr)


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        install_kernels(ROOT / "src" if self.editable_mode else Path(self.build_lib), self.editable_mode)


class Compiled(Distribution):
    """A distribution with libraries, installed as platform-specific files: auditwheel looks only there."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """A wheel for any Python on one platform: the library does not depend on Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=Compiled, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
