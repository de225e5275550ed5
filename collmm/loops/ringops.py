"""What the loops share: the own position, slices by shard, and sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from collmm.errors import OptionError
from collmm.ring import Chain, relabelled
from collmm.schedule import Schedule


def position(schedule: Schedule) -> Array:
    """This device's position on the ring, int32; ``OptionError`` if the mesh has another size."""
    size = lax.axis_size(schedule.axes)
    if size != schedule.ring_size:
        raise OptionError(
            f"the schedule is for a ring of {schedule.ring_size}, but the mesh axes "
            f"{schedule.axes} have {size} positions; make the schedule for this mesh"
        )
    return _lookup(_inverse(schedule.order), lax.axis_index(schedule.axes))


def _inverse(order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if order is None else tuple(order.index(i) for i in range(len(order)))


def _lookup(table: tuple[int, ...] | None, index: Array) -> Array:
    """``table[index]``; the index itself without a table."""
    if table is None:
        return index
    values = jnp.asarray(table, index.dtype)
    return lax.dynamic_index_in_dim(values, index, keepdims=False, allow_negative_indices=False)


def send(x: Array, chain: Chain, schedule: Schedule) -> Array:
    """One send of ``chain``."""
    order = schedule.order or range(schedule.ring_size)
    pairs = tuple((order[s], order[d]) for s, d in chain.permutation)
    if len(schedule.axes) == 1:
        return lax.ppermute(x, schedule.axes, pairs)
    # ppermute counts positions in the mesh's own order of axes, whatever order it is given.
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in mesh.axis_names if axis in schedule.axes)
    return lax.ppermute(x, axes, relabelled(pairs, schedule.axes, axes, mesh.shape))


def shard_start(pos: Array, offset: Any, schedule: Schedule, block: int, count: int = 1) -> Array:
    """Where the shard of the member ``offset`` positions on starts, in elements.

    With ``count`` > 1: where the first shard of its group of so many starts.
    """
    n = schedule.ring_size
    # A loop counter may be wider than the position; both operands of rem are non-negative.
    offset = lax.convert_element_type(offset, pos.dtype)
    member = _lookup(schedule.order, lax.rem(pos + offset, pos.dtype.type(n)))
    if count > 1:
        member = member - lax.rem(member, pos.dtype.type(count))
    return member * pos.dtype.type(block)


def take(x: Array, dim: int, start: Any, size: int) -> Array:
    """``x[..., start : start + size, ...]`` at ``dim``."""
    return lax.dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)


def take_apart(x: Array, dim: int, start: Array, size: int) -> Array:
    """``take``, and on a TPU in a kernel of its own.

    Fused into an einsum that sums over ``dim``, libtpu's slice keeps the whole depth in one tile:
    the tile of the result shrinks, and the operands are read that much oftener.
    """
    part = take(x, dim, start, size)
    return lax.platform_dependent(part, tpu=lax.optimization_barrier, default=lambda x: x)


def in_turn(x: Any) -> Any:
    """``x``, and on a GPU nothing that reads any of it starts before all of it is there.

    XLA keeps one permute in flight there, and of an unrolled ring starts the next as soon as it
    can, ahead of the einsums, so that the last ones have nothing to hide; and its dot merger would
    join the einsums.
    """
    wait = lax.optimization_barrier
    return lax.platform_dependent(x, cuda=wait, rocm=wait, default=lambda x: x)


def put(buffer: Array | None, part: Array, dim: int, start: Any, size: int) -> Array:
    """Write ``part`` at ``start`` of ``dim`` of a buffer of ``size``, made here if there is none.

    The buffer starts uninitialised: every element of it is written by the end of the ring, and a
    fill with zeros would be a pass over memory of its own.
    """
    return put_at(buffer, part, ((dim, start, size),))


def slot(member: Array, count: int, block: int) -> Array:
    """Where the shard of ``member`` starts among those of its group of ``count``, in elements."""
    return lax.rem(member, member.dtype.type(count)) * member.dtype.type(block)


Place = tuple[int, Any, int]
"""``(dim, start, size)``: where a slice starts in a dimension, which has ``size`` in all."""


def put_at(buffer: Array | None, part: Array, places: Sequence[Place]) -> Array:
    """``put`` with any number of dimensions in which ``part`` is a slice."""
    if buffer is None:
        shape = list(part.shape)
        for dim, _, size in places:
            shape[dim] = size
        buffer = lax.empty(tuple(shape), part.dtype)
    starts: list[Any] = [0] * part.ndim
    for dim, start, _ in places:
        starts[dim] = start
    dtype = jnp.result_type(*(start for _, start, _ in places))
    starts = [lax.convert_element_type(start, dtype) for start in starts]
    return lax.dynamic_update_slice(buffer, part, starts, allow_negative_indices=False)
