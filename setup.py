"""What pyproject.toml cannot say: compile the CPU kernels, with setuptools and a compiler alone.

They are plain C++ behind a C ABI, and find torch at run time: neither torch nor Python's headers are needed. Without a
compiler, or when compiling fails, the installation goes on without them: every op stays right, and ``bitport doctor``
says what is lost.
"""

import os
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

ROOT = Path(__file__).resolve().parent
LIBRARY = Path("bitport", "backends", "cpu", "libbitport_kernels.so")
ARCHIVE = Path("bitport", "export", "libbitport_deploy.a")
OPTIONS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections"]
"""Functions apart, so that an exported program takes along those that it can call."""
LINKED = ("calls", "weight", "ask")
"""Of native/torch, what exported programs take along (ARCHIVE); the rest finds torch by name and registers with it."""


def compilers() -> list[list[str]]:
    """Those that exist, the one named in CXX first."""
    named = shlex.split(os.environ.get("CXX", ""))
    return [command for command in (named, ["c++"], ["g++"], ["clang++"]) if command and shutil.which(command[0])]


def compile_kernels(place: Path) -> str | None:
    """Compile native/kernels, native/torch and native/shim into LIBRARY, and into ARCHIVE what is linked into exported
    programs; the reason if that fails. Older ones go first, so that they cannot pass for these."""
    for target in (LIBRARY, ARCHIVE):
        (place / target).parent.mkdir(parents=True, exist_ok=True)
        (place / target).unlink(missing_ok=True)
    sources = {folder: sorted((ROOT / "native" / folder).glob("*.cpp")) for folder in ("kernels", "torch", "shim")}
    if not all(sources.values()):
        return "native/kernels, native/torch and native/shim are not there"
    reason = "no C++ compiler was found (CXX, c++, g++, clang++)"
    for compiler in compilers():
        with tempfile.TemporaryDirectory() as folder:
            try:
                library, archive = build(compiler, sources, Path(folder))
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or str(error)
                reason = f"{compiler[0]}: {said[-4000:]}"
                continue
            shutil.copyfile(library, place / LIBRARY)
            if archive is not None:
                shutil.copyfile(archive, place / ARCHIVE)
            return None
    return reason


def build(compiler: list[str], sources: dict[str, list[Path]], folder: Path) -> tuple[Path, Path | None]:
    """Every source compiled once, into the library and the archive; of that, none without ``ar``."""

    def run(*command: object) -> None:
        subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True, timeout=300)

    def compiled(source: Path) -> Path:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        run(*compiler, *OPTIONS, "-c", "-o", target, source)
        return target

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        objects = {name: list(pool.map(compiled, paths)) for name, paths in sources.items()}
    library, archive = folder / LIBRARY.name, folder / ARCHIVE.name
    run(*compiler, "-shared", "-o", library, *objects["kernels"], *objects["torch"], "-ldl")
    if not shutil.which("ar"):
        return library, None
    linked = [path for path in objects["torch"] if path.stem.removeprefix("torch-") in LINKED]
    run("ar", "rcs", archive, *objects["kernels"], *linked, *objects["shim"])
    return library, archive


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        place = ROOT / "src" if self.editable_mode else Path(self.build_lib)
        if reason := compile_kernels(place):
            print(f"warning: bitport is installed without its native CPU kernels: {reason}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Any Python, one platform: the library knows nothing of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
