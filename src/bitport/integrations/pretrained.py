"""Shared implementation of from_pretrained and save_pretrained for transformers and diffusers.

Both libraries open weight files themselves, and pass a quantizer each tensor with its name in the model and its target
device. For a bitport checkpoint they are given a file with an empty tensor for each tensor of the checkpoint, which
bitport's own reader then replaces by the real one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bitport.algorithms import Algorithm, expression
from bitport.algorithms.apply import apply
from bitport.arguments import bytes_of
from bitport.checkpoint.load import read_tensor
from bitport.checkpoint.manifest import Manifest
from bitport.checkpoint.shards import Shards
from bitport.checkpoint.writer import SHARD_SIZE
from bitport.errors import ArgumentError, CheckpointError, shortened
from bitport.integrations.huggingface import save_model
from bitport.nn.quantize import check_finite
from bitport.ops.device import check_device
from bitport.report import LayerReport, Report
from bitport.report.quantized import listed
from bitport.schemes import Choice, Recipe, Target
from bitport.schemes.plan import refuse_static
from bitport.tensor.sharded import model_nbytes, nbytes_of

RUN = "load it in float, then quantize_(model, .., calibrate=batches); or bitport quantize --data FILE, and load that"
IDLE = ("token", "save_peft_format", "save_original_format")
"""Arguments of save_pretrained that have no effect on a bitport directory."""


class Stored:
    """A checkpoint that is read tensor by tensor into ``model``, which is on the meta device. ``files``: those of the
    checkpoint; the list is replaced by the one file that the library should open. ``held``: the manifest; ``manifest``:
    the same under the names of the model. ``ties``: alias -> name, for pairs that the library ties itself."""

    def __init__(
        self, model: nn.Module, files: list[str], held: Manifest, manifest: Manifest, ties: Mapping[str, str]
    ) -> None:
        self.path, self.held = Path(files[0]).parent, held
        self.wanted = {name: entry for name, entry in manifest.tensors.items() if entry.buffer != "derived"}
        self.own = model.state_dict(keep_vars=True)
        made = {frozenset(pair) for pair in ties.items()}
        self.tied = {
            alias: name for alias, name in manifest.tied.items() if alias in self.own and {alias, name} not in made
        }
        self.wanted |= {alias: manifest.tensors[name] for alias, name in self.tied.items()}
        self._check(model)
        self.shards = Shards(self.path, held, verify=True, mmap=True)
        self.shared: dict[str, Tensor] = {}
        self.brought: set[str] = set()
        self.folder = tempfile.TemporaryDirectory()
        files[:] = [str(Path(self.folder.name, "model.safetensors"))]
        with torch.device("cpu"):
            save_file({name: torch.empty(0, dtype=torch.float32) for name in self.wanted}, files[0], {"format": "pt"})

    def _check(self, model: nn.Module) -> None:
        both = [(name, self.wanted[name], self.own[name]) for name in self.wanted.keys() & self.own.keys()]
        if other := sorted(
            f"{name} (checkpoint {[*entry.shape]}, model {[*tensor.shape]})"
            for name, entry, tensor in both
            if entry.shape != tuple(tensor.shape)
        ):
            raise CheckpointError(
                f"{self.path} does not fit {type(model).__name__}. {len(other)} of another shape: {shortened(other)}"
            )
        buffers = {name for name, _ in model.named_buffers()}
        if wrong := sorted(name for name, entry, _ in both if entry.scheme and name in buffers):
            raise CheckpointError(
                f"{self.path}: {shortened(wrong)} is quantized, but a buffer in {type(model).__name__}"
            )

    def tensor(self, name: str, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """Read a tensor. ``dtype``: cast float tensors to it and dequantize quantized ones to it; None: as in the
        file."""
        entry, there = self.wanted[name], self.own[name]
        self.brought.add(name)
        if entry.name in self.shared:
            return self.shared[entry.name]
        if entry.scheme is not None:
            check_device(entry.scheme, device)
        read = read_tensor(self.shards, self.path, entry, device)
        if entry.dtype.is_floating_point and dtype is not None:
            read = read.to(dtype)
        if isinstance(there, nn.Parameter):
            trains = there.requires_grad and entry.scheme is None and read.is_floating_point()
            read = nn.Parameter(read, requires_grad=trains)
        if entry.name in self.tied.values():
            self.shared[entry.name] = read
        return read

    def close(self) -> None:
        self.shards.__exit__()
        self.folder.cleanup()


class Original:
    """A float model that is quantized while the library reads it. ``targets``: the weights of the model."""

    def __init__(self, targets: Sequence[Target], recipe: Recipe, algorithm: Algorithm, measure: bool) -> None:
        self.recipe, self.algorithm, self.measure = recipe, algorithm, measure
        self.plan = recipe.resolve(targets)
        refuse_static(self.plan.choices, RUN)
        self.targets = {target.name: target for target in targets}
        self.wanted = {choice.name: choice for choice in self.plan.quantized}
        self.told: dict[str, LayerReport] = {}
        """Reports by storage of the weight."""
        self.misfits: dict[str, torch.Size] = {}
        """Name -> shape in the files, if it differs from the model's: the library raises an error for such a weight or
        initializes a new one (ignore_mismatched_sizes)."""

    def tensor(self, name: str, value: Tensor) -> Tensor:
        """Return the replacement for ``value``, which is on its device already."""
        target, choice = self.targets[name], self.wanted[name]
        assert choice.scheme is not None
        if value.shape != target.shape:
            self.misfits[name] = value.shape
            return value
        check_finite(value, target)
        check_device(choice.scheme, value.device)
        outcome = apply(self.algorithm, value, target, choice.scheme, measure=self.measure).as_parameter()
        self.told[target.storage] = outcome.report(choice, value.nbytes)
        return outcome.q

    def report(self, model: nn.Module) -> Report:
        self._refuse_misfits(model)

        def left(choice: Choice) -> LayerReport:
            size = nbytes_of(model.get_parameter(choice.name))
            if choice.scheme:
                reason = f"the files {'have it in another shape' if choice.name in self.misfits else 'do not have it'}"
                choice = dataclasses.replace(choice, reason=reason)
            return LayerReport.kept(choice, size, size)

        storages = {name: target.storage for name, target in self.targets.items()}
        layers = listed(self.plan, storages, self.told, left)
        after = model_nbytes(model)
        before = after + sum(layer.bytes_before - layer.bytes_after for layer in self.told.values())
        return Report(layers, before, after, self.recipe.to_json(), expression(self.algorithm))

    def _refuse_misfits(self, model: nn.Module) -> None:
        """ArgumentError if the library used such a weight unquantized, as transformers before 5.23 does with any
        quantizer."""
        taken = [
            f"{name} {[*shape]}, not {[*self.targets[name].shape]}"
            for name, shape in self.misfits.items()
            if model.get_parameter(name).shape == shape
        ]
        if taken:
            raise ArgumentError(
                f"the files have weights in another shape than the model: {shortened(taken)}; take the config of the "
                f"files, or transformers from 5.23 on, which knows ignore_mismatched_sizes for quantized models too"
            )


class Loading:
    """Common base of the quantizers for both libraries."""

    work: Stored | Original | None = None
    """Set while a model is being loaded."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called with the user's device map, and again with the resolved one if that is "auto"."""
        places = device_map.items() if isinstance(device_map, dict) else ()
        if on_disk := [name or "all" for name, place in places if place == "disk"]:
            raise ArgumentError(
                f"the device map leaves weights on disk ({shortened(on_disk)}), from where accelerate brings plain "
                f"arrays, not quantized tensors: give more memory (max_memory), more devices, or a scheme of fewer bits"
            )

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class Saving:
    """Replaces save_pretrained of ``model`` by ``write``. It does not keep ``model`` alive, so that ``del model`` frees
    the memory; if nothing else does, as in ``from_pretrained(..).save_pretrained(..)``, ``twin`` is saved."""

    def __init__(self, write: Callable[..., None], model: Any, twin: Any) -> None:
        self.write, self.model, self.twin = write, weakref.ref(model), twin
        self.__signature__ = inspect.signature(functools.partial(write, model))

    def __call__(self, *args: Any, **given: Any) -> None:
        model = self.model()
        self.write(self.twin if model is None else model, *args, **given)

    def __reduce__(self) -> Any:
        return Saving, (self.write, self.model(), self.twin)


def twin_of(model: Any) -> Any:
    """A module that shares the children, parameters and buffers of ``model``, including later ones. For attributes of
    ``model``, where a reference to ``model`` itself would keep it alive."""
    twin = copy.copy(model)
    for own in ("hf_quantizer", "save_pretrained"):
        vars(twin).pop(own, None)
    return twin


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    max_shard_size: int | str | None = None,
    variant: str | None = None,
    **given: Any,
) -> None:
    """Replaces this method in a model that bitport has quantized. A checkpoint that is there is replaced, as by the
    method of the libraries, whose training loops rely on it. ``variant`` is explicit because pipelines of diffusers
    only pass arguments in the signature."""
    given |= {"variant": variant, "safe_serialization=False": not given.pop("safe_serialization", True)}
    if wrong := sorted(name for name, value in given.items() if name not in IDLE and value):
        raise ArgumentError(
            f"save_pretrained of a model that bitport has quantized takes a directory, is_main_process and "
            f"max_shard_size, not {', '.join(wrong)}; model.push_to_hub(name) uploads what it writes"
        )
    if is_main_process:
        limit = SHARD_SIZE if max_shard_size is None else min(SHARD_SIZE, bytes_of(max_shard_size, "max_shard_size"))
        save_model(model, save_directory, overwrite=True, shard_size=limit)
