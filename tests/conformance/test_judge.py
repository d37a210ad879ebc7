"""What a kernel or a layout does wrong beside its numbers, and how a failure is told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.conformance import run
from bitport.conformance.command import main
from bitport.layouts import Matrix, register_layout
from bitport.layouts.plain import Plain
from bitport.numerics import Quantized
from bitport.ops import IMPLS, OPS, Impl, register_kernel, unregister_kernel

pytestmark = pytest.mark.usefixtures("own_tables")


class Own(Plain):
    name, devices = "own", ("cpu",)


def failures_of(kernel: Any, op: str = "linear", supports: Any = lambda *args: None) -> list[str]:
    """The failures of a kernel that is chosen on the CPU."""
    register_kernel(Impl(op, "mine", "cpu", kernel, supports, priority=1 << 20))
    return [failure for row in run("cpu", [op], [torch.bfloat16]) for failure in row.failures]


@pytest.mark.parametrize("op", ["linear", "quantize", "embedding"])
def test_a_kernel_that_returns_the_same_memory_each_time_is_a_failure(op: str) -> None:
    """The first result is right until the second call."""
    memory: dict[tuple[Any, ...], Tensor] = {}

    def kernel(*args: Any) -> Any:
        made = OPS[op].generic(*args)
        kept = [
            memory.setdefault((at, part.dtype, part.shape), torch.empty_like(part)).copy_(part)
            for at, part in enumerate(made if isinstance(made, list) else [made])
        ]
        return kept if isinstance(made, list) else kept[0]

    failures = failures_of(kernel, op)
    assert failures
    assert all("written into the result of an earlier one" in each for each in failures)


@pytest.mark.parametrize(("part", "op"), [(2, "linear"), (0, "dyn_linear")])
def test_a_kernel_that_remembers_what_lay_at_an_address_is_a_failure(part: int, op: str) -> None:
    """Of weights, load_state_dict writes others into the same memory; of inputs, the next call."""
    seen: dict[tuple[Any, ...], Tensor] = {}

    def kernel(*args: Any) -> Tensor:
        given = args[part]
        kept = seen.setdefault((given.data_ptr(), given.shape, given.stride(), given.dtype), given.clone())
        return OPS[op].generic(*args[:part], kept, *args[part + 1 :])

    failures = failures_of(kernel, op)
    assert any("it computes with numbers it kept" in each for each in failures)


def test_a_result_in_the_memory_of_an_argument_is_a_failure() -> None:
    def kernel(x: Tensor, *rest: Any) -> list[Tensor]:
        parts = OPS["quantize_input"].generic(x, *rest)
        return parts if rest[1] is None else [parts[0], rest[1].reshape(parts[1].shape), *parts[2:]]

    failures = failures_of(kernel, "quantize_input")
    assert any("the result lies in the memory of the argument act_scale: return a copy" in each for each in failures)


def test_supports_that_looks_at_numbers_is_a_failure() -> None:
    """A program is traced, and explained, without them."""

    def reads(x: Tensor, *rest: Any) -> str | None:
        return "too large" if x.sum() > 1 << 40 else None

    def guesses(x: Tensor, *rest: Any) -> str | None:
        return "a traced program" if type(x) is not Tensor else None

    for supports, said in ((reads, "supports looks at numbers"), (guesses, "supports answers otherwise without")):
        failures = failures_of(OPS["embedding"].generic, "embedding", supports)
        assert failures
        assert all(said in each for each in failures), said
        unregister_kernel(IMPLS["embedding", "cpu"][0])


def test_a_kernel_that_changes_the_process_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])

    def kernel(*args: Any) -> Tensor:
        threads[0] += 1
        return OPS["embedding"].generic(*args)

    assert all("it has changed the process: " in each for each in failures_of(kernel, "embedding"))


def test_a_failure_names_the_kernel_and_the_place() -> None:
    def kernel(x: Tensor, *rest: Any) -> Tensor:
        if x.dim() == 1:
            return OPS["linear"].generic(x, *rest) + (torch.arange(rest[5]) == 3)
        return rest[2].float()  # a weight has a zero or not

    failures = failures_of(kernel)
    assert any(re.search(r"^int4-vector, mine: .* wanted; furthest off at \[3\]: ", each) for each in failures)
    line = kernel.__code__.co_firstlineno + 3
    where = re.escape(f"[{__file__}:{line}, in kernel]")
    assert any(re.search(f"^int8-row, mine: AttributeError: .*{where}$", each) for each in failures)


def test_rows_of_a_layout_that_are_others_are_a_failure() -> None:
    """Attention takes rows of projections that were joined by the layout's own method."""

    class Shifted(Own):
        off = 0

        def rows(self, matrix: Matrix, parts: Quantized, start: int, stop: int) -> Quantized | None:
            start, stop = (max(0, at - self.off) for at in (start, stop))
            cut = (None if part is None else part[start:stop] for part in parts[:3])
            return Quantized(*cut, parts.scale2) if matrix.block_n == 1 and parts.data.dim() == 2 else None  # type: ignore[arg-type]

    register_layout(Shifted())
    assert all(row.passed for row in run("cpu", ["repack"], [torch.bfloat16]))
    Shifted.off = 1
    failures = [failure for row in run("cpu", ["repack"], [torch.bfloat16]) for failure in row.failures]
    assert failures
    assert all(re.search(r"rows \d+ to \d+ of layout own are not those of the plain", each) for each in failures)


def test_a_layout_that_packs_into_the_same_memory_is_a_failure() -> None:
    """Two layers of one size had the weight of the second."""
    memory: dict[tuple[Any, ...], Tensor] = {}

    class Once(Own):
        def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
            held = memory.setdefault((parts.data.dtype, parts.data.shape), torch.empty_like(parts.data))
            return parts._replace(data=held.copy_(parts.data))

    register_layout(Once())
    failures = [failure for row in run("cpu", ["repack"], [torch.bfloat16]) for failure in row.failures]
    assert any("written into the result of an earlier one" in failure for failure in failures)


def test_failures_of_one_reason_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("not yet")

    register_kernel(Impl("int4pack_mm", "mine", "cpu", broken, lambda *args: None, priority=1 << 20))
    assert main(["--ops", "int4pack_mm"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"^FAILED int4pack_mm bfloat16 inner2-g32-row, mine: ValueError: not yet \[.*\]; 47 others alike$", line
    )
