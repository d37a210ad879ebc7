"""state_dict() of modules with weights in training: the float values, as in an unprepared model, plus any fixed
scales::

    layer.weight                 the value
    layer.weight._extra_state    uint8: a safetensors file of the fixed scales
"""

from __future__ import annotations

from typing import Any

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from bitport.errors import ArgumentError
from bitport.tensor.parts import check_extra, matrix_of, part_specs, rows_and_columns
from bitport.tensor.sharded import is_sharded, own, sharded_like
from bitport.train.fixed import Fixed
from bitport.train.tensor import PARTS, TrainedTensor

EXTRA_STATE = "._extra_state"
"""torch.distributed.checkpoint recognizes this suffix and does not look for an attribute of that name."""


def watch_state_(model: nn.Module) -> None:
    """Register the hooks on all modules that hold weights in training, including those prepared earlier."""
    forget_(model)
    for module in model.modules():
        params = module.named_parameters(recurse=False, remove_duplicate=False)
        if names := [name for name, param in params if isinstance(param, TrainedTensor)]:
            module.register_state_dict_post_hook(_write_values)
            module.register_load_state_dict_pre_hook(_read_scales)
            module.register_load_state_dict_post_hook(_StillPrepared(names))


def forget_(model: nn.Module) -> None:
    for module in model.modules():
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
            for key, hook in list(hooks.items()):
                found = getattr(hook, "hook", hook)  # hooks that receive the module are wrapped
                if found in (_write_values, _read_scales) or isinstance(found, _StillPrepared):
                    del hooks[key]


def _write_values(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Post-hook of state_dict(). With keep_vars=True the parameters themselves are kept."""
    for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        kept = state.get(prefix + name)
        if kept is None:
            continue
        shard = own(kept)
        if not isinstance(shard, TrainedTensor):
            continue
        if not isinstance(kept, nn.Parameter):
            state[prefix + name] = sharded_like(kept, shard.value)
        if shard.fixed is not None:
            state[prefix + name + EXTRA_STATE] = _as_bytes(shard)


def _read_scales(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *lists: Any) -> None:
    """Pre-hook of load_state_dict(). ``lists``: strict, missing keys, unexpected keys, error messages. Scales are
    missing if only the module has them; a module without scales adopts those given."""
    _, missing, _, wrong = lists
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        held = own(param)
        if not isinstance(held, TrainedTensor):
            continue
        key = prefix + name + EXTRA_STATE
        given = state.pop(key, None)
        if given is None:
            if held.fixed is not None:
                missing.append(key)
            continue
        try:
            parts = _parts_of(given, held, tuple(param.shape), prefix + name)
        except ArgumentError as error:
            wrong.append(str(error))
            continue
        if not is_sharded(param):
            param.act_scale = parts.pop("act_scale", None)  # type: ignore[attr-defined]
            param.hold(Fixed(**parts))  # type: ignore[attr-defined]
        elif _dtypes(parts) != (there := _dtypes(_beside(held))):
            wrong.append(f"{key} holds {_dtypes(parts)}, {prefix}{name} {there}: load it before fully_shard")
        else:
            for part, tensor in parts.items():
                getattr(held, part).copy_(tensor)


def _beside(w: TrainedTensor) -> dict[str, Tensor]:
    return {name: part for name in PARTS if (part := getattr(w, name)) is not None}


def _dtypes(parts: dict[str, Tensor]) -> dict[str, str]:
    return {name: str(part.dtype).removeprefix("torch.") for name, part in sorted(parts.items())}


def _as_bytes(w: TrainedTensor) -> Tensor:
    parts = _beside(w)
    if w.fixed is not None:
        parts["scale"] = w.fixed.as_bytes().scale
    data = save({name: part.cpu().contiguous() for name, part in parts.items()})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _parts_of(given: Any, w: TrainedTensor, shape: tuple[int, ...], name: str) -> dict[str, Tensor]:
    """Decode what :func:`_as_bytes` wrote, on the device of ``w``, and check that it suits a weight of ``shape``."""
    fmt, device, how = w.scheme.weight, w.value.device, w.rounding
    batched = len(shape) > 2 and how.kind != "conv"
    try:
        parts = {part: tensor.to(device) for part, tensor in load(given.cpu().numpy().tobytes()).items()}
    except (safetensors.SafetensorError, AttributeError, TypeError) as error:
        raise ArgumentError(f"{name}{EXTRA_STATE} does not hold scales: {error}") from error
    if "scale" in parts:
        parts["scale"] = Fixed(parts["scale"]).from_bytes(fmt).scale
    batch, (n, k) = shape[:-2] if batched else (), rows_and_columns(shape, batched, how.transposed)
    specs = part_specs(fmt, matrix_of(fmt, n, k))
    del specs["data"]
    for part, spec in specs.items():
        found = parts.get(part)
        if found is None or found.dtype not in spec.dtypes or [*found.shape] != [*batch, *spec.shape]:
            what = "missing" if found is None else f"{found.dtype} {[*found.shape]}"
            raise ArgumentError(
                f"{name}{EXTRA_STATE}: part {part!r} is {what}; {w.scheme} of {n}x{k} has "
                f"{' or '.join(map(str, spec.dtypes))} {[*batch, *spec.shape]}"
            )
    if unknown := set(parts) - set(specs) - {"act_scale", "pre_scale"}:
        raise ArgumentError(f"{name}{EXTRA_STATE} holds {', '.join(sorted(unknown))}, which {w.scheme} does not have")
    if ("act_scale" in parts) != (w.act_scale is not None):
        raise ArgumentError(
            f"{name}{EXTRA_STATE} holds {'an' if w.act_scale is None else 'no'} act_scale, unlike {name}; both are of "
            f"{w.scheme}, so one of them was not calibrated"
        )
    check_extra(k, device, pre_scale=parts.get("pre_scale"), act_scale=parts.get("act_scale"))
    if "pre_scale" in parts:  # always of the value's dtype
        parts["pre_scale"] = parts["pre_scale"].to(w.value.dtype)
    return parts


class _StillPrepared:
    """Post-hook of load_state_dict(): assign=True would replace the parameters in training."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, keys: Any) -> None:
        for name in self.names:
            if not isinstance(own(getattr(module, name)), TrainedTensor):
                raise ArgumentError(
                    f"load_state_dict(.., assign=True) replaced {name}, which is in training, by an ordinary tensor: "
                    f"load with assign=False, or before prepare_()"
                )
