"""Models that are built without memory for their weights, which are then loaded from a checkpoint."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode


class EmptyOnMeta(TorchFunctionMode):
    """Within this context parameters are on meta, and ``torch.empty`` returns meta tensors: weights take no memory,
    while computed buffers, such as rotary frequencies that no checkpoint holds, are real. (The experts of Llama 4 are
    created as zeros, and would be allocated otherwise.)"""

    def __enter__(self) -> EmptyOnMeta:
        thread = threading.get_ident()
        made: dict[int, tuple[Tensor, nn.Parameter]] = {}

        def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
            if param is None or param.device.type == "meta" or threading.get_ident() != thread:
                return None
            if id(param) not in made:
                made[id(param)] = param, nn.Parameter(param.detach().to("meta"), param.requires_grad)
            return made[id(param)][1]

        self.hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hook.remove()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meta = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **meta})
