"""Write the frozen files of a version: python -m tests.checkpoint.frozen.make DIRECTORY

They stand for the files that users have: tests read them and never write them. A new version of a format gets a
directory of its own beside those of the earlier ones, which stay.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import bitport as bp

from .models import MODELS
from .recipes import PLAN, RECIPE, SCHEME


def main(directory: Path) -> None:
    torch.manual_seed(0)
    for name, build in MODELS.items():
        model = build(True)
        bp.save(model, directory / name)
        torch.save(model.state_dict(), directory / f"{name}.pt")
    for name, value in (("scheme", SCHEME), ("recipe", RECIPE), ("plan", PLAN)):
        (directory / f"{name}.json").write_text(value.to_json() + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
