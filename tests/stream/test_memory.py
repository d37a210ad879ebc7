"""The memory estimate is sufficient and far below the model's size: measured in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitport.report.memory import resident
from tests.scripts import printed
from tests.turns import slow

PEAK = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from torch import nn
from bitport.algorithms import AWQ, GPTQ, Chain, SignRound
from bitport.stream import Stream
torch.set_num_threads(1)
folder = Path(sys.argv[1])
SCHEME, ALGORITHM, BLOCKS = *sys.argv[3:5], int(sys.argv[5])
MANY = "awq" in ALGORITHM or "static" in SCHEME
WIDTH, TOKENS = (256, 8192) if MANY else (512, 64)

def make():
    return Block() if MANY else nn.Linear(WIDTH, WIDTH, bias=False)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(BLOCKS))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

index = {}
for at in range(BLOCKS):
    block = {f"layers.{at}.{name}": param.detach() for name, param in make().named_parameters()}
    save_file(block, folder / f"{at}.safetensors")
    index |= dict.fromkeys(block, f"{at}.safetensors")
(folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
with torch.device("meta"):
    model = Model()
batches = [torch.randn(TOKENS, WIDTH) for _ in range(2)]
awq = AWQ(steps=2)  # as much memory as twenty
few = {"awq": awq, "awq+gptq": Chain((awq,), GPTQ(), ALGORITHM), "signround": SignRound(steps=2)}
stream = Stream(model, folder, sys.argv[2], SCHEME, batches=batches, algorithm=few.get(ALGORITHM, ALGORITHM))
report = stream.run()
print(json.dumps([report.memory_estimate, report.memory_peak, stream.memory.base, report.bytes_before]))
"""


@pytest.mark.skipif(not resident(), reason="measures memory by /proc")
@pytest.mark.parametrize(
    ("scheme", "algorithm", "blocks"),
    [
        ("int4", "rtn", 160),
        ("int4", "gptq", 6),
        ("int8-static", "rtn", 6),
        *slow(("int4", "awq", 3), ("int4", "awq+gptq", 3), ("int4", "signround", 6)),
    ],
)
def test_the_peak_is_below_what_was_foretold(tmp_path: Path, scheme: str, algorithm: str, blocks: int) -> None:
    (tmp_path / "in").mkdir()
    said = printed(PEAK, tmp_path / "in", tmp_path / "out", scheme, algorithm, blocks)
    foretold, taken, base, model = json.loads(said)
    print({"foretold": foretold - base, "taken": taken - base, "model": model})
    assert taken <= foretold
    assert blocks < 160 or foretold - base < model
