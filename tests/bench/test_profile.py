"""Samples of the native library, attributed to kinds of work."""

from __future__ import annotations

import argparse

import pytest

from bench import profile

LIBRARY = "/there/bitport/backends/cpu/libbitport_kernels.so"


@pytest.mark.parametrize(
    ("symbol", "library", "part"),
    [
        ("bitport::(anonymous namespace)::multiply_as<bitport::Codes<4, true>, true>", LIBRARY, "products by tiles"),
        ("bitport::(anonymous namespace)::fused_rows<bitport::Codes<4, true>, 1>", LIBRARY, "codes to products"),
        ("bitport::(anonymous namespace)::look_up_as<bitport::Codes<8, true> >", LIBRARY, "decoding by itself"),
        ("bitport::avx512_stream", LIBRARY, "scales"),
        ("bitport::(anonymous namespace)::range", LIBRARY, "x laid out"),
        ("bitport::share<...>::_FUN", LIBRARY, "the rest"),
        ("[unknown]", "/usr/lib/libgomp.so.1", "threads"),
        ("clear_page_erms", "[kernel.kallsyms]", "the system"),
        ("_PyEval_EvalFrameDefault", "/usr/bin/python3.11", "torch and Python"),
    ],
    ids=lambda value: value[:24],
)
def test_a_symbol_belongs_to_a_part(symbol: str, library: str, part: str) -> None:
    assert profile.part_of(symbol, library).startswith(part)


def test_shares_are_of_all_samples() -> None:
    script = [
        f"    7f0001 bitport::(anonymous namespace)::multiply(Job const&) ({LIBRARY})",
        f"    7f0002 bitport::(anonymous namespace)::multiply(Job const&) ({LIBRARY})",
        f"    7f0003 bitport::avx512_store ({LIBRARY})",
        "ffffffff clear_page_erms ([kernel.kallsyms])",
        "",
    ]
    found = profile.shares(script)
    assert list(found.values()) == [0.5, 0.25, 0.25]
    assert next(iter(found)).startswith("products by tiles")


def test_a_point_is_read_as_it_is_written() -> None:
    assert str(profile.Point.of("int8-dyn:3072x1024:375")) == "int8-dyn:3072x1024:375"
    with pytest.raises(argparse.ArgumentTypeError, match="SCHEME:KxN:ROWS"):
        profile.Point.of("int4:3072:1")
