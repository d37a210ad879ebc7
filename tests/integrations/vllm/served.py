"""Run vLLM on a text: python -m tests.integrations.vllm.served CHECKPOINT KEYWORDS_AS_JSON IDS_AS_JSON prints the
log-probabilities of all ids except the first, or, with max_tokens, the ids that follow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USAGE_STATS": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
MARK = "result: "


def serve(directory: Path, ids: list[int], **given: Any) -> tuple[Any, str]:
    """Run it in its own process; return the result, and what it printed."""
    command = [sys.executable, "-m", __name__, str(directory), json.dumps(given), json.dumps(ids)]
    run = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    said = run.stdout + run.stderr
    results = [line.removeprefix(MARK) for line in run.stdout.splitlines() if line.startswith(MARK)]
    return (json.loads(results[0]) if results else None), said


def main() -> None:
    from vllm import LLM, SamplingParams

    directory, (given, ids) = sys.argv[1], (json.loads(each) for each in sys.argv[2:])
    how = {"load_format": "bitport", "dtype": "float32", "enforce_eager": True} | given
    llm = LLM(directory, max_model_len=64, skip_tokenizer_init=True, **how)
    sampling = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    found = [said[token].logprob for said, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
    print(MARK + json.dumps([found, list(out.outputs[0].token_ids)]))


if __name__ == "__main__":
    main()
