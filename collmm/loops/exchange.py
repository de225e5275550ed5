"""All-to-all and einsum, split by peer: a block is multiplied as it arrives, or sent as it is done.

Device p sends block q of its operand straight to device q, one permute per distance. Nothing is
passed on, so every permute is independent of every other and of the einsums of other blocks.
"""

from __future__ import annotations

from jax import Array, lax

from collmm.errors import OptionError
from collmm.loops.gather import Arrivals, Consumer
from collmm.loops.partial import PartialEinsum
from collmm.loops.ringops import position, put, send, shard_start, take
from collmm.ring import Chain
from collmm.schedule import Schedule


def all_to_all_einsum(
    moved: Array,
    local: Array,
    consumer: Consumer,
    schedule: Schedule,
    *,
    split_dim: int,
    join_dim: int,
) -> Array:
    """The einsum of ``all_to_all(moved, axes, split_axis, concat_axis, tiled=True)``.

    Runs inside ``shard_map``. ``moved`` is this device's operand before the exchange: whole in
    ``split_dim``, a shard in ``join_dim``; after it, it is the other way round. ``local`` is the
    other operand, whole in the label of ``join_dim`` where it has it. The result is in the user's
    dtype; ``n - 1`` permutes.

    Raises ``OptionError`` when ``split_dim`` does not divide.
    """
    n = schedule.ring_size
    size = _block(moved, split_dim, n, "split_dim")
    if n == 1:
        return consumer.partial.dot(*_ordered(consumer, moved, local))
    pos = position(schedule)
    arrivals = Arrivals(schedule, (local,), (consumer,), join_dim, False)
    states = arrivals.empty()
    for distance in range(n):
        block = take(moved, split_dim, shard_start(pos, distance, schedule, size), size)
        arrived = _to_peer(block, distance, schedule)
        # What arrives over ``distance`` comes from that many positions before this one.
        joined = arrived.shape[join_dim]
        start = shard_start(pos, n - distance, schedule, joined)
        states = arrivals.consume(states, arrived, start, n * joined)
    return lax.convert_element_type(states[0], consumer.partial.out_dtype)


def einsum_all_to_all(
    lhs: Array,
    rhs: Array,
    partial: PartialEinsum,
    schedule: Schedule,
    *,
    split_dim: int,
    join_dim: int,
) -> Array:
    """``all_to_all(einsum(lhs, rhs), axes, split_axis, concat_axis, tiled=True)``.

    Runs inside ``shard_map``. ``split_dim`` and ``join_dim`` are dimensions of the result: the
    first is whole before the exchange and a shard after it, the second the other way round. The
    label of ``split_dim`` is free or batch; each block of it is computed by itself and sent.
    """
    n = schedule.ring_size
    einsum = partial.einsum
    label = einsum.out[split_dim]
    holder = (lhs, einsum.lhs) if label in einsum.lhs else (rhs, einsum.rhs)
    size = _block(holder[0], holder[1].index(label), n, "split_dim")
    if n == 1:
        return partial.dot(lhs, rhs)
    pos = position(schedule)
    result = None
    for distance in range(n):
        start = shard_start(pos, distance, schedule, size)
        operands = [
            take(x, labels.index(label), start, size) if label in labels else x
            for x, labels in ((lhs, einsum.lhs), (rhs, einsum.rhs))
        ]
        part = _to_peer(partial.dot(*operands), distance, schedule)
        joined = part.shape[join_dim]
        at = shard_start(pos, n - distance, schedule, joined)
        result = put(result, part, join_dim, at, n * joined)
    assert result is not None
    return result


def _to_peer(block: Array, distance: int, schedule: Schedule) -> Array:
    """Send to the device ``distance`` positions on; distance 0 stays here."""
    if distance == 0:
        return block
    n = schedule.ring_size
    return send(block, Chain(n, distance, 1), schedule)


def _block(x: Array, dim: int, n: int, name: str) -> int:
    if x.shape[dim] % n:
        raise OptionError(
            f"{name}={dim} of an operand of shape {x.shape} does not divide into {n} blocks"
        )
    return x.shape[dim] // n


def _ordered(consumer: Consumer, moved: Array, local: Array) -> tuple[Array, Array]:
    return (local, moved) if consumer.gathered_operand else (moved, local)
