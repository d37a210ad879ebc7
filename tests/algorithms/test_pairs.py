"""Pairs that can share a scale: found in every kind of model, and only where they exist."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.algorithms.block import Block
from bitport.algorithms.pair import Pair
from bitport.algorithms.pairs import find_pairs, shared_parameters
from bitport.algorithms.trial import Trial
from bitport.calibrate.batches import Call
from bitport.numerics import sqnr

from .families import CONFIGS, calls_of, model_of, output

ATTENTION = {
    "input_layernorm.weight -> self_attn.k_proj.weight self_attn.q_proj.weight self_attn.v_proj.weight",
    "self_attn.v_proj.weight -> self_attn.o_proj.weight",
}
GATED = {
    "post_attention_layernorm.weight -> mlp.gate_proj.weight mlp.up_proj.weight",
    "mlp.up_proj.weight -> mlp.down_proj.weight",
}
ROUTED = {
    "post_attention_layernorm.weight -> mlp.experts.gate_up_proj mlp.gate.weight",
}

EXPECTED: dict[str, set[str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), ATTENTION | GATED),
    "gemma2": ATTENTION
    | {
        "pre_feedforward_layernorm.weight -> mlp.gate_proj.weight mlp.up_proj.weight",
        "mlp.up_proj.weight -> mlp.down_proj.weight",
    },
    "phi": {
        "input_layernorm.weight -> mlp.fc1.weight self_attn.k_proj.weight self_attn.q_proj.weight "
        "self_attn.v_proj.weight",
        "self_attn.v_proj.weight -> self_attn.dense.weight",
    },
    "phi3": {
        "input_layernorm.weight -> self_attn.qkv_proj.weight",
        "post_attention_layernorm.weight -> mlp.gate_up_proj.weight",
        "self_attn.qkv_proj.weight[96:128:1] -> self_attn.o_proj.weight",
        "mlp.gate_up_proj.weight[96:192:1] -> mlp.down_proj.weight",
    },
    "olmo2": {"self_attn.v_proj.weight -> self_attn.o_proj.weight", "mlp.up_proj.weight -> mlp.down_proj.weight"},
    "gpt2": {
        "ln_1.weight -> attn.c_attn.weight",
        "ln_2.weight -> mlp.c_fc.weight",
        "attn.c_attn.weight[128:192:1] -> attn.c_proj.weight",
    },
    "opt": {
        "self_attn_layer_norm.weight -> self_attn.k_proj.weight self_attn.q_proj.weight self_attn.v_proj.weight",
        "final_layer_norm.weight -> fc1.weight",
        "self_attn.v_proj.weight -> self_attn.out_proj.weight",
        "fc1.weight -> fc2.weight",
    },
    "bert": {"attention.self.value.weight -> attention.output.dense.weight"},
    "whisper": {
        "self_attn_layer_norm.weight -> self_attn.k_proj.weight self_attn.q_proj.weight self_attn.v_proj.weight",
        "final_layer_norm.weight -> fc1.weight",
        "self_attn.v_proj.weight -> self_attn.out_proj.weight",
    },
    "mixtral": ATTENTION | ROUTED | {"mlp.experts.gate_up_proj[96:192:1] -> mlp.experts.down_proj"},
    "qwen3-moe": ATTENTION | ROUTED | {"mlp.experts.gate_up_proj[32:64:1] -> mlp.experts.down_proj"},
    "gpt-oss": ATTENTION | {"post_attention_layernorm.weight -> mlp.experts.gate_up_proj mlp.router.weight"},
    "deepseek": {
        "input_layernorm.weight -> self_attn.kv_a_proj_with_mqa.weight self_attn.q_a_proj.weight",
        "self_attn.q_a_layernorm.weight -> self_attn.q_b_proj.weight",
        "self_attn.kv_a_layernorm.weight -> self_attn.kv_b_proj.weight",
        "post_attention_layernorm.weight -> mlp.experts.gate_up_proj mlp.gate.weight "
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
        "mlp.experts.gate_up_proj[32:64:1] -> mlp.experts.down_proj",
        "mlp.shared_experts.up_proj.weight -> mlp.shared_experts.down_proj.weight",
    },
}
"""Pairs of the first block. Each missing pair has a reason: a GELU or a clamp in between (fc1 and fc2, gpt-oss), a norm
that also feeds the residual (BERT), no norm before (OLMo 2), values interleaved with other rows of one matrix
(DeepSeek)."""


def described(pair: Pair) -> str:
    return f"{pair.label} -> {' '.join(sorted(consumer.name for consumer in pair.consumers))}"


@pytest.mark.parametrize("name", CONFIGS)
def test_pairs_of_a_family(name: str) -> None:
    """The expected pairs are found in the first block, and random scales in all blocks leave the model's output
    unchanged.

    Each float32 step has a relative error of at most 2^-25; a hundred such errors in a row, of one sign, would still be
    110 dB away.
    """
    model = model_of(name)
    before = output(model, name)
    calls = calls_of(model, name)
    for at, (block, args, kwargs) in enumerate(calls):
        module = model.get_submodule(block)
        pairs, doubts = find_pairs(Trial(module, [Call(args, kwargs)]), shared_parameters(model, block))
        assert doubts == {}
        if at == 0:
            assert {described(pair) for pair in pairs} == EXPECTED[name]
        for pair in pairs:
            pair.scale_(module, torch.randn(pair.shape).clamp(-2, 2).exp())
    assert sqnr(before, output(model, name)) > 110


class Gated(nn.Module):
    """``between``: what happens to the product before the last layer."""

    def __init__(self, between: str = "") -> None:
        super().__init__()
        self.norm, self.between = nn.LayerNorm(16), between
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.other = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        y = F.silu(self.gate(seen)) * self.up(seen)
        if self.between == "limit":
            y = y.clamp(-4, 4)
        if self.between == "norm":
            y = F.layer_norm(y, (24,))
        result = x + self.down(y)
        return result + seen if self.between == "norm goes on" else result


def pairs_of(module: nn.Module, **options: object) -> set[str]:
    pairs, _ = find_pairs(Trial(module, [torch.randn(30, 16)]), **options)  # type: ignore[arg-type]
    return {described(pair) for pair in pairs}


NORM, UP = "norm.weight -> gate.weight up.weight", "up.weight -> down.weight"


@pytest.mark.parametrize(
    ("between", "expected"),
    [("", {NORM, UP}), ("limit", {NORM}), ("norm", {NORM}), ("norm goes on", {UP})],
    ids=["plain", "a limit that data do not reach", "a norm", "a norm that feeds the residual"],
)
def test_what_would_change_the_output_is_no_pair(between: str, expected: set[str]) -> None:
    torch.manual_seed(0)
    module = Gated(between)
    del module.other  # it is never reached, which would make all pairs doubtful
    assert pairs_of(module) == expected


def test_a_weight_that_is_never_reached_casts_doubt() -> None:
    torch.manual_seed(0)
    pairs, doubts = find_pairs(Trial(Gated(), [torch.randn(30, 16)]))
    assert {described(pair) for pair in pairs} == {UP}
    assert set(doubts) == {"gate.weight", "up.weight"}
    assert "norm.weight may feed other.weight too, which calibration never reached" in doubts["up.weight"]


def test_parameters_that_are_used_elsewhere_stay() -> None:
    torch.manual_seed(0)
    first, second = Gated(), Gated()
    model = nn.ModuleDict({"layers": nn.ModuleList([first, second])})
    del first.other
    second.down.weight = first.down.weight
    fixed = shared_parameters(model, "layers.0")
    assert fixed == {"down.weight"}
    assert pairs_of(first, fixed=fixed) == {NORM}


class Tied(nn.Module):
    """Queries and keys share one weight; with ``norms``, so do both norms."""

    def __init__(self, norms: bool = False) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.q, self.k, self.o = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)
        self.k.weight = self.q.weight
        if norms:
            self.norm2.weight = self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        x = x + self.o(torch.softmax(self.q(seen) @ self.k(seen).mT, -1) @ seen)
        return x + self.down(self.up(self.norm2(x)))


def test_a_weight_tied_within_a_block_and_beyond_it_stays() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Tied(), Tied()), torch.randn(30, 16)
    model[1].q.weight = model[1].k.weight = model[0].q.weight
    assert shared_parameters(model, "0") == {"q.weight", "k.weight"}
    before = model(x)
    pairs, _ = find_pairs(Trial(model[0], [x]), shared_parameters(model, "0"))
    assert {described(pair) for pair in pairs} == {"norm2.weight -> up.weight", "up.weight -> down.weight"}
    with torch.no_grad():
        for pair in pairs:
            pair.scale_(model[0], torch.randn(pair.shape).exp())
    assert sqnr(before, model(x)) > 110


@pytest.mark.parametrize("algorithm", ["awq", "smooth", "smooth+gptq", "rotate"])
@pytest.mark.parametrize("scheme", ["int8-dyn", "int8-static"])
@pytest.mark.parametrize("norms", [False, True], ids=["weights", "and norms"])
def test_tied_within_a_block(norms: bool, scheme: str, algorithm: str) -> None:
    """Rounding to 8 bits has an error of 1 / 127 / sqrt(12) of the row's maximum: 40 dB below a row whose maximum is
    four times its mean size. 30 dB leave room for ten such errors."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Tied(norms), Tied(norms)), torch.randn(64, 16)
    before = model(x)
    report = bitport.quantize_(model, scheme, algorithm=algorithm, calibrate=[x])
    assert all(layer.scheme for layer in report.layers)
    for block in model:
        assert block.q.weight is block.k.weight
    assert sqnr(before, model(x)) > 30


def test_trying_leaves_the_block_as_it_was() -> None:
    torch.manual_seed(0)
    module = Gated().half()
    before = {name: param.clone() for name, param in module.named_parameters()}
    trial = Trial(module, [torch.randn(30, 16)])
    find_pairs(trial)
    for name, param in module.named_parameters():
        assert param.dtype == torch.float16
        assert torch.equal(param, before[name])
        assert torch.equal(trial.block.get_parameter(name), before[name].float())


def test_more_batches_are_tried_until_every_weight_is_reached() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.experts[int(x[0, 0] > 0)](self.norm(x))

    torch.manual_seed(0)
    batches = [-torch.rand(3, 8), -torch.rand(3, 8), torch.rand(3, 8)]
    pairs, doubts = find_pairs(Trial(module := Routed(), batches))
    assert [described(pair) for pair in pairs] == ["norm.weight -> experts.0.weight experts.1.weight"]
    assert find_pairs(Trial(module, batches[:2]))[0] == []
    assert doubts == {}


class OnePlus(nn.Module):
    """Computes with 1 + w, as Gemma's norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.linspace(-1, 1, 16)), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(F.rms_norm(x, (16,)) * (1 + self.weight))


def test_consumers_take_the_scale_that_the_stored_norm_has() -> None:
    """Next to -1, bfloat16 holds w in steps of 2^-8. What remains is the rounding of the layer's weights, at most 2^-9
    of each: 54 dB below the product."""
    torch.manual_seed(0)
    module, x = OnePlus().bfloat16(), torch.randn(30, 16)
    exact = copy.deepcopy(module).float()(x) - x
    block = Block(module, {}, [x])
    (pair,) = block.pairs
    block.scale_(pair, torch.linspace(1, 900, 16).flip(0))
    assert sqnr(exact, copy.deepcopy(module).float()(x) - x) > 54
    assert sqnr(exact, block.trial.block(x) - x) > 54


class Expert(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.w, self.limit = nn.ModuleList([nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)]), limit

    def forward(self, x: Tensor) -> Tensor:
        return self.w[2]((F.silu(self.w[0](x)) * self.w[1](x)).clamp(-self.limit, self.limit))


class Routed(nn.Module):
    """Each expert gets some of the rows; the expert ``limited`` clamps."""

    def __init__(self, count: int, limited: int | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.experts = nn.ModuleList(Expert(4.0 if at == limited else torch.inf) for at in range(count))

    def forward(self, x: Tensor) -> Tensor:
        seen, y = self.norm(x), torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            y[at :: len(self.experts)] += expert(seen[at :: len(self.experts)])
        return x + y


@pytest.mark.parametrize("limited", [None, 0, 3])
def test_experts_are_told_apart(limited: int | None) -> None:
    torch.manual_seed(0)
    every = " ".join(f"experts.{at}.w.{layer}.weight" for at in range(5) for layer in (0, 1))
    found = {f"experts.{at}.w.1.weight -> experts.{at}.w.2.weight" for at in range(5) if at != limited}
    assert pairs_of(Routed(5, limited)) == found | {f"norm.weight -> {every}"}


def test_more_experts_take_no_more_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Trial] = []
    run = Trial.run
    monkeypatch.setattr(Trial, "run", lambda trial: (runs.append(trial), run(trial))[1])
    counts = []
    for experts in (2, 9):
        pairs_of(Routed(experts))
        counts.append(len(runs))
        runs.clear()
    assert counts[0] == counts[1] > 0
