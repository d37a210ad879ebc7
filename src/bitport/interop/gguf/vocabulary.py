"""The tokenizer settings of a GGUF file, from a model's tokenizer.json and tokenizer_config.json.

Two kinds are written: byte-level BPE ("gpt2"), if llama.cpp has a name for the way that texts are split into words,
which must be one of EXPRESSIONS; and sentencepiece ("llama"), which llama.cpp merges by scores: always the two
neighbours whose piece has the highest one. tokenizer.json has ranks of merges instead. They must be ranks of pieces:
the merges that yield a piece are consecutive, and every two pieces that form a third are a merge. The score is the
negated rank.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

from bitport.checkpoint.parse import json_object, parsed_object
from bitport.errors import ArgumentError, BitportError, CheckpointError, shortened

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
GPT2 = ""
"""Stands for the built-in expression of ByteLevel."""
DIGITS = "each digit"
"""Stands for that expression, applied to what is left between digits, each of which is a word."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (
    LLAMA3.replace("{1,3}", "")
    .replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
    .replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
)
TEKKEN = LOWER + "|" + UPPER + r"|\p{N}" + REST
GPT4O = LOWER + END + "|" + UPPER + END + r"|\p{N}{1,3}" + REST
EACH_DIGIT = {"type": "Digits", "individual_digits": True}
EXPRESSIONS = {
    (GPT2, False): "gpt-2",
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "smaug-bpe",
    (LLAMA3.replace("{1,3}", ""), False): "qwen2",
    (QWEN35, False): "qwen35",
    (TEKKEN, True): "tekken",
    (GPT4O, False): "gpt-4o",
    (DIGITS, False): "smollm",
}
"""Expression, and whether a word that is a token needs no merges (ignore_merges) -> name."""
SPACE = "\u2581"
NEVER = -1e9
"""The score of a token that no merge yields."""
REMEDY = "; without tokenizer.json and tokenizer_config.json the model is written without a vocabulary"


def vocabulary(files: Mapping[Path, str | Path], size: int, first: Any, last: Any) -> tuple[dict[str, Any], list[str]]:
    """(settings, notes). ``files``: of the model's directory; ``size``: rows of the embedding; ``first``, ``last``: ids
    of the tokens that begin and end a text."""
    try:
        settings, notes = _vocabulary(files, size, first, last)
        json.dumps(settings, ensure_ascii=False).encode()  # rejects unpaired surrogates
        return settings, notes
    except BitportError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"tokenizer.json is not as tokenizers writes it ({error!r}){REMEDY}") from error


def _vocabulary(files: Mapping[Path, str | Path], size: int, first: Any, last: Any) -> tuple[dict[str, Any], list[str]]:
    said, config = (_read(files, name) for name in ("tokenizer.json", "tokenizer_config.json"))
    if not said:
        return {}, ["there is no tokenizer.json, so the file has no vocabulary, which llama.cpp asks for"]
    model = said.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise ArgumentError(f"tokenizer.json is no BPE, which GGUF files are written with{REMEDY}")
    pieces = bool(model.get("byte_fallback"))
    tokens, types, notes = _tokens(said, model, size, pieces)
    merges = list(_merges(model))
    found: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if pieces:
        found = {"model": "llama", "pre": "default", **found, "scores": _scores(tokens, types, merges)}
        found["add_space_prefix"], more = _space_before(said)
        unk = model.get("unk_token")
        found |= {"unknown_token_id": tokens.index(unk)} if unk in tokens else {}
    else:
        name, more = _split(said, model)
        found = {"model": "gpt2", "pre": name, **found, "merges": [" ".join(pair) for pair in merges]}
    notes += more
    found |= _around(
        said, {end: tokens[number] for end, number in (("bos", first), ("eos", last)) if number is not None}
    )
    settings = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    return settings | _template(files, config), notes


def _read(files: Mapping[Path, str | Path], name: str) -> dict[str, Any]:
    content = files.get(Path(name))
    if content is None:
        return {}
    return json_object(content) if isinstance(content, Path) else parsed_object(content, name)


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for each in model.get("merges", []):
        pair = each.split(" ") if isinstance(each, str) else each
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(type(word) is str and " " not in word for word in pair)
        ):
            raise ArgumentError(f"tokenizer.json has the merge {short(each)}, which is no pair{REMEDY}")
        yield pair[0], pair[1]


def _tokens(
    said: Mapping[str, Any], model: Mapping[str, Any], size: int, pieces: bool
) -> tuple[list[str], list[int], list[str]]:
    """(tokens, their types, notes). Each row of the embedding gets a token: unused rows a name that occurs in no
    text."""
    tokens = [f"[PAD{at}]" for at in range(size)]
    types, beyond, stripped = [UNUSED] * size, [], []

    def put(token: Any, number: Any, kind: int) -> None:
        if type(token) is not str or type(number) is not int or number < 0:
            raise ArgumentError(f"tokenizer.json has {short(token)} as the token {short(number)}{REMEDY}")
        if number >= size:
            beyond.append(token)
        else:
            tokens[number], types[number] = token, kind

    for token, number in model["vocab"].items():
        byte = pieces and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        put(token, number, BYTE if byte else UNKNOWN if token == model.get("unk_token") else NORMAL)
    for added in said.get("added_tokens", []):
        if not isinstance(added, dict):
            raise ArgumentError(f"tokenizer.json has the added token {short(added)}{REMEDY}")
        unknown = added.get("content") == model.get("unk_token")
        put(added.get("content"), added.get("id"), UNKNOWN if unknown else CONTROL if added.get("special") else USER)
        if added.get("lstrip") or added.get("rstrip") or added.get("single_word"):
            stripped.append(added["content"])
    if len(set(tokens)) != size:
        raise ArgumentError(f"tokenizer.json gives one token two numbers{REMEDY}")
    notes = [f"left out: tokens that the embedding has no row for, {shortened(beyond, 3)}"] if beyond else []
    notes += [f"llama.cpp may not look at what stands beside the tokens {shortened(stripped, 3)}"] if stripped else []
    return tokens, types, notes


def _steps(said: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer .., or of a sequence of them."""
    if not isinstance(said, dict):
        return []
    inner = next((said[key] for key in ("normalizers", "pretokenizers", "processors") if key in said), None)
    return [step for each in inner for step in _steps(each)] if isinstance(inner, list) else [said]


def _split(said: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str, list[str]]:
    steps = _steps(said.get("pre_tokenizer"))
    byte_level = steps[-1] if steps else {}
    expression = None
    if byte_level.get("type") == "ByteLevel" and not byte_level.get("add_prefix_space"):
        if len(steps) == 1 and byte_level.get("use_regex", True):
            expression = GPT2
        elif len(steps) == 2 and steps[0] == EACH_DIGIT and byte_level.get("use_regex", True):
            expression = DIGITS
        elif len(steps) == 2 and steps[0].get("type") == "Split" and not byte_level.get("use_regex", True):
            pattern = steps[0].get("pattern")
            isolated = steps[0].get("behavior") in ("Isolated", "Removed") and not steps[0].get("invert")
            expression = pattern.get("Regex") if isinstance(pattern, dict) and isolated else None
    name = EXPRESSIONS.get((str(expression), bool(model.get("ignore_merges"))))
    if name is None:
        raise ArgumentError(
            f"tokenizer.json splits texts into words in another way than {', '.join(EXPRESSIONS.values())}, which are "
            f"written{REMEDY}"
        )
    if (normal := [step.get("type") for step in _steps(said.get("normalizer"))]) not in ([], ["NFC"]):
        raise ArgumentError(f"tokenizer.json normalizes texts by {normal}, which llama.cpp does not do{REMEDY}")
    return name, ["llama.cpp does not bring texts to the form NFC before it makes tokens of them"] if normal else []


def _scores(tokens: list[str], types: list[int], merges: list[tuple[str, str]]) -> list[float]:
    ranks: dict[str, int] = {}
    for rank, (piece, _) in enumerate(itertools.groupby(merges, key="".join)):
        if ranks.setdefault(piece, rank) != rank:
            raise ArgumentError(f"tokenizer.json has merges of other pieces between those of {piece!r}{REMEDY}")
    known, pairs = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}, set(merges)
    for token in known:
        for at in range(1, len(token)):
            pair = token[:at], token[at:]
            if known.issuperset(pair) and pair not in pairs:
                raise ArgumentError(
                    f"tokenizer.json does not merge {pair[0]!r} and {pair[1]!r}, which llama.cpp would{REMEDY}"
                )
    return [float(-ranks[token]) if token in ranks else NEVER for token in tokens]


def _space_before(said: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """(whether a space is prepended to texts, notes)."""
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normal, before = _steps(said.get("normalizer")), _steps(said.get("pre_tokenizer"))
    if normal == [{"type": "Prepend", "prepend": SPACE}, replaces] and not before:
        return True, []
    if normal == [replaces] and before in ([], [SPLIT_AT_SPACES]):
        return False, []
    if not normal and len(before) == 1 and before[0].get("replacement") == SPACE:
        scheme = before[0].get("prepend_scheme", "always")
        if before[0].get("type") == "Metaspace" and scheme in ("always", "first", "never"):
            told = "llama.cpp puts a space before each text between special tokens, not only the first"
            return scheme != "never", [told] if scheme == "first" else []
    raise ArgumentError(f"tokenizer.json treats spaces in a way that is not known of llama.cpp{REMEDY}")


SPLIT_AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
"""Has no effect if spaces are replaced before, as for Gemma."""


def _around(said: Mapping[str, Any], ends: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Whether every text gets a first and a last token."""
    steps = [step for step in _steps(said.get("post_processor")) if step.get("type") == "TemplateProcessing"]
    single = [piece for step in steps for piece in step.get("single", [])]
    words = [piece["SpecialToken"].get("id") if "SpecialToken" in piece else None for piece in single] or [None]
    middle = words.index(None) if None in words else 0
    bos, eos = words[:middle], words[middle + 1 :]
    if words.count(None) != 1 or bos not in ([], [ends.get("bos")]) or eos not in ([], [ends.get("eos")]):
        raise ArgumentError(f"tokenizer.json puts {words} around a text, where GGUF has {list(ends.values())}{REMEDY}")
    yield "add_bos_token", bool(bos)
    yield "add_eos_token", bool(eos)


def _template(files: Mapping[Path, str | Path], config: Mapping[str, Any]) -> dict[str, str]:
    beside = files.get(Path("chat_template.jinja"))
    if beside is not None:
        text = beside.read_text(encoding="utf-8") if isinstance(beside, Path) else beside
        return {"tokenizer.chat_template": text}
    said = config.get("chat_template")
    if isinstance(said, list):
        said = next(
            (each.get("template") for each in said if isinstance(each, dict) and each.get("name") == "default"), None
        )
    return {"tokenizer.chat_template": said} if isinstance(said, str) else {}
