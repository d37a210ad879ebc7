"""Modules that FSDP2 manages: it keeps parameters of its own beside those that a module shows, and puts them back."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from bitport.errors import ArgumentError


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Those that fully_shard was applied to."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [each for each in model.modules() if isinstance(each, kind)]


def reshard_(model: nn.Module) -> None:
    """Shards in the place of weights that were gathered and are still there."""
    for module in fsdp_modules(model):
        module.reshard()


def adopt_(model: nn.Module) -> None:
    """Has FSDP2 take the parameters that its modules show: it does so after each load_state_dict, even of nothing."""
    if fsdp_modules(model):
        model.load_state_dict({}, strict=False)


def refuse_fsdp(model: nn.Module, verb: str, instead: str = "") -> None:
    """ArgumentError where FSDP2 manages a part of ``model``."""
    if fsdp_modules(model):
        raise ArgumentError(
            f"{verb} cannot be used on a model that fully_shard was applied to: "
            f"{instead or f'use {verb} first and fully_shard afterwards'}"
        )
