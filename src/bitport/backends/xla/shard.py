"""Shard a weight over the devices of a mesh: along N, or along K at group boundaries.

Every function of functions.py can be compiled with sharded arrays; XLA then inserts the communication. This module says
how to shard the parts of a weight, and has a ``linear`` with one kernel per device for what XLA cannot split itself (a
Pallas kernel).

    along "n"   each device has rows of W       y is sharded along N; no communication
    along "k"   each device has columns of W    x is sharded likewise; the float32 sums are all-reduced
"""

from __future__ import annotations

from typing import Any, Literal

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bitport.backends.xla.decode import JaxWeight
from bitport.backends.xla.k_major import NAME
from bitport.backends.xla.products import finish, product, rows_of
from bitport.errors import ArgumentError

Along = Literal["n", "k"]


def check(weight: JaxWeight, devices: int, along: Along) -> None:
    """Raise ArgumentError unless every device gets whole blocks and whole bytes."""
    size, block = (weight.n, weight.block_n) if along == "n" else (weight.k, weight.block_k)
    share = size // devices
    whole = block >= size  # one scale for the whole axis, replicated on every device
    inner = "n" if weight.layout == NAME else "k"
    bits = share * weight.number.bits if along == inner and weight.data.dtype.name == "uint8" else 0
    if size % devices or (not whole and share % block) or bits % 8:
        raise ArgumentError(
            f"{along.upper()}={size} in blocks of {block} cannot be cut over {devices} devices: "
            f"each needs whole blocks and whole bytes"
        )


def specs(weight: JaxWeight, axis: str, along: Along) -> tuple[PartitionSpec | None, ...]:
    """Return how data, scale, zero and scale2 are sharded on the mesh's ``axis``."""
    rows = (along == "n") != (weight.layout == NAME)
    batch = [None] * (weight.data.ndim - 2)

    def spec(part: Array | None) -> PartitionSpec | None:
        if part is None:
            return None
        if part.shape[-2 if rows else -1] == 1:
            return PartitionSpec()
        return PartitionSpec(*batch, axis, None) if rows else PartitionSpec(*batch, None, axis)

    data, scale, zero = (spec(part) for part in weight[:3])
    return data, scale, zero, None if weight.scale2 is None else PartitionSpec()


def put(weight: JaxWeight, mesh: Mesh, axis: str, along: Along) -> JaxWeight:
    """Return the weight with its parts on the devices of the mesh."""
    check(weight, mesh.shape[axis], along)
    data, scale, zero, scale2 = (
        part if part is None else jax.device_put(part, NamedSharding(mesh, spec))
        for part, spec in zip(weight[:4], specs(weight, axis, along), strict=True)
    )
    return weight._replace(data=data, scale=scale, zero=zero, scale2=scale2)


def linear(mesh: Mesh, axis: str, along: Along, x: Array, *rest: Any) -> Array:
    """Compute the op ``linear`` with a sharded weight: one product per device, by the kernel of its platform."""
    *parts, bias = rest
    weight = JaxWeight(*parts)
    devices = mesh.shape[axis]
    check(weight, devices, along)
    share = weight._replace(n=weight.n // devices) if along == "n" else weight._replace(k=weight.k // devices)
    share = share._replace(block_n=min(share.block_n, share.n), block_k=min(share.block_k, share.k))

    def on_one(x: Array, data: Array, scale: Array, zero: Array | None, scale2: Array | None) -> Array:
        y = product(x, share._replace(data=data, scale=scale, zero=zero, scale2=scale2))
        return y if along == "n" else jax.lax.psum(y, axis)

    x_spec = PartitionSpec() if along == "n" else PartitionSpec(None, axis)
    y_spec = PartitionSpec(None, axis) if along == "n" else PartitionSpec()
    y = jax.shard_map(
        on_one, mesh=mesh, in_specs=(x_spec, *specs(weight, axis, along)), out_specs=y_spec, check_vma=False
    )(rows_of(x), *weight[:4])
    return finish(y, x, bias)
