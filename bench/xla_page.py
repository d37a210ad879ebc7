"""Generate the table of docs/xla.md from results on this machine (``make xla-page``).

python -m bench.xla_page --cases CASES.pt       write the cases for torch_xla, which needs another version of torch
python -m bench.xla_page --theirs RESULTS.json  import torch_xla's results, which are kept in docs/xla.json
python -m bench.xla_page                        compute bitport's own results, and write the page
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bitport.numerics import sqnr
from bitport.ops import OPS, Sample
from bitport.report.text import markdown

DOCS = Path(__file__).parents[1] / "docs"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

ROUTES = {
    "CPU": "the op on CPU tensors, eager",
    "JAX": "its JAX function, compiled by XLA for the CPU",
    "torchax": "the op on torchax tensors, eager",
}


def cases() -> dict[str, Sample]:
    """Case ("channel-sym-w8a16 fp32") -> sample: every row of the page's table, including unsupported ones."""
    cpu = torch.device("cpu")
    return {
        f"{sample.name} {name}": sample
        for name, dtype in DTYPES.items()
        for sample in OPS["quantized_matmul"].samples(cpu, dtype)
    }


def write_cases(path: Path) -> None:
    torch.save({name: {"args": list(each.args), "exact": each.expected()} for name, each in cases().items()}, path)


def ours() -> dict[str, dict[str, float]]:
    """SQNR in dB of each case by each route."""
    import jax

    from bitport.backends.xla import torchax_ops
    from bitport.backends.xla.functions import FUNCTIONS
    from bitport.backends.xla.move import to_array, to_tensor

    torchax, op = torchax_ops.register(), torch.ops.bitport.quantized_matmul
    compiled = jax.jit(FUNCTIONS["quantized_matmul"], static_argnums=(4, 5, 6))
    found = {}
    for name, sample in cases().items():
        exact = sample.expected()
        arrays = [to_array(arg) if isinstance(arg, torch.Tensor) else arg for arg in sample.args]
        with torchax.default_env():
            eager = op(*(torchax_ops.wrap(arg) if isinstance(arg, jax.Array) else arg for arg in arrays))
        results = {"CPU": op(*sample.args), "JAX": to_tensor(compiled(*arrays)), "torchax": to_tensor(eager.jax())}
        found[name] = {route: round(float(sqnr(exact, result)), 1) for route, result in results.items()}
    return found


def page(record: dict[str, Any]) -> str:
    """The content between the markers in docs/xla.md, outside which the page is prose."""
    theirs = record.get("torch_xla", {"rows": {}})
    head = ["scheme", "x", "budget", *ROUTES, "on torch_xla", "torch_xla, CPU", "torch_xla, XLA:CPU"]
    rows = []
    notes: list[str] = []
    for name, sample in cases().items():
        scheme, dtype = name.split()
        own = record["bitport"]["rows"][name]
        cells = [_level(own[route], sample.budget) for route in ROUTES]
        other = theirs["rows"].get(name, {})
        cells += [_their(other.get(kind, "*not run*"), sample.budget, notes) for kind in ("bitport", "cpu", "xla")]
        rows.append((scheme, dtype, f"{sample.budget:.0f}", *cells))
    versions = ", ".join(f"{key} {record['bitport'][key]}" for key in ("torch", "jax", "torchax"))
    ran = f"Run with {versions}" + (f"; torch_xla {theirs['torch_xla']}." if "torch_xla" in theirs else ".")
    numbered = [f"({at}) {note}" for at, note in enumerate(notes, 1)]
    return "\n\n".join([markdown(head, rows, words=(0, 1)), ran, *numbered])


def _level(level: float, budget: float) -> str:
    return f"{level:.0f}" if level >= budget else f"**{level:.0f}**"


def _their(result: float | str, budget: float, notes: list[str]) -> str:
    if not isinstance(result, str):
        return _level(result, budget)
    if result == "*not run*":
        return result
    reason = result.partition(": %")[0]  # without the names of compiled values
    if reason not in notes:
        notes.append(reason)
    return f"no ({notes.index(reason) + 1})"


START, END = "<!-- table: make xla-page -->", "<!-- end of table -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--theirs", type=Path)
    args = parser.parse_args()
    if args.cases:
        write_cases(args.cases)
        return
    path = DOCS / "xla.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    if args.theirs:
        record["torch_xla"] = json.loads(args.theirs.read_text())
    else:
        from importlib.metadata import version

        record["bitport"] = {name: version(name) for name in ("torch", "jax", "torchax")} | {"rows": ours()}
    path.write_text(json.dumps(record, indent=1) + "\n")
    if "bitport" in record:
        text = (DOCS / "xla.md").read_text()
        before, _, rest = text.partition(START)
        _, _, after = rest.partition(END)
        (DOCS / "xla.md").write_text(f"{before}{START}\n\n{page(record)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
