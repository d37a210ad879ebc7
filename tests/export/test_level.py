"""Programs are compiled for an instruction set level and nothing beyond it."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config, cpu_vec_isa

from bitport.errors import ArgumentError
from bitport.export import Method, package
from bitport.export.level import LEVELS, RUN_BY, best_level, nothing_beyond

GXX = shutil.which("g++")


def macros(*flags: str) -> set[str]:
    """The macros that g++ defines for the instructions it may use."""
    assert GXX
    command = [GXX, "-x", "c++", "-dM", "-E", *flags, "/dev/null"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


@pytest.mark.skipif(not GXX or not best_level(), reason="needs g++ for x86")
@pytest.mark.parametrize("level", LEVELS)
def test_the_compiler_is_told_of_no_other_instructions(level: str) -> None:
    before = cpu_vec_isa.valid_vec_isa_list  # only referenced, since calling it compiles test programs
    with nothing_beyond(level), config.patch({"cpp.simdlen": LEVELS[level]}):
        picked = cpu_vec_isa.pick_vec_isa()
        assert bool(picked)
        flags = picked.build_arch_flags().split()
    assert picked.bit_width() == LEVELS[level]
    assert macros(f"-march={level}", *flags) == macros(f"-march={level}")
    assert cpu_vec_isa.valid_vec_isa_list is before


def test_levels_of_two_threads_follow_each_other() -> None:
    """Two that overlapped left torch with the first one's instructions for the rest of the process."""
    before, entered, go_on = cpu_vec_isa.valid_vec_isa_list, threading.Event(), threading.Event()

    def other() -> None:
        entered.set()
        with nothing_beyond("x86-64-v3"):
            go_on.wait(60)

    with nothing_beyond("x86-64-v4"):
        first = cpu_vec_isa.valid_vec_isa_list
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(60)
        thread.join(0.1)
        assert cpu_vec_isa.valid_vec_isa_list is first
    go_on.set()
    thread.join(60)
    assert cpu_vec_isa.valid_vec_isa_list is before


@pytest.mark.xdist_group("package")
def test_a_library_says_so(packed: Path) -> None:
    """On processors with VNNI, BF16 or AMX, torch also notes these if it compiled for them."""
    with zipfile.ZipFile(packed) as archive:
        noted = [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith("_metadata.json")]
    wanted = {"x86-64-v4": "AVX512", "x86-64-v3": "AVX2"}.get(best_level())
    assert noted
    assert all(wanted in (None, each["AOTI_CPU_ISA"]) for each in noted)


def test_a_level_that_this_machine_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is compiled."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert "AVX2" not in RUN_BY["x86-64-v4"]
    with pytest.raises(ArgumentError, match="does not run x86-64-v4: choose x86-64-v3"):
        package(Method(nn.Linear(4, 4), (torch.ones(1, 4),)), tmp_path / "a.pt2", level="x86-64-v4")
