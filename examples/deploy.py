"""The small model in models/tinylm, quantized, compiled, and run without Python: python examples/deploy.py

`bitport-run` continues a prompt with the most likely tokens; they must be those of eager mode. `make runner` builds it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

import bitport
from bitport.export import package
from bitport.integrations.huggingface import load_model, load_tokenizer, token_ids
from bitport.integrations.program import causal_lm
from bitport.report.text import size

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "One winter night, Daniel and Anton sat together by the well."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tinylm", help="a Hugging Face directory")
    parser.add_argument("--scheme", default="int4")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--capacity", type=int, default=256, help="positions of the cache (default: 256)")
    parser.add_argument("--runner", type=Path, default=ROOT / "build" / "runner" / "bitport-run")
    args = parser.parse_args()
    if not args.runner.exists():
        raise SystemExit(f"{args.runner} is missing: make runner")
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    bitport.quantize_(model, args.scheme, measure=False, progress=False)
    prompt = token_ids(tokenizer, PROMPT)
    wanted = greedy(model, prompt, args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tinylm.pt2")
        methods, meta = causal_lm(model, args.capacity)
        manifest = package(methods, path, meta=meta)
        print(f"{path.name}: {size(path.stat().st_size)}, of which {size(manifest['weights']['size'])} are weights")
        report = without_python(args.runner, path, prompt, args.tokens)
    print(f"prompt {report['prompt_ms']:.1f} ms, then {1e3 / report['token_ms']:.0f} tokens/s, without Python")
    print(f"\n  {PROMPT}{tokenizer.decode(report['ids'], skip_special_tokens=True)}".replace("\n", "\n  "))
    if report["ids"] != wanted:
        raise SystemExit(f"eager mode gives other tokens: {wanted}, not {report['ids']}")
    print(f"\nthe {len(wanted)} tokens of eager mode")


def greedy(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    ids = prompt[None]
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def without_python(runner: Path, path: Path, prompt: torch.Tensor, tokens: int) -> dict[str, Any]:
    ids = ",".join(map(str, prompt.tolist()))
    library = Path(torch.__path__[0]) / "lib"
    command = [runner, path, "--generate", ids, "--tokens", tokens, "--torch", library, "--json"]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    if python := [name for name in report["libraries"] if "python" in Path(name).name]:
        raise SystemExit(f"there is Python in the process: {python}")
    return report


if __name__ == "__main__":
    main()
