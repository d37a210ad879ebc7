"""``bitport doctor``: everything it names exists, and anything missing is reported with the command that installs
it."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from bitport import layouts, plugins
from bitport.cli import doctor, system
from bitport.errors import KernelError
from bitport.ops import IMPLS, OPS, Impl, register_kernel

from .conftest import Run

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_json_holds_what_is_loaded(run: Run) -> None:
    ran = run("doctor", "--json")
    assert ran.code == 0
    data = ran.data
    assert data["versions"]["torch"] == version("torch")
    assert data["devices"][0]["device"] == "cpu"
    assert {row["op"] for row in data["kernels"]} == set(OPS)
    assert [row["name"] for row in data["layouts"]] == list(layouts.LAYOUTS)
    cpu = {row["op"]: row["kernels"] for row in data["kernels"] if row["device"] == "cpu"}
    assert all(names == [*(impl.name for impl in IMPLS.get((op, "cpu"), [])), "generic"] for op, names in cpu.items())
    assert data["backends"] == {
        "loaded": list(plugins.load()),
        "installed": sorted(plugins.installed()),
        "notes": plugins.describe(),
        "problem": None,
    }


def test_text_has_every_section(run: Run) -> None:
    out = run("doctor").out
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "versions",
        "devices",
        "CPU features",
        "backends",
        "kernels, the first that takes a call runs it",
        "layouts",
        "optional packages",
        "environment",
    ]


def test_features_that_the_system_does_not_tell(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_cpuinfo", lambda: (set(), "a processor"))
    assert "\nCPU features\n  not known on this system\n" in run("doctor").out


@pytest.mark.parametrize("extra", doctor.EXTRAS, ids=lambda extra: extra.package)
def test_commands_name_extras_that_exist(extra: doctor.Extra) -> None:
    named = re.search(r"bitport\[([\w-]+)\]", extra.install)
    if named is None:
        assert extra.install == f"pip install {extra.package}"
        return
    section = PYPROJECT.read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = dict(re.findall(r"^([\w-]+) = \[(.*?)\]$", section.replace("bitport[hf]", "bitport-hf"), re.MULTILINE))
    assert extra.package in extras[named[1]]


def test_what_is_missing_is_told_with_its_price(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "installed_version", lambda package: None if package == "transformers" else "1")
    ran = run("doctor")
    assert ran.code == 0
    line = next(line for line in ran.out.splitlines() if "transformers is missing" in line)
    assert "pip install 'bitport[hf]'" in line
    assert "without it: no eval" in line


def test_a_broken_backend_is_a_finding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        value = "acme_npu.backend"

        def load(self) -> None:
            raise KernelError("its library is gone")

    plugins.load()
    monkeypatch.setattr(plugins, "_started", False)
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_broken", {})
    monkeypatch.setattr(plugins, "installed", lambda: {"acme": Broken()})
    ran = run("doctor")
    assert ran.code == 1
    assert "its library is gone" in ran.out
    assert "BITPORT_DISABLE" in ran.out


def test_environment_shows_slips(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITPORT_DISABLE", "xpu")
    monkeypatch.setenv("BITPORT_KERNELS", "generic")
    found = {row["name"]: row for row in run("doctor", "--json").data["environment"]}
    assert found["BITPORT_DISABLE"]["value"] == "xpu"
    assert found["BITPORT_KERNELS"]["meaning"] == "bitport does not know this variable"


def test_variables_are_those_that_the_code_reads() -> None:
    source = Path(system.__file__).parents[1]
    read = {
        name
        for path in source.rglob("*.py")
        if "cli" not in path.parts
        for name in re.findall(r"environ(?:\.get\(|\[)\"(BITPORT_\w+)", path.read_text())
    }
    assert read == set(doctor.VARIABLES)


def test_cpu_features_come_from_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_cpuinfo", lambda: ({"avx2", "sse"}, "Some CPU"))
    monkeypatch.setattr(system.platform, "machine", lambda: "x86_64")
    found = system.cpu()
    assert found["model"] == "Some CPU"
    assert [name for name, (has, _) in found["features"].items() if has] == ["avx2"]
    monkeypatch.setattr(system, "_cpuinfo", lambda: (set(), ""))
    assert system.cpu()["features"] == {}


def test_an_accelerator_is_listed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def get_device_name(index: int) -> str:
            return f"Card {index}"

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert [row["name"] for row in system.devices()[1:]] == ["Card 0", "Card 1"]


def test_two_devices_of_a_kind_have_their_kernels_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    two = [{"device": f"cpu:{index}", "type": "cpu", "name": "Some CPU"} for index in range(2)]
    monkeypatch.setattr(system, "devices", lambda: two)
    head = next(line for line in run("doctor").out.splitlines() if line.split()[:1] == ["op"])
    assert head.split() == ["op", "cpu"]


@pytest.mark.usefixtures("own_tables")
def test_kernels_of_a_device_that_is_not_here_are_told(run: Run) -> None:
    """One that is registered under a wrong name is never called, and was listed nowhere."""
    for op in ("linear", "embedding"):
        register_kernel(Impl(op, "mine", "privateuseone", lambda *args: None, lambda *args: None))
    assert run("doctor", "--json").data["kernels_elsewhere"]["privateuseone"] == 2
    assert re.search("kernels for devices that are not here: .*privateuseone .2.", run("doctor").out)
