"""The tokenizer in a GGUF file, as the files that transformers writes for it."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

from bitport.errors import CheckpointError
from bitport.interop.gguf.vocabulary import EACH_DIGIT
from bitport.optional import UNREADABLE, optional

DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r")
"""The pre-tokenizers (tokenizer.ggml.pre) that first take each digit alone, and split the rest as GPT-2 does."""
SPLITS = (
    *("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "qwen2", "qwen35", "deepseek-r1-qwen"),
    *("tekken", "gpt-4o", "llama4", "gpt-2", *DIGITS),
)
"""Those that transformers supports, GPT-2's, which it assumes for all others, and those completed here."""
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Those with which a word that is a token needs no merges, in llama.cpp and in the model; transformers would merge
it."""


def tokenizer_files(path: Path, settings: Mapping[str, Any]) -> dict[Path, str]:
    """Name in a model's directory -> text."""
    transformers = optional("transformers", "gguf", f"the tokenizer in {path} needs")
    _check(path, settings)
    try:
        tokenizer = transformers.PreTrainedTokenizerFast(
            gguf_file=path.name, name_or_path=str(path.parent), **_around_a_text(settings)
        )
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
            made = {file.relative_to(folder): file.read_text(encoding="utf-8") for file in files}
    except UNREADABLE as error:
        raise CheckpointError(f"transformers cannot read the tokenizer in {path}: {error}") from error
    split = settings.get("tokenizer.ggml.pre")
    if split in (*WHOLE, *DIGITS) and settings["tokenizer.ggml.model"] == "gpt2":
        name = Path("tokenizer.json")
        said = json.loads(made[name])
        if split in WHOLE:
            said["model"]["ignore_merges"] = True
        else:
            said["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [EACH_DIGIT, said["pre_tokenizer"]]}
        made[name] = json.dumps(said, ensure_ascii=False, indent=2)
    return made


def _around_a_text(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Whether a text gets a first and a last token, which transformers 5.20 does not read from a file."""
    said = {key: settings.get(f"tokenizer.ggml.{key}") for key in ("add_bos_token", "add_eos_token")}
    return {key: value for key, value in said.items() if type(value) is bool}


def _check(path: Path, settings: Mapping[str, Any]) -> None:
    """CheckpointError unless both parts and the result of each merge are in the vocabulary, for byte-level BPE (gpt2)
    spelled in its alphabet. The library tokenizers would raise an exception that cannot be told from others."""
    tokens, merges = (settings.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "merges"))
    if not all(isinstance(each, list) and all(type(word) is str for word in each) for each in (tokens, merges)):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens and .merges must be lists of strings")
    known = set(tokens)
    if settings["tokenizer.ggml.model"] == "gpt2":
        alphabet = set(importlib.import_module("tokenizers").pre_tokenizers.ByteLevel.alphabet())
        known = {token for token in known if alphabet.issuperset(token)}
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or not known.issuperset((left, right, left + right)):
            raise CheckpointError(f"{path}: tokenizer.ggml.merges has {merge!r}, which makes no token; fetch it again")


def tokenizer_notes(settings: Mapping[str, Any]) -> Iterator[str]:
    split = settings.get("tokenizer.ggml.pre")
    if settings.get("tokenizer.ggml.model") == "gpt2" and split not in SPLITS:
        yield (
            f"texts are split into words as {short(split)}, which transformers may not know and split as GPT-2 does: "
            f"then some texts become other tokens. Take the tokenizer of the original model"
        )
