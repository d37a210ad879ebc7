"""Kernel selection on a device: priority, refusals, forcing, and that decide() names the kernel that runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bitport.errors import KernelError
from bitport.ops import (
    IMPLS,
    OPS,
    Impl,
    call,
    decide,
    decompositions,
    register_kernel,
    unregister_kernel,
    use_kernel,
)
from bitport.ops.optimizer_step import optimizer_step
from bitport.ops.product import operand
from bitport.ops.select import FORCED, STEP, Decision, own_kernel
from bitport.schemes import preset
from bitport.tensor import quantize_tensor
from tests.scripts import ended, printed

pytestmark = pytest.mark.usefixtures("own_tables")
HIGH = 1_000_000


@pytest.fixture
def add(own_tables: None) -> Callable[..., None]:
    """Register a CPU kernel of linear that returns a constant, so that a result shows which kernel ran."""

    def register(name: str, gives: float, priority: int = HIGH, refuses: str | None = None, op: str = "linear") -> None:
        def run(x: torch.Tensor, *rest: Any) -> torch.Tensor:
            return x.new_full((*x.shape[:-1], rest[5]), gives)

        register_kernel(Impl(op, name, "cpu", run, lambda *args: refuses, priority))

    return register


def arguments(scheme: str = "int4-g32") -> tuple[Any, ...]:
    weight = quantize_tensor(torch.randn(8, 64), preset(scheme))
    return (torch.randn(3, 64), *operand(weight), None)


def who(args: tuple[Any, ...]) -> float:
    return OPS["linear"].overload(*args).unique().item()


def test_the_highest_priority_runs(add: Callable[..., None]) -> None:
    args = arguments()
    add("low", 1.0, HIGH)
    add("high", 3.0, HIGH + 2)
    add("middle", 2.0, HIGH + 1)
    assert who(args) == 3.0
    assert [impl.name for impl in IMPLS["linear", "cpu"]][:3] == ["high", "middle", "low"]


def test_a_kernel_that_comes_as_another_goes_is_seen() -> None:
    """F.linear caches which ops have a kernel at the dispatcher, unless the layout has a direct entry; counting
    registrations would miss this change."""
    x, weight = torch.randn(3, 64), quantize_tensor(torch.randn(8, 64), preset("int8-dyn"))
    for op, expected in (("linear", None), ("dyn_linear", 7.0)):
        library = torch.library.Library("bitport", "IMPL")
        try:
            library.impl(op, lambda x, *rest: x.new_full((*x.shape[:-1], rest[5]), 7.0), "CPU")
            got = [F.linear(x, each) for each in (weight, weight.to_layout("plain"))]
        finally:
            library._destroy()
        assert [each.unique().numel() > 1 for each in got] == [expected is None] * 2


def test_of_equal_priority_the_first_registered_runs(add: Callable[..., None]) -> None:
    add("first", 1.0)
    add("second", 2.0)
    assert who(arguments()) == 1.0


def test_a_refusal_passes_the_call_on(add: Callable[..., None]) -> None:
    args = arguments()
    add("picky", 1.0, HIGH + 1, refuses="M must be 7, not 3")
    add("easy", 2.0, HIGH)
    assert who(args) == 2.0
    decision = decide("linear", *args)
    assert decision.kernel == "easy"
    assert decision.refused == (("picky", "M must be 7, not 3"),)


def test_when_all_refuse_the_generic_kernel_runs(add: Callable[..., None]) -> None:
    args = arguments()
    for known in list(IMPLS.get(("linear", "cpu"), [])):
        unregister_kernel(known)
    add("one", 1.0, refuses="a")
    add("two", 1.0, refuses="b")
    assert torch.equal(OPS["linear"].overload(*args), OPS["linear"].generic(*args))
    assert decide("linear", *args).kernel == "generic"
    assert decide("linear", *args).refused == (("one", "a"), ("two", "b"))


def test_a_kernel_registered_after_a_call_is_seen(add: Callable[..., None]) -> None:
    args = arguments()
    OPS["linear"].overload(*args)
    add("late", 4.0)
    assert who(args) == 4.0


def test_the_generic_overload_is_never_replaced(add: Callable[..., None]) -> None:
    args = arguments()
    add("other", 4.0)
    assert torch.equal(torch.ops.bitport.linear.generic(*args), OPS["linear"].generic(*args))


def test_a_name_is_taken_once_per_op_and_device(add: Callable[..., None]) -> None:
    add("mine", 1.0)
    with pytest.raises(KernelError, match=rf"'mine' already, of {re.escape(__name__)}; choose another name"):
        add("mine", 2.0)
    add("mine", 2.0, op="dyn_linear")
    with pytest.raises(KernelError, match="'generic' already, in plain PyTorch; choose"):
        add("generic", 1.0)


def test_a_kernel_of_an_op_that_does_not_exist_is_refused() -> None:
    """It would silently never run."""
    with pytest.raises(KernelError, match=r"'mine' is for 'liner', and there is no such op: .*, linear, "):
        register_kernel(Impl("liner", "mine", "cpu", OPS["linear"].generic, lambda *args: None))
    assert ("liner", "cpu") not in IMPLS


@pytest.mark.parametrize("answer", [True, False, ""])
def test_supports_answers_in_words(answer: Any, add: Callable[..., None]) -> None:
    """Wherever supports() is asked: a kernel that says True would never run, one that says False would run when
    forced."""
    args = arguments()
    add("mine", 1.0, refuses=answer)
    said = f"'mine' has answered {answer!r}.*None where the kernel takes the call"
    for ask in (lambda: decide("linear", *args), lambda: call("linear", *args, kernel="mine")):
        with pytest.raises(KernelError, match=said):
            ask()
    if answer != "":
        with pytest.raises(KernelError, match=said):
            who(args)


@pytest.mark.parametrize("op", ["linear", STEP])
def test_a_predicate_that_raises_is_named(op: str) -> None:
    def supports(*args: Any) -> str | None:
        return args[-1].dtype  # the bias, which is None

    register_kernel(Impl(op, "mine", "cpu", OPS["linear"].generic, supports, HIGH))
    args = arguments()
    target: Any = SimpleNamespace(param=torch.ones(4))
    asks: dict[str, tuple[Callable[[], Any], ...]] = {
        "linear": (lambda: who(args), lambda: decide("linear", *args), lambda: call("linear", *args, kernel="mine")),
        STEP: (lambda: optimizer_step("adam", [target]),),
    }
    said = f"{op} on cpu: supports of kernel 'mine' has raised AttributeError: .*'dtype'; it must return None"
    for ask in asks[op]:
        with pytest.raises(KernelError, match=said):
            ask()


def test_a_kernel_at_the_dispatcher_has_no_name_to_force_it_by() -> None:
    args = (*arguments()[1:11], torch.float32)
    library = torch.library.Library("bitport", "IMPL")
    try:
        library.impl("dequantize", lambda data, *rest: data, "CPU")
        with pytest.raises(
            KernelError, match=r"has only: .*generic; the kernel that cpu has at the dispatcher has no name"
        ):
            call("dequantize", *args, kernel="cpu's own (dispatcher)")
    finally:
        library._destroy()


def test_a_kernel_at_the_dispatcher_is_the_devices_own() -> None:
    """Those of bitport are not, whatever the op; one from outside runs before any kernel of the registry."""
    assert not [op for op in OPS if own_kernel(op, torch.device("cpu"))]
    args = (*arguments()[1:11], torch.float32)
    library = torch.library.Library("bitport", "IMPL")
    try:
        library.impl("dequantize", lambda data, *rest: data, "CPU")
        assert [op for op in OPS if own_kernel(op, torch.device("cpu"))] == ["dequantize"]
        assert decide("dequantize", *args) == Decision("cpu's own (dispatcher)", ())
        assert call("dequantize", *args) is args[0]
        with use_kernel("generic"):
            assert decide("dequantize", *args).kernel == "generic (forced)"
    finally:
        library._destroy()


def test_a_device_is_a_type() -> None:
    """A kernel for cpu:0 would never be asked."""
    with pytest.raises(KernelError, match="'mine' is for 'cpu:0': device is a type, 'cpu'"):
        register_kernel(Impl("linear", "mine", "cpu:0", OPS["linear"].generic, lambda *args: None))
    assert ("linear", "cpu:0") not in IMPLS


def test_forced_by_name(add: Callable[..., None]) -> None:
    args = arguments()
    add("high", 3.0, HIGH + 2)
    add("low", 1.0, HIGH)
    with use_kernel("linear=low"):
        assert who(args) == 1.0
        assert decide("linear", *args).kernel == "low (forced)"
    assert who(args) == 3.0


def test_forced_for_f_linear_too(add: Callable[..., None]) -> None:
    weight = quantize_tensor(torch.randn(8, 64), preset("int4-g32"))
    add("high", 3.0)
    x = torch.randn(2, 64)
    assert F.linear(x, weight).unique().item() == 3.0
    with use_kernel("generic"):
        torch.testing.assert_close(F.linear(x, weight), x @ weight.dequantize().T)


def test_forced_within_forced(add: Callable[..., None]) -> None:
    args = arguments()
    add("a", 1.0)
    add("b", 2.0)
    with use_kernel("generic"):
        with use_kernel("linear=b"):
            assert who(args) == 2.0
        assert torch.equal(OPS["linear"].overload(*args), OPS["linear"].generic(*args))
    assert who(args) == 1.0
    assert FORCED == {}


def test_the_last_setting_decides(add: Callable[..., None]) -> None:
    """Also one for all ops within one for this op."""
    args = arguments()
    add("a", 1.0)
    with use_kernel("linear=a"), use_kernel("generic"), use_kernel("dyn_linear=a"):
        assert torch.equal(OPS["linear"].overload(*args), OPS["linear"].generic(*args))
        assert decide("linear", *args).kernel == "generic (forced)"


def test_blocks_end_in_any_order(add: Callable[..., None]) -> None:
    """As those of two threads do. Equal settings are told apart."""
    args = arguments()
    for name, gives in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        add(name, gives)
    first, second, third = (use_kernel(setting) for setting in ("linear=b", "c", "linear=b"))
    for each in (first, second, third):
        each.__enter__()
    assert who(args) == 2.0
    third.__exit__(None, None, None)
    assert who(args) == 3.0
    first.__exit__(None, None, None)
    assert who(args) == 3.0
    second.__exit__(None, None, None)
    assert who(args) == 1.0
    assert FORCED == {}


@pytest.mark.parametrize("setting", ["linear=low", "low", "generic", "linear=picky", "linear=nope"])
def test_decompositions_are_of_the_forced_kernel(setting: str, add: Callable[..., None]) -> None:
    args = arguments()
    add("high", 3.0, HIGH + 1)
    add("low", 1.0)
    add("picky", 2.0, refuses="K must be even")
    decomposed = decompositions(native=True)[OPS["linear"].overload]
    assert decomposed(*args).unique().item() == 3.0
    with use_kernel(setting):
        if setting.endswith("low"):
            assert decomposed(*args).unique().item() == 1.0
        elif setting == "generic":
            assert torch.equal(decomposed(*args), OPS["linear"].generic(*args))
        else:
            with pytest.raises(KernelError, match="was forced for linear"):
                decomposed(*args)


def test_a_forced_kernel_is_released_after_an_error(add: Callable[..., None]) -> None:
    with pytest.raises(ZeroDivisionError), use_kernel("generic"):
        _ = 1 / 0
    assert FORCED == {}


def test_one_setting_for_several_ops(add: Callable[..., None]) -> None:
    add("mine", 5.0)
    with use_kernel(" linear = mine ,dyn_linear=generic"):
        assert [*FORCED.values()] == [{"linear": "mine", "dyn_linear": "generic"}]
        assert who(arguments()) == 5.0


def test_a_forced_kernel_that_refuses_is_an_error(add: Callable[..., None]) -> None:
    add("picky", 1.0, refuses="K must be even")
    with (
        use_kernel("linear=picky"),
        pytest.raises(KernelError, match=r"'picky' was forced for linear on cpu.*K must be even"),
    ):
        OPS["linear"].overload(*arguments())


def test_a_forced_kernel_that_does_not_exist_is_an_error(add: Callable[..., None]) -> None:
    add("mine", 1.0)
    with use_kernel("linear=nope"), pytest.raises(KernelError, match=r"'nope' was forced for linear.*mine.*generic$"):
        OPS["linear"].overload(*arguments())
    with use_kernel("linear=nope"):
        decision = decide("linear", *arguments())
    assert decision.kernel == "error: nope (forced)"
    assert "only: mine" in decision.refused[0][1]


def test_an_op_that_is_not_forced_chooses_as_ever(add: Callable[..., None]) -> None:
    """Forcing one op does not affect the others."""
    add("mine", 5.0)
    with use_kernel("dyn_linear=generic"):
        assert who(arguments()) == 5.0
        assert decide("linear", *arguments()).kernel == "mine"


def test_call_by_name(add: Callable[..., None]) -> None:
    args = arguments()
    add("mine", 5.0)
    assert call("linear", *args, kernel="mine").unique().item() == 5.0
    assert torch.equal(call("linear", *args, kernel="generic"), OPS["linear"].generic(*args))
    assert call("linear", *args).unique().item() == 5.0


def test_a_forced_call_is_checked_too(add: Callable[..., None]) -> None:
    from bitport.errors import ArgumentError

    x, *rest = arguments()
    with pytest.raises(ArgumentError, match="x must have shape"), use_kernel("generic"):
        OPS["linear"].overload(x[:, :-1], *rest)


def test_a_forced_call_is_differentiated(add: Callable[..., None]) -> None:
    weight = quantize_tensor(torch.randn(8, 64), preset("int4-g32"))
    x = torch.randn(2, 64, requires_grad=True)
    with use_kernel("generic"):
        F.linear(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(2, -1), rtol=1e-5, atol=1e-5)


def test_decide_agrees_with_what_runs_for_every_scheme() -> None:
    """Each kernel that decide() names gives the op's result bit for bit."""
    for scheme in ("int4-g32", "int8", "int3-channel-sym", "nf4", "fp8-wo", "mxfp4-wo"):
        args = arguments(scheme)
        named = decide("linear", *args).kernel
        assert torch.equal(call("linear", *args, kernel=named), OPS["linear"].overload(*args)), (scheme, named)


RUN = """
import torch, torch.nn.functional as F
from bitport import quantize_tensor, preset
from bitport.ops import decide
from bitport.ops.product import operand
w, x = quantize_tensor(torch.randn(8, 64), preset("int4-g32")), torch.randn(2, 64)
print(decide("linear", x, *operand(w), None).kernel, F.linear(x, w).shape)
"""


def test_forced_by_the_environment() -> None:
    assert printed(RUN, BITPORT_KERNEL="generic").strip() == "generic (forced) torch.Size([2, 8])"


def test_an_unknown_kernel_in_the_environment_is_an_error() -> None:
    done = ended(RUN, BITPORT_KERNEL="linear=warp")
    assert done.returncode != 0
    assert "KernelError: kernel 'warp' was forced for linear" in done.stderr


def test_an_unknown_op_in_the_environment_is_an_error() -> None:
    done = ended("import bitport", BITPORT_KERNEL="linaer=generic")
    assert done.returncode != 0
    assert "KernelError: cannot force a kernel of linaer: the ops are" in done.stderr


@pytest.mark.parametrize(
    "setting", ["linaer=generic", "linear=", "=", "linear=generic,=mine", "linear=a,linear=b", None]
)
def test_a_misspelt_setting_is_an_error(setting: Any) -> None:
    """An unknown op would silently force nothing."""
    with pytest.raises(KernelError, match="linear"), use_kernel(setting):
        pass
