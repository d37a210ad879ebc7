"""An exported program to a library: torch.export, bitport's ops to native ones, AOTInductor."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from bitport import plugins
from bitport.errors import ArgumentError, ExportError
from bitport.export.lower import fix_tables, lowerings
from bitport.export.ops import declarations

ARCHIVE = Path(__file__).with_name("libbitport_deploy.a")
"""The native kernels, and the C functions that generated code calls; linked into every library."""
LEVELS = {"x86-64-v4": 512, "x86-64-v3": 256}
"""Instruction sets of x86 by the names of its ABI, and the bits of their vectors."""
EXPORTS = Path(__file__).with_name("exports.map")
"""For the linker: all that a host of a library looks for. What is hidden is bound when it is linked, not by name when
it is loaded, and left out where nothing calls it."""


@dataclasses.dataclass(frozen=True)
class Method:
    """What a program can be asked: ``module(*args)``. ``dynamic_shapes``: as torch.export.export takes it, with
    torch.export.Dim for each size that may differ from call to call; the same name means the same size."""

    module: nn.Module
    args: tuple[Any, ...]
    dynamic_shapes: Any = None


def dense(method: Method) -> Method:
    """Arguments as a caller's lie: torch takes over the strides of these, also of sizes that are 1, which no check of
    contiguity sees."""
    shapes = method.dynamic_shapes
    if isinstance(shapes, torch.export.ShapesCollection | torch.export.AdditionalInputs):  # by the tensors themselves
        shapes = shapes.dynamic_shapes(method.module, method.args)
    return dataclasses.replace(method, args=pytree.tree_map_only(Tensor, _dense, method.args), dynamic_shapes=shapes)


def _dense(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def exported(method: Method) -> torch.export.ExportedProgram:
    """Plain tensors and torch's ops beside ours."""
    with torch.no_grad():
        return torch.export.export(method.module, method.args, dynamic_shapes=method.dynamic_shapes, strict=False)


def lowered(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    plugins.load()
    with torch.no_grad():
        return program.run_decompositions(lowerings())


def graph_of(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """What AOTInductor compiles; its constants lie as they are read."""
    graph = program.module(check_guards=False)
    fix_tables(graph)
    return graph


def compile_library(
    program: torch.export.ExportedProgram, graph: fx.GraphModule, folder: Path, level: str
) -> list[Path]:
    """The files of a library that keeps no weights; the first is the library itself."""
    if not ARCHIVE.is_file():
        raise ExportError(
            f"{ARCHIVE.name} is missing: the native kernels were not compiled when bitport was installed. Install g++ "
            "(with ar), then bitport again: pip install --no-deps -e . in the folder of its source"
        )
    args, kwargs = program.example_inputs
    with torch.no_grad():
        made: Any = torch._inductor.aot_compile(graph, args, kwargs, options=options(folder, level))
    files = [Path(file) for file in made if isinstance(file, str) and Path(file).suffix in (".so", ".json")]
    libraries = [file for file in files if file.suffix == ".so"]
    if len(libraries) != 1:
        raise ExportError(f"AOTInductor made {len(libraries)} libraries, not one: {', '.join(map(str, made))}")
    return [*libraries, *(file for file in files if file.suffix != ".so")]


def options(folder: Path, level: str) -> dict[str, Any]:
    """For this compilation alone. But for the folder, the same for all: torch keeps compiled headers, 140 MB of them
    for each command line that it has not met."""
    chosen: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(folder),
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": declarations(),
        "aot_inductor.custom_op_libs": [_linked()],
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.compile_wrapper_opt_level": "Os",  # what calls kernels, layer by layer: size is load time
        "cpp.dynamic_threads": True,
        "emulate_precision_casts": True,
        "max_autotune": False,
    }
    if level:
        chosen |= {"cpp.march": level, "cpp.simdlen": LEVELS[level]}
    return chosen


def _linked() -> str:
    """ARCHIVE, and the linker's options, for which torch has no place: what stands here goes behind ``-l``. That takes
    names to look for in its own folders, not paths; from any of them the way up leads to the root."""
    archive = f":{'../' * 32}{ARCHIVE.resolve().relative_to('/')}"
    return shlex.join((archive, "-Wl,--gc-sections", "-Wl,--strip-all", f"-Wl,--version-script={EXPORTS}"))


def best_level() -> str:
    """The highest of LEVELS that this machine runs; none on other machines."""
    if platform.machine() != "x86_64":
        return ""
    found = torch.backends.cpu.get_cpu_capability()
    if found not in ("AVX512", "AVX2"):
        raise ExportError(f"programs are compiled for x86 with AVX2 at least; this machine has {found}")
    return "x86-64-v4" if found == "AVX512" else "x86-64-v3"


def check_level(level: str | None) -> str:
    if level is not None and level not in LEVELS:
        raise ArgumentError(f"unknown level {level!r}; known: {', '.join(LEVELS)}")
    return best_level() if level is None else level


def check_compiler() -> None:
    if not shutil.which(os.environ.get("CXX", "g++")):
        raise ExportError("compiling a program needs a C++ compiler: install g++, or name one in CXX")
