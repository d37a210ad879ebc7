"""``bitport bench``: measure quantized linear layers against bf16 on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys

import torch

from bitport.cli.common import add_verb, computing_device, count, counts, scheme_name, show
from bitport.evaluate.speed import Speed, speeds
from bitport.report.text import table
from bitport.schemes import preset

SCHEMES = ("int4", "nf4", "int8", "int8-dyn", "int4-int8")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = add_verb(
        verbs,
        "bench",
        run,
        "Measure linear layers against bf16 on this machine. For each shape, number of input rows (tokens at once) and "
        "scheme: the kernel, its time, the speedup over bf16, and the accuracy.",
        "",
        "--shapes 3072x8192,8192x3072 --rows 1,16,375 --schemes int4,int8",
    )
    verb.add_argument(
        "--shapes",
        type=shapes,
        default=((4096, 4096),),
        metavar="KxN,..",
        help="layers from K inputs to N outputs (default: 4096x4096)",
    )
    verb.add_argument(
        "--rows", type=counts, default=(1, 16, 64, 512), metavar="N,..", help="input rows (default: 1,16,64,512)"
    )
    verb.add_argument(
        "--schemes", type=schemes, default=SCHEMES, metavar="SCHEME,..", help=f"default: {','.join(SCHEMES)}"
    )
    verb.add_argument("--repetitions", type=count, default=7, metavar="N", help="measurements of each (default: 7)")
    verb.add_argument(
        "--device", type=computing_device, default=torch.device("cpu"), help="a torch device (default: cpu)"
    )


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse shapes such as 3072x8192,8192x3072."""
    return tuple(_shape(item) for item in text.split(","))


def _shape(text: str) -> tuple[int, int]:
    k, _, n = text.partition("x")
    if not (k.isdecimal() and n.isdecimal() and int(k) and int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write KxN, such as 4096x14336")
    return int(k), int(n)


def schemes(text: str) -> tuple[str, ...]:
    """Parse scheme names such as int4,int8-dyn."""
    names = tuple(map(scheme_name, text.split(",")))
    for name in names:
        if preset(name).static:
            raise argparse.ArgumentTypeError(f"{name} wants a calibrated input scale, which a bench does not have")
    return names


def run(args: argparse.Namespace) -> int:
    rows: list[Speed] = []
    for k, n in args.shapes:
        print(f"measuring {k}x{n}", file=sys.stderr)
        options = {"device": args.device, "repetitions": args.repetitions}
        rows += speeds(k, n, args.rows, args.schemes, **options)
    header = ("shape", "rows", "scheme", "kernel", "bf16 ms", "ms", "x bf16", "noise", "SQNR dB")
    show(args, [dataclasses.asdict(row) for row in rows], table(header, [_cells(row) for row in rows]))
    return 0


def _cells(row: Speed) -> tuple[str, ...]:
    return (
        f"{row.k}x{row.n}",
        str(row.rows),
        row.scheme,
        row.kernel,
        f"{row.bf16_ms:.3f}",
        f"{row.ms:.3f}",
        f"{row.speedup:.2f}",
        "-" if math.isnan(row.noise) else f"{100 * row.noise:.0f} %",
        f"{row.sqnr_db:.1f}",
    )
