"""A Voxtral-shaped program: an audio encoder, a token embedding and a text decoder, with random weights.

It has four methods, as for a runtime without Python: each takes tensors of fixed size, and reads and writes a cache of
fixed size owned by the caller, so that each is a graph. The arithmetic is that of the real models (Whisper's layers;
grouped attention, rotary positions and a gated feed-forward), because the surrounding work determines how visible the
speed of a product is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Sizes:
    frames: int = 1500
    """Positions for half a minute of audio; the decoder gets one for every STACK of them."""
    audio: int = 1280
    audio_heads: int = 20
    audio_inner: int = 5120
    audio_layers: int = 32
    width: int = 3072
    heads: int = 32
    groups: int = 8
    """Key-value heads."""
    head: int = 128
    inner: int = 8192
    layers: int = 30
    words: int = 131072
    length: int = 1024
    """Positions of the cache."""

    @property
    def prompt(self) -> int:
        return self.frames // STACK


STACK = 4
VOXTRAL = Sizes()


class AudioLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.audio
        self.heads = sizes.audio_heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.v, self.out = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, sizes.audio_inner), nn.Linear(sizes.audio_inner, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        y: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return y


class AudioEncoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AudioLayer(sizes) for _ in range(sizes.audio_layers))
        self.norm = nn.LayerNorm(sizes.audio)
        self.join = nn.Linear(STACK * sizes.audio, sizes.width, bias=False)
        self.project = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, frames: Tensor) -> Tensor:
        """[1, frames, audio] -> [1, frames / STACK, width]"""
        for layer in self.layers:
            frames = layer(frames)
        stacked = self.norm(frames).unflatten(1, (-1, STACK)).flatten(2)
        y: Tensor = self.project(F.gelu(self.join(stacked)))
        return y


class TextLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.before, self.between = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.q = nn.Linear(sizes.width, sizes.heads * sizes.head, bias=False)
        self.k, self.v = (nn.Linear(sizes.width, sizes.groups * sizes.head, bias=False) for _ in range(2))
        self.out = nn.Linear(sizes.heads * sizes.head, sizes.width, bias=False)
        self.gate, self.up = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(
        self, x: Tensor, at: Tensor, keys: Tensor, values: Tensor, turn: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        h = self.before(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        keys.index_copy_(2, at, turned(k, turn))
        values.index_copy_(2, at, v)
        mixed = F.scaled_dot_product_attention(turned(q, turn), keys, values, attn_mask=seen, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        h = self.between(x)
        y: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions: rotate each pair (i, i + half) by its angle."""
    low, high = x.chunk(2, -1)
    cos, sin = turn
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class TextDecoder(nn.Module):
    cos: Tensor
    sin: Tensor
    positions: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.layers = nn.ModuleList(TextLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.words = nn.Linear(sizes.width, sizes.words, bias=False)
        self.lay_out(torch.empty(0))

    def lay_out(self, like: Tensor) -> None:
        """Compute buffers that depend on the sizes only; positions stay integers."""
        sizes, device = self.sizes, like.device
        angles = torch.arange(sizes.length)[:, None] / 1e8 ** (torch.arange(0, sizes.head, 2) / sizes.head)
        self.register_buffer("cos", angles.cos().to(like), persistent=False)
        self.register_buffer("sin", angles.sin().to(like), persistent=False)
        self.register_buffer("positions", torch.arange(sizes.length, device=device), persistent=False)

    def cache(self) -> list[Tensor]:
        """Keys and values of every layer, alternating."""
        shape = (1, self.sizes.groups, self.sizes.length, self.sizes.head)
        return [self.cos.new_zeros(shape) for _ in range(2 * len(self.layers))]

    def forward(self, x: Tensor, at: Tensor, cache: list[Tensor]) -> Tensor:
        """Map x [1, n, width] at the positions ``at`` [n] to the logits of the last, [1, words]."""
        turn = self.cos[at], self.sin[at]
        seen = self.positions <= at[:, None]
        for layer, keys, values in zip(self.layers, cache[::2], cache[1::2], strict=True):
            x = layer(x, at, keys, values, turn, seen)
        y: Tensor = self.words(self.norm(x[:, -1]))
        return y


class Program(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.audio_encoder = AudioEncoder(sizes)
        self.token_embedding = nn.Embedding(sizes.words, sizes.width)
        self.text_decoder = TextDecoder(sizes)


Treat = Callable[[str, nn.Module], None]


def program(sizes: Sizes, device: torch.device, treat: Treat | None = None) -> Program:
    """Build the program in bfloat16, with the same weights for the same sizes. ``treat`` receives the name and module
    of each layer as soon as it has its weights, and may replace them: when quantizing, only one full layer exists at a
    time."""
    with torch.device("meta"):
        made = Program(sizes).to(torch.bfloat16).eval().requires_grad_(False)
    for at, (name, module) in enumerate(made.named_modules()):
        if next(module.parameters(recurse=False), None) is None:
            continue
        module.to_empty(device=device, recurse=False)
        fill(module, at)
        if treat:
            treat(name, module)
    made.text_decoder.lay_out(torch.empty(0, dtype=torch.bfloat16, device=device))
    return made


def fill(module: nn.Module, seed: int) -> None:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        module.reset_parameters()
        return
    for parameter in module.parameters(recurse=False):
        generator = None if parameter.is_meta else torch.Generator(parameter.device).manual_seed(seed)
        parameter.normal_(0.0, 0.02, generator=generator)


def inputs(made: Program, device: torch.device) -> dict[str, tuple[Tensor, ...]]:
    """Method -> its input tensors: half a minute of audio, its prompt, one more token. Caches are not included."""
    sizes = made.sizes
    generator = torch.Generator().manual_seed(0)
    frames = torch.randn(1, sizes.frames, sizes.audio, generator=generator).to(device, torch.bfloat16)
    ids = torch.randint(sizes.words, (1, sizes.prompt), generator=generator).to(device)
    prompt = torch.randn(1, sizes.prompt, sizes.width, generator=generator).to(device, torch.bfloat16)
    return {
        "audio_encoder": (frames,),
        "token_embedding": (ids,),
        "text_prefill": (prompt, torch.arange(sizes.prompt, device=device)),
        "text_decode": (prompt[:, -1].clone()[:, None], torch.full((1,), sizes.prompt, device=device)),
    }


def module_of(made: Program, method: str) -> nn.Module:
    return made.get_submodule("text_decoder" if method.startswith("text_") else method)


def methods(made: Program, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Name -> the method bound to its inputs; those of the decoder share a cache."""
    cache = made.text_decoder.cache()

    def call(method: str, given: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        module = module_of(made, method)
        return lambda: module(*given, *([cache] if method.startswith("text_") else []))

    return {method: call(method, given) for method, given in inputs(made, device).items()}
