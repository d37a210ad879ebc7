"""Writing a model as a GGUF file of llama.cpp, number for number."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError, CheckpointError
from bitport.interop.codec import Described, no_place
from bitport.interop.gguf import latent, unused
from bitport.interop.gguf.architecture import Architecture
from bitport.interop.gguf.blocks import FLOATS
from bitport.interop.gguf.changes import codes_of_file, floats_of_file, misfit, rows_of_file
from bitport.interop.gguf.joins import SUM, WHOLE, joined, kinds
from bitport.interop.gguf.names import TensorPlace, apart, experts_of, parted, places, scale_of
from bitport.interop.gguf.output import Output
from bitport.interop.gguf.settings import ENDS, settings_of
from bitport.interop.gguf.source import EMBEDDING, HEAD, first_layer
from bitport.interop.gguf.vocabulary import vocabulary
from bitport.schemes import Scheme
from bitport.tensor import QTensor, from_parts

FLOAT_NAMES = {dtype: name for name, dtype in FLOATS.items()}


class Writer:
    """``names``: of all tensors of a model; ``files``: its other files. Both are validated on construction:
    ArgumentError for what a file cannot represent. ``left``: the tensors that it does not write."""

    name = "gguf"

    def __init__(self, names: list[str], tied: Mapping[str, str], files: Mapping[Path, str | Path]) -> None:
        said = files.get(Path("config.json"))
        if not isinstance(said, str):
            raise ArgumentError("there is no config.json, from which the settings of a GGUF file are made")
        config: dict[str, Any] = json.loads(said)
        self.its, self.settings, self.vectors, read, ties = settings_of(config, first_layer(names))
        left = unused.in_model(names, read, config.get("num_nextn_predict_layers"))
        self.left = {name for each in left.values() for name in each}
        self.vocabulary: int = config["vocab_size"]
        ids = (self.settings.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", "eos"))
        words, self.notes = vocabulary(files, self.vocabulary, *ids)
        self.settings |= words
        self.notes += unused.notes(left)
        self.places = places(self.its, [name for name in names if name not in self.left], read)
        self.experts = experts_of(read)
        if HEAD not in names and HEAD not in tied and not ties:
            raise ArgumentError(f"the model has no {HEAD}, and config.json does not tie it to the embedding")
        self.notes += _otherwise(self.its, read)
        ends = config.get("eos_token_id")
        if isinstance(ends, list) and len(ends) > len(ENDS):
            self.notes.append(f"texts end with {ends}, and a GGUF file says the first {len(ENDS)}")

    def refuses(self, q: Described) -> str | None:
        """The reason why a weight of this description cannot be written, or None."""
        if q.name in self.left:
            return None
        fmt = q.scheme.weight
        place = self.places.get(q.name)
        vector = place is not None and (place.dimensions == 1 or place.names[0].endswith("bias"))
        if len(q.shape) not in (2, 3) or vector or q.transposed != (place is not None and place.transposed):
            return "GGUF holds matrices, [.., N, K]"
        k = q.shape[-2] if q.transposed else q.shape[-1]
        if q.scheme.act:
            return "GGUF has inputs as they are: take a scheme for weights alone, such as int4-g32-sym"
        if extra := no_place(q, "GGUF"):
            return extra
        if place is not None and place.change.latent:
            return None
        if fmt.global_scale and q.name == EMBEDDING:
            return "llama.cpp knows no scale of an embedding: mxfp4-wo does without"
        leaves = [parted(name)[1].removesuffix(".weight") for name in place.names] if place is not None else []
        if fmt.global_scale and not set(leaves).isdisjoint(self.its.unscaled):
            return f"llama.cpp does not multiply by the scale of {', '.join(leaves)}: mxfp4-wo does without"
        if kinds(q.scheme, k):
            return None
        if fmt.number.kind == "int" and fmt.number.bits > 1:
            return f"GGUF has scales of whole blocks of 32 columns, not of {fmt.block[1] or k}"
        return f"GGUF has no type for {q.scheme}; integers such as int4-g32-sym, mxfp4-wo, nvfp4-wo and IQ4 are written"

    @contextlib.contextmanager
    def output(self, path: Path, weights: Iterable[Described]) -> Iterator[Output]:
        """Open the file. ``weights``: all that are quantized."""
        dimensions = dict.fromkeys(self.vectors, 1)
        dimensions |= {name: place.dimensions for place in self.places.values() for name in place.names}
        scaled = [self.places[q.name] for q in weights if q.scheme.weight.global_scale and q.name not in self.left]
        scaled = [place for place in scaled if not place.change.latent]
        dimensions |= {scale_of(name): 1 for place in scaled for name in place.names}
        with Output(path, self.settings, dimensions) as out:
            for name, vector in self.vectors.items():
                out.add(name, "F32", tuple(vector.shape), vector.contiguous().view(torch.uint8))
            yield out

    def write(self, out: Output, name: str, tensor: Tensor) -> None:
        place = self.places[name]
        tensor = tensor.mT if place.transposed and tensor.dim() == 3 else tensor
        change = place.change
        if change.one is not None and tensor.dim() == place.dimensions + 1 and tensor.shape[change.one] == 1:
            tensor = tensor.squeeze(change.one)
        if change.latent:
            self._write_latent(out, name, tensor, place, change.latent)
            return
        self._check_shape(name, tuple(tensor.shape), place)
        kind, rows = self._rows(name, tensor, place)
        if isinstance(tensor, QTensor) and tensor.scale2 is not None:
            self._write_scales(out, tensor.scale2, place)
        self._write_rows(out, name, kind, tuple(tensor.shape), rows_of_file(rows, change), place)

    def _check_shape(self, name: str, shape: tuple[int, ...], place: TensorPlace) -> None:
        if len(shape) != place.dimensions - (place.part is not None) or 0 in shape:
            raise CheckpointError(f"{name} is {list(shape)}, which has no place in {place.names[0]}")
        if name in (EMBEDDING, HEAD) and shape[0] != self.vocabulary:
            raise CheckpointError(f"{name} has {shape[0]} rows, and config.json a vocab_size of {self.vocabulary}")
        if reason := misfit(shape, place.change):
            raise CheckpointError(f"{name} {reason}")

    def _write_rows(
        self, out: Output, name: str, kind: str, shape: tuple[int, ...], rows: Tensor, place: TensorPlace
    ) -> None:
        """Write ``rows`` as a part of a tensor, or as one tensor or several."""
        count = len(place.names)
        if place.part is not None:
            out.add(place.names[0], kind, (self.experts, *shape), rows, place.part)
        elif place.change.mixed:
            for each, part in zip(place.names, rows.split(place.change.mixed.parts), strict=True):
                out.add(each, kind, (len(part), *shape[1:]), part)
        elif count == 1:
            out.add(place.names[0], kind, shape, rows)
        elif shape[1] % count:
            raise CheckpointError(f"{name} has {shape[1]} rows, which {count} tensors cannot share")
        else:
            for each, part in zip(place.names, apart(rows, count, place.in_turn), strict=True):
                out.add(each, kind, (shape[0], shape[1] // count, *shape[2:]), part)

    def _write_scales(self, out: Output, scales: Tensor, place: TensorPlace) -> None:
        """``scales``: a number for each matrix of the tensor."""
        numbers = scales.reshape(-1, 1).contiguous()
        count = len(numbers) if place.part is None else self.experts
        for name in place.names:
            out.add(scale_of(name), "F32", (count,), numbers.view(torch.uint8), place.part or 0)

    def _write_latent(self, out: Output, name: str, tensor: Tensor, place: TensorPlace, sizes: tuple[int, int]) -> None:
        if tensor.dim() != 2 or tensor.shape[0] % sum(sizes):
            raise CheckpointError(f"{name} is {list(tensor.shape)}, and must have {sum(sizes)} rows for each head")
        if isinstance(tensor, QTensor):
            tensor = tensor.dequantize()
            self._tell(
                f"kv_b_proj is written as floats, rounded to {tensor.dtype}, since half of the matrix lies transposed "
                "in the file, where scales would be of other numbers"
            )
        _check_floats(name, tensor)
        for each, part in zip(place.names, latent.parted(tensor, sizes), strict=True):
            out.add(each, FLOAT_NAMES[tensor.dtype], tuple(part.shape), part.contiguous().view(torch.uint8))

    def _rows(self, name: str, tensor: Tensor, place: TensorPlace) -> tuple[str, Tensor]:
        """(type, bytes of each row); the rows of vectors have one element."""
        if isinstance(tensor, QTensor):
            try:
                if order := place.change.columns:
                    parts = codes_of_file(tensor.plain(), tensor.scheme.weight, order)
                    tensor = from_parts(parts, tensor.scheme, shape=tuple(tensor.shape), dtype=tensor.dtype)
                kind, rows = joined(tensor, whole=place.part is not None)
            except ArgumentError as error:
                raise ArgumentError(f"{name} ({tensor.scheme}) cannot be written as GGUF. {error}") from error
            self._tell_of_size(tensor.scheme, kind)
            return kind, rows
        _check_floats(name, tensor)
        if place.single:
            self._tell_of_norms(tensor.float(), place)
            tensor = tensor.float()
        tensor = floats_of_file(tensor, place.change)
        vectors = tensor.dim() == 1 or place.names[0].endswith("bias")
        rows = tensor.unsqueeze(-1).contiguous() if vectors else tensor.contiguous()
        return FLOAT_NAMES[tensor.dtype], rows.view(torch.uint8)

    def _tell(self, note: str) -> None:
        """Once, although it holds for many tensors."""
        if note not in self.notes:
            self.notes.append(note)

    def _tell_of_size(self, scheme: Scheme, kind: str) -> None:
        bits = scheme.weight.number.bits
        its = (WHOLE | SUM).get(kind, bits)
        smaller = next((name for name, most in WHOLE.items() if most >= bits), kind)
        told = f"{scheme} takes {kind}, the smallest type that holds its numbers"
        if kind in WHOLE and kind != smaller:
            told = (
                f"{scheme} takes {kind}, as GGUF's whole numbers have no zero points: "
                f"a model quantized as int{bits}-g32-sym takes {smaller}, which is smaller"
            )
        if its > bits:
            self._tell(told)

    def _tell_of_norms(self, norm: Tensor, place: TensorPlace) -> None:
        if place.change.less_one and bool((norm.double() + 1 != (norm + 1).double()).any()):
            self._tell("weights of norms, plus 1, are rounded to float32, as the model does when it computes")


def _otherwise(its: Architecture, read: Mapping[str, Any]) -> Iterator[str]:
    """What llama.cpp computes otherwise than the model does. ``read``: the config as a file says it."""
    near, kind = read.get("sliding_window"), read["model_type"]
    if kind in ("phi3", "starcoder2") and near and near < read["max_position_embeddings"]:
        yield f"llama.cpp has no window of {near} tokens for {kind}: there a token sees all before it"
    if read["rope_parameters"].get("truncate") is False:
        yield "llama.cpp rounds the limits of yarn to whole numbers, the model does not (truncate)"
    if its.latent and (eps := read["rms_norm_eps"]) != latent.EPSILON:
        yield f"llama.cpp's norms of q_a and kv_a have {eps} too, where the model has {latent.EPSILON}"
    if read.get("topk_method") == "group_limited_greedy":
        yield "llama.cpp chooses groups of experts by their two best, the model by the best of each"


def _check_floats(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOAT_NAMES:
        raise ArgumentError(f"{name} is {tensor.dtype}, which GGUF files of models do not have")
