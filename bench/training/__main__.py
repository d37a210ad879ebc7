"""python -m bench.training steps|schemes|scales|gradients [--json]; with "page" it writes docs/training-figures.md."""

from __future__ import annotations

import argparse

from bench.measure import append, busy, header
from bench.training import page, quality, steps

SUITE = "training"
QUALITY = {"schemes": quality.run_schemes, "scales": quality.run_scales, "gradients": quality.run_gradients}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("what", choices=("steps", *QUALITY, "page"))
    parser.add_argument("--rounds", type=int, default=15, help="of steps")
    parser.add_argument("--steps", type=int, default=150, help="of training, for schemes and scales")
    parser.add_argument("--json", action="store_true", help=f"append to bench/results/{SUITE}.jsonl")
    args = parser.parse_args()
    if args.what == "page":
        page.write()
        return
    head = {**header(), "busy": busy(), "what": args.what}
    if args.what == "steps":
        rows = steps.run(args.rounds, print)
    else:
        rows = QUALITY[args.what](args.steps, print)
    before = [head]
    for row in rows:  # recorded one by one, since the whole run takes long
        if args.json:
            append(SUITE, [*before, {"run": head["run"], **row}])
            before = []


if __name__ == "__main__":
    main()
