"""Fixtures for the native library, and for absent devices, built once: the example's simulated one, installed by pip,
and a guard for fake ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from bitport.backends import cpu
from bitport.backends.cpu.native import ISAS, Library
from tests.backends.taken import NEEDED

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "outoftree-device"


@pytest.fixture(params=ISAS)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The native library, in each variant that this processor can run."""
    if not isinstance(cpu.LIBRARY, Library):
        pytest.skip(NEEDED)
    if request.param not in cpu.LIBRARY.available:
        pytest.skip(f"this processor runs {', '.join(cpu.LIBRARY.available)}")
    monkeypatch.setattr(cpu.LIBRARY, "isa", ISAS[request.param])
    return cpu.LIBRARY


@pytest.fixture
def isa(library: Library) -> str:
    """The name of that variant, by which the kernels run."""
    return library.isa_name


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        pytest.skip("no C++ compiler: install one, or name it in CXX")
    return found


@pytest.fixture(scope="session")
def sim_site(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site folder with the example installed; it is built from a copy, since pip leaves files in the source."""
    source, site = tmp_path_factory.mktemp("source") / "outoftree-device", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so"))
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(site)]
    _run([sys.executable, "-m", "pip", "install", *options, str(source)], {"CXX": compiler})
    return site


@pytest.fixture(scope="session")
def guard(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    linked = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10"]
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC"]
    _run([compiler, *flags, *include, str(HERE / "guard.cpp"), "-o", str(library), *linked], {})
    return library


@pytest.fixture(scope="session")
def elsewhere() -> Callable[..., None]:
    """Run test files in a separate process, since registering a device with PyTorch cannot be undone; with ``every``
    their slow tests too."""

    def run(*files: str, site: Path | None = None, only: str = "", every: bool = False, **variables: str) -> None:
        paths = [str(ROOT / "src"), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", f"--rootdir={ROOT}", "-k", only]
        marked = ["-m", ""] if every else []
        _run(
            [sys.executable, "-m", "pytest", *options, *marked, *(str(HERE / file) for file in files)],
            {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **variables},
        )

    return run


def _run(command: list[str], variables: dict[str, str]) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-20000:]}\n{done.stderr[-5000:]}"
