"""AutoRound's layer wrapper and optimizer, in a loop like its own: 200 steps, each on 8 randomly drawn sequences,
keeping the best. Its original loop only supports whole models. H is not shrunk, as the errors are compared by it."""

from __future__ import annotations

import torch
from auto_round.algorithms.quantization.sign_round.sign_sgd import SignSGD
from auto_round.wrapper import WrapperLinear
from torch import Tensor, nn

from bitport.algorithms import GPTQ, SignRound

PACKAGES = ("auto-round",)
SCHEME, ALGORITHM = "int4", SignRound(start=GPTQ(shrinkage=0.0), shrinkage=0.0)
STEPS, BATCH, LENGTH = 200, 8, 256
SETTINGS = {
    "bits": 4,
    "group_size": 128,
    "sym": False,
    "data_type": "int",
    "act_bits": 16,
    "scale_dtype": torch.float16,
}


def solve(weight: Tensor, x: Tensor) -> Tensor:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    for name, value in SETTINGS.items():
        setattr(layer, name, value)
    wrapper = WrapperLinear(layer, enable_torch_compile=False, iters=STEPS)
    params = [wrapper.params[name] for name in ("value", "min_scale", "max_scale")]
    optimizer = SignSGD(params, lr=1 / STEPS, weight_decay=0)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    sequences = x.unflatten(0, (-1, LENGTH))
    generator = torch.Generator().manual_seed(0)
    best, least = [param.detach().clone() for param in params], float("inf")
    for _ in range(STEPS):
        drawn = sequences[torch.randperm(len(sequences), generator=generator)[:BATCH]]
        loss = (wrapper(drawn).float() - (drawn @ weight.t()).float()).square().mean()
        if float(loss) < least:
            best, least = [param.detach().clone() for param in params], float(loss)
        (1000 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        falling.step()
    with torch.no_grad():
        return wrapper._qdq_weight(*best)[0].float()
