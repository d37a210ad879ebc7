"""The benefit of training: the bundled model quantized by an algorithm, then trained for some steps; and the distance
of low-precision gradients from float ones.

The text is new, from the model's own corpus, of which it saw other parts. The target is the logits of the float model,
so that the benefit of further training in general is not mistaken for that of training for the scheme.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

import bitport as bp
from bitport.algorithms.solving import uses_data
from bitport.evaluate.yardstick import Yardstick
from bitport.numerics import sqnr
from bitport.train import convert_, learn_scales_, prepare_
from examples.tinylm.corpus import nth_story

MODEL = Path("models/tinylm")
SCHEMES = ("int2", "int3", "int4", "mxfp4")
ALGORITHMS = ("rtn", "gptq", "awq+gptq")
GRADIENTS: dict[str, tuple[str, str | None]] = {
    "int8-dyn": ("int8-dyn", None),
    "int8-dyn, gradients int8": ("int8-dyn", "int8"),
    "fp8, gradients fp8": ("fp8", "fp8"),
    "fp8-row, gradients fp8-row": ("fp8-row", "fp8-row"),
    "fp8-block, gradients fp8-block": ("fp8-block", "fp8-block"),
    "mxfp8, gradients mxfp8": ("mxfp8", "mxfp8"),
}
BATCH, LENGTH = 4, 256
RATE = 1e-4
RATE_OF_SCALES = 1e-2
"""Learning rate of relative scale changes."""
UNSEEN = 77
"""Seed of stories that neither the training nor the evaluation of the bundled model used."""

Row = dict[str, Any]


def batches(steps: int) -> Iterator[Tensor]:
    """[BATCH, LENGTH + 1] of consecutive text."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    end = tokenizer.encode("<|endoftext|>").ids[0]
    pending: list[int] = []
    number = made = 0
    size = BATCH * LENGTH
    while made < steps:
        while len(pending) <= size:
            pending += [end, *tokenizer.encode("\n".join(nth_story(UNSEEN, number + i) for i in range(8))).ids]
            number += 8
        yield torch.tensor(pending[: size + 1]).unfold(0, LENGTH + 1, LENGTH)
        del pending[:size]
        made += 1


def train(model: nn.Module, steps: int, rate: float, teacher: nn.Module) -> None:
    """Train towards the logits of ``teacher``: the loss is the KL divergence of the next token, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    for rows in batches(steps):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = _log_probabilities(teacher, rows)
            predicted = _log_probabilities(model, rows)
        F.kl_div(predicted, wanted, log_target=True, reduction="batchmean").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _log_probabilities(model: Any, rows: Tensor) -> Tensor:
    return model(input_ids=rows[:, :-1]).logits.flatten(0, 1).float().log_softmax(-1)


def _calibration(yardstick: Yardstick, scheme: str, algorithm: str) -> list[Tensor] | None:
    """The batches, or None where they would have no effect."""
    return yardstick.batches if uses_data(algorithm, scheme) else None


def quantized(yardstick: Yardstick, model: nn.Module, scheme: str, algorithm: str) -> nn.Module:
    data = _calibration(yardstick, scheme, algorithm)
    bp.quantize_(model, scheme, algorithm=algorithm, calibrate=data, measure=False, progress=False)
    return model


def rounded(yardstick: Yardstick, scheme: str, algorithm: str) -> float:
    return math.exp(yardstick.nll(quantized(yardstick, copy.deepcopy(yardstick.base), scheme, algorithm)))


def tuned(yardstick: Yardstick, scheme: str, algorithm: str, steps: int) -> float:
    """Perplexity after training in float32, starting from the result of ``algorithm``."""
    teacher = copy.deepcopy(yardstick.base).float().requires_grad_(False)
    model = copy.deepcopy(teacher).requires_grad_(True)
    data = _calibration(yardstick, scheme, algorithm)
    prepare_(model, scheme, algorithm=algorithm, calibrate=data, progress=False)
    train(model, steps, RATE, teacher)
    convert_(model, measure=False)
    return math.exp(yardstick.nll(model))


def learned(yardstick: Yardstick, scheme: str, algorithm: str, steps: int) -> float:
    """Perplexity after training only the scales of a model that ``algorithm`` quantized in float32."""
    teacher = copy.deepcopy(yardstick.base).float().requires_grad_(False)
    model = quantized(yardstick, copy.deepcopy(teacher), scheme, algorithm)
    learn_scales_(model)
    train(model, steps, RATE_OF_SCALES, teacher)
    convert_(model)
    return math.exp(yardstick.nll(model))


def run_schemes(steps: int, say: Callable[[str], None]) -> Iterator[Row]:
    yield from _run("scheme", tuned, SCHEMES, ALGORITHMS, steps, say)


def run_scales(steps: int, say: Callable[[str], None]) -> Iterator[Row]:
    yield from _run("scales", learned, ("int2", "int3", "int4"), ("gptq", "awq+gptq"), steps, say)


def _run(
    what: str,
    trained_by: Callable[[Yardstick, str, str, int], float],
    schemes: Sequence[str],
    algorithms: Sequence[str],
    steps: int,
    say: Callable[[str], None],
) -> Iterator[Row]:
    yardstick = Yardstick(MODEL)
    base = round(math.exp(yardstick.nll(copy.deepcopy(yardstick.base))), 4)
    common = {"what": what, "steps": steps, "tokens": steps * BATCH * LENGTH, "float": base}
    for scheme in schemes:
        for algorithm in algorithms:
            alone = round(rounded(yardstick, scheme, algorithm), 4)
            trained = round(trained_by(yardstick, scheme, algorithm, steps), 4)
            say(f"{scheme:8} {algorithm:10} {alone:.4f}  trained {trained:.4f}")
            yield {**common, "scheme": scheme, "algorithm": algorithm, "alone": alone, "trained": trained}


def run_gradients(steps: int, say: Callable[[str], None]) -> Iterator[Row]:
    """Gradients of the bundled model on one batch, against float32: median and minimum SQNR in dB over matrices."""
    yardstick, rows = Yardstick(MODEL), next(batches(1))
    exact = _gradients(copy.deepcopy(yardstick.base).float(), rows, autocast=False)
    for name, (scheme, gradients) in {"bf16": ("", None), **GRADIENTS}.items():
        model = copy.deepcopy(yardstick.base).float()
        if scheme:
            prepare_(model, scheme, gradients=gradients)
        found = _gradients(model, rows, autocast=True)
        errors = sorted(float(sqnr(exact[key], grad)) for key, grad in found.items())
        row = {"what": "gradients", "candidate": name, "median": statistics.median(errors), "least": errors[0]}
        say(f"{name:32} {row['median']:.1f} dB, at least {row['least']:.1f}")
        yield row


def _gradients(model: Any, rows: Tensor, *, autocast: bool) -> dict[str, Tensor]:
    model.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=rows[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.dim() == 2}
