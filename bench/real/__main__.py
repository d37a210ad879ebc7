"""Measure, and write the page: ``python -m bench.real``.

Rows that the record has already are kept, so that an interrupted run continues. Remove the record to measure all anew.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from bench.real.plan import PLAN
from bench.real.record import measure, opened, yardstick_of_texts
from bitport.evaluate.algorithms import Measurer
from bitport.evaluate.compare import BASELINE
from bitport.evaluate.measure import size_of


def row(measurer: Measurer, scheme: str, algorithm: str) -> dict[str, Any]:
    base = measurer.yardstick.base
    model = copy.deepcopy(base) if scheme == BASELINE else measurer.quantized(scheme, algorithm)
    if model is None:
        raise RuntimeError(f"{algorithm} refuses {scheme}: take it out of the plan")
    measured = size_of(model)
    figures = dataclasses.asdict(measurer.yardstick.stretches(model))
    return {"scheme": scheme, "algorithm": algorithm, "nbytes": measured.nbytes, "weights": measured.weights} | figures


def main() -> None:
    yardstick = yardstick_of_texts()
    measurer = Measurer(yardstick)
    measure(opened(yardstick), "rows", PLAN, functools.partial(row, measurer))


if __name__ == "__main__":
    main()
