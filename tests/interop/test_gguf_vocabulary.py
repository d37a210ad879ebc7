"""Tokenizers as settings of a GGUF file: read back, they give the same tokens; what a file cannot represent is
refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop.gguf.header import read_header
from bitport.interop.gguf.output import Output
from bitport.interop.gguf.tokenizer import SPLITS, tokenizer_files
from bitport.interop.gguf.vocabulary import DIGITS, EXPRESSIONS, GPT2, LLAMA3, vocabulary

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install 'bitport[hf]'")
transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

SIZE = 330
TEXTS = ("abc cab", "  two  spaces\n\n and 12345 lines\t", "Zwölf ñ 漢字 🙂", "a<|end|>b <tool>c", "don't I'LL", "")


MERGES = (("a", "b"), ("ab", "c"), ("Ġ", "a"))


def of_bytes(split: str = "", merges: Sequence[tuple[str, str]] = MERGES, **model: Any) -> Any:
    """A byte-level tokenizer with few merges. ``split``: the regular expression for words, GPT-2's if empty."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate([*letters, *map("".join, merges)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=list(merges), **model))
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    cut = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated")] if split else []
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cut, level]) if cut else level
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|begin|>", "<|end|>"])
    made.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return made


def of_pieces(spaces: str = "normalizer") -> Any:
    """As transformers converts sentencepiece: any two pieces that form a third are merged, by its rank."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "ab", "▁t", "he", "▁the", "▁ab", "the", "in", "ing"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    known = set(pieces)
    merges = [
        (piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece)) if {piece[:at], piece[at:]} <= known
    ]
    model = tokenizers.models.BPE(
        vocab={token: at for at, token in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    made = tokenizers.Tokenizer(model)
    normalizers, replace = tokenizers.normalizers, tokenizers.normalizers.Replace(" ", "▁")
    if spaces == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    elif spaces == "none":
        made.normalizer = replace
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("▁", prepend_scheme=spaces, split=False)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def files_of(made: Any, **config: Any) -> dict[Path, str | Path]:
    return {Path("tokenizer.json"): made.to_str(), Path("tokenizer_config.json"): json.dumps(config)}


def settings(made: Any, first: int | None = None, last: int | None = None, **config: Any) -> dict[str, Any]:
    found, _ = vocabulary(files_of(made, **config), SIZE, first, last)
    return {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}


def read_back(made: Any, folder: Path, first: int | None = None) -> Any:
    said, _ = vocabulary(files_of(made), SIZE, first, None)
    ends = {} if first is None else {"tokenizer.ggml.bos_token_id": first}
    with Output(folder / "m.gguf", {"general.architecture": "llama", **ends, **said}, {}) as out:
        out.publish()
    header = read_header(folder / "m.gguf")
    for path, text in tokenizer_files(folder / "m.gguf", dict(header.settings)).items():
        (folder / path).write_text(text)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("split", "whole"),
    [pytest.param(*each, id=name) for each, name in EXPRESSIONS.items() if each[0] not in (GPT2, DIGITS)],
)
def test_bytes_that_are_merged(split: str, whole: bool, tmp_path: Path) -> None:
    made = of_bytes(split, ignore_merges=whole)
    again = read_back(made, tmp_path)
    for text in TEXTS:
        assert again(text, add_special_tokens=False).input_ids == made.encode(text).ids, text


def test_ways_to_split_are_read_too() -> None:
    assert set(EXPRESSIONS.values()) <= set(SPLITS)


def test_gpt2(tmp_path: Path) -> None:
    made = of_bytes()
    assert settings(made)["pre"] == "gpt-2"
    again = read_back(made, tmp_path)
    for text in TEXTS:
        assert again(text, add_special_tokens=False).input_ids == made.encode(text).ids, text


def test_each_digit_alone(tmp_path: Path) -> None:
    """As SmolLM splits: both spaces before a digit are one word. As GPT-2 splits, the second is the digit's."""
    made = of_bytes(merges=[("a", "b"), ("Ġ", "Ġ"), ("1", "2")])
    like_gpt2 = made.encode("a  12").ids
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), made.pre_tokenizer]
    )
    assert settings(made)["pre"] == "smollm"
    again = read_back(made, tmp_path)
    for text in (*TEXTS, "a  12", "x = 3.14\n    5 two6"):
        assert again(text, add_special_tokens=False).input_ids == made.encode(text).ids, text
    assert made.encode("a  12").ids != like_gpt2


def test_what_is_said_of_tokens() -> None:
    said = settings(of_bytes())
    assert (said["model"], said["merges"]) == ("gpt2", ["a b", "ab c", "Ġ a"])
    assert said["tokens"][256:264] == ["ab", "abc", "Ġa", "<|begin|>", "<|end|>", "<tool>", "[PAD262]", "[PAD263]"]
    assert said["token_type"][256:264] == [1, 1, 1, 3, 3, 4, 5, 5]
    assert len(said["tokens"]) == len(said["token_type"]) == SIZE
    assert (said["add_bos_token"], said["add_eos_token"]) == (False, False)


@pytest.mark.parametrize("spaces", ["normalizer", "always", "none", "never"])
def test_pieces(spaces: str) -> None:
    said = settings(of_pieces(spaces))
    assert (said["model"], said["unknown_token_id"]) == ("llama", 0)
    assert said["token_type"][:5] == [2, 3, 3, 6, 6]
    assert said["add_space_prefix"] == (spaces in ("normalizer", "always"))
    scores = dict(zip(said["tokens"], said["scores"], strict=True))
    assert scores["▁a"] == 0 > scores["ab"] > scores["the"] > scores["ing"] > scores["q"]


def test_pieces_are_merged_as_before(tmp_path: Path) -> None:
    made = of_pieces("always")
    again = read_back(made, tmp_path)
    for text in ("the abab thing", "singing then", "Zwölf", "abthe the"):
        assert again(text, add_special_tokens=False).input_ids == made.encode(text, add_special_tokens=False).ids, text


def test_first_and_last_tokens(tmp_path: Path) -> None:
    made = of_bytes(LLAMA3, ignore_merges=True)
    template = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", made.token_to_id("<|begin|>"))]
    )
    made.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template])
    first = made.token_to_id("<|begin|>")
    assert settings(made, first)["add_bos_token"] is True
    assert settings(made, first)["add_eos_token"] is False
    assert read_back(made, tmp_path, first)("abc").input_ids == made.encode("abc").ids == [first, 257]
    for other in (None, first + 1):
        with pytest.raises(ArgumentError, match="around a text"):
            settings(made, other)


def test_templates_of_chats(tmp_path: Path) -> None:
    made = of_bytes()
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    assert "tokenizer.chat_template" not in settings(made)
    assert settings(made, chat_template="x")["tokenizer.chat_template"] == "x"
    assert settings(made, chat_template=named)["tokenizer.chat_template"] == "y"
    (tmp_path / "t").write_text("z")
    beside = {**files_of(made, chat_template="x"), Path("chat_template.jinja"): tmp_path / "t"}
    assert vocabulary(beside, SIZE, None, None)[0]["tokenizer.chat_template"] == "z"


def test_notes() -> None:
    made = of_bytes(LLAMA3.replace("{1,3}", ""))
    assert vocabulary(files_of(made), SIZE, None, None)[1] == []
    made.normalizer = tokenizers.normalizers.NFC()
    assert "NFC" in vocabulary(files_of(made), SIZE, None, None)[1][0]
    made.add_tokens([tokenizers.AddedToken("<wide>", rstrip=True)])
    assert "<wide>" in vocabulary(files_of(made), SIZE, None, None)[1][0]
    assert vocabulary(files_of(of_pieces("always")), SIZE, None, None)[1] == []
    assert "not only the first" in vocabulary(files_of(of_pieces("first")), SIZE, None, None)[1][0]
    assert "no vocabulary" in vocabulary({}, SIZE, None, None)[1][0]


def test_tokens_beyond_the_embedding() -> None:
    found, notes = vocabulary(files_of(of_bytes()), 261, None, None)
    assert len(found["tokenizer.ggml.tokens"]) == 261
    assert "<tool>" in notes[0]


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda said: {**said, **changes}


def model(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda said: {**said, "model": {**said["model"], **changes}}


def merged(said: dict[str, Any]) -> dict[str, Any]:
    return {**said, "model": {**said["model"], "merges": said["model"]["merges"][1:]}}


def apart(said: dict[str, Any]) -> dict[str, Any]:
    merges = said["model"]["merges"]
    merges.append(merges.pop(merges.index(["▁", "the"])))
    return said


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (of_bytes, model(type="WordPiece"), "is no BPE"),
        (of_bytes, changed(pre_tokenizer=None), "splits texts into words in another way than gpt-2, llama-bpe"),
        (of_bytes, model(ignore_merges=True), "in another way"),
        (of_bytes, changed(normalizer={"type": "Lowercase"}), "normalizes texts by .'Lowercase'"),
        (of_bytes, model(vocab={"a": "x"}), "'a' as the token 'x'"),
        (of_bytes, model(vocab={"a": -1}), "'a' as the token -1"),
        (of_bytes, model(vocab={"[PAD5]": 6}), "one token two numbers"),
        (of_bytes, model(merges=[["a"]]), "no pair"),
        (of_bytes, model(merges=["a b c"]), "no pair"),
        (of_bytes, changed(added_tokens=[3]), "the added token 3"),
        (of_pieces, merged, "does not merge '▁' and 'a', which llama.cpp would"),
        (of_pieces, apart, "other pieces between those of '▁the'"),
        (of_pieces, changed(normalizer=None), "treats spaces"),
    ],
)
def test_what_a_file_cannot_say(make: Any, change: Any, reason: str) -> None:
    said = json.dumps(change(json.loads(make().to_str())))
    with pytest.raises(ArgumentError, match=f"{reason}.*without a vocabulary"):
        vocabulary({Path("tokenizer.json"): said}, SIZE, None, None)


@pytest.mark.parametrize(
    "change",
    [
        changed(added_tokens=3),
        changed(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": 3}]}),
        changed(pre_tokenizer={"pretokenizers": [3]}),
        model(merges=3),
        model(vocab=3),
    ],
)
def test_damage(change: Any) -> None:
    said = json.dumps(change(json.loads(of_bytes().to_str())))
    with pytest.raises(BitportError):
        vocabulary({Path("tokenizer.json"): said}, SIZE, None, None)


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_no_json(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        vocabulary({Path("tokenizer.json"): text}, SIZE, None, None)
