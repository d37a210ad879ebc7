"""A pair: parameters that produce channels, and the weights that consume these. A change of the one that is undone in
the other leaves the model's output as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class ChannelSlice:
    """Elements of a vector or rows of a matrix, one per channel. ``axis``: the axis that they lie along, None for a
    vector. ``offset``: the parameter acts as offset + w."""

    name: str
    axis: int | None
    rows: slice
    offset: float = 0.0

    def of(self, block: nn.Module) -> Tensor:
        """Return a view, not a copy."""
        whole = block.get_parameter(self.name).data
        return whole[..., self.rows, :] if self.axis == -2 else whole[..., self.rows]

    def multiply_(self, block: nn.Module, factors: Tensor) -> None:
        held = self.of(block)
        if self.axis is not None:
            factors = factors.unsqueeze(-1 if self.axis == -2 else -2)
        held.copy_((_precise(held) + self.offset) * factors - self.offset)


@dataclasses.dataclass(frozen=True)
class Consumer:
    """``axis``: the axis of its inputs. ``width``: input channels are runs of this many of the producer's channels,
    each run repeated by the ratio of inputs to channels."""

    name: str
    axis: int
    inputs: int
    width: int

    def channels(self, count: int) -> Tensor:
        """For each input, the channel of the producer that it comes from."""
        runs = torch.arange(count, device="cpu").view(count // self.width, 1, self.width)
        return runs.expand(-1, self.inputs // count, -1).reshape(-1)

    def multiply_(self, block: nn.Module, factors: Tensor) -> None:
        """``factors``: one for each channel of the producer."""
        held = block.get_parameter(self.name).data
        own = factors[..., self.channels(factors.shape[-1]).to(factors.device)]
        held.copy_(_precise(held) * (own.unsqueeze(-2) if self.axis == -1 else own.unsqueeze(-1)))


@dataclasses.dataclass(frozen=True)
class Pair:
    """``count``: number of channels; ``matrices``: the shape of matrices with their own channels, if experts feed
    experts."""

    producer: tuple[ChannelSlice, ...]
    consumers: tuple[Consumer, ...]
    count: int
    matrices: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a scale, channels last."""
        return (*self.matrices, self.count)

    @property
    def names(self) -> list[str]:
        """The names of all its parameters."""
        return list(dict.fromkeys([*(part.name for part in self.producer), *(each.name for each in self.consumers)]))

    @property
    def label(self) -> str:
        first = self.producer[0]
        rows = "" if first.rows == slice(None) else f"[{first.rows.start}:{first.rows.stop}:{first.rows.step or 1}]"
        return f"{first.name}{rows}"

    def storable(self, block: nn.Module, scale: Tensor) -> Tensor:
        """Return the scale that the weight of a norm is effectively divided by once stored, so that consumers take
        exactly that: in bfloat16 the w of 1 + w = 1 / 30 is off by a twentieth. 1 for a channel that would vanish."""
        part = self.producer[0]
        if part.axis is not None:
            return scale
        held = part.of(block)
        before = _precise(held) + part.offset
        after = _precise((before / scale - part.offset).to(held.dtype)) + part.offset
        return torch.where((before == 0) | (after == 0), 1.0, before / after)

    def scale_(self, block: nn.Module, scale: Tensor) -> None:
        """Divide the producer by ``scale`` and multiply the consumers by it."""
        for part in self.producer:
            part.multiply_(block, 1 / scale)
        for consumer in self.consumers:
            consumer.multiply_(block, scale)

    def rotate_(self, block: nn.Module, rotated: Callable[[Tensor, int], Tensor]) -> None:
        """Apply ``rotated`` (weight, axis) to the channels of producer and consumers."""
        for part in self.producer:
            held = part.of(block)
            held.copy_(rotated(held, part.axis or -1))
        for consumer in self.consumers:
            param = block.get_parameter(consumer.name)
            param.data.copy_(rotated(param.data, consumer.axis))


def _precise(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
