"""The lower bound on the time of a product, from made-up limits."""

from __future__ import annotations

import shutil

import pytest

from bench import limits
from bench.limits import Limits

MACHINE = Limits(read=10e9, units={"avx512_f32": 1e11, "amx_bf16": 2e12, "amx_int8": 4e12})


def test_few_rows_are_bound_by_memory() -> None:
    """4-bit 1000x2000 is 1 MB; x and y are 6 kB of bf16."""
    assert MACHINE.floor(1, 1000, 2000, 1_000_000, int8=False) == pytest.approx((1_000_000 + 2 * 3000) / 10e9)


@pytest.mark.parametrize(("int8", "peak"), [(False, 2e12), (True, 4e12)], ids=["bf16 input", "int8 input"])
def test_many_rows_are_bound_by_the_unit_that_fits(int8: bool, peak: float) -> None:
    assert MACHINE.floor(10_000, 1000, 2000, 1_000_000, int8) == pytest.approx(2 * 10_000 * 1000 * 2000 / peak)


def test_a_limit_is_the_best_that_was_seen() -> None:
    disturbed = Limits(read=12e9, units={"amx_bf16": 1e12})
    assert limits.best([disturbed, Limits(5e9, {"amx_bf16": 3e12})]) == Limits(12e9, {"amx_bf16": 3e12})


@pytest.mark.parametrize(
    ("isa", "units"),
    [
        ("", {"avx2_f32": 2e9, "avx512_f32": 3e9, "avx512_bf16": 4e9, "amx_bf16": 5e9}),
        ("avx512_vnni", {"avx2_f32": 2e9, "avx512_f32": 3e9}),
        ("avx2", {"avx2_f32": 2e9}),
    ],
    ids=["all", "avx512_vnni", "avx2"],
)
def test_an_instruction_set_limits_the_units(isa: str, units: dict[str, float]) -> None:
    text = "read 1.5\navx2_f32 2\navx512_f32 3\navx512_bf16 4\namx_bf16 5\n"
    assert limits.parse(text, isa) == Limits(1.5e9, units)


def test_without_units_only_memory_counts() -> None:
    assert Limits(1e9, {}).floor(1000, 1000, 1000, 1_000_000, int8=True) == pytest.approx(5e6 / 1e9)


@pytest.mark.skipif(not any(map(shutil.which, limits.COMPILERS)), reason="needs a C++ compiler")
def test_this_machine_has_limits() -> None:
    found = limits.measure(threads=1, seconds=0.01, megabytes=8, times=1)
    assert isinstance(found, Limits), found
    assert 1e8 < found.read < 1e12
    assert all(rate > 1e9 for rate in found.units.values())


@pytest.mark.skipif(not any(map(shutil.which, limits.COMPILERS)), reason="needs a C++ compiler")
def test_memory_is_read_whenever_it_is_asked_for() -> None:
    reading = limits.Reading(threads=1, megabytes=8)
    assert all(1e8 < reading() < 1e12 for _ in range(3))
    reading.close()


@pytest.mark.skipif(not any(map(shutil.which, limits.COMPILERS)), reason="needs a C++ compiler")
def test_no_operation_is_counted_that_the_compiler_left_out() -> None:
    """avx2 multiplies 32 bytes with two instructions on the ports that take one for 8 floats: at most twice the
    rate."""

    def ratio() -> float:
        found = limits.measure(threads=1, seconds=0.05, megabytes=8, times=3)
        assert isinstance(found, Limits), found
        if "avx2_int8" not in found.units:
            pytest.skip("needs a processor with AVX2")
        return found.units["avx2_int8"] / found.units["avx2_f32"]

    assert any(ratio() < 3 for _ in range(5)), "noise takes one measurement, a compiler that leaves work out all"
