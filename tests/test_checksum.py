"""The checksum of files against zlib's."""

from __future__ import annotations

import zlib

import pytest
import torch

from bitport import checksum, plugins
from bitport.backends import cpu
from bitport.backends.cpu.native import Library
from tests.scripts import printed

MESSAGE = torch.randint(256, (3 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 127, 128, 1000, 3 << 20])
@pytest.mark.parametrize("start", [0, 1])
def test_of_any_part_of_a_message(start: int, size: int) -> None:
    data = MESSAGE[start : start + size].data
    assert checksum.crc32(data) == zlib.crc32(data)
    assert checksum.crc32(bytes(data)) == zlib.crc32(data)  # bytes cannot be written to


def test_in_parts_as_of_the_whole() -> None:
    sums = 0
    for part in (MESSAGE[:70_001], MESSAGE[70_001:70_003], MESSAGE[70_003:]):
        sums = checksum.crc32(part.data, sums)
    assert sums == zlib.crc32(MESSAGE.data)


def test_it_is_the_native_one() -> None:
    plugins.load()
    assert isinstance(cpu.LIBRARY, Library)
    assert checksum._crc32 == cpu.LIBRARY.crc32


def test_without_native_kernels() -> None:
    script = "from bitport import checksum; print(checksum.crc32(b'123456789'), checksum._crc32.__module__)"
    assert printed(script, BITPORT_DISABLE="cpu").split() == [str(0xCBF43926), "zlib"]
