"""Quantized key-value cache: the time of one query, and of those of a prompt, compared with torch's
scaled_dot_product_attention over the same tokens in bfloat16, that of one query in memory of a fixed size, the time to
append a token, its size, and its effect on the predictions of the bundled model.

One layer and one sequence are timed. Every call uses the next of several copies, together larger than the caches, as a
model goes from layer to layer. Torch is called in the fastest way: for one query with the query heads that share a key
head as rows, for a prompt with a copy of the keys and values for each query head, whose making is not timed. With
OMP_NUM_THREADS=1 thread time is used, which other processes do not disturb.
``--page`` writes docs/performance-kv-cache.md from the records.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import cached_program
from bench.measure import RESULTS, busy, header, record
from bench.models import TINYLM
from bench.results import lines_of, runs_of
from bitport.cache import KeyValueStore, StaticStore
from bitport.evaluate.divergence import summarized, token_divergence
from bitport.evaluate.perplexity import losses, predictions, summary
from bitport.evaluate.timing import interleaved, medians, ratio, spread
from bitport.integrations.huggingface import load_model, load_tokenizer, logits_of, token_ids
from bitport.report.text import markdown, size, table

SUITE = "kv_cache"
BASE = "bf16"
FLOATS = "int8+last999999"
"""Unquantized tokens, read by bitport."""
FORMATS = ("int8", "fp8-wo", "int4", "int4-g32", "int2-b32x1:int2-g32")
CONTEXTS = (512, 2048, 8192, 32768)
PROMPTS = (128, 375, 1024, 2048)
ROOM, FILLED = 4096, (128, 512, 2048, 4096)
"""Tokens that fit into memory of a fixed size, and how many of them there are."""
COPIES = 256 << 20
"""Total size of the copies, in bytes of keys and values in bfloat16."""
PAGE = Path(__file__).parents[1] / "docs" / "performance-kv-cache.md"

QUALITY = (
    *("int8", "fp8-wo", "int6-g32", "int4", "int4-g32", "nf4-g32", "mxfp4-wo", "int3-g32", "int2-g32"),
    *("int2-b32x1:int2-g32", "int2-g32+first4+last64", "int2-b32x1:int2-g32+first4+last64"),
)
TOKENS, WINDOW, STEP = 8192, 512, 16

SIZES = {
    "room": ROOM,
    "tokens": TOKENS,
    "window": WINDOW,
    "step": STEP,
    "capacity": cached_program.CAPACITY,
    "layers": cached_program.SIZES["num_hidden_layers"],
    "width": cached_program.SIZES["hidden_size"],
}

Row = dict[str, Any]


class Heads(NamedTuple):
    queries: int
    keys: int
    width: int


MODELS = {
    "32 heads on 8 of 128": Heads(32, 8, 128),
    "14 heads on 2 of 64": Heads(14, 2, 64),
    "32 heads on 32 of 128": Heads(32, 32, 128),
}
"""The heads of Llama 3 8B, Qwen2.5 0.5B and Llama 2 7B."""


def clock() -> Callable[[], float]:
    """Thread time if there is one thread, which excludes the time of other processes, else wall time."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def in_turn(copies: list[Callable[[], Any]]) -> Callable[[], Any]:
    following = itertools.cycle(copies)
    return lambda: next(following)()


def copies(heads: Heads, context: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of so many tokens, as often as it takes."""
    shape = (1, heads.keys, context, heads.width)
    count = max(2, min(COPIES // (4 * heads.keys * context * heads.width), 16))
    return [(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()) for _ in range(count)]


def store_of(name: str, keys: Tensor, values: Tensor) -> KeyValueStore:
    store = KeyValueStore(name)
    store.append(keys, values)
    return store


def attention(
    heads: Heads, context: int, formats: tuple[str, ...], repetitions: int, *, prompt: bool = False
) -> Iterator[Row]:
    """Attention of one query after ``context`` tokens, or of all queries of a prompt of so many."""
    sharing, rows = heads.queries // heads.keys, context if prompt else 1
    q = torch.randn(1, heads.queries, rows, heads.width, dtype=torch.bfloat16)
    tokens = copies(heads, context)
    nbytes = {BASE: 2 * tokens[0][0].nbytes}
    if prompt:
        given = [tuple(each.repeat_interleave(sharing, 1) for each in pair) for pair in tokens]
        plain = [lambda pair=pair: F.scaled_dot_product_attention(q, *pair, is_causal=True) for pair in given]
    else:
        packed = q.reshape(1, heads.keys, sharing, heads.width)
        plain = [lambda pair=pair: F.scaled_dot_product_attention(packed, *pair) for pair in tokens]
    candidates = {BASE: in_turn(plain)}
    for name in formats:
        stores = [store_of(name, *pair) for pair in tokens]
        candidates[name] = in_turn([lambda store=store: store.attend(q, causal=prompt) for store in stores])
        nbytes[name] = stores[0].nbytes
    times = interleaved(candidates, repetitions=repetitions, clock=clock())
    for name, seconds in medians(times).items():
        ratios = [base / mine for base, mine in zip(times[BASE], times[name], strict=True)]
        yield {
            "kind": "prompt" if prompt else "attention",
            "heads": [*heads],
            "context": context,
            "format": name,
            "ms": float(f"{seconds * 1e3:.4g}"),
            "speedup": round(1 / ratio(times, name, BASE), 3),
            "noise": round(spread(ratios), 3),
            "bytes_per_second": float(f"{nbytes[name] / seconds:.4g}"),
            "bytes_per_token": nbytes[name] / context,
        }


def in_static_memory(heads: Heads, filled: int, formats: tuple[str, ...], repetitions: int) -> Iterator[Row]:
    """Attention of one query in memory for ROOM tokens, whose mask shows ``filled``."""
    sharing = heads.queries // heads.keys
    q = torch.randn(1, heads.queries, 1, heads.width, dtype=torch.bfloat16)
    tokens = copies(heads, ROOM)
    seen = (torch.arange(ROOM) < filled)[None, None, None]
    packed, mask = q.reshape(1, heads.keys, sharing, heads.width), seen.expand(1, 1, sharing, ROOM)

    def static_store_of(name: str, pair: tuple[Tensor, Tensor]) -> StaticStore:
        store = StaticStore(name)
        store.allocate(*pair, ROOM)
        store.write(*pair, torch.arange(ROOM))
        return store

    plain = [functools.partial(F.scaled_dot_product_attention, packed, *pair, mask) for pair in tokens]
    candidates = {BASE: in_turn(plain)}
    for name in formats:
        stores = [static_store_of(name, pair) for pair in tokens]
        candidates[name] = in_turn([functools.partial(store.attend, q, seen) for store in stores])
    times = interleaved(candidates, repetitions=repetitions, clock=clock())
    for name, seconds in medians(times).items():
        found = {"kind": "static", "heads": [*heads], "context": filled, "room": ROOM, "format": name}
        yield {**found, "ms": float(f"{seconds * 1e3:.4g}"), "speedup": round(1 / ratio(times, name, BASE), 3)}


def adding(heads: Heads, context: int, formats: tuple[str, ...], repetitions: int) -> Iterator[Row]:
    """Appending one token to a layer that has ``context``, compared with torch.cat, by which transformers' own cache
    grows. Removing the token afterwards is timed too, but moves no data."""
    shape = (1, heads.keys, context, heads.width)
    keys, values = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    new = keys[:, :, :1], values[:, :, :1]

    def added(store: KeyValueStore) -> None:
        store.append(*new)
        store.crop(context)

    candidates: dict[str, Callable[[], Any]] = {
        BASE: lambda: [torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)]
    }
    candidates |= {name: functools.partial(added, store_of(name, keys, values)) for name in formats}
    times = interleaved(candidates, repetitions=repetitions, clock=clock())
    for name, seconds in medians(times).items():
        found = {"kind": "adding", "heads": [*heads], "context": context, "format": name}
        yield {**found, "ms": float(f"{seconds * 1e3:.4g}"), "speedup": round(1 / ratio(times, name, BASE), 3)}


def quality(formats: tuple[str, ...], count: int) -> Iterator[Row]:
    """Predictions of the bundled model in float32, which reads windows of its text STEP tokens at a time."""
    from bitport.integrations import kv_cache

    model = load_model(TINYLM, dtype=torch.float32)
    tokens = token_ids(load_tokenizer(TINYLM), (TINYLM / "eval.txt").read_text(encoding="utf-8"))[:count]
    floats = list(predictions(logits_of(model), tokens, window=WINDOW, batch=4))
    base = summary(torch.cat([losses(*each) for each in floats]))
    yield {"kind": "quality", "format": BASE, "perplexity": base.value, "scored": base.scored}
    for name in formats:
        read = list(predictions(kv_cache.logits_of(model, name, step=STEP), tokens, window=WINDOW, batch=4))
        value = summary(torch.cat([losses(*each) for each in read])).value
        apart = summarized(token_divergence(p, q) for (p, _), (q, _) in zip(floats, read, strict=True))
        # after a whole window, relative to bfloat16
        whole = torch.zeros(1, 2, WINDOW, 64, dtype=torch.bfloat16)
        size = store_of(name, whole, whole).nbytes / (2 * whole.nbytes)
        found = {"kind": "quality", "format": name, "size": size}
        yield {**found, "perplexity": value, "kl": apart.kl, "top1": apart.top1}


def page(lines: list[Row]) -> str:
    """The newest run of each kind; for times, of each number of threads."""
    text = [INTRODUCTION.format(**SIZES)]
    for title, kind in (
        ("One query", "attention"),
        ("A prompt", "prompt"),
        ("In memory of a fixed size", "static"),
    ):
        text.append(f"## {title}\n")
        for head, rows in newest(lines, kind):
            text += [f"{told(head)}\n", *(queries(name, rows) for name in MODELS)]
    text.append("## A step of a model\n")
    for head, rows in newest(lines, "program"):
        text.append(f"{told(head)}\n\n{of_programs(rows)}\n")
    text.append("## One more token\n")
    for head, rows in newest(lines, "adding"):
        cells = [
            (name, row["context"], called(row["format"]), f"{row['ms']:.3g}", f"{row['speedup']:.2f}x")
            for row in rows
            for name, shape in MODELS.items()
            if row["heads"] == [*shape]
        ]
        titles = ("heads", "tokens", "format", "ms", "speedup")
        text.append(f"{told(head)}\n\n{markdown(titles, cells, words=(0, 2))}\n")
    head, rows = newest(lines, "quality")[-1]
    return "\n".join([*text, f"## Predictions\n\n{told(head)}\n", predicted(rows)]) + "\n"


def queries(name: str, rows: list[Row]) -> str:
    mine = [row for row in rows if row["heads"] == [*MODELS[name]]]
    contexts = sorted({row["context"] for row in mine})
    sizes = "bytes_per_token" in mine[0]
    titles = ("tokens", *(["bytes per token"] if sizes else []), *contexts)
    lines = []
    for fmt in dict.fromkeys(row["format"] for row in mine):
        cells = {row["context"]: row for row in mine if row["format"] == fmt}
        figures = [f"{cells[at]['ms']:.3g} ms, {cells[at]['speedup']:.2f}x" for at in contexts]
        size = [f"{cells[contexts[-1]]['bytes_per_token']:.0f}"] if sizes else []
        lines.append((called(fmt), *size, *figures))
    return f"{name}:\n\n{markdown(titles, lines)}\n"


def of_programs(rows: list[Row]) -> str:
    lines, contexts = [], sorted({row["context"] for row in rows})
    for name in dict.fromkeys(row["format"] for row in rows):
        cells = {row["context"]: row for row in rows if row["format"] == name}
        figures = [f"{cells[at]['ms']:.3g} ms, {cells[at]['speedup']:.2f}x" for at in contexts]
        nbytes = cells[contexts[0]].get("cache")
        lines.append((name, "" if nbytes is None else size(nbytes), *figures))
    return markdown(("model", "cache", *(f"after {at}" for at in contexts)), lines)


def predicted(rows: list[Row]) -> str:
    base = rows[0]["perplexity"]
    lines = [("floats", "1", f"{base:.3f}", "", "", "")]
    for row in rows[1:]:
        change, same = f"{100 * (row['perplexity'] / base - 1):+.2f} %", f"{100 * row['top1']:.1f} %"
        lines.append(
            (row["format"], f"{row['size']:.2f}", f"{row['perplexity']:.3f}", change, f"{row['kl']:.2g}", same)
        )
    return markdown(("format", "part of bf16", "perplexity", "change", "KL", "same token"), lines)


def newest(lines: list[Row], kind: str) -> list[tuple[Row, list[Row]]]:
    """(header, rows) of the newest run with rows of this kind, for each number of threads."""
    having = {row["run"] for row in lines if row.get("kind") == kind}
    heads = {head["machine"]["threads"]: head for run, head in runs_of(lines).items() if run in having}
    return [
        (head, [row for row in lines if row["run"] == head["run"] and row.get("kind") == kind])
        for _, head in sorted(heads.items(), key=lambda each: -each[0])
    ]


def called(name: str) -> str:
    return {BASE: "bf16, torch", FLOATS: "bf16, bitport"}.get(name, name)


def told(head: Row) -> str:
    machine = head["machine"]
    where = f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"
    return f"Run {head['run']}, commit {head['commit']}: {where}; other processes used {head['busy']} cores."


INTRODUCTION = """# The quantized key-value cache in figures

The cost and savings of [the quantized key-value cache](kv-cache.md): `python -m bench.kv_cache --json` measures,
`python -m bench.kv_cache --page` writes this page; nothing in it is typed by hand.

*One query*: attention of one new token over a layer's cache, in milliseconds, and the speedup over torch's own
attention over bf16, in the same turn; *bytes per token* are those of keys and values in one layer. *A prompt*: the
same for as many queries as there are tokens, each of which sees those before it. *In memory of a fixed size*: one query
in memory for {room} tokens, of which so many are filled and shown by a mask; torch's own attention reads all of it.
*A step of a model*: one more token by [a package](deploy.md#a-language-models-methods) of a model of {layers} layers,
{width} wide, with room for {capacity} tokens, beside the package that PyTorch makes of it in bf16; and in eager mode,
with the cache of transformers and those of bitport. *One more token*: the time to add it. With one thread it is the
time of that thread. *Predictions*: the bundled model on {tokens} tokens of its text, in windows of {window} that are
read {step} tokens at a time, compared with a float cache; *part of bf16* is the size after a whole window. It is
a small model of an easy language, with heads of 64: use it to compare formats, and measure your own model with
`bitport eval --kv-cache`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS), help="tokens in the cache")
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS), help="tokens of a prompt")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", action="store_true", help=f"append the rows to bench/results/{SUITE}.jsonl")
    parser.add_argument("--page", action="store_true", help="measure nothing: write the page from the records")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(lines_of(RESULTS / f"{SUITE}.jsonl")), encoding="utf-8")
        return
    head = header() | {"busy": busy()}
    rows = [row for kind in options.kinds for row in KINDS[kind](options)]
    for kind in options.kinds:
        mine = [row for row in rows if row["kind"] == kind]
        keys = [key for key in mine[-1] if key != "kind"]
        print(table(keys, [tuple(str(row.get(key, "-")) for key in keys) for row in mine]))
    if options.json:
        record(SUITE, head, rows)


@torch.no_grad()
def _attention(options: argparse.Namespace) -> Iterator[Row]:
    for heads in MODELS.values():
        for context in options.contexts:
            yield from attention(heads, context, (*FORMATS, FLOATS), options.repetitions)


@torch.no_grad()
def _prompt(options: argparse.Namespace) -> Iterator[Row]:
    for heads in MODELS.values():
        for context in options.prompts:
            yield from attention(heads, context, ("int8", "int4-g32", FLOATS), options.repetitions, prompt=True)


@torch.no_grad()
def _static(options: argparse.Namespace) -> Iterator[Row]:
    for heads in MODELS.values():
        for filled in FILLED:
            yield from in_static_memory(heads, filled, ("int8", "int4-g32"), options.repetitions)


@torch.no_grad()
def _adding(options: argparse.Namespace) -> Iterator[Row]:
    for context in (options.contexts[0], options.contexts[-1]):
        yield from adding(MODELS["32 heads on 8 of 128"], context, FORMATS[:1] + FORMATS[3:4], options.repetitions)


KINDS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "attention": _attention,
    "prompt": _prompt,
    "static": _static,
    "program": lambda options: cached_program.steps(options.repetitions),
    "adding": _adding,
    "quality": lambda options: quality(QUALITY, TOKENS),
}


if __name__ == "__main__":
    main()
