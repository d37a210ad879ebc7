"""Measure the two limits of a product, reading memory and the multiply unit, by means of ``limits.cpp``."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "limits.cpp"
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = ("-std=c++17", "-O3", "-pthread")

MEGABYTES = 1024
"""Megabytes read by the bandwidth test: beyond every cache, since weights come from memory too
(``workers.Flusher``)."""

ISA_UNITS = {
    "": ("avx2_f32", "avx2_int8", "avx512_f32", "avx512_int8", "avx512_bf16", "amx_bf16", "amx_int8"),
    "avx512_vnni": ("avx2_f32", "avx2_int8", "avx512_f32", "avx512_int8"),
    "avx2": ("avx2_f32", "avx2_int8"),
}
"""Restriction -> the units that remain; "" is unrestricted."""


@dataclasses.dataclass(frozen=True)
class Limits:
    read: float
    """Bytes per second."""
    units: dict[str, float]
    """Name of a unit, such as amx_bf16 -> multiplications and additions per second."""

    def peak(self, int8: bool) -> float:
        """The peak of the best suitable unit: only int8 inputs may use the int8 unit."""
        fitting = [rate for name, rate in self.units.items() if int8 or not name.endswith("int8")]
        return max(fitting, default=float("inf"))

    def floor(self, m: int, n: int, k: int, weight_bytes: int, int8: bool) -> float:
        """Lower bound of a product in seconds: weight, x and y (2 bytes each) moved once, or all arithmetic done."""
        moved = (weight_bytes + 2 * m * (n + k)) / self.read
        return max(moved, 2 * m * n * k / self.peak(int8))


def measure(
    threads: int, isa: str = "", seconds: float = 0.15, megabytes: int = MEGABYTES, times: int = 3
) -> Limits | str:
    """The limits of this machine, the best of ``times``, or why they are unknown."""
    program = _program()
    if isinstance(program, str):
        return program
    found = []
    for _ in range(times):
        command = [program, str(threads), str(megabytes), str(seconds)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ran.returncode:
            return f"{SOURCE.name} failed with {ran.returncode}: {ran.stderr.strip()}"
        found.append(parse(ran.stdout, isa))
    return best(found)


class Reading:
    """Measures the read bandwidth on each call, because it varies if others share the memory."""

    def __init__(self, threads: int, megabytes: int = 512) -> None:
        program = _program()
        if isinstance(program, str):
            raise FileNotFoundError(program)
        command = [program, str(threads), str(megabytes), "0.01", "again"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def __call__(self) -> float:
        """Bytes per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        return parse(self._process.stdout.readline()).read

    def close(self) -> None:
        self._process.communicate(timeout=10)


def best(found: list[Limits]) -> Limits:
    """The maximum of each figure: a limit is what the machine can do undisturbed."""
    units = {name: max(each.units[name] for each in found) for name in found[0].units}
    return Limits(max(each.read for each in found), units)


def parse(text: str, isa: str = "") -> Limits:
    """Parse lines "name figure", in units of 10^9 per second."""
    figures = {name: float(figure) * 1e9 for name, figure in (line.split() for line in text.splitlines())}
    read = figures.pop("read")
    kept = {name: rate for name, rate in figures.items() if name in ISA_UNITS[isa]}
    return Limits(read, kept)


def _program() -> Path | str:
    """The compiled program, or why there is none."""
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return f"no C++ compiler was found ({', '.join(COMPILERS)})"
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join((compiler, *OPTIONS)).encode()).hexdigest()[:12]
    target = FOLDER / "build" / f"limits-{key}"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        command = [compiler, *OPTIONS, "-o", f"{target}.tmp", str(SOURCE)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ran.returncode:
            return f"{' '.join(command)} failed: {ran.stderr[-2000:]}"
        Path(f"{target}.tmp").replace(target)
    return target
