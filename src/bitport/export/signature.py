"""The inputs and outputs of a method, as described in the manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bitport.errors import ArgumentError, ExportError
from bitport.export.trace import Method, by_name
from bitport.export.weights import TAGS

Sizes = dict[str, list[int | None]]
"""The minimum and maximum of a named size; None: no maximum."""


def check(name: str, method: Method) -> None:
    """Validate a method before anything is traced."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f"a method is called by an identifier, such as decode, not {name!r}")
    if not isinstance(method, Method) or not isinstance(method.args, tuple):
        given = f"args a {type(method.args).__name__}" if isinstance(method, Method) else f"a {type(method).__name__}"
        raise ArgumentError(f"{name}: a method is a Method(module, args), args a tuple, not {given}")
    if not isinstance(method.module, torch.nn.Module):
        raise ArgumentError(f"{name}: a method is of a torch.nn.Module, not of a {type(method.module).__name__}")
    wrong = [type(value).__name__ for value in pytree.tree_leaves(method.args) if not isinstance(value, Tensor)]
    if wrong:
        raise ArgumentError(f"{name}: a program takes tensors, in lists and dictionaries too, not {', '.join(wrong)}")
    tensors = [*pytree.tree_leaves(method.args), *method.module.parameters(), *method.module.buffers()]
    if elsewhere := {tensor.device.type for tensor in tensors} - {"cpu"}:
        raise ArgumentError(f"{name}: programs are made for the CPU, and some tensors are on {', '.join(elsewhere)}")


def describe(name: str, method: Method, program: torch.export.ExportedProgram) -> tuple[dict[str, Any], Sizes]:
    """Return the method's entry ("inputs", "outputs") and the named sizes that it uses."""
    signature = program.graph_signature
    if signature.buffers_to_mutate:
        raise ExportError(
            f"{name} writes into its buffers ({', '.join(signature.buffers_to_mutate.values())}), which programs share "
            "and map from a file: take what changes, such as a cache, as an argument instead"
            + (", and call eval() first if these are statistics of training" if method.module.training else "")
        )
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = list(signature.user_inputs)
    given = [values[each] for each in inputs]
    symbols = _symbols(given, list(_shapes_of(*by_name(method))))
    mutated = set(signature.user_inputs_to_mutate.values())
    entry = {
        "inputs": [
            {**_tensor(each, value, symbols), "mutated": each in mutated}
            for each, value in zip(map(str, inputs), given, strict=True)
        ],
        "outputs": [
            _tensor(f"output{at}", _output(name, values.get(str(each), each)), symbols)
            for at, each in enumerate(signature.user_outputs)
        ],
    }
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    sizes: Sizes = {}
    for symbol, size in symbols.items():
        bounds = ranges[symbol]
        most = int(bounds.upper) if bounds.upper.is_finite and bounds.upper < 2**62 else None
        sizes[size] = [int(bounds.lower), most]
    for each in entry["inputs"]:
        if derived := [size for size in each["shape"] if isinstance(size, str) and size not in sizes]:
            raise ExportError(
                f"{name}: {each['name']} has the size {derived[0]}, and sizes of inputs are numbers or names: take "
                "this dimension as two, such as [rows, 2] for 2*rows, and flatten them in the module"
            )
    return entry, sizes


def _output(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ExportError(f"{name} gives {value!r}; a program gives tensors")
    return value


def _tensor(name: str, value: Tensor, symbols: dict[str, str]) -> dict[str, Any]:
    if value.dtype not in TAGS:
        raise ExportError(f"{name} is {value.dtype}; a program takes and gives {', '.join(map(str, TAGS))}")
    return {"name": name, "dtype": TAGS[value.dtype], "shape": [_size(size, symbols) for size in value.shape]}


def _size(size: Any, symbols: dict[str, str]) -> int | str:
    if isinstance(size, int):
        return size
    return re.sub(r"\w+", lambda found: symbols.get(found[0], found[0]), str(size))


def _symbols(given: list[Tensor], shapes: list[Any]) -> dict[str, str]:
    """Map torch's symbols for sizes to their names in dynamic_shapes."""
    found: dict[str, str] = {}
    for tensor, shape in zip(given, shapes, strict=True):
        for at, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                named = shape.get(at) if isinstance(shape, dict) else shape[at] if shape else None
                found.setdefault(str(size), getattr(named, "__name__", str(size)))
    return {symbol: name for symbol, name in found.items() if symbol.isidentifier()}


def _shapes_of(args: Any, shapes: Any) -> Iterator[Any]:
    """The entry of dynamic_shapes for each tensor of ``args``."""
    if isinstance(args, Tensor):
        yield shapes
    else:
        for key in args if isinstance(args, dict) else range(len(args)):
            yield from _shapes_of(args[key], shapes[key] if shapes else None)
