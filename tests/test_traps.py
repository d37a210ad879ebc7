"""Failures of other libraries, one test each: the case must work here, or be refused at once with the reason.

The docstrings say what went wrong there; the numbers are those of public issue reports.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.errors import ArgumentError, RecipeError
from bitport.layouts import LAYOUTS, Matrix, preferred
from bitport.layouts.tile_packed import TilePacked
from bitport.numerics import Quantized
from bitport.schemes import PRESETS
from bitport.tensor import QTensor
from tests.scripts import ended, printed

INT4 = Matrix("int4", 48, 256, 1, 128), Quantized(torch.zeros(48, 128, dtype=torch.uint8), torch.ones(48, 2).bfloat16())
HOLD_INT4 = [name for name, layout in LAYOUTS.items() if layout.refuses(*INT4) is None]
"""Layouts that can hold int4 in groups with bfloat16 scales."""
DYNAMIC = [name for name in PRESETS if not PRESETS[name].static]


def layer(scheme: str = "int4-g32", n: int = 64, k: int = 96) -> nn.Linear:
    made = nn.Linear(k, n)
    bitport.quantize_(made, scheme)
    return made


# -- moving between devices ------------------------------------------------------------------------------------------


class Tiles(TilePacked):
    """The tensor-core layout, on a device that every machine has."""

    devices = ("cpu",)

    def __init__(self) -> None:
        super().__init__(4)
        self.name = "tiles"


@pytest.mark.usefixtures("own_tables")
@pytest.mark.parametrize("source", HOLD_INT4)
def test_packed_bits_are_never_moved_as_they_are(source: str) -> None:
    """pytorch/ao 1117: a tensor packed for one device was moved byte for byte, which gave garbage on the next."""
    plain = nn.Linear(256, 48).bfloat16()
    bitport.quantize_(plain, "int4")
    value, x = plain.weight.dequantize(), torch.randn(3, 256).bfloat16()
    y = plain(x)
    packed = copy.deepcopy(plain)
    packed.weight = nn.Parameter(plain.weight.to_layout(source), requires_grad=False)
    bitport.layouts.register_layout(Tiles())
    file = io.BytesIO()
    torch.save(packed.state_dict(), file)
    file.seek(0)
    arrived = nn.Linear(256, 48).bfloat16()
    arrived.load_state_dict(torch.load(file, map_location="cpu", weights_only=True), assign=True)
    assert (
        arrived.weight.bits_layout
        == preferred(torch.device("cpu"), arrived.weight.matrix, arrived.weight.plain())
        == "tiles"
    )
    assert torch.equal(arrived.weight.dequantize(), value)
    assert torch.equal(arrived.weight, packed.weight)
    torch.testing.assert_close(arrived(x), y, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("source", HOLD_INT4)
def test_a_packed_tensor_leaves_its_device_in_the_canonical_form(source: str) -> None:
    """Tensors packed for one device generation were not marked as such (ntile 8 and 16 have the same shape)."""
    plain = nn.Linear(256, 48).bfloat16()
    bitport.quantize_(plain, "int4")
    there = plain.weight.to_layout(source).to("meta")
    assert there.bits_layout == "plain"
    assert there.qdata.shape == plain.weight.plain().data.shape


def test_load_with_map_location() -> None:
    model, file = layer(), io.BytesIO()
    torch.save(model.state_dict(), file)
    for location in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, where: storage):
        file.seek(0)
        other = nn.Linear(96, 64)
        other.load_state_dict(torch.load(file, map_location=location, weights_only=True), assign=True)
        assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_every_scheme_runs_on_a_plain_cpu(scheme: str) -> None:
    """15 of 25 configurations failed on a CPU, some only at the first forward."""
    model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
    bitport.quantize_(model, scheme)
    assert model(torch.randn(3, 96).bfloat16()).isfinite().all()
    assert model[0].weight.dequantize().shape == (64, 96)


def test_an_int4_weight_can_be_dequantized_in_every_layout() -> None:
    """None of four packing formats could be dequantized."""
    model = nn.Linear(256, 48).bfloat16()
    bitport.quantize_(model, "int4")
    for name in HOLD_INT4:
        assert torch.equal(model.weight.to_layout(name).dequantize(), model.weight.dequantize())


def test_cpu_offload() -> None:
    """diffusers 3632: parameters were swapped through .data on every forward."""
    model = layer()
    kept, x = model.weight.data, torch.randn(3, 96)
    y = model(x)
    model.weight.data = kept.clone()
    assert torch.equal(model(x), y)
    model.weight.data = layer().weight.data
    assert not torch.equal(model(x), y)


# -- casts, copies, processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
def test_a_cast_reaches_quantized_weights(cast: str) -> None:
    """half() changed the dtype of the bias, but not that of quantized weights."""
    model = nn.Sequential(layer(), nn.LayerNorm(64), layer("int8-dyn", 32, 64))
    getattr(model, cast)()
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}[cast]
    assert {param.dtype for param in model.parameters()} == {dtype}
    assert model(torch.randn(3, 96).to(dtype)).dtype == dtype


def test_a_cast_after_compile() -> None:
    model = layer()
    run = torch.compile(model, backend="aot_eager")
    run(torch.randn(3, 96))
    torch.compiler.reset()
    model.half()
    assert run(torch.randn(3, 96).half()).dtype == torch.float16


def test_shared_memory_does_not_crash_the_process() -> None:
    code = (
        "import torch, bitport; m, x = torch.nn.Linear(96, 64), torch.ones(1, 96); bitport.quantize_(m, 'int4-g32');"
        "y = m(x); m.weight.share_memory_(); m.share_memory(); assert m.weight.is_shared() and torch.equal(m(x), y)"
    )
    printed(code)


def test_deepcopy_is_a_copy() -> None:
    model = layer()
    other = copy.deepcopy(model)
    other.weight.scale.zero_()
    assert model.weight.scale.all()
    assert torch.equal(pickle.loads(pickle.dumps(model)).weight, model.weight)


def test_a_shallow_copy_of_a_state_dict_is_the_model() -> None:
    model = layer()
    assert model.state_dict()["weight"].qdata.data_ptr() == model.weight.qdata.data_ptr()


# -- what is skipped, untied or quantized twice ----------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.middle = nn.Linear(64, 64)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(ids)))


@pytest.mark.parametrize("recipe", ["int8", {"*": "int8"}], ids=["name", "rule"])
def test_tied_weights_are_never_untied(recipe: Any) -> None:
    """An int8 head was added next to the float embedding, so the model grew."""
    model = Tied()
    report = bitport.quantize_(model, recipe)
    assert model.embed.weight is model.head.weight
    assert report.bytes_after < report.bytes_before
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 50)
    assert {layer.name for layer in report.layers} == {"embed.weight", "head.weight", "middle.weight"}


def test_quantizing_twice_is_told_and_harmless() -> None:
    """The second call failed deep inside aten.view."""
    model = layer()
    before = model.weight.clone()
    with pytest.warns(UserWarning, match=r"stay as they are: weight \(int4-g32, not int8\)\. dequantize_\(model\)"):
        report = bitport.quantize_(model, "int8")
    assert report.layers[0].reason == "is int4-g32 already, not int8"
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("made", "given"),
    [
        pytest.param(lambda: nn.Conv2d(3, 8, 3), (2, 3, 9, 9), id="conv2d"),
        pytest.param(lambda: nn.Conv1d(3, 8, 3), (2, 3, 9), id="conv1d"),
        pytest.param(lambda: nn.Conv2d(3, 8, 1), (2, 3, 9, 9), id="conv2d-1x1"),
        pytest.param(lambda: nn.Conv3d(4, 6, (2, 3, 3), stride=2), (2, 4, 5, 9, 9), id="conv3d"),
        pytest.param(
            lambda: nn.Conv2d(4, 8, 3, groups=2, padding_mode="circular", padding=1), (2, 4, 9, 9), id="conv2d-groups"
        ),
    ],
)
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8-wo", "nf4"])
def test_a_quantized_convolution_runs(made: Callable[[], nn.Module], given: tuple[int, ...], scheme: str) -> None:
    """quantize_ succeeded, and the forward failed."""
    conv = made()
    report = bitport.quantize_(conv, {"*": scheme})
    assert [layer.scheme for layer in report.layers] == [scheme]
    x, value = torch.randn(given), copy.deepcopy(conv)
    bitport.dequantize_(value)
    assert torch.equal(conv(x), value(x))


def test_a_quantized_embedding_runs() -> None:
    table = nn.Embedding(20, 48, padding_idx=0)
    bitport.quantize_(table, {"*": "int4-g32"})
    ids = torch.tensor([[1, 0], [19, 7]])
    assert torch.equal(table(ids), table.weight.dequantize()[ids])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_multihead_attention_is_quantized_and_runs(mode: str) -> None:
    """It was silently skipped; in eval mode its fused path reads the raw weight."""
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    x, y = torch.randn(2, 5, 64), torch.randn(2, 7, 64)
    getattr(attention, mode)()
    before, cross = attention(x, x, x)[0], attention(x, y, y)[0]
    report = bitport.quantize_(attention, "int8")
    assert {layer.name for layer in report.quantized} == {"in_proj_weight", "out_proj.weight"}
    for inference in (False, True):
        with torch.inference_mode(inference):
            assert (attention(x, x, x)[0] - before).abs().max() < 0.02
            assert (attention(x, y, y)[0] - cross).abs().max() < 0.02


@pytest.mark.parametrize("scheme", ["int8", "int8-dyn"])
def test_attention_with_keys_of_another_size(scheme: str) -> None:
    """Its three matrices stayed float, reported as a module of unknown type."""
    attention = nn.MultiheadAttention(64, 4, kdim=48, vdim=32, batch_first=True).eval()
    x, keys, values = torch.randn(2, 5, 64), torch.randn(2, 7, 48), torch.randn(2, 7, 32)
    assert not bitport.quantize_(attention, scheme).skipped
    wanted = bitport.dequantize_(copy.deepcopy(attention))(x, keys, values)[0]
    with torch.inference_mode():
        torch.testing.assert_close(
            attention(x, keys, values)[0], wanted, rtol=0, atol=0.02 if "dyn" in scheme else 1e-6
        )


def test_transformer_encoders_run_their_slow_path() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
    x, mask = torch.randn(2, 5, 64), torch.zeros(2, 5, dtype=torch.bool)
    before = encoder(x)
    bitport.quantize_(encoder, "int8")
    with torch.inference_mode():
        assert (encoder(x, src_key_padding_mask=mask) - before).abs().max() < 0.1


@pytest.mark.parametrize("k", [100, 127, 129, 1])
def test_a_size_that_the_group_does_not_divide_is_not_skipped(k: int) -> None:
    """executorch 22044, torchchat 1362: such layers stayed float, with only a log message."""
    model = nn.Linear(k, 16)
    report = bitport.quantize_(model, "int4")
    assert [layer.scheme for layer in report.layers] == ["int4"]
    x = torch.randn(3, k)
    torch.testing.assert_close(model(x), F.linear(x, model.weight.dequantize(), model.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(nn.Bilinear(4, 4, 4), id="bilinear"),
        pytest.param(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), id="weight-norm"),
    ],
)
def test_what_cannot_be_quantized_is_reported(module: nn.Module) -> None:
    model = nn.ModuleDict({"odd": module, "linear": nn.Linear(8, 8)})
    report = bitport.quantize_(model, "int8")
    assert [layer.name for layer in report.quantized] == ["linear.weight"]
    assert report.skipped
    way_out = ["remove_parametrizations" in layer.reason for layer in report.skipped]
    assert way_out == [nn.utils.parametrize.is_parametrized(module)] * len(way_out)
    assert all("unknown type" in layer.reason for layer in report.skipped)


@pytest.mark.parametrize(
    "module",
    [nn.LSTM(8, 8), nn.GRU(8, 8), nn.RNNCell(8, 8), nn.ConvTranspose1d(4, 4, 3), nn.ConvTranspose3d(4, 4, 3)],
    ids=lambda module: type(module).__name__,
)
def test_a_rule_for_all_leaves_no_matrix_of_these(module: nn.Module) -> None:
    """Recurrent layers and transposed convolutions stayed float; of the latter a matrix is [in, out * kernel]."""
    model = nn.ModuleDict({"odd": module, "linear": nn.Linear(8, 8)})
    by_name = bitport.plan(model, "int8")
    assert [choice.name for choice in by_name.quantized] == ["linear.weight"]
    assert all("a scheme given by name leaves" in choice.reason for choice in by_name.skipped)
    report = bitport.quantize_(model, {"*": "int8"})
    assert not report.skipped
    assert all(isinstance(param, QTensor) for param in model.parameters() if param.dim() > 1)


def test_weight_norm_of_a_quantized_weight_is_refused_at_once() -> None:
    """After a NotImplementedError in right_inverse torch goes on, and fails with: _WeightNorm.forward() missing
    'weight_v'."""
    quantized = layer()
    before = quantized.weight
    with pytest.raises(ArgumentError, match=r"dequantize_\(model\) first"):
        nn.utils.parametrizations.weight_norm(quantized)
    assert quantized.weight is before


def test_a_rule_that_fits_nothing_is_no_silence() -> None:
    with pytest.raises(RecipeError, match="fits no weight"):
        bitport.quantize_(nn.Sequential(nn.Linear(8, 8)), {"layers.*": "int8"})


# -- process-wide state ----------------------------------------------------------------------------------------------


STATE = """
import json, logging, os, signal, sys, threading, warnings
import torch, torch._inductor.config, torch._dynamo.config

def state():
    return {
        "inductor": repr(sorted(torch._inductor.config.get_config_copy().items(), key=str)),
        "dynamo": repr(sorted(torch._dynamo.config.get_config_copy().items(), key=str)),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        "dtype": str(torch.get_default_dtype()), "device": str(torch.get_default_device()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "grad": torch.is_grad_enabled(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed(), "rng": torch.get_rng_state().sum().item(),
        "handlers": [[str(h) for h in logging.getLogger(n).handlers] for n in (None, "torch", "bitport")],
        "level": logging.root.level, "warnings": len(warnings.filters),
        "signal": str(signal.getsignal(signal.SIGINT)), "environment": sorted(os.environ.items()),
        "path": list(sys.path), "excepthook": str(sys.excepthook),
        "swap": torch.__future__.get_swap_module_params_on_conversion(),
    }
"""


def test_nothing_of_the_process_is_changed() -> None:
    """ao 4625: matmul precision; transformers 36608, unsloth 10525: inductor flags; ao 2919: log handlers."""
    code = (
        STATE
        + """
before = state()
import bitport
imported = state()
model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 8))
torch.manual_seed(before["seed"])
bitport.quantize_(model, {"0": "int4-g32", "1": "fp8-row"}, progress=True)
model(torch.ones(3, 96))
bitport.explain(model)
torch.manual_seed(before["seed"])
after = state()
for now in (imported, after):
    print(json.dumps([key for key in before if now[key] != before[key]]))
"""
    )
    assert [json.loads(line) for line in printed(code).splitlines()] == [[], []]


def test_quantizing_draws_no_random_number() -> None:
    model = nn.Linear(96, 64)
    before = torch.get_rng_state()
    bitport.quantize_(model, "int4-g32")
    model(torch.ones(1, 96))
    assert torch.equal(torch.get_rng_state(), before)


HEAVY = (
    "triton",
    "transformers",
    "torch._inductor",
    "torch._dynamo",
    "torch.distributed.tensor",
    "numpy.f2py",
    "matplotlib",
    "rich",
    "safetensors",
)


def test_import_is_light() -> None:
    """torchao imported 77 modules, including inductor and DTensor, and took a second."""
    code = f"""
import sys, torch
before = set(sys.modules)
import bitport
new = set(sys.modules) - before
print([name for name in new if name.startswith({HEAVY!r})])
print(torch.cuda.is_initialized(), torch.xpu.is_initialized() if hasattr(torch, "xpu") else False)
print([name for name in new if name.startswith("bitport.backends.")])
"""
    done = ended(code)
    assert done.returncode == 0, done.stderr
    heavy, initialized, backends = done.stdout.splitlines()
    assert heavy == "[]"
    assert initialized == "False False"
    assert backends == "[]", "a backend is loaded when a device is first asked about"
    assert done.stderr == "", "an import says nothing"


def test_quantizing_touches_no_accelerator() -> None:
    code = (
        "import torch, bitport; m = torch.nn.Linear(96, 64); bitport.quantize_(m, 'int4-g32'); m(torch.ones(1, 96));"
        "print(torch.cuda.is_initialized())"
    )
    assert printed(code).strip() == "False"


# -- early errors, cheap calls ---------------------------------------------------------------------------------------


def test_what_cannot_run_is_refused_when_quantizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """mxfp8 and int4 were quantized without an error, and failed at the first forward."""
    from bitport.errors import DeviceError
    from bitport.ops import device

    def attempt(scheme: bitport.Scheme, where: torch.device) -> None:
        raise NotImplementedError("aten::_to_copy is not implemented for float8")

    monkeypatch.setattr(device, "_try", attempt)
    model = nn.Linear(96, 64)
    with pytest.raises(DeviceError, match=r"cpu cannot hold mxfp8: .*Quantize on the CPU, or choose another scheme"):
        bitport.quantize_(model, "mxfp8")
    assert type(model.weight) is nn.Parameter


def test_a_forward_looks_at_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """ao 4872: a repr on every call copied a tensor from the device, which broke CUDA graphs."""
    models = [layer(scheme) for scheme in ("int4-g32", "int8", "int8-dyn", "fp8-row", "mxfp4", "nvfp4")]
    x = torch.randn(3, 96)
    for model in models:
        model(x)

    def looked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a tensor's data was read on the hot path")

    for name in ("item", "tolist", "__repr__", "__bool__", "__int__", "__float__", "cpu", "numpy", "__format__"):
        monkeypatch.setattr(Tensor, name, looked)
    for model in models:
        model(x)


def test_printing_a_model_shows_no_numbers() -> None:
    model = nn.Sequential(layer())
    assert "in_features=96" in repr(model)
    assert repr(model[0].weight).count("\n") == 0


def test_compiled_subclasses_do_not_alias() -> None:
    """ao 1463: a compiled graph that returns a view of a subclass parameter."""
    model, x = layer(), torch.randn(3, 96)
    torch.compiler.reset()
    run = torch.compile(
        lambda z: (z @ model.weight.t(), F.linear(z, model.weight[:32]), model.weight), backend="aot_eager"
    )
    whole, part, weight = run(x)
    torch.testing.assert_close(whole, x @ model.weight.t())
    torch.testing.assert_close(part, F.linear(x, model.weight[:32]))
    assert torch.equal(weight, model.weight)


def test_an_optimizer_leaves_quantized_weights_alone() -> None:
    model = nn.Sequential(layer(), nn.Linear(64, 8))
    before = model[0].weight.clone()
    assert not model[0].weight.requires_grad
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(torch.randn(4, 96)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_a_float_model_does_not_take_quantized_numbers_in_silence() -> None:
    quantized, plain = layer(), nn.Linear(96, 64)
    with pytest.raises(RuntimeError, match="assign=True"):
        plain.load_state_dict(quantized.state_dict())
    with pytest.raises(ArgumentError):
        plain.weight.data.copy_(quantized.weight)
