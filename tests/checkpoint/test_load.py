"""Which models a checkpoint can be loaded into, and the messages where it cannot."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import nn

import bitport as bp
from bitport.checkpoint.dcp import ModelState
from bitport.errors import ArgumentError, CheckpointError, DeviceError
from bitport.tensor import QTensor

from .models import Everything, assert_same, edit, raw, tensors_of


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    bp.quantize_(model, {"0": "int4-g32", "*": "skip"})
    bp.save(model, tmp_path)
    return tmp_path


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))


REFUSED = {
    "missing": (lambda: nn.Sequential(*small(), nn.Linear(8, 2)), "2 missing in the checkpoint: 2.weight, 2.bias"),
    "unknown": (lambda: nn.Sequential(nn.Linear(64, 32)), "2 unknown to the model: 1.weight, 1.bias"),
    "shape": (
        lambda: nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 8)),
        r"3 of another shape: 0.weight \(checkpoint \[32, 64\], model \[16, 64\]\), 0.bias",
    ),
    "many": (
        lambda: nn.Sequential(*(nn.Linear(64, 32, bias=False) for _ in range(30))),
        "and 18 more",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_that_does_not_fit(name: str, saved: Path) -> None:
    build, message = REFUSED[name]
    model = build()
    before = {name: raw(tensor) for name, tensor in tensors_of(model).items()}
    with pytest.raises(CheckpointError, match=message):
        bp.load(model, saved)
    assert {name: raw(tensor) for name, tensor in tensors_of(model).items()} == before


def test_a_device_that_is_not_there(saved: Path) -> None:
    with pytest.raises(DeviceError, match="no device privateuseone here"):
        bp.load(small, saved, device="privateuseone")


def test_not_strict_warns_and_loads_the_rest(saved: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    own = model[2].weight
    with pytest.warns(UserWarning, match=r"2 missing in the checkpoint: 2.weight.*2 unknown to the model: 1.weight"):
        bp.load(model, saved, strict=False)
    assert isinstance(model[0].weight, QTensor)
    assert model[2].weight is own


def test_not_strict_still_refuses_other_shapes(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="of another shape"):
        bp.load(nn.Sequential(nn.Linear(64, 16)), saved, strict=False)


def test_nothing_stays_on_meta(saved: Path) -> None:
    class More(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*small())
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    with pytest.raises(CheckpointError, match=r"1 on the meta device and not in the checkpoint .*: angles"):
        bp.load(More, saved)
    loaded = bp.load(More(), saved)
    assert torch.equal(loaded.angles, torch.arange(4.0))


def test_a_plain_attribute_does_not_stay_on_meta(saved: Path) -> None:
    class Scaled(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*small())
            self[0].factor = torch.tensor(2.0)

    with pytest.raises(CheckpointError, match=r"1 on the meta device and not in the checkpoint .*: 0\.factor"):
        bp.load(Scaled, saved)
    assert bp.load(Scaled(), saved)[0].factor == 2


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_plain_attributes_that_a_hook_recomputes(norm: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model, x = norm(nn.Linear(4, 4)).eval(), torch.ones(4)
    bp.save(model, tmp_path)
    assert torch.equal(bp.load(lambda: norm(nn.Linear(4, 4)), tmp_path).eval()(x), model(x))


def test_buffers_that_no_state_dict_has_may_be_unknown(tmp_path: Path) -> None:
    """They can be recomputed, and which ones a model keeps changes with its code."""
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.ones(3), persistent=False)
    bp.save(model, tmp_path)
    assert torch.equal(bp.load(nn.Linear(2, 2), tmp_path).weight, model.weight)


def test_meta_model_becomes_real(tmp_path: Path) -> None:
    model = Everything()
    bp.quantize_(model, "int8")
    bp.save(model, tmp_path)
    with torch.device("meta"):
        empty = Everything()
    bp.load(empty, tmp_path)
    assert {tensor.device.type for tensor in tensors_of(empty).values()} == {"cpu"}
    assert_same(model, empty)


def test_weights_that_the_model_ties(saved: Path) -> None:
    """Files by others hold a tied weight once and leave the tying to the model."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

    model = Tied()
    bp.save(model, saved, overwrite=True)
    edit(saved, lambda manifest: manifest["tied"].clear())
    loaded = bp.load(Tied, saved)
    assert loaded.a.weight is loaded.b.weight
    assert torch.equal(loaded.a.weight, model.a.weight)


def test_quantized_weight_for_a_buffer(saved: Path) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(32, 64))
            self.bias = nn.Parameter(torch.zeros(32))

    with pytest.raises(CheckpointError, match=r"1 quantized in the checkpoint but a buffer in the model: 0.weight"):
        bp.load(nn.Sequential(Buffered(), nn.Linear(32, 8)), saved)


def test_quantized_buffer(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", bp.quantize_tensor(torch.randn(32, 64), "int4-g32"))

    model = Table()
    bp.save(model, tmp_path)
    loaded = bp.load(Table(), tmp_path)
    assert torch.equal(loaded.table, model.table)
    assert "table" in dict(loaded.named_buffers())


class Shares(nn.Module):
    """Two layers share one weight, which one of them holds as a buffer."""

    def __init__(self, first: str) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(8, 8))
        for name in (first, *({"buffer", "parameter"} - {first})):
            layer = nn.Module()
            if name == "buffer":
                layer.register_buffer("weight", weight.data)
            else:
                layer.weight = weight
            self.add_module(name, layer)


@pytest.mark.parametrize("first", ["buffer", "parameter"])
def test_buffer_that_is_a_parameter_too(first: str, tmp_path: Path) -> None:
    model = Shares(first)
    bp.save(model, tmp_path)
    loaded = bp.load(Shares(first), tmp_path)
    assert [name for name, _ in loaded.named_parameters()] == ["parameter.weight"]
    assert [name for name, _ in loaded.named_buffers()] == ["buffer.weight"]
    assert loaded.parameter.weight.requires_grad
    assert loaded.parameter.weight.data_ptr() == loaded.buffer.weight.data_ptr()
    assert_same(loaded, model)


def test_factory_must_make_a_module(saved: Path) -> None:
    with pytest.raises(ArgumentError, match="returns one, not dict"):
        bp.load(dict, saved)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="the first argument cannot be a str"):
        bp.load(str(saved), small)  # type: ignore[arg-type]


def test_a_compiled_model_is_the_one_that_it_wraps(tmp_path: Path) -> None:
    """Whether the whole model or a part is compiled, when saving and when loading."""
    model = small()
    bp.quantize_(model, "int4-g32")
    part = nn.Sequential(torch.compile(copy.deepcopy(model[0])), model[1])
    for compiled in (torch.compile(model), part):
        bp.save(compiled, tmp_path, overwrite=True)
        assert_same(bp.load(small, tmp_path), model)
    assert_same(bp.load(torch.compile(small()), tmp_path)._orig_mod, model)
    states = [ModelState(each).state_dict() for each in (part, model)]
    assert states[0].keys() == states[1].keys()
    other = torch.compile(copy.deepcopy(model))
    with torch.no_grad():
        other._orig_mod[0].bias.zero_()
    ModelState(other).load_state_dict(states[0])
    assert_same(other._orig_mod, model)


def test_a_child_that_is_called_as_torch_compile_calls_it(tmp_path: Path) -> None:
    """weight was added already."""
    model = nn.Linear(4, 4)
    model.add_module("_orig_mod", nn.Linear(4, 4))
    with pytest.raises(ArgumentError, match=r"^weight and _orig_mod\.weight would both be weight.*another name$"):
        bp.save(model, tmp_path)


@pytest.mark.parametrize("strict", [True, False])
def test_each_name_that_is_missing_is_told_once(strict: bool, saved: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        bp.load(lambda: nn.Sequential(*small(), nn.Linear(8, 2)), saved, strict=strict)
    assert str(caught.value).count("2.weight") == 1


def test_device(saved: Path) -> None:
    loaded = bp.load(small, saved, device="cpu")
    assert loaded[0].weight.qdata.device.type == "cpu"


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, said in {
        tmp_path: r"it has no bitport\.json.*bitport quantize",
        tmp_path / "nowhere": r"nowhere does not exist; give the directory of a checkpoint",
        tmp_path / "file": r"file is a file; give the directory of a checkpoint",
    }.items():
        with pytest.raises(CheckpointError, match=said):
            bp.load(small, path)


NO_DIRECTORY = {
    "there/file": r"there/file is a file; a checkpoint is a directory: give another name",
    "new.safetensors": r"new\.safetensors names a file, and a checkpoint is a directory: leave out '\.safetensors'",
}


@pytest.mark.parametrize("name", NO_DIRECTORY)
def test_a_checkpoint_is_a_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(ArgumentError, match=NO_DIRECTORY[name]):
        bp.save(small(), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_checkpoint_is_replaced_when_asked(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(ArgumentError, match=r"holds a checkpoint already; overwrite=True replaces it"):
        bp.save(nn.Linear(3, 3), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    model = nn.Linear(3, 3)
    bp.save(model, saved, overwrite=True)
    assert_same(bp.load(nn.Linear(3, 3), saved), model)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_holds_one_model(name: str, overwrite: bool, tmp_path: Path) -> None:
    """transformers would load its float weights from there, and bitport the quantized ones."""
    (tmp_path / name).touch()
    with pytest.raises(ArgumentError, match=rf"holds another model already \({name}\); choose another directory"):
        bp.save(small(), tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_progress_is_drawn_when_asked_for(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bp.load(small, saved, progress=True)
    bp.save(small(), saved, overwrite=True, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "loading [" in shown.err
    assert "saving [" in shown.err


def test_mapped_tensors_are_views_and_private(tmp_path: Path) -> None:
    """With mmap a load allocates nothing; writing to a parameter changes neither the file nor the next load."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    bp.save(model, tmp_path)
    mapped = bp.load(lambda: nn.Sequential(nn.Linear(64, 64, bias=False)), tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    assert mapped[0].weight.untyped_storage().nbytes() == shard.stat().st_size
    with torch.no_grad():
        mapped[0].weight.zero_()
    again = bp.load(lambda: nn.Sequential(nn.Linear(64, 64, bias=False)), tmp_path, verify=True, mmap=False)
    assert torch.equal(again[0].weight, model[0].weight)
    assert again[0].weight.untyped_storage().nbytes() == again[0].weight.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are always UTF-8")
def test_a_directory_whose_name_pytorch_cannot_take(tmp_path: Path) -> None:
    """Python's functions take any bytes, so that such a checkpoint can be written."""
    model, directory = nn.Linear(64, 32), tmp_path / os.fsdecode(b"mod\xe8le")
    bp.quantize_(model, "int4")
    bp.save(model, directory)
    with pytest.raises(CheckpointError, match=r"cannot map .*: its whole name has to be UTF-8"):
        bp.load(lambda: nn.Linear(64, 32), directory)


def test_a_loaded_model_is_shared_with_other_processes(saved: Path) -> None:
    """What a file is mapped to was taken for shared memory: a model from a file could not be sent to another process
    (OSError: Bad file descriptor), and share_memory() left each process with numbers of its own."""
    model = bp.load(small, saved)
    x = torch.randn(3, 64)
    y = model(x)
    assert not any(param.is_shared() for param in model.parameters())
    assert torch.equal(model.share_memory()(x), y)
    other = pickle.loads(ForkingPickler.dumps(model))
    assert torch.equal(other(x), y)
    with torch.no_grad():
        model[1].bias.fill_(5)
    assert other[1].bias.unique().tolist() == [5]
    assert not torch.equal(bp.load(small, saved)[1].bias, model[1].bias)
