"""Einsums of a ring-gathered operand: the shards travel, and each is multiplied as it arrives.

    gathered = all_gather(shard)              s = shard
    y = dot(gathered, local)        ==>       for i in range(n):
                                                  t = ppermute(s)       # these two do not
                                                  y[s.id] = dot(s, ..)  # depend on each other
                                                  s = t

What travels may be narrower than what is multiplied: with ``unpack``, casts and scales are done on
each shard as it arrives. Any number of einsums share one ring. The gathered label may be free in an
einsum (a slice of the result is written), contracting (the local operand is sliced, and the
products are summed) or batch (the local operand is sliced and a slice of the result is written).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax import Array, lax

from collmm.errors import OptionError
from collmm.loops.partial import PartialEinsum, add
from collmm.loops.ringops import position, put, send, shard_start, take, take_apart
from collmm.ring import Chain, gather_chains
from collmm.schedule import Schedule


@dataclass(frozen=True)
class Consumer:
    """An einsum one of whose operands is gathered: ``gathered_operand`` 0 for lhs, 1 for rhs."""

    partial: PartialEinsum
    gathered_operand: int

    def gathered_labels(self) -> tuple[int, ...]:
        """The labels of the gathered operand."""
        return (self.partial.einsum.lhs, self.partial.einsum.rhs)[self.gathered_operand]

    def local_labels(self) -> tuple[int, ...]:
        """The labels of the operand that stays."""
        return (self.partial.einsum.rhs, self.partial.einsum.lhs)[self.gathered_operand]


def all_gather_einsum(
    shard: Any,
    locals_: Sequence[Array],
    consumers: Sequence[Consumer],
    schedule: Schedule,
    *,
    gathered_dim: int,
    return_gathered: bool = False,
    unpack: Callable[[Any], Array] | None = None,
) -> list[Array]:
    """Einsums of ``all_gather(shard, schedule.axes, axis=gathered_dim, tiled=True)``.

    Runs inside ``shard_map``. ``shard`` is this device's block; ``locals_[k]`` is the other
    operand of ``consumers[k]``, whole in the gathered label where it has it. The blocks are
    joined in the order of the ring positions. One result per consumer, in its ``out_dtype``;
    with ``return_gathered`` the gathered operand itself comes last. All share ``n - 1`` permutes.

    With ``unpack`` the shard is any pytree of arrays, each of which travels, and ``unpack(shard)``
    is the block that is multiplied; it must not depend on which device it is done on.

    Raises ``OptionError`` when the operands do not fit each other or the mesh.
    """
    own = shard if unpack is None else unpack(shard)
    check(own, locals_, consumers, schedule.ring_size, gathered_dim)
    if schedule.ring_size == 1:
        results = [
            consumer.partial.dot(*_ordered(consumer, own, local))
            for consumer, local in zip(consumers, locals_, strict=True)
        ]
        return [*results, own] if return_gathered else results
    ring = Arrivals(
        schedule, tuple(locals_), tuple(consumers), gathered_dim, return_gathered, unpack
    )
    return rounded(go_round(ring, shard), consumers)


def rounded(states: States, consumers: Sequence[Consumer]) -> list[Array]:
    """What a ring has made for its consumers, each in its ``out_dtype``; the rest as it is."""
    return [
        lax.convert_element_type(state, consumer.partial.out_dtype)
        for state, consumer in zip(states, consumers, strict=False)
    ] + list(states[len(consumers) :])


States = tuple[Any, ...]


class Ring(Protocol):
    """What is done with the shards that arrive."""

    @property
    def schedule(self) -> Schedule:
        """How they travel."""

    def first(self, shard: Any, pos: Array) -> tuple[Ring, States]:
        """Make the results, of the own shard; what arrives later goes to the ring given back."""

    def consume(self, states: States, shard: Any, pos: Array, offset: Any) -> States:
        """Add to the results what the shard at ``offset`` is worth."""


def go_round(ring: Ring, shard: Any) -> States:
    """Send ``shard`` round the ring and return the results, sums in their accumulation dtype."""
    run = _unrolled if ring.schedule.unroll else _rolled
    return run(ring, shard, position(ring.schedule))


# Bytes of a sum beyond which libtpu's tiles suffer from a slice that is fused; as seen for v5e,
# where both ways take the same at this size, v5p and v6e. On v4 the fused one is 2 % faster.
_LARGE_SUM = 128 * 2**20


@dataclass(frozen=True)
class Arrivals:
    """What every step needs besides the shard that has arrived, on a ring or from a peer."""

    schedule: Schedule
    locals_: tuple[Array, ...]
    consumers: tuple[Consumer, ...]
    dim: int
    return_gathered: bool
    unpack: Callable[[Any], Array] | None = None

    def first(self, shard: Any, pos: Array) -> tuple[Arrivals, States]:
        """Multiply the own shard, which makes the results."""
        return self, self.consume(self.empty(), shard, pos, 0)

    def empty(self) -> States:
        """No results yet: the first step makes them."""
        return (None,) * (len(self.consumers) + self.return_gathered)

    def consume(self, states: States, shard: Any, pos: Array, offset: Any) -> States:
        """Multiply the shard at ``offset`` with every local operand."""
        shard = shard if self.unpack is None else self.unpack(shard)
        n, block = self.schedule.ring_size, shard.shape[self.dim]
        start = shard_start(pos, offset, self.schedule, block)
        new = [
            self.consume_one(consumer, local, state, shard, start)
            for consumer, local, state in zip(self.consumers, self.locals_, states, strict=False)
        ]
        if self.return_gathered:
            new.append(put(states[-1], shard, self.dim, start, n * block))
        return tuple(new)

    def consume_one(
        self, consumer: Consumer, local: Array, state: Array | None, shard: Array, start: Array
    ) -> Array:
        """Multiply the block at ``start`` with one local operand."""
        partial, block = consumer.partial, shard.shape[self.dim]
        label = consumer.gathered_labels()[self.dim]
        if label in consumer.local_labels():
            cut = take_apart if self._sums_much(consumer, shard, local) else take
            local = cut(local, consumer.local_labels().index(label), start, block)
        operands = _ordered(consumer, shard, local)
        if label not in partial.einsum.out:
            part = partial.partial_sum(*operands)
            return part if state is None else add(state, part)
        size = block * self.schedule.ring_size
        return put(state, partial.dot(*operands), partial.einsum.out.index(label), start, size)

    def _sums_much(self, consumer: Consumer, shard: Array, local: Array) -> bool:
        """Whether every step reads and writes a sum that is too large to stay on a chip."""
        partial = consumer.partial
        label = consumer.gathered_labels()[self.dim]
        if label in partial.einsum.out or not self.schedule.barrier:
            return False
        sizes = dict(zip(consumer.local_labels(), local.shape, strict=True))
        sizes |= dict(zip(consumer.gathered_labels(), shard.shape, strict=True))
        elements = math.prod(sizes[label] for label in partial.einsum.out)
        return elements * partial.accumulation_dtype.itemsize > _LARGE_SUM


def _unrolled(ring: Ring, shard: Any, pos: Array) -> States:
    """Every step written out: the sends of step i first, then the einsums of step i."""
    schedule = ring.schedule
    chains = gather_chains(schedule.ring_size, schedule.two_way)
    held = [shard] * len(chains)
    states: States = ()
    for i in range(chains[0].sends + 1):
        arriving = [
            _send(x, chain, schedule) if i < chain.sends else x
            for x, chain in zip(held, chains, strict=True)
        ]
        if i == 0:  # every chain holds the own shard: multiply it once
            ring, states = ring.first(shard, pos)
        for k, chain in enumerate(chains):
            if 0 < i <= chain.sends:
                states = ring.consume(states, held[k], pos, chain.gathered_offset(i))
        held = arriving
    return states


def _rolled(ring: Ring, shard: Any, pos: Array) -> States:
    """A loop whose program does not grow with the ring; the sends are those of the unrolled one.

    The own shard is peeled off in front (it makes the results, so no buffer is filled first) and
    the last shards behind (nothing is left to send, or one chain has one send more).
    """
    schedule = ring.schedule
    chains = gather_chains(schedule.ring_size, schedule.two_way)
    common = min(chain.sends for chain in chains)

    def arrive(held: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_send(x, c, schedule) for x, c in zip(held, chains, strict=True))

    def consume(states: States, held: tuple[Any, ...], i: Any) -> States:
        for x, chain in zip(held, chains, strict=True):
            states = ring.consume(states, x, pos, chain.gathered_offset(i))
        return states

    def body(i: Array, carry: tuple[tuple[Any, ...], States]) -> Any:
        held, states = carry
        return arrive(held), consume(states, held, i)

    held = arrive((shard,) * len(chains))
    ring, states = ring.first(shard, pos)
    if common > 1:
        held, states = lax.fori_loop(1, common, body, (held, states))
    longest = chains[0]
    extra = [_send(held[0], longest, schedule)] if longest.sends > common else []
    states = consume(states, held, common)
    for x in extra:
        states = ring.consume(states, x, pos, longest.gathered_offset(longest.sends))
    return states


def _send(shard: Any, chain: Chain, schedule: Schedule) -> Any:
    return jax.tree.map(lambda x: send(x, chain, schedule), shard)


def _ordered(consumer: Consumer, gathered: Array, local: Array) -> tuple[Array, Array]:
    return (local, gathered) if consumer.gathered_operand else (gathered, local)


def check(
    shard: Any, locals_: Sequence[Any], consumers: Sequence[Consumer], n: int, dim: int
) -> None:
    """Raise ``OptionError`` where whole local operands do not fit the shard of a ring of ``n``."""
    if len(locals_) != len(consumers):
        raise OptionError(
            f"all_gather_einsum got {len(locals_)} local operands for {len(consumers)} consumers; "
            "give one to each"
        )
    if not 0 <= dim < shard.ndim:
        raise OptionError(f"gathered_dim={dim} is not a dimension of the shard {shard.shape}")
    gathered = (*shard.shape[:dim], n * shard.shape[dim], *shard.shape[dim + 1 :])
    for consumer, local in zip(consumers, locals_, strict=True):
        lhs, rhs = (local.shape, gathered) if consumer.gathered_operand else (gathered, local.shape)
        consumer.partial.einsum.sizes(lhs, rhs)
