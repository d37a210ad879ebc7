"""Tensors that a model has in another form than a checkpoint, against the same rows of float tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import bitport as bp
from bitport.checkpoint import load, plan_files, quantize_files
from bitport.checkpoint.arranged import Arranged, arranged
from bitport.checkpoint.manifest import Entry, Manifest, Part
from bitport.checkpoint.source import Source
from bitport.errors import CheckpointError
from bitport.numerics import Format
from bitport.schemes import Scheme, preset
from bitport.tensor import QTensor, quantize_tensor

Pieces = Sequence[Sequence[Tensor]]


def matrices(count: int, *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def entry(name: str, tensor: Tensor, *, buffer: str = "") -> Entry:
    scheme = tensor.scheme if isinstance(tensor, QTensor) else None
    transposed = isinstance(tensor, QTensor) and tensor.transposed
    parts = {"": Part(tensor.dtype, tuple(tensor.shape), 0)}
    return Entry(name, f"{name}.safetensors", tensor.dtype, tuple(tensor.shape), parts, scheme, transposed, buffer)


def made(pieces: Pieces, **form: object) -> tuple[Arranged, Tensor]:
    """(the description of what is made of ``pieces``, the tensor)."""
    held = {f"p{row}.{at}": piece for row, each in enumerate(pieces) for at, piece in enumerate(each)}
    entries = [[entry(f"p{row}.{at}", piece) for at, piece in enumerate(each)] for row, each in enumerate(pieces)]
    described = arranged("whole", entries, **form)  # type: ignore[arg-type]
    return described, described.made(lambda piece: held[piece.name])


FORMS: dict[str, tuple[Pieces, dict[str, object], Callable[[Pieces], Tensor]]] = {
    "renamed": ([matrices(1, 8, 64)], {}, lambda p: p[0][0]),
    "beside": ([[*matrices(1, 8, 64), *matrices(1, 4, 64)]], {}, lambda p: torch.cat([*p[0]])),
    "stacked": ([[m] for m in matrices(3, 8, 64)], {"stack": True}, lambda p: torch.stack([row[0] for row in p])),
    "stack of one": ([matrices(1, 8, 64)], {"stack": True}, lambda p: p[0][0][None]),
    "stacked pairs": (
        [matrices(2, 8, 64, seed=seed) for seed in range(3)],
        {"stack": True},
        lambda p: torch.stack([torch.cat([*row]) for row in p]),
    ),
    "second of three": ([matrices(1, 12, 64)], {"part": range(4, 8)}, lambda p: p[0][0][4:8]),
    "last of two of a pair": ([matrices(2, 8, 64)], {"part": range(8, 16)}, lambda p: p[0][1]),
    "in another order": ([matrices(1, 8, 64)], {"part": (6, 1, 0, 7)}, lambda p: p[0][0][[6, 1, 0, 7]]),
    "order within a stack": (
        [matrices(1, 3, 8, 64)],
        {"part": (6, 1, 0, 7), "axis": 1},
        lambda p: p[0][0][:, [6, 1, 0, 7]],
    ),
    "part of a stack": ([matrices(1, 3, 8, 64)], {"part": range(2, 5), "axis": 1}, lambda p: p[0][0][:, 2:5]),
    "stacks beside": (
        [[*matrices(1, 3, 8, 64), *matrices(1, 3, 4, 64)]],
        {"axis": 1},
        lambda p: torch.cat([*p[0]], 1),
    ),
    "flipped": ([matrices(1, 8, 64)], {"flipped": True}, lambda p: p[0][0].T),
    "flipped stack": (
        [[m] for m in matrices(2, 8, 64)],
        {"stack": True, "flipped": True},
        lambda p: torch.stack([row[0].T for row in p]),
    ),
}


@pytest.mark.parametrize("scheme", [None, "int8", "int4-g32"])
@pytest.mark.parametrize("form", FORMS)
def test_the_same_rows(form: str, scheme: str | None) -> None:
    floats, said, judge = FORMS[form]
    pieces = floats if scheme is None else [[quantize_tensor(m, scheme) for m in row] for row in floats]
    rounded = [[m.dequantize() if isinstance(m, QTensor) else m for m in row] for row in pieces]
    described, whole = made(pieces, **said)
    wanted = judge(rounded)
    assert described.shape == tuple(whole.shape) == tuple(wanted.shape)
    assert torch.equal(whole.dequantize() if isinstance(whole, QTensor) else whole, wanted)
    assert isinstance(whole, QTensor) == (scheme is not None)
    assert whole.is_contiguous() or isinstance(whole, QTensor)
    every = [piece for row in pieces for piece in row]
    assert (described.dtype, described.scheme, described.parts) == (
        torch.float32,
        None if scheme is None else preset(scheme),
        {},
    )
    assert described.transposed == ((isinstance(whole, QTensor) and whole.transposed) or said.get("flipped", False))
    assert (
        described.nbytes * sum(piece.numel() for piece in every)
        == sum(entry("p", piece).nbytes for piece in every) * whole.numel()
    )
    assert (described.shard, described.buffer) == ("p0.0.safetensors", "")


@pytest.mark.parametrize("form", FORMS)
def test_the_tensor_that_it_is_a_form_of(form: str) -> None:
    described, _ = made(FORMS[form][0], **FORMS[form][1])
    alone = len(FORMS[form][0]) == len(FORMS[form][0][0]) == 1 and not FORMS[form][1].get("stack")
    assert described.source == ("p0.0" if alone else None)


def test_convolutions_beside_each_other() -> None:
    floats = matrices(2, 8, 4, 3, 3)
    pieces = [quantize_tensor(m, "int8", kind="conv") for m in floats]
    described, whole = made([pieces])
    assert described.shape == (16, 4, 3, 3)
    assert torch.equal(whole.dequantize(), torch.cat([piece.dequantize() for piece in pieces]))


def test_one_scale_for_each_of_two() -> None:
    """Each row of the pair gets the scale of its matrix; alone, a tensor is the one in the file."""
    scheme = Scheme(weight=Format(dtype="float8_e4m3", block=(0, 0)))
    pieces = [quantize_tensor(m, scheme) for m in (torch.full((4, 64), 3.0), torch.full((4, 64), 5e-3))]
    _, whole = made([pieces])
    assert isinstance(whole, QTensor)
    assert whole.scheme.weight.block == (1, 0)
    assert torch.equal(whole.dequantize(), torch.cat([piece.dequantize() for piece in pieces]))
    assert made([pieces[:1]])[1] is pieces[0]


@pytest.mark.parametrize("block", [(0, 0), (4, 0), (4, 32), (1, 32)])
def test_scales_of_rows_that_change_places(block: tuple[int, int]) -> None:
    """A scale of some rows is repeated for each of them; one for all rows stays one."""
    piece = quantize_tensor(*matrices(1, 12, 64), Scheme(weight=Format(dtype="float8_e4m3", block=block)))
    order = [5, 0, 11, 1, 4]
    _, taken = made([[piece]], part=tuple(order))
    assert isinstance(taken, QTensor)
    assert taken.scheme.weight.block == ((1, block[1]) if block[0] else block)
    assert torch.equal(taken.dequantize(), piece.dequantize()[order])


def test_inputs_keep_their_order() -> None:
    stored = quantize_tensor(*matrices(1, 8, 64), "int8").t()
    with pytest.raises(CheckpointError, match=r"dimension 0 of .* is not that of its outputs"):
        made([[stored]], part=(1, 0))


def test_what_lies_the_other_way_round_in_the_file() -> None:
    stored = quantize_tensor(*matrices(1, 8, 64), "int8").t()
    described, whole = made([[stored]], flipped=True)
    assert (described.shape, described.transposed) == ((8, 64), False)
    assert torch.equal(whole.dequantize(), stored.dequantize().t())


def test_a_buffer_stays_one() -> None:
    (one,) = matrices(1, 4, 4)
    assert arranged("whole", [[entry("p", one, buffer="persistent")]]).buffer == "persistent"


SQUARE = quantize_tensor(torch.ones(64, 64), "int8")


@pytest.mark.parametrize(
    ("pieces", "said", "reason"),
    [
        ([[torch.ones(4, 8), torch.ones(4, 9)]], {}, r"pieces of shapes \[\[4, 8\], \[4, 9\]\]"),
        ([[torch.ones(4, 8)], [torch.ones(5, 8)]], {"stack": True}, r"pieces of shapes \[\[4, 8\], \[5, 8\]\]"),
        ([[torch.ones(()), torch.ones(())]], {}, r"pieces of shapes \[\[\], \[\]\]"),
        ([[torch.ones(5, 8)]], {"part": range(4, 6)}, r"rows range\(4, 6\) of p0.0 \[5, 8\]"),
        ([[torch.ones(())]], {"part": range(1)}, r"rows range\(0, 1\) of p0.0 \[\]"),
        ([[torch.ones(4, 8), torch.ones(4, 8).half()]], {}, "p0.0 is torch.float32 and p0.1 is torch.float16"),
        (
            [[quantize_tensor(torch.ones(4, 64), "int8"), torch.ones(4, 64)]],
            {},
            "p0.0 is int8 and p0.1 is torch.float32",
        ),
        ([[quantize_tensor(torch.ones(4, 64), name) for name in ("int8", "int4")]], {}, "int8 and p0.1 is int4"),
        ([[SQUARE, SQUARE.t()]], {}, "p0.0 is int8 and p0.1 is int8"),
    ],
)
def test_pieces_that_do_not_fit(pieces: Pieces, said: dict[str, object], reason: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^whole .*{reason}"):
        made(pieces, **said)


def test_pieces_whose_parts_cannot_be_one() -> None:
    """Each has a scale of its inputs, and a stack only one."""
    pieces = [
        [quantize_tensor(m, "int8").replace(pre_scale=torch.full((64,), float(at + 1)))]
        for at, m in enumerate(matrices(2, 8, 64))
    ]
    with pytest.raises(CheckpointError, match=r"^whole cannot be made of p0\.0 and others: .*own pre_scale"):
        made(pieces, stack=True)


class Named(nn.Module):
    """Its files have other names, and one matrix the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 64)
        self.first, self.second = nn.Linear(64, 96, bias=False), nn.Linear(96, 32, bias=False)


IN_FILES = {"rows.weight": "table.weight", "first.weight": "up.weight", "second.weight": "down.weight"}


def named(manifest: Manifest) -> Manifest:
    tensors = {
        name: arranged(name, [[manifest.tensors[held]]], flipped=held == "down.weight")
        for name, held in IN_FILES.items()
    }
    return dataclasses.replace(manifest, tensors=tensors)


@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_a_model_tells_what_tensors_are_that_its_files_call_otherwise(file: str, tmp_path: Path) -> None:
    model = Named()
    held = {IN_FILES[name]: param.detach() for name, param in model.named_parameters()}
    held["down.weight"] = held["down.weight"].t().contiguous()
    (tmp_path / "in").mkdir()
    save_file(held, tmp_path / "in" / "model.safetensors")
    read = dict(Source(tmp_path / "in" / file, arrangement=named).read(IN_FILES))
    assert all(torch.equal(read[name], param) for name, param in model.named_parameters())
    plan = plan_files(tmp_path / "in" / file, "int4-g32", model=model, arrangement=named)
    assert {choice.name for choice in plan.quantized} == {"up.weight", "down.weight"}
    quantize_files(tmp_path / "in" / file, tmp_path / "out", "int4-g32", model=model, arrangement=named)
    bp.quantize_(model, "int4-g32")
    loaded = load(Named, tmp_path / "out", arrangement=named)
    assert not isinstance(loaded.rows.weight, QTensor)
    for layer, same in ((model.first, loaded.first), (model.second, loaded.second)):
        assert torch.equal(layer.weight.dequantize(), same.weight.dequantize())
