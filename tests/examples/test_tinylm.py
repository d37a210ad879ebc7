"""The reference model: its corpus is reproducible, its files belong together, and its recorded figures are true."""

import copy
import hashlib
import itertools
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from examples.tinylm import corpus, evaluate, model, report, spread, train  # noqa: E402
from examples.tinylm.grammar import Person, Story, number, polish  # noqa: E402

FOLDER = REPOSITORY / "models" / "tinylm"


@pytest.fixture(scope="module")
def tinylm() -> model.TinyLM:
    torch.set_num_threads(1)
    return model.load(FOLDER)


def test_a_seed_always_gives_the_same_text() -> None:
    """The digest is that of the corpus that the stored weights were trained on."""
    text = corpus.take(corpus.TRAIN_SEED, 50_000).encode()[:50_000]
    assert hashlib.sha256(text).hexdigest() == "86476ad6565dbe9344738ed78e80606ecead09a823153fece91cf577432cd49f"


@pytest.mark.parametrize(
    ("name", "seed", "size"),
    [("eval.txt", corpus.VALIDATION_SEED, 240_000), ("calibration.txt", corpus.CALIBRATION_SEED, 100_000)],
    ids=["evaluation", "calibration"],
)
def test_stored_text_is_what_the_generator_makes(name: str, seed: int, size: int) -> None:
    assert (FOLDER / name).read_text() == corpus.take(seed, size)


def test_splits_share_no_story() -> None:
    stored = {name: set((FOLDER / name).read_text().split("\n\n")) for name in ("eval.txt", "calibration.txt")}
    trained = {corpus.nth_story(corpus.TRAIN_SEED, i).rstrip("\n") for i in range(1500)}
    assert all(a.isdisjoint(b) for a, b in itertools.combinations((*stored.values(), trained), 2))


def test_text_is_rich_and_free_of_template_marks() -> None:
    text = corpus.take(corpus.TRAIN_SEED, 1_000_000)
    assert len(Counter(re.findall(r"[a-z]+", text.lower()))) >= 1500
    assert not re.search(r"[\[\]{}<>|]|a\(n\)|  | [,.?!]", text)


def test_sums_in_the_stories_are_right() -> None:
    """Parsed from: had START things in a bag. ... gave GIVEN things to Y, so X had REST left."""
    value = {number(n): n for n in range(100)}
    text = corpus.take(corpus.TRAIN_SEED, 1_000_000)
    told = re.findall(
        r" had (\S+) \w+(?: in a bag| in a basket|, all counted twice)\. "
        r"(?:[^.]* )?gave (\S+) \w+ to [^,]+, so [^.]* had (\S+) left",
        text,
    )
    assert len(told) >= 20
    assert all(value[start] - value[given] == value[rest] for start, given, rest in told)


def test_pronouns_stand_for_the_last_person_they_fit() -> None:
    """Of two people with the same pronoun, it refers only to the one mentioned last."""
    story = Story(corpus.random.Random(0))
    tom, ben = Person("Tom", "he", "kind"), Person("Ben", "he", "brave")
    for _ in range(50):
        story.say("[A] <see> [B.obj].", A=tom, B=ben)
        story.say("[A] <nod>.", A=tom)
    assert all(sentence == "Tom nodded." for sentence in story.paragraphs[0][1::2])


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("a(n) apple and a(n) pear .", "An apple and a pear."),
        ("a(n) useful uncle met a(n) uncle", "A useful uncle met an uncle"),
        ('"where?" asked Tom. he left', '"Where?" asked Tom. He left'),
    ],
    ids=["article", "sound of u", "capitals"],
)
def test_polish(raw: str, text: str) -> None:
    assert polish(raw) == text


def test_files_fit_together(tinylm: model.TinyLM) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 20_000_000
    assert 5_000_000 <= sum(p.numel() for p in tinylm.parameters()) <= 8_000_000
    assert config["hidden_size"] % 128 == 0
    assert config["intermediate_size"] % 128 == 0
    assert config["vocab_size"] % 64 == 0
    assert config["vocab_size"] == Tokenizer.from_file(str(FOLDER / "tokenizer.json")).get_vocab_size()
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
        assert {file.get_tensor(name).dtype for name in stored} == {torch.bfloat16}
    assert stored == {name: tuple(p.shape) for name, p in tinylm.named_parameters()}


def test_recorded_perplexity_is_true(tinylm: model.TinyLM) -> None:
    recorded = json.loads((FOLDER / "training.jsonl").read_text().splitlines()[-1])
    tokens = evaluate.read_tokens(FOLDER)[: 16 * evaluate.WINDOW]
    assert evaluate.perplexity(tinylm, tokens) == pytest.approx(recorded["slice_perplexity"], rel=1e-2)
    assert recorded["slice_perplexity"] == pytest.approx(recorded["final_perplexity"], rel=0.1)


def test_model_needs_its_context(tinylm: model.TinyLM) -> None:
    """Far better than word frequencies, and clearly better with 512 tokens of context than with 32."""
    tokens = evaluate.read_tokens(FOLDER)[: 4 * evaluate.WINDOW]
    frequency = torch.bincount(tokens).double() / len(tokens)
    unigram = math.exp(-(frequency[frequency > 0] * frequency[frequency > 0].log()).sum().item())
    with torch.no_grad():
        full = tinylm(tokens.view(-1, evaluate.WINDOW)).log_softmax(-1)
        short = tinylm(tokens.view(-1, 32)).log_softmax(-1)
    later = torch.arange(len(tokens) - 1) % 32 >= 8  # predictions with at least eight tokens of context in both
    later &= (torch.arange(len(tokens) - 1) + 1) % 32 != 0
    long_loss, short_loss = (
        -logp.reshape(-1, tinylm.config.vocab_size)[:-1].gather(1, tokens[1:, None])[later].mean().item()
        for logp in (full, short)
    )
    assert math.exp(long_loss) < unigram / 10
    assert long_loss < short_loss - 0.05


def test_spreading_channels_changes_no_bit_of_the_logits(tinylm: model.TinyLM) -> None:
    even = copy.deepcopy(tinylm)
    spread.spread(even, undo=True)
    tokens = evaluate.read_tokens(FOLDER)[None, :100]
    weight, even_weight = (m.model.layers[0].mlp.down_proj.weight.abs() for m in (tinylm, even))
    assert not torch.equal(weight, even_weight)
    with torch.no_grad():
        assert torch.equal(tinylm(tokens), even(tokens))
    # what remains after undoing is more even: channel magnitudes within a row vary less
    assert even_weight.mean(0).log().std() < 0.5 * weight.mean(0).log().std()


def test_batches_go_on_where_they_stopped() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    first, second = itertools.islice(train.batches(tokenizer, skip=0), 2)
    (resumed,) = itertools.islice(train.batches(tokenizer, skip=1), 1)
    assert first.shape == (train.BATCH, train.WINDOW + 1)
    assert torch.equal(resumed, second)
    assert first[-1, -1] == second[0, 0]


def test_readme_states_the_figures_of_the_log() -> None:
    assert report.report(FOLDER) in (REPOSITORY / "examples" / "tinylm" / "README.md").read_text()


def test_transformers_reads_the_folder_alike(tinylm: model.TinyLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run in float32 on the same weights, so logits of size 10 differ only by rounding: 1e-3 is generous."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    text = (FOLDER / "eval.txt").read_text()[:3000]
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids[0]) == text
    peer = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(tinylm(ids[:, :512]), peer(ids[:, :512]).logits, atol=1e-3, rtol=0)
