"""Everything that needs a GPU, in pieces that take a few minutes each: ``python -m bench.gpu.pieces NAME``.

Nothing is installed and no network is needed: PyTorch for the device, Triton, numpy, safetensors and pytest are
required, other libraries are compared with if installed. Each piece is stopped after nine minutes, saves results to one
folder as it goes, and continues where it was when run again. Further arguments are passed to the piece:
``quick --peers tinygemm``. bench/README.md recommends an order.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu"
SECONDS = 540
GRACE = 20
"""Seconds for a piece to save its results after it was told to stop."""
STOPPED = 124

TESTS = (
    *("-m", "pytest", "-p", "no:cacheprovider", "-p", "bench.gpu.fresh", "-p", "bench.gpu.told"),
    *("-o", "faulthandler_timeout=120", "--tb=short", "-rf"),
)
"""Hanging tests report where they hang, and failures are reported immediately."""
KERNELS = tuple(
    f"tests/backends/on_{name}.py"
    for name in (
        *("triton", "triton_attention", "triton_inputs", "triton_pairs"),
        *("triton_quantize", "triton_scaled", "triton_tables"),
    )
)
DEVICE_TESTS = ("tests/backends/test_gpu.py", "tests/backends/test_cuda_few_rows.py")
WORKERS = ("-n", "WORKERS", "--maxschedchunk=1")
"""Tests are handed out one by one: those that compile the most kernels stand side by side, and in the usual chunks of
five a single worker would get them."""
SCHEMES = ("int4", "nf4", "int8", "int8-dyn", "fp8-row", "int4-int8")
PIECES: dict[str, tuple[str, ...]] = {
    "kernels": (*TESTS, *WORKERS, "-m", "", *KERNELS),
    "tests": (*TESTS, *WORKERS, "-m", "gpu", "-k", "not watched", *DEVICE_TESTS),
    "support": ("-m", "bitport.conformance", "--device", "DEVICE", "--json", "FOLDER/support.json"),
    "tune": ("-m", "bench.gpu.tune", "--json"),
    "quick": ("-m", "bench.gpu.products", "--json", "--go-on", "--quick"),
    "methods": ("-m", "bench.gpu.methods", "--json"),
    "products": ("-m", "bench.gpu.products", "--json", "--go-on", "--repetitions", "7", "--schemes", *SCHEMES),
    "all-schemes": ("-m", "bench.gpu.products", "--json", "--go-on", "--repetitions", "7"),
    "sanitizer": (*TESTS, "-m", "gpu", "-k", "watched", DEVICE_TESTS[0]),
}
"""Arguments of python, in order of decreasing value; WORKERS, DEVICE and FOLDER are substituted."""


def command(name: str, folder: Path, device: str, more: tuple[str, ...] = ()) -> list[str]:
    put_in = {"WORKERS": str(min(12, os.cpu_count() or 1)), "DEVICE": device}
    lacking = WORKERS if importlib.util.find_spec("xdist") is None else ()
    given = [put_in.get(each, each.replace("FOLDER", str(folder))) for each in PIECES[name] if each not in lacking]
    return [sys.executable, *given, *more]


def environment(folder: Path, device: str) -> dict[str, str]:
    """Records and the tuned table, which other pieces use, are in one folder. Each process compiles by itself: with an
    Inductor pool for each of twelve there would be 200 processes."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "TRITON_DEVICE": device,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "BITPORT_CACHE": str(folder),
        "BENCH_RESULTS": str(folder),
    }


def run(name: str, folder: Path, device: str, seconds: float = SECONDS, more: tuple[str, ...] = ()) -> int:
    """Return the exit status, or STOPPED. The output is appended to ``pieces.txt`` as well."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "pieces.txt"
    with log.open("a") as file:
        print(f"\n== {name}", file=file, flush=True)
        start, place = time.monotonic(), file.tell()
        process = subprocess.Popen(
            command(name, folder, device, more),
            cwd=ROOT,
            env=environment(folder, device),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=interruptible,
        )
        try:
            status = watch(process, log, place, seconds)
        finally:
            end(process)
        print(f"== {name}: {said(status)} after {time.monotonic() - start:.0f} s", file=file, flush=True)
    print(f"== {name}: {said(status)} after {time.monotonic() - start:.0f} s")
    return status


def said(status: int) -> str:
    return "stopped, to be called again," if status == STOPPED else f"ended with {status}"


def watch(process: subprocess.Popen[bytes], log: Path, place: int, seconds: float) -> int:
    """Print new output from the log; returns the exit status."""
    until = time.monotonic() + seconds
    with log.open() as file:
        file.seek(place)
        while True:
            status = process.poll()
            sys.stdout.write(file.read())
            sys.stdout.flush()
            if status is not None:
                return status
            if time.monotonic() > until:
                return STOPPED
            time.sleep(0.2)


def interruptible() -> None:
    """Enable SIGINT even if a shell has started this in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children."""
    for kind in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, kind)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def present() -> str:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("bench.gpu.pieces needs a CUDA, ROCm or XPU device, and PyTorch finds none here")
    return device.type


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="+", choices=PIECES)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: build/gpu")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for each piece; default: {SECONDS}")
    parser.add_argument("--in-all", type=float, default=math.inf, metavar="SECONDS", help="for all pieces together")
    options, more = parser.parse_known_args()
    if more and len(options.pieces) > 1:
        parser.error(f"{' '.join(more)} would go to each of {', '.join(options.pieces)}; give one piece with it")
    device, folder = present(), options.folder.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # so that a piece ends with this process
    until, status = time.monotonic() + options.in_all, 0
    for name in options.pieces:
        left = until - GRACE - time.monotonic()
        if left > 0:
            status = max(status, abs(run(name, folder, device, min(options.seconds, left), tuple(more))))
        else:
            print(f"== {name}: left out, no time is left")
            status = max(status, STOPPED)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
