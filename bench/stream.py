"""Quantize a model larger than the memory limit, with kills and resumes: the result must be identical to a clean run.

A Llama-like model of random weights (12 GB in bf16) is written to disk from a seed. ``bitport quantize`` then runs on
it twice with limited memory: once undisturbed, and once killed (SIGKILL) at random moments in its first and second
third and resumed each time. All files of the two results are compared byte by byte.

The limit is RLIMIT_DATA: Linux refuses private writable mappings beyond it, which is everything that a process
allocates, touched or not. It excludes the page cache, which the system may drop at any time; weights are read rather
than mapped, so they count. The peak of resident memory (libraries included) is reported as well.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

import bitport.algorithms
from bench.measure import header, record
from bitport.checkpoint.output import FOLDER, JOURNAL
from bitport.checkpoint.safetensors_writer import SafetensorsWriter
from bitport.report.text import size

GIB = 2**30
HIDDEN, INNER, HEADS, VOCABULARY = 2048, 5632, 16, 32000
TOKENS, WINDOW = 1024, 512


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for at in range(layers):
        block = f"model.layers.{at}"
        found |= {f"{block}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        found |= {f"{block}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{block}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        found |= {f"{block}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def write_model(folder: Path, nbytes: int, seed: int) -> int:
    """Write about ``nbytes`` of weights, in shards of at most 2 GB; returns the number of layers."""
    outer, inner = (sum(map(lambda s: int(np.prod(s)), shapes(n).values())) for n in (0, 1))
    layers = max(1, round((nbytes / 2 - outer) / (inner - outer)))
    folder.mkdir(parents=True)
    draw, index, shards = torch.Generator().manual_seed(seed), {}, 0
    file: SafetensorsWriter | None = None
    for name, shape in shapes(layers).items():
        if file is None or file.data_size > 2 * 10**9 - 2 * int(np.prod(shape)):
            if file is not None:
                file.finish()
            shards += 1
            file = SafetensorsWriter(folder / f"model-{shards:05}.safetensors", 1 << 20)
        one = len(shape) == 1
        file.write(name, torch.ones(shape).bfloat16() if one else _weight(shape, draw))
        index[name] = file.path.name
    assert file is not None
    file.finish()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": WINDOW,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, TOKENS)
    np.save(folder / "tokens.npy", ids)
    return layers


def _weight(shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).bfloat16()


def command(source: Path, target: Path, algorithm: str, limit: int, *more: str) -> list[str]:
    words = ["quantize", source, "--scheme", "int4", "--algorithm", algorithm, "--memory-limit", limit, "-o", target]
    if bitport.algorithms.algorithm(algorithm).needs_inputs:
        words += ["--data", source / "tokens.npy", "--data-tokens", TOKENS]
    return [sys.executable, "-m", "bitport", *map(str, words), "--json", *more]


def started(words: list[str], limit: int, out: IO[str] | None = None) -> subprocess.Popen[bytes]:
    """Start the command with limited memory. glibc arenas count once reserved, so their number is limited."""
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "MALLOC_ARENA_MAX": "2"}

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return subprocess.Popen(words, stdout=out or subprocess.DEVNULL, env=env, preexec_fn=limited)


def finished(words: list[str], target: Path, limit: int) -> tuple[int, dict[str, Any]]:
    """Return the number of steps observed while it ran, and the report."""
    steps = 0
    with tempfile.TemporaryFile("w+") as out:
        process = started(words, limit, out)
        while process.poll() is None:
            steps = max(steps, steps_done(target))
            time.sleep(0.2)
        if process.returncode:
            raise SystemExit(f"bitport quantize ended with {process.returncode}")
        out.seek(0)
        return steps, json.load(out)


def steps_done(target: Path) -> int:
    path = target / FOLDER / JOURNAL
    with contextlib.suppress(FileNotFoundError):  # removed by the last step
        return len(json.loads(path.read_bytes())["done"])
    return 0


def disturbed(words: list[str], target: Path, limit: int, steps: int, source_of_chance: random.Random) -> list[int]:
    """Kill the run twice; returns after how many steps."""
    killed = []
    for third in (1, 2):
        process = started([*words, "--resume"], limit)
        goal = source_of_chance.randrange((third - 1) * steps // 3, third * steps // 3) + 1
        while steps_done(target) < goal and process.poll() is None:
            time.sleep(0.2)
        time.sleep(source_of_chance.random() * 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(f"the run ended with {process.returncode} before it was killed")
        killed.append(steps_done(target))
    return killed


def hashes(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="an empty or new folder, with room for the model and two results")
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--algorithm", default="rtn")
    parser.add_argument("--limit", type=float, default=4.0, help="GiB of memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="append to bench/results/stream.jsonl")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    source, whole, broken = (args.folder / name for name in ("model", "undisturbed", "killed"))
    limit = int(args.limit * GIB)
    layers = write_model(source, int(args.gigabytes * 1e9), args.seed)
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(f"{size(nbytes)}, {layers} layers, limit {size(limit)}", flush=True)
    begin = time.monotonic()
    steps, report = finished(command(source, whole, args.algorithm, limit), whole, limit)
    seconds = time.monotonic() - begin
    print(f"undisturbed: {seconds:.0f} s, peak {size(report['memory_peak'])}", flush=True)
    words = command(source, broken, args.algorithm, limit)
    killed = disturbed(words, broken, limit, steps, random.Random(args.seed))
    _, again = finished([*words, "--resume"], broken, limit)
    first, second = hashes(whole), hashes(broken)
    result = {
        "algorithm": args.algorithm,
        "bytes": nbytes,
        "layers": layers,
        "limit": limit,
        "tokens": TOKENS if bitport.algorithms.algorithm(args.algorithm).needs_inputs else 0,
        "seconds": round(seconds, 1),
        "memory_estimate": report["memory_estimate"],
        "memory_peak": max(report["memory_peak"], again["memory_peak"]),
        "steps": steps,
        "killed_after_steps": killed,
        "files": len(first),
        "bytes_after": report["bytes_after"],
        "same_bytes": first == second,
    }
    print(json.dumps(result, indent=1))
    if args.json:
        record("stream", header(), [result])
    for folder in (source, whole, broken):
        shutil.rmtree(folder)
    if first != second:
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
