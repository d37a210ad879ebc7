"""What is foretold is enough, and far less than the model: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bitport.report.memory import Memory, available, peak, resident

PEAK = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from torch import nn
import bitport as bp
from bitport.stream import Stream
torch.set_num_threads(1)
folder = Path(sys.argv[1])
BLOCKS, WIDTH = int(sys.argv[4]), 512

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

for at in range(BLOCKS):
    save_file({f"layers.{at}.weight": torch.eye(WIDTH)}, folder / f"{at}.safetensors")
index = {f"layers.{at}.weight": f"{at}.safetensors" for at in range(BLOCKS)}
(folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
with torch.device("meta"):
    model = Model()
batches = [torch.randn(64, WIDTH)]
stream = Stream(model, folder, sys.argv[2], "int4", batches=batches, algorithm=sys.argv[3])
report = stream.run()
print(json.dumps([report.memory_estimate, report.memory_peak, stream.memory.base, report.bytes_before]))
"""


@pytest.mark.skipif(not resident(), reason="measures memory by /proc")
@pytest.mark.parametrize(("algorithm", "blocks"), [("rtn", 240), ("gptq", 6)])
def test_the_peak_is_below_what_was_foretold(tmp_path: Path, algorithm: str, blocks: int) -> None:
    (tmp_path / "in").mkdir()
    command = [sys.executable, "-c", PEAK, str(tmp_path / "in"), str(tmp_path / "out"), algorithm, str(blocks)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    foretold, taken, base, model = json.loads(run.stdout)
    print({"foretold": foretold - base, "taken": taken - base, "model": model})
    assert taken <= foretold
    assert algorithm == "gptq" or foretold - base < model


def test_what_the_system_says() -> None:
    assert peak() >= 0.9 * resident()
    limit = available()
    assert limit is None or limit > resident()


def test_the_estimate_as_text() -> None:
    text = str(Memory(base=10**6, weights=2 * 10**6, activations=3, grams=4, work=5, disk=6))
    assert "weights 2.0 MB" in text
    assert "activations on disk 6 B" in text
