"""Trains the model, by default on one CPU core: python -m examples.tinylm.train (--minutes M | --steps N) [--resume]

Every batch is new text from the endless corpus, so nothing is seen twice and nothing can be memorised.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import MODELS, TRAIN_SEED, nth_story
from .evaluate import WINDOW, perplexity, read_tokens
from .model import Config, TinyLM, load, save
from .spread import spread

BATCH = 8
PEAK_RATE, FINAL_RATE, WARMUP_STEPS = 2e-3, 1e-5, 100
STORIES_PER_DOCUMENT = 8  # the end token comes only between documents, so that text without it is familiar too
EVALUATE_EVERY, CHECKPOINT_EVERY, LOG_EVERY = 250, 500, 50


def batches(tokenizer: Tokenizer, skip: int) -> Iterator[Tensor]:
    """Yield batches [BATCH, WINDOW + 1] of consecutive text from number `skip` on; adjacent rows share one token."""
    end = tokenizer.encode("<|endoftext|>").ids[0]
    pending: list[int] = []
    size = BATCH * WINDOW
    made = 0
    for document in count():
        first = document * STORIES_PER_DOCUMENT
        text = "\n".join(nth_story(TRAIN_SEED, first + i) for i in range(STORIES_PER_DOCUMENT))
        pending += [end, *tokenizer.encode(text).ids]
        while len(pending) > size:
            if made >= skip:
                yield torch.tensor(pending[: size + 1]).unfold(0, WINDOW + 1, WINDOW)
            made += 1
            del pending[:size]


def rate(step: int, progress: float) -> float:
    """Linear warmup, then a cosine from the peak to the final rate."""
    decayed = FINAL_RATE + 0.5 * (PEAK_RATE - FINAL_RATE) * (1 + math.cos(math.pi * min(1.0, progress)))
    return decayed * min(1.0, (step + 1) / WARMUP_STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="training time; the schedule follows the clock")
    budget.add_argument("--steps", type=int, help=f"number of steps of {BATCH * WINDOW} tokens")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, default=MODELS)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/tinylm.pt"))
    args = parser.parse_args()

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(0)
    model = TinyLM(Config()).to(args.device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    step, spent = 0, 0.0
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if args.resume:
        state = torch.load(args.checkpoint, map_location=args.device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent = state["step"], state["spent"]
    log = (args.out / "training.jsonl").open("a" if args.resume else "w")
    validation = read_tokens(args.out).to(args.device)

    @torch.compile
    def loss_of(rows: Tensor) -> Tensor:
        with torch.autocast(args.device.type, torch.bfloat16):
            logits = model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def record(**values: float) -> None:
        rounded = {name: round(value, 5) for name, value in values.items()}
        line = json.dumps({"step": step, "tokens": step * BATCH * WINDOW, **rounded})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    started = time.monotonic() - spent
    mean_loss = torch.zeros((), device=args.device)
    for rows in batches(Tokenizer.from_file(str(args.out / "tokenizer.json")), skip=step):
        spent = time.monotonic() - started
        progress = spent / (60 * args.minutes) if args.minutes else step / args.steps
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate(step, progress)
        loss = loss_of(rows.to(args.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss += loss.detach() / LOG_EVERY
        step += 1
        if step % LOG_EVERY == 0:
            record(seconds=spent, loss=mean_loss.item(), rate=rate(step, progress))
            mean_loss.zero_()
        if step % EVALUATE_EVERY == 0:
            with torch.autocast(args.device.type, torch.bfloat16):
                record(seconds=spent, validation_perplexity=perplexity(model, validation[: 32 * WINDOW]))
        if step % CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "spent": spent}
            torch.save(state, args.checkpoint)
    spread(model.cpu())
    save(model, args.out)
    stored, validation = load(args.out), validation.cpu()
    record(
        seconds=spent,
        final_perplexity=perplexity(stored, validation),
        slice_perplexity=perplexity(stored, validation[: 16 * WINDOW]),
    )


if __name__ == "__main__":
    main()
