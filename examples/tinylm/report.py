"""Print the figures of the last training run as a Markdown table: python -m examples.tinylm.report"""

import json
from pathlib import Path

from .corpus import MODELS
from .model import load


def report(folder: Path = MODELS) -> str:
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    last = lines[-1]
    rows = {
        "Parameters": f"{sum(p.numel() for p in load(folder).parameters()):,}",
        "Training steps": f"{last['step']:,}",
        "Training tokens": f"{last['tokens']:,}",
        "Training time, one CPU core": f"{last['seconds'] / 60:.0f} minutes",
        "Final training loss (nats per token)": f"{[line['loss'] for line in lines if 'loss' in line][-1]:.3f}",
        "Perplexity of eval.txt, bf16 weights, float32 arithmetic": f"{last['final_perplexity']:.4f}",
    }
    return "\n".join(["| Figure | Value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


if __name__ == "__main__":
    print(report())
