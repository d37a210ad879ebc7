"""Run tasks of lm-evaluation-harness on a model in memory: accuracy on MMLU, ARC and so on.

The harness sets the seeds of torch, numpy and random, as usual; torch's random state is restored.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitport.errors import ArgumentError, BitportError
from bitport.integrations.generation import random_apart

__all__ = ["run_tasks"]

INSTALL = "pip install 'bitport[lm-eval]'"

Scores = dict[str, dict[str, float]]
"""Task, metric ("acc", "acc_stderr", or with its filter "exact_match,strict-match") -> value."""


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str | dict[str, Any]],
    *,
    batch: int = 1,
    shots: int | None = None,
    limit: int | None = None,
    include: str | Path | None = None,
) -> Scores:
    """Run tasks and return their scores. ``tasks``: names known to the harness, or configurations as in its YAML files;
    ``include``: a folder with more such files. ``shots``: examples in the prompt (default: as the task says);
    ``limit``: documents per task."""
    evaluator, manager, wrapper = (
        _module("lm_eval.evaluator"),
        _module("lm_eval.tasks").TaskManager(include_path=None if include is None else str(include)),
        _module("lm_eval.models.huggingface"),
    )
    _check_known(tasks, manager.all_tasks)
    with random_apart(model.device):
        found = evaluator.simple_evaluate(
            model=wrapper.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch),
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            log_samples=False,
        )
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


def check_installed() -> None:
    """Check that the harness is installed, before a model is loaded for it."""
    _module("lm_eval.evaluator")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BitportError(f"tasks are run by lm-evaluation-harness ({error}); install it: {INSTALL}") from error


def _check_known(tasks: Sequence[str | dict[str, Any]], known: Sequence[str]) -> None:
    unknown = [task for task in tasks if isinstance(task, str) and task not in known]
    if unknown:
        raise ArgumentError(
            f"lm-evaluation-harness knows no task {', '.join(unknown)}; `lm-eval ls tasks` lists the {len(known)} it "
            f"knows, and a folder of task files can be added (--task-folder)"
        )


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Keep the numeric metrics, and rename "acc,none" to "acc"."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
    return {
        key.removesuffix(",none"): float(value)
        for key, value in numbers.items()
        if key != "sample_len" and math.isfinite(value)
    }
