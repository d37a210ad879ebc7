"""How much memory saving, loading and converting take, measured in a process of their own.

32 float32 weights of 2 MB are 64 MB. Beyond what they return, save() needs nothing (the bytes are written from where
they are), load() needs one weight, or nothing at all if it maps the file, and quantize_files needs what quantizing and
measuring one weight takes: float32 steps and codes, and the float64 values of the error, 16 MB. A conversion between
formats holds one weight in both.

The allocator of that process maps every large tensor separately. By default, an allocation as large as an earlier freed
one comes from the heap: a tensor may then reuse memory that was there before the call, or leave behind memory that
nobody uses, and the same call takes anything from 0 to 31 MB.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.scripts import printed

PEAKS = """
import json, sys, torch
from pathlib import Path
from torch import nn
import bitport as bp
import bitport.interop
from bitport.checkpoint import quantize_files
torch.set_num_threads(1)
directory = Path(sys.argv[1])

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512, 1024))

def build():
    return nn.Sequential(*(Layer() for _ in range(32)))

def status(field):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(field)]
    return int(line.split()[1]) / 1024

def peak(work):
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    before = status("VmRSS")
    result = work()
    return status("VmHWM") - before

def convert(target, dtype=None):
    (source,) = (directory / "model").glob("*.safetensors")
    return quantize_files(source, directory / target, {"*.weight": "int8"}, dtype=dtype, progress=False)

def send():
    convert("half", torch.float16)
    (directory / "half" / "config.json").write_text("{}")
    return peak(lambda: bp.interop.convert(directory / "half", directory / "sent", to="gptq_v2", progress=False))

small = nn.Sequential(nn.Linear(32, 32))
bp.quantize_(small, "int8")
bp.save(small, directory / "small")
bp.load(lambda: nn.Sequential(nn.Linear(32, 32)), directory / "small")
model = build()
print(json.dumps({
    "save": peak(lambda: bp.save(model, directory / "model")),
    "load into it": peak(lambda: bp.load(model, directory / "model", mmap=False)),
    "load": peak(lambda: bp.load(build, directory / "model", mmap=False)),
    "map": peak(lambda: bp.load(build, directory / "model", verify=False)),
    "convert": peak(lambda: convert("files")),
    "load quantized": peak(lambda: bp.load(build, directory / "files", mmap=False)),
    "to another format": send(),
    "from another format": peak(lambda: bp.interop.convert(directory / "sent", directory / "back", progress=False)),
}))
"""

WEIGHT, MODEL, NOISE = 2, 64, 4  # MB
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # read by glibc
BUDGETS = {
    "save": NOISE,
    "load into it": WEIGHT + NOISE,
    "load": MODEL + WEIGHT + NOISE,
    "map": NOISE,
    "convert": 8 * WEIGHT + NOISE,
    "load quantized": MODEL / 4 + WEIGHT + NOISE,
    "to another format": NOISE,
    "from another format": NOISE,
}


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="measures memory by /proc")
def test_peaks(tmp_path: Path) -> None:
    peaks = json.loads(printed(PEAKS, tmp_path, **MAPPED))
    print({name: round(peak, 1) for name, peak in peaks.items()})
    assert {name: peak for name, peak in peaks.items() if peak > BUDGETS[name]} == {}
    held = {"load": 0.9 * MODEL, "load quantized": 0.9 * MODEL / 4, "convert": 2 * WEIGHT}
    assert all(peaks[name] > least for name, least in held.items()), "the measurement sees what is allocated"
