"""The quantization_config of compressed-tensors: groups of modules, each with arguments for its weights and inputs.

A module belongs to the group that has its name; else to that of the first regular expression, in alphabetical order,
that matches; else to that of its class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from bitport.errors import CheckpointError
from bitport.interop.codec import kind_of
from bitport.interop.compressed_tensors.arguments import (
    FORMATS,
    activation_of,
    arguments_of,
    format_of,
    formats_of,
    scheme_of,
    told,
)
from bitport.interop.configuration import compiled, refuse_unknown, setting
from bitport.numerics import ACTIVATIONS
from bitport.schemes import Scheme

MIXED = "mixed-precision"
GROUP = {"targets", "weights", "input_activations", "output_activations", "format"}
READ = {"config_groups", "format", "ignore", "kv_cache_scheme", "quant_method", "version", "sparsity_config"}
NO_NUMBERS = {
    *("quantization_status", "global_compression_ratio", "provider"),
    *("run_compressed", "dequantize", "use_optimized_inference"),
}
"""Settings without effect on numbers."""


@dataclasses.dataclass(frozen=True)
class Group:
    scheme: Scheme
    format: str
    symmetric: bool
    """Whether its weights have no zero points in the files."""
    reordered: bool
    """Whether the files have the group of each column of a weight."""


class Groups:
    """The settings of modules in a quantization_config, which is validated as a whole."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        sparsity = setting(config, "sparsity_config", dict, {})
        if sparsity.get("format", "dense") != "dense":
            raise CheckpointError(f"sparsity_config has the format {sparsity['format']!r}; only 'dense' is read")
        setting(config, "kv_cache_scheme", dict, {})
        default = setting(config, "format", str, MIXED)
        self.ignored = Targets(_strings(config, "ignore", []))
        self.groups: dict[str, Group | None] = {}
        """Target -> its group; None: not quantized."""
        for name, said in setting(config, "config_groups", dict).items():
            if not isinstance(said, dict):
                raise CheckpointError(
                    f"quantization_config: {name} must be a group with all its settings, not {said!r}"
                )
            self.groups.update(dict.fromkeys(_strings(said, "targets"), _group(name, said, default)))
        self.targets = Targets(self.groups)

    def of(self, module: str) -> Group:
        """The group of a ``module`` with quantized tensors; CheckpointError if the config says that it is not
        quantized."""
        if ignored := self.ignored.first(module):
            raise CheckpointError(f"{module} has quantized tensors, and quantization_config ignores it ({ignored!r})")
        group = self.groups.get(self.targets.first(module) or "")
        if group is None:
            raise CheckpointError(
                f"{module} has quantized tensors, and no group of quantization_config says of which numbers; targets "
                f"are {', '.join(map(repr, self.groups))}"
            )
        return group


class Targets:
    """Names of modules, regular expressions after "re:", and classes. Files do not contain the class of a module: it is
    taken for an Embedding if its name says so, and else for a Linear."""

    def __init__(self, targets: Iterable[str]) -> None:
        self.names = set(targets)
        self.patterns = {
            each: compiled(each.removeprefix("re:")) for each in sorted(self.names) if each.startswith("re:")
        }

    def first(self, module: str) -> str | None:
        """The target that applies to ``module``."""
        if module in self.names:
            return module
        kind = "Embedding" if is_embedding(module) else "Linear"
        found = (target for target, pattern in self.patterns.items() if pattern.match(module))
        return next(found, kind if kind in self.names else None)


def group_of(scheme: Scheme, targets: list[str], stored: str) -> dict[str, Any]:
    """The entry of config_groups for weights of ``scheme`` in the format ``stored``."""
    inputs = None
    if scheme.act:
        fmt = ACTIVATIONS[scheme.act]
        inputs = arguments_of(fmt, inputs=True, dynamic="local" if fmt.global_scale else not scheme.static)
    return {
        "targets": targets,
        "weights": arguments_of(scheme.weight),
        "input_activations": inputs,
        "output_activations": None,
        "format": stored,
    }


def is_embedding(module: str) -> bool:
    return kind_of(f"{module}.weight", (1, 1)) == "embedding"


def _group(name: str, said: dict[str, Any], default: str) -> Group | None:
    refuse_unknown(said, GROUP, name)
    weights, inputs = (setting(said, key, dict, None) for key in ("weights", "input_activations"))
    if said.get("output_activations"):
        raise CheckpointError(f"{name} has output_activations; bitport rounds what goes into a product, not its result")
    if weights is None:
        if inputs:
            raise CheckpointError(f"{name} has input_activations without weights, for which bitport has no form")
        return None
    fmt = format_of(weights, f"the weights of {name}")
    if setting(weights, "dynamic", (bool, str), False) is not False:
        raise CheckpointError(f"the weights of {name} must have dynamic=false, not {weights['dynamic']!r}")
    stored, known = setting(said, "format", str, default), formats_of(fmt)
    if stored not in known:
        where = f"they are read from {', '.join(known)}" if known else f"such are in none of {', '.join(FORMATS)}"
        raise CheckpointError(f"{name} has the format {stored!r} for weights with {told(weights)}; {where}")
    act, static = ("", False) if inputs is None else activation_of(inputs, f"the inputs of {name}")
    reordered = setting(weights, "actorder", (str, bool), False) in ("group", "dynamic", True)
    return Group(scheme_of(fmt, stored, act, static), stored, fmt.zero == "none", reordered)


def _strings(said: Mapping[str, Any], key: str, default: Any = ...) -> list[str]:
    found: list[str] = setting(said, key, list, default)
    if not all(isinstance(each, str) for each in found):
        raise CheckpointError(f"quantization_config: {key} must be a list of strings, not {found!r}")
    return found
