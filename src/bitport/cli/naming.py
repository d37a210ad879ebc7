"""Notes on files whose tensors have other names than the model that load_model builds from their config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bitport.checkpoint.arranged import Arrangement
from bitport.errors import BitportError, CheckpointError, shortened
from bitport.integrations.components import is_component
from bitport.integrations.huggingface import OWN_MODEL, named_model
from bitport.integrations.transformers_names import arrangement


def named(directory: Path) -> tuple[Any | None, list[str]]:
    """The empty model of config.json in ``directory``, or None, and notes on why it could not be built."""
    if not (directory / "config.json").is_file():
        return None, []
    try:
        return named_model(directory), []
    except BitportError as error:
        return None, [f"the names of the weights were not compared with the model's: {error}"]


def naming_notes(
    model: Any | None, directory: Path, names_of: Callable[[Arrangement], Iterable[str]], advice: str
) -> list[str]:
    """Notes for the user if ``model``, built from ``directory``, will not find its weights under the names that
    ``names_of`` returns for its arrangement."""
    if model is None:
        return []
    try:
        names = names_of(arrangement(model))
    except CheckpointError as error:
        return [f"load_model will not find the weights of {type(model).__name__} in this checkpoint: {error}. {advice}"]
    made, known = type(model).__name__, model.state_dict().keys()
    unknown = [name for name in names if name not in known]
    if not unknown:
        return []
    diffusers = is_component(model)
    if not diffusers and (said := model.config.architectures) and made not in said:
        return [f"load_model builds a {made}, not the {said[0]} that {directory} holds: {OWN_MODEL}"]
    return [
        f"{made} of {'diffusers' if diffusers else 'transformers'} has no {shortened(unknown, 3)}: it keeps them in "
        f"another form, and load_model will not find them in this checkpoint. {advice}"
    ]
