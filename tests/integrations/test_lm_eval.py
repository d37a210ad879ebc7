"""Tasks of lm-evaluation-harness: its arguments and the handling of its results; and, where it is installed, the
harness itself on a task with documents from a file."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import bitport as bp
from bitport.errors import ArgumentError, BitportError
from bitport.integrations.huggingface import load_model, load_tokenizer, logits_of
from bitport.integrations.lm_eval import check_installed, run_tasks

from .models import make_directory

ANSWER = {
    "results": {
        "some": {"alias": "some", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict": 1, "sample_len": 8},
        "other": {"alias": " - other", "ppl,none": 3.5, "ppl_stderr,none": "N/A"},
        "third": {"acc,none": float("nan")},
    }
}


class Harness:
    """Stands in for lm_eval, and records how it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        parts = {name: ModuleType(name) for name in ("lm_eval", *map("lm_eval.{}".format, self.PARTS))}
        parts["lm_eval.evaluator"].simple_evaluate = self.evaluate  # type: ignore[attr-defined]
        parts["lm_eval.tasks"].TaskManager = self.manager  # type: ignore[attr-defined]
        parts["lm_eval.models.huggingface"].HFLM = lambda **given: given  # type: ignore[attr-defined]
        for name, module in parts.items():
            monkeypatch.setitem(sys.modules, name, module)

    PARTS = ("evaluator", "tasks", "models", "models.huggingface")

    def manager(self, include_path: str | None) -> Any:
        self.asked["include"] = include_path
        manager = ModuleType("manager")
        manager.all_tasks = ["some", "other"]  # type: ignore[attr-defined]
        return manager

    def evaluate(self, **given: Any) -> Any:
        torch.manual_seed(99)
        self.asked |= given
        return ANSWER


def test_what_the_harness_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harness = Harness(monkeypatch)
    state = torch.random.get_rng_state()
    model = SimpleNamespace(device=torch.device("cpu"))
    found = run_tasks(model, "tokenizer", ["some", {"task": "own"}], batch=3, shots=2, limit=5, include=tmp_path)
    assert found == {
        "some": {"acc": 0.5, "acc_stderr": 0.1, "exact_match,strict": 1.0},
        "other": {"ppl": 3.5},
        "third": {},
    }
    assert harness.asked["model"] == {"pretrained": model, "tokenizer": "tokenizer", "batch_size": 3}
    assert harness.asked["tasks"] == ["some", {"task": "own"}]
    assert (harness.asked["num_fewshot"], harness.asked["limit"], harness.asked["include"]) == (2, 5, str(tmp_path))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_unknown_task_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(monkeypatch)
    with pytest.raises(ArgumentError, match="knows no task sum"):
        run_tasks("model", "tokenizer", ["some", "sum"])
    assert "tasks" not in harness.asked


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.evaluator", raising=False)
    with pytest.raises(BitportError, match=r"pip install 'bitport\[lm-eval\]'"):
        check_installed()


@pytest.mark.peers
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="pip install 'bitport[lm-eval]'")
def test_the_harness_runs_a_quantized_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices between two continuations, with documents from a file; the expected result is summed from log-likelihoods
    here."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    documents = [
        {"q": f"The quick {word}", "choices": [" fox", " dog"], "gold": at % 2} for at, word in enumerate("abcdef")
    ]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    task = {
        "task": "own_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    directory = make_directory(tmp_path / "llama")
    model, tokenizer = load_model(directory, dtype=torch.float32), load_tokenizer(directory)
    bp.quantize_(model, "int4-g32")
    right = 0
    for document in documents:
        totals = []
        for choice in document["choices"]:
            start, ids = (
                tokenizer(text, return_tensors="pt").input_ids[0] for text in (document["q"], document["q"] + choice)
            )
            with torch.no_grad():
                chances = logits_of(model)(ids[None])[0].double().log_softmax(-1)
            totals.append(sum(chances[at - 1, ids[at]].item() for at in range(len(start), len(ids))))
        right += totals.index(max(totals)) == document["gold"]
    found = run_tasks(model, tokenizer, [task], batch=2)
    assert found["own_choice"]["acc"] == right / len(documents)
    assert "acc_stderr" in found["own_choice"]
    assert run_tasks(model, tokenizer, [task], limit=2)["own_choice"]["acc"] in (0.0, 0.5, 1.0)
