"""A Llama in plain PyTorch. Parameter names are those of Hugging Face checkpoints, so files need no conversion."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


HUGGING_FACE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i+d/2}) of a head by the position times theta^(-2i/d)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@torch.compiler.disable
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(d)) v, written out: in bf16 on a CPU this trains faster than the fused operator."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    future = torch.full((q.shape[2], q.shape[2]), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + future).softmax(-1, dtype=q.dtype) @ v


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (p.view(batch, length, -1, self.head_dim).transpose(1, 2) for p in projected)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        return self.o_proj(attend(q, k, v).transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angle = torch.outer(torch.arange(c.max_position_embeddings), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.get_buffer("cos")[: tokens.shape[1]], self.get_buffer("sin")[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class TinyLM(nn.Module):
    """tokens [batch, length] -> logits [batch, length, vocabulary]; the output head is the embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        residual_writers = ("o_proj", "down_proj")
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = (2 * config.num_hidden_layers) ** -0.5 if any(w in name for w in residual_writers) else 1.0
                nn.init.normal_(p, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.model(tokens), self.model.embed_tokens.weight)


def save(model: TinyLM, folder: Path) -> None:
    """Write weights in bf16 and the configuration that Hugging Face readers need."""
    config = {**HUGGING_FACE, **asdict(model.config)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {name: p.to(torch.bfloat16) for name, p in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> TinyLM:
    stored = json.loads((folder / "config.json").read_text())
    model = TinyLM(Config(**{k: stored[k] for k in asdict(Config())}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(dtype).eval()
