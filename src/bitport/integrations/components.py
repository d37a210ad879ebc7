"""Directories of diffusers models: components of a pipeline, such as its transformer, UNet or autoencoder.

Their config.json names the class. A bitport directory additionally holds the index that diffusers looks for. It lists
only the manifest, which leads bitport to everything else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bitport.checkpoint.manifest import DIFFUSERS_INDEX, SAID
from bitport.checkpoint.side_files import POINTER
from bitport.interop.diffusers_model import class_of
from bitport.schemes import Recipe, Rule, Target


def is_component(model: Any) -> bool:
    """Whether it is a diffusers model; diffusers need not be installed."""
    return any(each.__module__ == "diffusers.models.modeling_utils" for each in type(model).__mro__)


def component(root: Path, name: str) -> nn.Module:
    """Build the model ``name`` that config.json in ``root`` describes; the device is up to the context."""
    found = class_of(root, name)
    config = {key: value for key, value in found.load_config(root).items() if key != "quantization_config"}
    return found.from_config(config)


def write_config(model: Any, root: Path) -> None:
    said = {**json.loads(model.to_json_string()), "quantization_config": SAID}
    (root / "config.json").write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (root / DIFFUSERS_INDEX).write_text(POINTER, encoding="utf-8")


def spared(recipe: Recipe, model: Any, targets: Sequence[Target]) -> Recipe:
    """``recipe`` with skip rules for modules that the class of ``model`` keeps in float32, inserted before the
    catch-all rule ("*"). Earlier rules that name them take precedence."""
    at = next((at for at, rule in enumerate(recipe.rules) if rule.match == "*"), None)
    if at is None:
        return recipe
    names = model._keep_in_fp32_modules or ()
    rules = [Rule(glob, "skip") for name in names for glob in (name, f"{name}.*", f"*.{name}", f"*.{name}.*")]
    fitting = [rule for rule in rules if any(rule.fits(target) for target in targets)]
    return Recipe((*recipe.rules[:at], *fitting, *recipe.rules[at:]))
