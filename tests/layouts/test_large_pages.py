"""Memory of packed weights in large pages: its alignment, and that it behaves like any other memory."""

from __future__ import annotations

import copy
import mmap

import pytest
import torch

import bitport
from bitport.layouts import large_pages
from bitport.layouts.large_pages import PAGE

linux = pytest.mark.skipif(large_pages.ADVICE is None, reason="the system has no large pages to ask for")


@linux
@pytest.mark.parametrize("count", [PAGE, PAGE + 1, 3 * PAGE - 1])
def test_large_memory_begins_with_a_page_and_holds_as_much_as_was_asked_for(count):
    memory = large_pages.empty([count])
    assert memory.data_ptr() % PAGE == 0
    assert memory.untyped_storage().nbytes() == count
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * count


@pytest.mark.parametrize("shape", [[0], [0, 4], [PAGE - 1], [2, 3, 5]])
def test_what_fills_no_page_is_memory_of_pytorch(shape):
    memory = large_pages.empty(shape)
    assert (*memory.shape,) == (*shape,)
    assert memory.dtype == torch.uint8


@pytest.mark.parametrize("count", [100, 3 * PAGE])
def test_it_lies_on_the_cpu_whatever_the_default_device_is(count):
    with torch.device("meta"):
        assert large_pages.empty([count]).device.type == "cpu"


@linux
def test_whole_pages_are_asked_for_and_no_part_of_one(monkeypatch):
    asked = []

    class Recorder(mmap.mmap):
        def madvise(self, *given):
            asked.append(given)
            raise OSError("this kernel has none")

    monkeypatch.setattr(large_pages.mmap, "mmap", Recorder)
    memory = large_pages.empty([2 * PAGE + PAGE // 2])
    ((advice, start, length),) = asked
    assert advice == mmap.MADV_HUGEPAGE
    assert length == 2 * PAGE
    assert 0 <= start < PAGE
    memory.fill_(1)  # failed advice changes nothing


@linux
def test_memory_is_given_back_with_the_last_tensor():
    def mapped() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * mmap.PAGESIZE

    before = mapped()
    for _ in range(50):
        large_pages.empty([16 * PAGE]).fill_(1)
    assert mapped() - before < 4 * 17 * PAGE


def test_a_weight_of_several_pages_is_copied_shared_and_moved_like_any_other():
    layer = torch.nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16)
    bitport.quantize_(layer, "int4")
    x = torch.randn(3, 2048, dtype=torch.bfloat16)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(layer.share_memory()(x), y)
