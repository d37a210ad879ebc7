"""Compile an exported program to a library: torch.export, lowering bitport's ops to native ones, AOTInductor."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from bitport import plugins
from bitport.errors import BitportError, ExportError
from bitport.export.level import LEVELS, nothing_beyond
from bitport.export.lower import fix_tables, lowerings
from bitport.export.ops import declarations
from bitport.export.pieces import has_pieces, keep_pieces

ARCHIVE = Path(__file__).with_name("libbitport_deploy.a")
"""The native kernels and the C functions that generated code calls; linked into every library."""
EXPORTS = Path(__file__).with_name("exports.map")
"""Linker script with the symbols that a host of a library looks up. All others are hidden: bound at link time rather
than by name at load time, and dropped if nothing calls them."""
TORCH = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
"""The part of torch that generated code calls."""
DROPOUTS = [
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
]
LINKER = ("-Wl,--gc-sections", "-Wl,--strip-all", f"-Wl,--version-script={EXPORTS}")


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a program: ``module(*args)``. ``dynamic_shapes``: as for torch.export.export, with torch.export.Dim
    for each size that may vary between calls; the same name means the same size."""

    module: nn.Module
    args: tuple[Any, ...]
    dynamic_shapes: Any = None


def dense(method: Method) -> Method:
    """Make the arguments contiguous as a caller's will be: torch specializes on their strides, even those of dimensions
    of size 1, which contiguity checks ignore."""
    shapes = method.dynamic_shapes
    if isinstance(shapes, torch.export.ShapesCollection | torch.export.AdditionalInputs):  # keyed by tensor identity
        shapes = shapes.dynamic_shapes(method.module, method.args)
    return dataclasses.replace(method, args=pytree.tree_map_only(Tensor, _dense, method.args), dynamic_shapes=shapes)


def _dense(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def exported(method: Method) -> torch.export.ExportedProgram:
    """Export the method; the program has plain tensors, and torch's ops beside bitport's."""
    program = _traced(method.module, method)
    if any(map(_drops, program.graph.nodes)):
        raise ExportError(
            "the model is in training mode, so the program would drop numbers at random: call its eval() first"
        )
    if has_pieces(program):
        graph = program.module(check_guards=False)
        keep_pieces(graph)
        program = _traced(graph, method)
    return program


def _drops(node: fx.Node) -> bool:
    """Whether it is active dropout: (input, p, train), or attention (query, key, value, mask, p)."""
    if node.target in DROPOUTS:
        return bool(node.args[1] and node.args[2])
    return node.target is torch.ops.aten.scaled_dot_product_attention.default and any(node.args[4:5])


def _traced(module: nn.Module, method: Method) -> torch.export.ExportedProgram:
    try:
        with torch.no_grad():
            return torch.export.export(module, method.args, dynamic_shapes=method.dynamic_shapes, strict=False)
    except BitportError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise ExportError(
            f"torch.export cannot trace {type(module).__name__} with these arguments and dynamic_shapes: {error}\n"
            "It must run as it is called here, every size that may differ must be free to, and what its code does must "
            "not depend on the numbers in tensors"
        ) from error


def lowered(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    plugins.load()
    with torch.no_grad():
        return program.run_decompositions(lowerings())


def graph_of(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The graph that AOTInductor compiles, with its constants as the kernels read them."""
    graph = program.module(check_guards=False)
    fix_tables(graph)
    return graph


def compile_library(
    program: torch.export.ExportedProgram, graph: fx.GraphModule, folder: Path, level: str
) -> list[Path]:
    """Compile a library without weights; returns its files, the library itself first."""
    args, kwargs = program.example_inputs
    with torch.no_grad(), nothing_beyond(level):
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
