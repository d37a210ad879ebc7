"""Compile an exported program to a library: bitport's ops are lowered to native ones, the rest is AOTInductor's."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from bitport import plugins
from bitport.errors import ExportError
from bitport.export import ids
from bitport.export.level import LEVELS, nothing_beyond
from bitport.export.lower import fix_tables, lowerings
from bitport.export.ops import declarations

ARCHIVE = Path(__file__).with_name("libbitport_deploy.a")
"""The native kernels and the C functions that generated code calls; linked into every library."""
EXPORTS = Path(__file__).with_name("exports.map")
"""Linker script with the symbols that a host of a library looks up. All others are hidden: bound at link time rather
than by name at load time, and dropped if nothing calls them."""
TORCH = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
"""The part of torch that generated code calls."""
LINKER = ("-Wl,--gc-sections", "-Wl,--strip-all", f"-Wl,--version-script={EXPORTS}")


@contextlib.contextmanager
def _no_warning_of_torchs_own() -> Iterator[None]:
    """PyTorch 2.13 warns of a class that it copies itself, where a method has lists among its arguments."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*\(treespec, LeafSpec\)", FutureWarning)
        yield


def lowered(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    plugins.load()
    with torch.no_grad(), _no_warning_of_torchs_own():
        return program.run_decompositions({**lowerings(), **ids.decompositions()})


def graph_of(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The graph that AOTInductor compiles, with its constants as the kernels read them, and ids checked."""
    graph = program.module(check_guards=False)
    fix_tables(graph)
    ids.check_ids(graph)
    return graph


def compile_library(
    program: torch.export.ExportedProgram, graph: fx.GraphModule, folder: Path, level: str
) -> list[Path]:
    """Compile a library without weights; returns its files, the library itself first."""
    args, kwargs = program.example_inputs
    with torch.no_grad(), nothing_beyond(level), _no_warning_of_torchs_own():
        made: Any = torch._inductor.aot_compile(graph, args, kwargs, options=options(folder, level))
    files = [Path(file) for file in made if isinstance(file, str) and Path(file).suffix in (".so", ".json")]
    libraries = [file for file in files if file.suffix == ".so"]
    if len(libraries) != 1:
        raise ExportError(f"AOTInductor made {len(libraries)} libraries, not one: {', '.join(map(str, made))}")
    return [*libraries, *(file for file in files if file.suffix != ".so")]


def options(folder: Path, level: str) -> dict[str, Any]:
    """Inductor options for this compilation. They are the same for all except for the folder, because torch caches
    compiled headers, 140 MB for each distinct command line."""
    chosen: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(folder),
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": declarations(),
        "aot_inductor.custom_op_libs": [_linked()],
        "aot_inductor.link_libtorch": False,  # libtorch.so depends on the libraries of every device
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.compile_wrapper_opt_level": "Os",  # it only calls kernels layer by layer: its size is load time
        "cpp.dynamic_threads": True,
        "emulate_precision_casts": True,
        "max_autotune": False,
    }
    if level:
        chosen |= {"cpp.march": level, "cpp.simdlen": LEVELS[level]}
    return chosen


def _linked() -> str:
    """ARCHIVE, the torch library it depends on, and linker options, which torch has no setting for: the string is
    inserted after ``-l``. That looks up names in its own folders rather than paths, so a name goes up to the root
    first, which works from any of them."""
    archive, runs_on = (f":{'../' * 32}{file.resolve().relative_to('/')}" for file in (ARCHIVE, TORCH))
    return shlex.join((archive, f"-l{runs_on}", *LINKER))


def check_compiler() -> None:
    if sys.platform == "win32":
        raise ExportError("packages are not made on Windows: export the model on Linux, such as in WSL")
    if not hasattr(torch._inductor.config.cpp, "march"):
        raise ExportError(
            f"a program is compiled for a level of instructions, which the inductor of PyTorch {torch.__version__} "
            "cannot be told: PyTorch 2.13 is needed. Without a package the model runs, with torch.compile too"
        )
    if not shutil.which(os.environ.get("CXX", "g++")):
        raise ExportError("compiling a program needs a C++ compiler: install g++, or name one in CXX")
    if not ARCHIVE.is_file():
        raise ExportError(
            f"{ARCHIVE.name} is missing: the native kernels were not compiled when bitport was installed. Install g++ "
            "(with ar), then bitport again: pip install --no-deps -e . in the folder of its source"
        )
