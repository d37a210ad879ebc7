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
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LIBRARY = Path("bitport", "backends", "cpu", "libbitport_kernels.so")
OPTIONS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"]


def compilers() -> list[list[str]]:
    """Those that exist, the one named in CXX first."""
    named = shlex.split(os.environ.get("CXX", ""))
    return [command for command in (named, ["c++"], ["g++"], ["clang++"]) if command and shutil.which(command[0])]


def compile_kernels(target: Path) -> str | None:
    """Compile native/kernels and native/torch into ``target``; the reason if that fails. An older library goes first,
    so that it cannot pass for this one."""
    target.unlink(missing_ok=True)
    folders = [ROOT / "native" / name for name in ("kernels", "torch")]
    sources = [str(path) for folder in folders for path in sorted(folder.glob("*.cpp"))]
    if not all(any(folder.glob("*.cpp")) for folder in folders):
        return "native/kernels and native/torch are not there"
    reason = "no C++ compiler was found (CXX, c++, g++, clang++)"
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".tmp")
    for compiler in compilers():
        command = [*compiler, *OPTIONS, "-o", str(fresh), *sources]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = f"{compiler[0]}: {error}"
            continue
        if ran.returncode == 0:
            fresh.replace(target)
            return None
        reason = f"{shlex.join(command)}\n{ran.stderr[-4000:]}"
    fresh.unlink(missing_ok=True)
    return reason


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        place = ROOT / "src" if self.editable_mode else Path(self.build_lib)
        if reason := compile_kernels(place / LIBRARY):
            print(f"warning: bitport is installed without its native CPU kernels: {reason}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Any Python, one platform: the library knows nothing of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
