"""A QTensor survives everything that stores, copies and moves a tensor, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

import bitport
from bitport.errors import ArgumentError, SchemeError
from bitport.schemes import PRESETS
from bitport.tensor import EXTRA, PARTS, QTensor, from_parts, quantize_tensor
from bitport.tensor.qtensor import ATEN, rebuild

Make = Callable[..., QTensor]


def saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "save": saved_and_loaded,
    "clone": torch.clone,
    "detach": Tensor.detach,
    "to-copy": lambda q: q.to("cpu", copy=True),
    "to-memory-format": lambda q: q.contiguous(),
    "data": lambda q: q.data,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("scheme", PRESETS)
def test_copies_of_every_scheme(make: Make, scheme: str, how: str) -> None:
    q = make(scheme)
    other = COPIES[how](q)
    assert type(other) is QTensor
    assert torch.equal(other, q)
    assert torch.equal(other.dequantize(), q.dequantize())
    assert (other.shape, other.dtype, other.device, other.scheme) == (q.shape, q.dtype, q.device, q.scheme)


@pytest.mark.parametrize("how", COPIES)
def test_copies_keep_every_part(full: QTensor, how: str) -> None:
    other = COPIES[how](full)
    for name in (*PARTS, *EXTRA):
        mine, theirs = getattr(full, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "clone", "to-copy"])
def test_copies_share_no_memory(full: QTensor, how: str) -> None:
    other = COPIES[how](full)
    for name in PARTS:
        if getattr(full, name) is not None:
            assert getattr(other, name).data_ptr() != getattr(full, name).data_ptr(), name


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "save"])
def test_a_parameter_stays_one(make: Make, how: str) -> None:
    other = COPIES[how](nn.Parameter(make(), requires_grad=False))
    assert isinstance(other, nn.Parameter)
    assert isinstance(other, QTensor)
    assert not other.requires_grad


def test_deepcopy_keeps_what_is_tied_tied(make: Make) -> None:
    q = nn.Parameter(make(), requires_grad=False)
    one, two = copy.deepcopy([q, q])
    assert one is two
    model = nn.ModuleList([nn.Linear(96, 64), nn.Linear(96, 64)])
    model[0].weight = model[1].weight = q
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other[0].weight is other[1].weight


@pytest.mark.parametrize("layout", ["plain_int32", "tile_packed_2", "tile_packed_8", "cpu_tiles"])
def test_a_packed_tensor_is_written_in_the_canonical_form(make: Make, layout: str) -> None:
    q = make("int4", 60, 256, dtype=torch.bfloat16).to_layout("plain")
    packed = q.to_layout(layout)
    file = io.BytesIO()
    torch.save(packed, file)
    written = packed.__reduce_ex__(2)[1]
    assert written[2] == "plain"
    assert torch.equal(written[0]["qdata"], q.qdata)
    for other in (pickle.loads(pickle.dumps(packed)), saved_and_loaded(packed)):
        assert other.bits_layout == q.to_device_layout().bits_layout
        assert torch.equal(other.to_layout("plain").qdata, q.qdata)
    assert torch.equal(packed, q)
    assert torch.equal(q.clone().copy_(packed), q)
    assert torch.equal(packed.clone().copy_(q), q)


def test_an_expanded_view_is_not_written(make: Make) -> None:
    with pytest.raises(ArgumentError, match="expanded view of a quantized tensor: save the tensor itself"):
        torch.save(make().t().expand(3, 96, 64), io.BytesIO())


@pytest.mark.parametrize("kernel", [(7,), (1, 7)])
def test_a_convolution_from_one_channel_to_one_is_written(kernel: tuple[int, ...]) -> None:
    model = nn.Sequential((nn.Conv1d if len(kernel) == 1 else nn.Conv2d)(1, 1, kernel))  # type: ignore[arg-type]
    bitport.quantize_(model, [("*", "int8", ("conv",))])
    assert isinstance(model[0].weight, QTensor)
    assert torch.equal(saved_and_loaded(model.state_dict())["0.weight"], model[0].weight)


def test_loaded_to_another_device(full: QTensor) -> None:
    there = saved_and_loaded(full, map_location="meta")
    assert there.device.type == "meta"
    assert all(getattr(there, name).device.type == "meta" for name in PARTS if getattr(there, name) is not None)
    assert there.shape == full.shape


def test_only_one_function_may_be_called_by_load(make: Make) -> None:
    """weights_only load allows rebuild and nothing else of bitport."""
    known = [f for f in torch.serialization.get_safe_globals() if getattr(f, "__module__", "").startswith("bitport")]
    assert known == [rebuild]
    assert b"cbitport.tensor.qtensor\nrebuild\n" in pickle.dumps(make(), protocol=2), "the name that files have for it"


def test_the_old_format_of_torch_save_is_refused(make: Make) -> None:
    """The old format yields a tensor before its data is read, so packing would use the wrong data."""
    file = io.BytesIO()
    torch.save(make(), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    with pytest.raises(ArgumentError, match="write the file without _use_new_zipfile_serialization=False"):
        torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "reader",
    [torch.from_dlpack, numpy.from_dlpack, numpy.asarray, Tensor.numpy, Tensor.tolist],
    ids=lambda f: f.__name__,
)
def test_other_libraries_find_no_memory(make: Make, reader: Callable[[QTensor], object]) -> None:
    """They would read from address 0 or elsewhere; torch's own error for numpy mentions only subclasses."""
    with pytest.raises(ArgumentError, match="give them its dequantize"):
        reader(make())


# -- dtypes and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        pytest.param(lambda q: q.half(), torch.float16, id="half"),
        pytest.param(lambda q: q.bfloat16(), torch.bfloat16, id="bfloat16"),
        pytest.param(lambda q: q.float(), torch.float32, id="float"),
        pytest.param(lambda q: q.to(torch.float16), torch.float16, id="to"),
        pytest.param(lambda q: q.to("cpu", torch.float16), torch.float16, id="to-both"),
        pytest.param(lambda q: q.type(torch.float16), torch.float16, id="type"),
        pytest.param(lambda q: q.to(torch.empty(1, dtype=torch.float16)), torch.float16, id="to-other"),
    ],
)
def test_a_cast_changes_the_dtype_and_no_number(
    make: Make, cast: Callable[[QTensor], QTensor], dtype: torch.dtype
) -> None:
    q = make("int4-g32")
    other = cast(q)
    assert other.dtype == other.dequantize().dtype == dtype
    assert torch.equal(other.qdata, q.qdata)
    assert torch.equal(other.scale, q.scale)
    assert torch.equal(other.dequantize(torch.float32), q.dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool], ids=str)
def test_it_cannot_become_an_integer(make: Make, dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=f"cannot become {dtype}"):
        make().to(dtype)
    with pytest.raises(ArgumentError, match=f"stands for a float tensor, not for {dtype}"):
        make().dequantize(dtype)


def test_modules_cast_and_move(make: Make) -> None:
    layer = nn.Linear(96, 64)
    layer.weight = nn.Parameter(make(), requires_grad=False)
    weight, before = layer.weight, layer.weight.dequantize()
    layer.half()
    assert layer.weight is weight, "a module's parameter keeps its identity"
    assert layer.weight.dtype == layer.bias.dtype == torch.float16
    assert torch.equal(layer.weight.dequantize(torch.float32), before)
    assert layer(torch.randn(2, 96).half()).dtype == torch.float16
    layer.to("meta", torch.bfloat16)
    assert layer.weight.device.type == layer.weight.qdata.device.type == "meta"
    assert layer.weight.dtype == torch.bfloat16
    assert layer.half()(torch.empty(2, 96, device="meta").half()).shape == (2, 64)


def test_a_model_made_empty_takes_a_state_dict(make: Make) -> None:
    """meta, to_empty, load: how large models are initialized."""
    layer = nn.Linear(96, 64)
    layer.weight = nn.Parameter(make(), requires_grad=False)
    empty = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    assert isinstance(empty.weight, QTensor)
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty.weight, layer.weight)


def test_like_tensors_are_float(make: Make) -> None:
    q = make(dtype=torch.bfloat16)
    for other in (torch.zeros_like(q), torch.ones_like(q), torch.full_like(q, 3.0)):
        assert type(other) is Tensor
        assert (other.shape, other.dtype, other.device) == (q.shape, q.dtype, q.device)
    assert torch.full_like(q, 3.0).eq(3).all()
    assert torch.zeros_like(q, dtype=torch.float32).dtype == torch.float32
    mask = torch.empty_like(q, dtype=torch.bool)
    assert (type(mask), mask.shape, mask.dtype) == (Tensor, q.shape, torch.bool)


def test_new_tensors_are_float(make: Make) -> None:
    """State created alongside a weight: next(model.parameters()).new_zeros(..)."""
    q = make(dtype=torch.bfloat16)
    for other in (q.new_empty((2, 3)), q.new_zeros(2, 3), q.new_ones((2, 3)), q.new_full((2, 3), 3.0)):
        assert type(other) is Tensor
        assert (other.shape, other.dtype, other.device) == ((2, 3), q.dtype, q.device)
    assert q.new_full((2,), 3.0).eq(3).all()
    assert q.new_zeros(2, dtype=torch.int64).tolist() == [0, 0]
    assert q.new_zeros(2, device="meta").device.type == "meta"


def test_a_stream_is_told_of_every_part(full: QTensor) -> None:
    """Through record_stream, which CPU tensors do not have."""
    told: list[tuple[Tensor, object]] = []
    ATEN[torch.ops.aten.record_stream.default](lambda *both: told.append(both), full, "stream")
    every = [part for name in PARTS if (part := getattr(full, name)) is not None]
    assert [(id(part), stream) for part, stream in told] == [(id(part), "stream") for part in every]


@pytest.mark.parametrize("save", [save_file, save_model])
def test_safetensors_own_writers_are_refused(make: Make, tmp_path: Path, save: Callable[..., None]) -> None:
    """They, and save_pretrained of transformers, write a tensor's memory, which a quantized one does not have."""
    layer = nn.Linear(96, 64)
    layer.weight = nn.Parameter(make(), requires_grad=False)
    with pytest.raises(ArgumentError, match=r"use bitport\.save\(model, directory\), or save_model"):
        save(layer if save is save_model else layer.state_dict(), tmp_path / "model.safetensors")


def test_sizes(make: Make) -> None:
    q = make("int4-g32", 64, 96, dtype=torch.bfloat16)
    assert q.nbytes == 64 * 48 + 64 * 3 * 2 + 64 * 3
    assert (q.numel(), q.dim(), q.element_size(), len(q), q.size(1)) == (6144, 2, q.nbytes / 6144, 64, 96)
    assert q.scheme.weight.nbytes(64, 96, torch.bfloat16) == q.nbytes


def test_what_it_prints(make: Make) -> None:
    q = make("int4-g32", dtype=torch.bfloat16).to_layout("plain")
    text = "QTensor(int4-g32, shape=(64, 96), dtype=torch.bfloat16, device='cpu', layout='plain')"
    assert repr(q) == str(q) == f"{q}" == text
    assert repr(q.t()) == text.replace("64, 96", "96, 64").replace("plain'", "plain', transposed")


# -- state dicts -----------------------------------------------------------------------------------------------------


def model(scheme: str = "int4-g32") -> nn.Module:
    made = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32))
    bitport.quantize_(made, scheme)
    return made


def test_state_dicts(make: Make) -> None:
    torch.manual_seed(1)
    first, second = model(), model()
    assert not torch.equal(first[0].weight, second[0].weight)
    state = saved_and_loaded(first.state_dict())
    second.load_state_dict(state)
    assert torch.equal(first[0].weight, second[0].weight)
    third = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32))
    third.load_state_dict(state, assign=True)
    x = torch.randn(3, 96)
    assert torch.equal(third(x), first(x))
    assert isinstance(third[0].weight, nn.Parameter)


def test_a_state_dict_of_another_kind_is_refused() -> None:
    quantized, plain = model(), nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32))
    with pytest.raises(RuntimeError, match="float tensor cannot be copied into a quantized one"):
        quantized.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="assign=True"):
        plain.load_state_dict(quantized.state_dict())
    with pytest.raises(RuntimeError, match="scheme and shape must be equal"):
        quantized.load_state_dict(model("int8").state_dict())


# -- several processes -----------------------------------------------------------------------------------------------


def _double_the_scale(layer: nn.Module, done: Any) -> None:
    layer.weight.scale.mul_(2)  # type: ignore[operator, union-attr]
    done.put(float(layer(torch.ones(1, 96)).sum()))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_shared_memory(make: Make, start: str) -> None:
    layer = nn.Linear(96, 64, bias=False)
    layer.weight = nn.Parameter(make(), requires_grad=False)
    assert not layer.weight.is_shared()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert all(part.is_shared() for part in layer.weight.parts if part is not None)
    before = float(layer(torch.ones(1, 96)).sum())
    context = mp.get_context(start)
    done = context.Queue()
    process = context.Process(target=_double_the_scale, args=(layer, done))
    process.start()
    theirs = done.get(timeout=120)
    process.join()
    assert theirs == pytest.approx(2 * before, rel=1e-5)
    assert float(layer(torch.ones(1, 96)).sum()) == theirs


def _value_of(layer: nn.Module, done: Any) -> None:
    done.put((layer.weight.dequantize().numpy(), layer.weight.bits_layout))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("layout", ["plain", "cpu_tiles"])
@pytest.mark.parametrize("scheme", PRESETS)
def test_another_process_reads_what_was_sent(make: Make, scheme: str, layout: str) -> None:
    """Also packed weights of 8-bit floats."""
    q = make(scheme).to_layout(layout)
    there = pickle.loads(ForkingPickler.dumps(q))
    assert there.bits_layout == layout
    assert torch.equal(there, q)
    there.scale.view(torch.uint8).zero_()
    assert not q.scale.view(torch.uint8).any()


def test_a_process_is_started_with_a_packed_weight(make: Make) -> None:
    """If the canonical form's memory were freed, spawn would fail: ``bad value(s) in fds_to_keep``."""
    layer = nn.Linear(96, 64)
    layer.weight = nn.Parameter(make().to_layout("cpu_tiles"), requires_grad=False)
    wanted = layer.weight.dequantize().numpy()
    context = mp.get_context("spawn")
    done = context.Queue()
    process = context.Process(target=_value_of, args=(layer, done))
    process.start()
    value, layout = done.get(timeout=120)
    process.join()
    assert layout == "cpu_tiles"
    assert numpy.array_equal(value, wanted)


def test_what_lies_in_shared_memory_is_written_in_the_canonical_form(make: Make) -> None:
    shared = make().to_layout("cpu_tiles").share_memory_()
    assert shared.__reduce_ex__(2)[1][2] == "plain"
    assert torch.equal(saved_and_loaded(shared), shared)


# -- hostile input ---------------------------------------------------------------------------------------------------


def described(q: QTensor) -> tuple[Any, ...]:
    return q.__reduce_ex__(2)[1]


HOSTILE: dict[str, Callable[[dict[str, Tensor], list[Any]], None]] = {
    "rows": lambda t, a: t.update(qdata=t["qdata"][:-1]),
    "columns": lambda t, a: t.update(qdata=t["qdata"][:, :-1]),
    "data-dtype": lambda t, a: t.update(qdata=t["qdata"].view(torch.int8)),
    "data-rank": lambda t, a: t.update(qdata=t["qdata"].flatten()),
    "data-scalar": lambda t, a: t.update(qdata=torch.zeros((), dtype=torch.uint8)),
    "scale-shape": lambda t, a: t.update(scale=t["scale"][:, :-1]),
    "scale-dtype": lambda t, a: t.update(scale=t["scale"].double()),
    "zero-missing": lambda t, a: t.pop("zero"),
    "zero-dtype": lambda t, a: t.update(zero=t["zero"].int()),
    "scale2-extra": lambda t, a: t.update(scale2=torch.ones(1, 1)),
    "device": lambda t, a: t.update(scale=t["scale"].to("meta")),
    "perm-shape": lambda t, a: t.update(perm=torch.arange(95)),
    "perm-twice": lambda t, a: t.update(perm=torch.zeros(96, dtype=torch.int64)),
    "perm-out-of-bounds": lambda t, a: t.update(perm=torch.arange(96) + 1),
    "perm-float": lambda t, a: t.update(perm=torch.arange(96.0)),
    "pre_scale-shape": lambda t, a: t.update(pre_scale=torch.ones(64)),
    "pre_scale-int": lambda t, a: t.update(pre_scale=torch.ones(96, dtype=torch.int64)),
    "act_scale-two": lambda t, a: t.update(act_scale=torch.ones(2)),
    "act_scale-dtype": lambda t, a: t.update(act_scale=torch.ones(1, 1, dtype=torch.float64)),
    "shape": lambda t, a: a.__setitem__(2, (64, 97)),
    "shape-negative": lambda t, a: a.__setitem__(2, (-64, 96)),
    "shape-huge": lambda t, a: a.__setitem__(2, (1 << 40, 1 << 40)),
    "shape-1d": lambda t, a: a.__setitem__(2, (6144,)),
    "shape-batch": lambda t, a: a.__setitem__(2, (2, 32, 96)),
    "dtype": lambda t, a: a.__setitem__(3, torch.int8),
    "transposed": lambda t, a: a.__setitem__(4, True),
    "layout": lambda t, a: a.__setitem__(1, "tile_packed_2"),
    "layout-int32": lambda t, a: a.__setitem__(1, "plain_int32"),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_file_that_contradicts_itself(make: Make, change: str) -> None:
    tensors, scheme, *rest = described(make())
    arguments = [scheme, *rest]
    HOSTILE[change](tensors, arguments)
    with pytest.raises(ArgumentError):
        rebuild(tensors, *arguments)


@pytest.mark.parametrize("scheme", ["", "{}", "null", "int4", '{"version": 99}'])
def test_a_file_with_a_scheme_that_is_none(make: Make, scheme: str) -> None:
    tensors, _, *rest = described(make())
    with pytest.raises(SchemeError):
        rebuild(tensors, scheme, *rest)


@pytest.mark.parametrize("name", ["qdata", "scale"])
def test_a_file_without_a_part(make: Make, name: str) -> None:
    tensors, *rest = described(make())
    tensors.pop(name)
    with pytest.raises(ArgumentError, match=f"lacks {name}"):
        rebuild(tensors, *rest)


def test_parts_given_by_hand_are_checked(make: Make) -> None:
    q = make().to_layout("plain")
    good = from_parts(q.parts, q.scheme, shape=(64, 96), dtype=torch.float32)
    assert torch.equal(good, q)
    with pytest.raises(ArgumentError, match=r"part 'data' is torch.uint8 \[64, 48\], expected torch.uint8 \[64, 64\]"):
        from_parts(q.parts, q.scheme, shape=(64, 128), dtype=torch.float32)
    with pytest.raises(ArgumentError, match="part 'zero' is missing"):
        from_parts(q.parts._replace(zero=None), q.scheme, shape=(64, 96), dtype=torch.float32)


@pytest.mark.parametrize("given", [16, 17])
def test_zero_points_are_codes_or_one_more(make: Make, given: int) -> None:
    """Kernels read zero points in few bits: 200 would be different numbers on different devices."""
    q = make().to_layout("plain")
    parts = q.parts._replace(zero=torch.full_like(q.parts.zero, given))
    with pytest.raises(ArgumentError, match=r"one of 0\.\.16, .* holds 17") if given > 16 else nullcontext():
        from_parts(parts, q.scheme, shape=(64, 96), dtype=torch.float32)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(torch.ones(4, 4, dtype=torch.int32), "only a matrix.*not torch.int32", id="int"),
        pytest.param(torch.ones(4), "at least two dimensions|matrix", id="1d"),
        pytest.param(torch.ones(4, 4, dtype=torch.float64), "float64", id="float64"),
        pytest.param(torch.ones(4, 4, dtype=torch.complex64), "only a matrix.*torch.complex64", id="complex"),
    ],
)
def test_what_cannot_be_quantized(value: Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        quantize_tensor(value, PRESETS["int8"])


def test_a_kind_that_there_is_not() -> None:
    """A convolution weight would become a batch of matrices of the size of its kernel."""
    with pytest.raises(ArgumentError, match=r"is of kind linear, .*conv, .*not 'conv2d'"):
        quantize_tensor(torch.randn(8, 4, 3, 3), "int8", kind="conv2d")


@pytest.mark.parametrize("shape", [(0, 96), (64, 0), (0, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("scheme", ["int4-g32", "fp8-block", "mxfp4", "nvfp4", "nf4"])
def test_empty_and_tiny_tensors(scheme: str, shape: tuple[int, int]) -> None:
    check_round_trip(scheme, shape)


@pytest.mark.parametrize(
    ("scheme", "shape"), [("int8", (64, 0)), ("fp8-row", (64, 0)), ("int5-tensor", (0, 96))], ids=str
)
def test_one_scale_over_nothing_is_refused(scheme: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="empty matrix"):
        quantize_tensor(torch.randn(shape), bitport.preset(scheme))


def test_quantize_leaves_an_empty_layer_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 0))
    report = bitport.quantize_(model, "int8")
    assert [layer.reason for layer in report.skipped] == ["it is empty"]


def check_round_trip(scheme: str, shape: tuple[int, int]) -> None:
    q = quantize_tensor(torch.randn(shape), bitport.preset(scheme))
    assert q.dequantize().shape == shape
    assert torch.equal(saved_and_loaded(q), q)
    y = nn.functional.linear(torch.randn(3, shape[1]), q)
    assert y.shape == (3, shape[0])
    if shape[1] == 0:
        assert not y.any()
