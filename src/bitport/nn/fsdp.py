"""Modules managed by FSDP2, which keeps its own parameters beside those registered on a module and restores them."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from bitport.errors import ArgumentError


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that fully_shard was applied to."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [each for each in model.modules() if isinstance(each, kind)]


def reshard_(model: nn.Module) -> None:
    """Free gathered weights and put their shards back in place."""
    for module in fsdp_modules(model):
        module.reshard()


def adopt_(model: nn.Module) -> None:
    """Make FSDP2 adopt the parameters registered on its modules; it does so after each load_state_dict, even an empty
    one."""
    if fsdp_modules(model):
        model.load_state_dict({}, strict=False)


def refuse_fsdp(model: nn.Module, verb: str, instead: str = "") -> None:
    """Raise ArgumentError if FSDP2 manages a part of ``model``."""
    if fsdp_modules(model):
        raise ArgumentError(
            f"{verb} cannot be used on a model that fully_shard was applied to: "
            f"{instead or f'use {verb} first and fully_shard afterwards'}"
        )
