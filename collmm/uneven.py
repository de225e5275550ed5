"""Uneven shards: pad what does not divide, run on the padded shards, cut the results back.

    t[17@m, 8]                       t[17@m, 8]        m of 4: shards of 5, 5, 5 and 2 rows
                                     u = pad t         [20@m, 8]
    y = einsum(x, t)  # t gathered   z = ring(x, u)    each device multiplies shards of 5 rows
                                     y = slice z       the user's shape again

A compiler that shards 17 rows over 4 devices gives each 5, of which the last hold padding. Padding
to the same 20 moves nothing between devices, and neither does the slice. Zeros are padded, so that
a sum over the dimension stays what it was; in other dimensions they make results that are cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from collmm import _jax
from collmm.sites import Spec

Dims = tuple[Hashable, ...]
"""A name per dimension of a value; equal names are one dimension, in every operand and result."""


def pspec(spec: Spec) -> PartitionSpec:
    """Return ``spec`` as jax spells it."""
    return PartitionSpec(*(axes if axes else None for axes in spec))


def on_shards(
    body: Callable,
    mesh: Any,
    operands: Sequence[jax.Array],
    ins: Sequence[tuple[Dims, Spec]],
    outs: Sequence[tuple[Dims, Spec]],
) -> list[jax.Array]:
    """Run ``body`` on every device's shards of whole values, padded where they do not divide.

    Args:
      body: of one shard per operand; returns a list of one shard per result.
      mesh: a ``jax.sharding.Mesh`` or ``AbstractMesh``; ``body`` is manual over all its axes.
      operands: whole values of any shape.
      ins: per operand the names of its dimensions and their mesh axes.
      outs: the same per result; every name is one of an operand's.

    Returns:
      The whole results, of the sizes that their dimensions have in ``operands``.
    """
    sizes = {
        dim: size
        for x, (dims, _) in zip(operands, ins, strict=True)
        for dim, size in zip(dims, x.shape, strict=True)
    }
    padded = _padded_sizes(sizes, (*ins, *outs), dict(mesh.shape))
    given = [_pad(x, *named, padded, mesh) for x, named in zip(operands, ins, strict=True)]
    in_specs = tuple(pspec(spec) for _, spec in ins)
    out_specs = [pspec(spec) for _, spec in outs]
    results = _jax.shard_map_all(body, mesh, in_specs, out_specs)(*given)
    return [_cut(x, *named, sizes, mesh) for x, named in zip(results, outs, strict=True)]


def uneven_dims(shape: Sequence[int], spec: Spec, mesh: Any) -> list[int]:
    """Return the dimensions of a value sharded by ``spec`` that are padded."""
    padded = _padded_sizes(dict(enumerate(shape)), [(tuple(range(len(shape))), spec)], mesh.shape)
    return [d for d, size in enumerate(shape) if padded[d] != size]


def _padded_sizes(
    sizes: Mapping[Hashable, int],
    named: Sequence[tuple[Dims, Spec]],
    axis_sizes: Mapping[str, int],
) -> dict[Hashable, int]:
    """Return every dimension's least size that divides by all of its shardings."""
    shards = dict.fromkeys(sizes, 1)
    for dims, spec in named:
        for dim, axes in zip(dims, spec, strict=True):
            shards[dim] = math.lcm(shards[dim], math.prod(axis_sizes[a] for a in axes))
    return {dim: -(-size // shards[dim]) * shards[dim] for dim, size in sizes.items()}


def _pad(x: jax.Array, dims: Dims, spec: Spec, padded: Mapping[Hashable, int], mesh: Any) -> Any:
    missing = [padded[dim] - size for dim, size in zip(dims, x.shape, strict=True)]
    if not any(missing):
        return x
    # The constraint first: what is padded is the shard, not the whole value.
    x = _placed(x, spec, mesh)
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, more, 0) for more in missing])


def _cut(x: jax.Array, dims: Dims, spec: Spec, sizes: Mapping[Hashable, int], mesh: Any) -> Any:
    shape = tuple(sizes[dim] for dim in dims)
    if x.shape == shape:
        return x
    return _placed(lax.slice(x, (0,) * x.ndim, shape), spec, mesh)


def _placed(x: jax.Array, spec: Spec, mesh: Any) -> jax.Array:
    sharding = NamedSharding(_jax.auto_mesh(mesh), pspec(spec))
    return lax.with_sharding_constraint(x, sharding)
