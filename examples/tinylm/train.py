"""Trains the model on one CPU core: python -m examples.tinylm.train (--minutes M | --steps N) [--resume]

Every batch is new text from the endless corpus, so nothing is seen twice and nothing can be memorised. In the middle
of the training some rows are exercises in copying instead. They make the model learn to look up what followed a word
when it last occurred; from stories alone, that takes several times as long.
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
STORIES_PER_DOCUMENT = 8  # the end token stands only between documents, so plain text without it is familiar too
COPY_ROWS, COPY_SPAN, COPY_PERIODS = 4, (0.5, 0.7), (24, 160)  # rows per batch, part of the training, tokens
EVALUATE_EVERY, CHECKPOINT_EVERY, LOG_EVERY = 250, 250, 50


def batches(tokenizer: Tokenizer, skip: int) -> Iterator[Tensor]:
    """Batches [BATCH, WINDOW + 1] of consecutive text from number `skip` on; neighbors share their border token."""
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


def copy_exercise(row: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens of a row in random order, repeated to its end; what cannot be copied is no target (-100)."""
    period = int(torch.randint(*COPY_PERIODS, (1,)))
    repeated = row[torch.randperm(period)].repeat(len(row) // period + 1)[: len(row)]
    targets = repeated[1:].clone()
    targets[:period] = -100
    return repeated[:-1], targets


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
    parser.add_argument("--out", type=Path, default=MODELS)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/tinylm.pt"))
    args = parser.parse_args()

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(0)
    model = TinyLM(Config())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    step, spent = 0, 0.0
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if args.resume:
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent = state["step"], state["spent"]
    log = (args.out / "training.jsonl").open("a" if args.resume else "w")
    validation = read_tokens(args.out)

    @torch.compile
    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        """Per token, zero where there is no target."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(targets)

    def record(**values: float) -> None:
        rounded = {name: round(value, 5) for name, value in values.items()}
        line = json.dumps({"step": step, "tokens": step * BATCH * WINDOW, **rounded})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    started = time.monotonic() - spent
    mean_loss, copy_loss = torch.zeros(()), torch.zeros(())
    for rows in batches(Tokenizer.from_file(str(args.out / "tokenizer.json")), skip=step):
        spent = time.monotonic() - started
        progress = spent / (60 * args.minutes) if args.minutes else step / args.steps
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate(step, progress)
        inputs, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
        exercises = COPY_ROWS if COPY_SPAN[0] <= progress < COPY_SPAN[1] else 0
        for row in range(exercises):
            inputs[row], targets[row] = copy_exercise(rows[row])
        token_losses = losses(inputs, targets)
        token_losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss += token_losses[exercises:].detach().mean() / LOG_EVERY
        if exercises:
            copy_loss += token_losses[:exercises].detach().sum() / (targets[:exercises] >= 0).sum() / LOG_EVERY
        step += 1
        if step % LOG_EVERY == 0:
            copying = {"copy_loss": copy_loss.item()} if exercises else {}
            record(seconds=spent, loss=mean_loss.item(), rate=rate(step, progress), **copying)
            mean_loss.zero_()
            copy_loss.zero_()
        if step % EVALUATE_EVERY == 0:
            with torch.autocast("cpu", torch.bfloat16):
                record(seconds=spent, validation_perplexity=perplexity(model, validation[: 32 * WINDOW]))
        if step % CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "spent": spent}
            torch.save(state, args.checkpoint)
    spread(model)
    save(model, args.out)
    stored = load(args.out)
    record(seconds=spent, final_perplexity=perplexity(stored, validation),
           slice_perplexity=perplexity(stored, validation[: 16 * WINDOW]))


if __name__ == "__main__":
    main()
