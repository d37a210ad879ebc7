"""Hugging Face directories: causal language models and tokenizers, quantized by bitport or not, and quantized diffusers
models.

A bitport directory holds ``bitport.json``, its shards, and the ``config.json`` and tokenizer of the original model. The
model is built from config.json without allocating weights, which are then loaded from the checkpoint.
"""

from __future__ import annotations

import copy
import importlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitport import checkpoint
from bitport.arguments import floats_of, path_of
from bitport.checkpoint.manifest import NAME as MANIFEST
from bitport.checkpoint.manifest import SAID
from bitport.checkpoint.parse import json_object, read_manifest
from bitport.checkpoint.save import others
from bitport.checkpoint.side_files import class_name
from bitport.checkpoint.source import FETCH, Source
from bitport.checkpoint.writer import SHARD_SIZE
from bitport.errors import ArgumentError, BitportError, shortened
from bitport.integrations.components import component, is_component, write_config
from bitport.integrations.empty import EmptyOnMeta
from bitport.integrations.transformers_names import arrangement
from bitport.interop import READERS
from bitport.interop.skeleton import check_layers, class_of
from bitport.interop.sources import method_of
from bitport.nn.targets import uncompiled
from bitport.ops.device import check_present
from bitport.optional import UNREADABLE, optional
from bitport.tensor import QTensor

__all__ = ["load_model", "load_tokenizer", "save_model"]

SAFELY = {"local_files_only": True, "trust_remote_code": False}
"""Without the second, transformers asks whether to run code that comes with a model."""
CAUSAL = "AutoModelForCausalLM"
OWN_MODEL = "build the model yourself: bitport.load puts the weights of a checkpoint into it"
OUR_WORDS = {
    "trust_remote_code": f"it comes with code of its own, which is never run; {OWN_MODEL}",
    "Unrecognized configuration class": "it is no causal language model; load it by load_model(.., causal=False), and "
    "calibrate it by quantize_(.., calibrate=batches)",
    "instantiate the backend tokenizer": "it has no tokenizer that can be read: fetch the model's tokenizer.json and "
    "what else begins with tokenizer, or install what its tokenizer needs (sentencepiece, tiktoken)",
}
"""Text in errors of transformers with advice that does not apply here, or a list of all models -> our message."""


def load_model(
    directory: str | Path,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    *,
    verify: bool = True,
    causal: bool = True,
) -> Any:
    """Load the causal language model, or the diffusers model quantized by bitport, from ``directory``, in evaluation
    mode, on ``device`` (default: CPU).

    ``dtype``: for float parameters and computation (default: as in the files); the numbers of quantized weights never
    change. ``verify``: as for :func:`bitport.load`. ``causal``: load a causal language model; False loads the class
    that config.json names, whatever it does.
    """
    root, dtype = model_directory(directory), floats_of(dtype, "dtype")
    if device is not None:
        check_present(device)
    if (root / MANIFEST).is_file():
        if there := others(root):
            raise BitportError(
                f"{root} holds two models, that of {MANIFEST} and one that was saved there by another program "
                f"({shortened(there)}): remove {MANIFEST}, or the files of the other"
            )
        model = empty_model(root, causal=causal)
        checkpoint.load(model, root, device=device, verify=verify, arrangement=arrangement(model))
    elif name := class_name(root):
        raise BitportError(f"{root} is a model of diffusers in float: diffusers.{name}.from_pretrained loads it")
    else:
        model, _ = _pretrained(root, causal=causal)
    if device is not None:
        model = model.to(device)
    if dtype is not None:
        cast_parameters(model, dtype)
    return model.eval()


def whole_model(directory: str | Path, dtype: torch.dtype | None = None, *, causal: bool) -> Any:
    """Load the whole float model from ``directory``, in order to save it again: BitportError if its files hold tensors
    that would be lost. ``causal``: as for :func:`load_model`."""
    root = model_directory(directory)
    model, unexpected = _pretrained(root, causal=causal)
    if unexpected:
        raise BitportError(
            f"{root} is more than a {type(model).__name__}, which has no {shortened(unexpected)}: quantize its files "
            f"tensor by tensor, without --in-memory and by an algorithm without data, or load the model in Python "
            f"and calibrate it there: bitport.quantize_(model, .., calibrate=batches)"
        )
    if dtype is not None:
        cast_parameters(model, dtype)
    return model.eval()


def empty_model(directory: str | Path, *, causal: bool = True) -> Any:
    """Build the model that config.json describes, with weights on meta and real computed buffers. ``causal``: as for
    :func:`load_model`."""
    root = model_directory(directory)
    if name := class_name(root):
        with EmptyOnMeta():
            return component(root, name)
    config = _config(root)
    with EmptyOnMeta():
        model = _from_config(root, _causal(config) if causal else _named(config), config)
    if (root / "generation_config.json").is_file():
        model.generation_config = _made(root, "GenerationConfig.from_pretrained", root)
    return model


def named_model(directory: str | Path) -> Any:
    """Build the model whose weights are in ``directory``, of the class that config.json names, entirely on meta; a
    causal language model if transformers does not have that class. Its buffers are not computed."""
    root = model_directory(directory)
    if part := class_name(root):
        with torch.device("meta"):
            return component(root, part)
    config = _config(root)
    with torch.device("meta"):
        return _from_config(root, _named(config), config)


def _named(config: Any) -> str:
    """The class that ``config`` names, if transformers has it, else CAUSAL."""
    found = class_of(config)
    return CAUSAL if found is None else config.architectures[0]


def _causal(config: Any) -> str:
    """Name the class of the causal language model: AutoModelForCausalLM if transformers maps ``config`` to one; else
    the class that ``config`` names (such as a vision-language model) if it generates from text alone."""
    transformers, name = _transformers(), _named(config)
    if name == CAUSAL or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return CAUSAL
    found = getattr(transformers, name)
    writes = found.can_generate() and found.main_input_name == "input_ids" and not config.is_encoder_decoder
    return name if writes else CAUSAL


def _from_config(root: Path, name: str, config: Any) -> Any:
    """Build a model of the class ``name``, on the device of the surrounding context."""
    if name == CAUSAL:
        return _made(root, f"{name}.from_config", config, trust_remote_code=False)
    return _made(root, name, config)


def _config(root: Path) -> Any:
    """The model configuration, without settings for how transformers should load it."""
    ours, weights = (root / MANIFEST).is_file(), any(root.glob("*.safetensors"))
    if ours or weights:
        tensors = (read_manifest(root) if ours else Source(root, quantized=True)).tensors
        check_layers(json_object(root / "config.json"), len(tensors))
    config = _made(root, "AutoConfig.from_pretrained", root, **SAFELY)
    if not isinstance(said := config.architectures or [], list):
        raise BitportError(f"{root / 'config.json'} says architectures={said!r}, which must be a list of class names")
    vars(config).pop("quantization_config", None)
    return config


def _pretrained(root: Path, *, causal: bool) -> tuple[Any, list[str]]:
    """Load safetensors files with transformers; returns the model and unexpected keys. BitportError if any weight would
    have to be initialized. ``causal``: as for :func:`load_model`."""
    Source(root, quantized=True)  # raises clear errors for invalid files
    config = _config(root)
    name = _causal(config) if causal else _named(config)
    options = {**SAFELY, "dtype": "auto", "use_safetensors": True, "output_loading_info": True}
    try:
        model, found = _made(root, f"{name}.from_pretrained", root, **options)
    except BitportError as error:
        if method_of(root) in READERS:
            raise BitportError(f"{error}. bitport convert {root} -o OUT reads it") from error
        raise
    if missing := sorted(found["missing_keys"]):
        raise BitportError(f"{root} is no whole {type(model).__name__}: its files lack {shortened(missing)}")
    return model, sorted(found["unexpected_keys"])


def load_tokenizer(directory: str | Path) -> Any:
    """Load the tokenizer in ``directory`` by ``AutoTokenizer`` of transformers, without running any code in it."""
    root = model_directory(directory)
    return _made(root, "AutoTokenizer.from_pretrained", root, **SAFELY)


def save_model(
    model: Any,
    directory: str | Path,
    tokenizer: Any = None,
    *,
    overwrite: bool = False,
    shard_size: int | str = SHARD_SIZE,
) -> None:
    """Save the quantized ``model``, its configuration, and the tokenizer to a directory for :func:`load_model`, or for
    transformers and diffusers with :mod:`bitport.integrations.transformers` and :mod:`bitport.integrations.diffusers`.
    ``overwrite``, ``shard_size``: as for :func:`bitport.save`."""
    root, model = path_of(directory, "directory"), uncompiled(model)
    if not is_component(model) and not hasattr(model, "can_generate"):
        raise ArgumentError(
            f"save_model takes a model of transformers or diffusers, not a {type(model).__name__}; bitport.save(model, "
            "directory) writes any other"
        )
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ArgumentError(f"a tokenizer is one of transformers, not {tokenizer!r}")
    checkpoint.save(model, root, overwrite=overwrite, shard_size=shard_size)
    if is_component(model):
        write_config(model, root)
        return
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = model.dtype, [type(model).__name__.removeprefix("FSDP")]
    config.quantization_config = SAID
    config.save_pretrained(root)
    if model.can_generate():
        model.generation_config.save_pretrained(root)
    if tokenizer is not None:
        tokenizer.save_pretrained(root)


def logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Map token ids [batch, length] to logits [batch, length, vocabulary] on the device of ``model``."""
    return lambda ids: model(input_ids=ids.to(model.device), use_cache=False).logits.to(ids.device)


def token_ids(tokenizer: Any, text: str) -> Tensor:
    """The ids of ``text``, including the special tokens that the tokenizer adds."""
    return torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.int64)


def text_config(model: Any) -> Any:
    """The config of the text decoder; a multimodal model has one for each of its parts."""
    return model.config.get_text_config(decoder=True)


def positions_of(model: Any) -> int | None:
    """The number of positions that ``model`` supports; None if its config names no limit, or -1 as XLNet's does."""
    known = getattr(text_config(model), "max_position_embeddings", None)
    return known if known is not None and known > 0 else None


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the float parameters of ``model`` in place, and let quantized ones dequantize to ``dtype``. Buffers are not
    cast, since rotary frequencies must be float32. Tied parameters stay tied."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in done and (isinstance(param, QTensor) or param.is_floating_point()):
                done[id(param)] = nn.Parameter(param.detach().to(dtype), requires_grad=False)
            setattr(module, name, done.get(id(param), param))


def model_directory(directory: str | Path) -> Path:
    """Return ``directory`` as a path; ArgumentError unless it can hold a model."""
    root = path_of(directory, "directory")
    if not root.is_dir():
        hint = f"bitport convert {root} -o OUT makes one of it" if root.suffix == ".gguf" and root.is_file() else FETCH
        raise ArgumentError(f"{root} is not a directory; give one that holds config.json and weights; {hint}")
    if not (root / "config.json").is_file():
        raise ArgumentError(f"{root} has no config.json; a Hugging Face model directory is needed")
    return root


def _transformers() -> Any:
    return optional("transformers", "hf", "Hugging Face models need")


def _made(root: Path, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the function ``name`` of transformers on ``root``, turning its errors into a clear one."""
    transformers = _transformers()
    bad_config = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    try:
        return operator.attrgetter(name)(transformers)(*args, **kwargs)
    except (*UNREADABLE, bad_config) as error:
        said = " ".join(str(error).split())
        said = next((ours for theirs, ours in OUR_WORDS.items() if theirs in said), said)
        raise BitportError(f"transformers cannot read {root}: {said}") from error
