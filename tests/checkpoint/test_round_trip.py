"""What is saved is loaded again: the same bits, the same outputs, the same ties."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import bitport as bp
from bitport.checkpoint import read_manifest
from bitport.errors import ArgumentError
from bitport.numerics import quantize
from bitport.tensor import EXTRA, QTensor, from_parts, quantize_tensor
from bitport.train import prepare_

from .models import IDS, Everything, assert_same, raw, tensors_of


@pytest.mark.parametrize("scheme", bp.PRESETS)
def test_every_preset(scheme: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 40), nn.ReLU(), nn.Linear(40, 24))

    model, x = build().bfloat16(), torch.randn(3, 256, dtype=torch.bfloat16)
    bp.quantize_(model, scheme, calibrate=[x] if bp.preset(scheme).static else None)
    bp.save(model, tmp_path)
    for target in (build, build()):
        loaded = bp.load(target, tmp_path, verify=True)
        assert_same(model, loaded)
        assert torch.equal(model(x), loaded(x))


@pytest.mark.parametrize("shard_size", [1, 2000, 4 * 10**9])
def test_everything(shard_size: int, tmp_path: Path) -> None:
    model = Everything()
    bp.quantize_(model, {"embed": "int8", "head": "int8", "conv": "int4-g32", "*": "int4-g32"})
    bp.save(model, tmp_path, shard_size=shard_size)
    loaded = bp.load(Everything, tmp_path, verify=True)
    assert isinstance(loaded, Everything)
    assert_same(model, loaded)
    for mine, theirs in zip(model(IDS), loaded(IDS), strict=True):
        assert torch.equal(mine, theirs)
    assert loaded.head.weight is loaded.embed.weight
    assert not loaded.frozen.requires_grad
    assert loaded.norm.weight.requires_grad
    assert "mask" not in loaded.state_dict()


def test_training_state_and_requires_grad_stay(tmp_path: Path) -> None:
    model = Everything()
    bp.save(model, tmp_path)
    target = Everything().eval()
    target.linear.weight.requires_grad_(False)
    bp.load(target, tmp_path)
    assert not target.training
    assert not target.linear.weight.requires_grad
    assert target.linear.bias.requires_grad


def test_dtype_is_that_of_the_file(tmp_path: Path) -> None:
    bp.save(nn.Linear(4, 4).half(), tmp_path)
    assert bp.load(nn.Linear(4, 4), tmp_path).weight.dtype == torch.float16


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


class Buffers(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bytes 0 and 1 are valid in every dtype, including bool; the shapes are odd, zero-dimensional and empty."""

    def of(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return (torch.arange(count) % 2).to(torch.uint8).view(dtype).reshape(shape)

    made = {"odd": of(3, 5), "turned": of(4, 6).transpose(0, 1)[1:], "scalar": of(), "empty": of(0, 7)}
    bp.save(Buffers(**made), tmp_path)
    loaded = bp.load(Buffers(**{name: torch.zeros(buffer.shape) for name, buffer in made.items()}), tmp_path)
    for name, buffer in made.items():
        found = getattr(loaded, name)
        assert found.dtype == dtype
        assert found.shape == buffer.shape
        assert raw(found) == raw(buffer)


def test_conjugate_and_negative_views(tmp_path: Path) -> None:
    z = torch.randn(3, dtype=torch.complex64)
    bp.save(Buffers(conjugate=z.conj(), imaginary=z.conj().imag), tmp_path)
    loaded = bp.load(Buffers(conjugate=z.clone(), imaginary=z.imag.clone()), tmp_path)
    assert torch.equal(loaded.conjugate, z.conj())
    assert torch.equal(loaded.imaginary, -z.imag)


def test_permutation_pre_scale_and_fixed_input_scale(tmp_path: Path) -> None:
    scheme = bp.preset("int8-static")
    model = nn.Sequential(nn.Linear(32, 8, bias=False))
    parts = quantize(torch.randn(8, 32), scheme.weight)
    extra = {"perm": torch.randperm(32), "pre_scale": torch.rand(32) + 0.5, "act_scale": torch.tensor([[0.02]])}
    q = from_parts(parts, scheme, shape=(8, 32), dtype=torch.float32, **extra).to_device_layout()
    model[0].weight = nn.Parameter(q, requires_grad=False)
    bp.save(model, tmp_path)
    loaded = bp.load(nn.Sequential(nn.Linear(32, 8, bias=False)), tmp_path)
    for name in EXTRA:
        assert torch.equal(getattr(loaded[0].weight, name), extra[name])
    x = torch.randn(2, 32)
    assert torch.equal(model(x), loaded(x))


@pytest.mark.parametrize("layout", ["tile_packed_2", "tile_packed_8", "plain_int32"])
def test_packed_layouts_are_saved_canonical(layout: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 24, bias=False)).bfloat16()
    bp.quantize_(model, "int4")
    expected = tensors_of(model)
    packed = copy.deepcopy(model)
    packed[0].weight = nn.Parameter(packed[0].weight.to_layout(layout), requires_grad=False)
    bp.save(packed, tmp_path)
    assert read_manifest(tmp_path).tensors["0.weight"].parts["qdata"].shape == (24, 128)
    loaded = bp.load(model, tmp_path)
    assert_same(packed, loaded)
    assert {name: raw(tensor) for name, tensor in tensors_of(loaded).items()} == {
        n: raw(t) for n, t in expected.items()
    }


def test_transposed_weights(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 16))

    model = Holder()
    q = quantize_tensor(model.weight.detach().t().contiguous(), bp.preset("int4-g32")).t()
    model.weight = nn.Parameter(q, requires_grad=False)
    bp.save(model, tmp_path)
    loaded = bp.load(Holder, tmp_path)
    assert_same(model, loaded)
    assert loaded.weight.transposed
    assert torch.equal(model.weight.dequantize(), loaded.weight.dequantize())


def test_safetensors_reads_the_shards(tmp_path: Path) -> None:
    """The reference is the format's own reader: names, order, values."""
    model = Everything()
    bp.quantize_(model, "mxfp8")
    bp.save(model, tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    expected = tensors_of(model)
    del expected["head.weight"]
    with safe_open(str(shard), "pt") as file:
        assert set(file.keys()) == set(expected)
        for name in file.offset_keys():
            found = file.get_tensor(name)
            assert raw(found) == raw(expected[name]), name
        order = [name for name in file.offset_keys() if name.startswith("attention.in_proj_weight")]
        assert order == ["attention.in_proj_weight.qdata", "attention.in_proj_weight.scale"]


def test_order_is_that_of_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    bp.save(model, tmp_path, shard_size=100)
    manifest = read_manifest(tmp_path)
    assert list(manifest.tensors) == [name for name, _ in model.named_parameters()]
    assert [entry.shard for entry in manifest.tensors.values()] == sorted(e.shard for e in manifest.tensors.values())


def test_shard_sizes(tmp_path: Path) -> None:
    """50 weights of 400 bytes in shards of at most 1000 bytes: two per shard; a larger one gets a shard of its own."""
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(50)), nn.Linear(100, 10, bias=False))
    bp.save(model, tmp_path, shard_size=1000)
    manifest = read_manifest(tmp_path)
    assert len(manifest.shards) == 26
    assert manifest.nbytes == 50 * 400 + 4000
    assert {name: (tmp_path / name).stat().st_size for name in manifest.shards} == manifest.shards


def test_manifest_says_what_is_there(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 32, bias=False))
    bp.quantize_(model, "int4-g32")
    bp.save(model, tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest.tensors["1.weight"].nbytes == model[1].weight.nbytes
    assert {scheme and str(scheme): [entry.name for entry in found] for scheme, found in manifest.schemes.items()} == {
        None: ["0.weight"],
        "int4-g32": ["1.weight"],
    }


def test_memory_that_is_shared_stays_shared(tmp_path: Path) -> None:
    """Ties are found by storage rather than by Parameter identity; a part of a storage is not a tie."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    model[2].weight = nn.Parameter(model[0].weight.data[:2])
    bp.save(model, tmp_path)
    assert read_manifest(tmp_path).tied == {"1.weight": "0.weight"}
    loaded = bp.load(copy.deepcopy(model), tmp_path)
    assert loaded[1].weight is loaded[0].weight
    assert torch.equal(loaded[2].weight, model[2].weight)


def test_module_under_two_names(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    bp.save(nn.Sequential(layer, nn.ReLU(), layer), tmp_path)
    fresh = nn.Linear(4, 4)
    loaded = bp.load(nn.Sequential(fresh, nn.ReLU(), fresh), tmp_path)
    assert torch.equal(loaded[2].weight, layer.weight)
    assert loaded[0].weight is loaded[2].weight


def test_recurrent_layers_see_their_new_weights(tmp_path: Path) -> None:
    saved, x = nn.LSTM(4, 3), torch.randn(2, 1, 4)
    bp.save(saved, tmp_path)
    assert torch.equal(bp.load(nn.LSTM(4, 3), tmp_path)(x)[0], saved(x)[0])


def test_model_without_tensors(tmp_path: Path) -> None:
    bp.save(nn.ReLU(), tmp_path)
    bp.load(nn.ReLU(), tmp_path)
    assert read_manifest(tmp_path).tensors == {}


def test_one_that_is_quantized_already_can_be_the_target(tmp_path: Path) -> None:
    model, target = nn.Sequential(nn.Linear(64, 8)), nn.Sequential(nn.Linear(64, 8))
    bp.quantize_(model, "int4-g32")
    bp.quantize_(target, "int8")
    bp.save(model, tmp_path)
    assert_same(model, bp.load(target, tmp_path))


class Extra(nn.Linear):
    def get_extra_state(self) -> object:
        return {"steps": 3}


class Holder(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor, requires_grad=False)


def _expanded() -> QTensor:
    return quantize_tensor(torch.randn(8, 32), bp.preset("int8")).t().expand(2, 32, 8)


def _prepared() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 8))
    prepare_(model, "int8")
    return model


UNSAVABLE = {
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "no data"),
    "lazy": (lambda: nn.LazyLinear(2), "no shape yet"),
    "extra state": (lambda: Extra(2, 2), "extra state"),
    "sparse": (lambda: Holder(torch.eye(3).to_sparse()), r"\(torch.sparse_coo\); .* convert it first$"),
    "expanded": (lambda: Holder(_expanded()), "expanded"),
    "in training": (_prepared, r"convert_\(model\)"),
    "a state_dict": (lambda: nn.Linear(2, 2).state_dict(), "a model is a torch.nn.Module, not OrderedDict"),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_cannot_be_saved(name: str, tmp_path: Path) -> None:
    build, message = UNSAVABLE[name]
    good = nn.Linear(2, 2)
    bp.save(good, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ArgumentError, match=message):
        bp.save(build(), tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_same(good, bp.load(nn.Linear(2, 2), tmp_path))
