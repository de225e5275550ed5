"""Einsums of a ring-gathered operand: the shards travel, and each is multiplied as it arrives.

    gathered = all_gather(shard)              s = shard
    y = dot(gathered, local)        ==>       for i in range(n):
                                                  t = ppermute(s)       # these two do not
                                                  y[s.id] = dot(s, ..)  # depend on each other
                                                  s = t

A schedule with ``chains`` cuts every shard along the gathered dimension: each piece travels all the
way by itself and is multiplied as it arrives, so that the ring ends with the einsum of a piece::

    for i in range(n):
        ta, tb = ppermute(sa), ppermute(sb)     # two-way, one each way
        y[sa.id] = dot(sa, ..); y[sb.id] = dot(sb, ..)
        sa, sb = ta, tb

With ``shards_per_step`` of g, g neighbours put their shards together first, and g shards travel and
are multiplied at a time, in n / g steps::

    for j in range(g - 1):  # within a group
        s = ppermute(s);  S[s.id] = s
    for i in range(n / g):  # from group to group
        T = ppermute(S);  y[S.ids] = dot(S, ..);  S = T

Nothing hides the permutes within the group: to multiply the own shard meanwhile costs more, since
it makes one large einsum into g small ones.

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
from collmm.loops.ringops import in_turn, position, put, send, shard_start, slot, take, take_apart
from collmm.ring import GroupChain, Part, gather_parts
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
    shard_dims: Any = None,
) -> list[Array]:
    """Einsums of ``all_gather(shard, schedule.axes, axis=gathered_dim, tiled=True)``.

    Runs inside ``shard_map``. ``shard`` is this device's block; ``locals_[k]`` is the other
    operand of ``consumers[k]``, whole in the gathered label where it has it. The blocks are
    joined in the order of the ring positions. One result per consumer, in its ``out_dtype``;
    with ``return_gathered`` the gathered operand itself comes last. All share ``n - 1`` permutes,
    of each piece where the schedule cuts the shards.

    With ``unpack`` the shard is any pytree of arrays, each of which travels, and ``unpack(shard)``
    is the block that is multiplied; it must not depend on which device it is done on, and of a
    piece of the shard must make that piece of the block. ``shard_dims``, a pytree like the shard,
    says which dimension of each array runs along the gathered one; ``gathered_dim`` by default.

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
    dims = gathered_dim if shard_dims is None else shard_dims
    return rounded(go_round(ring, shard, dims), consumers)


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

    def first(self, shard: Any, start: Array, size: int) -> tuple[Ring, States]:
        """Make the results, of the own shard; what arrives later goes to the ring given back."""

    def consume(self, states: States, piece: Any, start: Array, size: int) -> States:
        """Add to the results what the piece at ``start`` is worth, of a dimension of ``size``."""


def go_round(ring: Ring, shard: Any, dims: Any) -> States:
    """Send ``shard`` round the ring and return the results, sums in their accumulation dtype.

    ``dims``: the gathered dimension of the shard, or of each of its arrays.
    """
    schedule = ring.schedule
    if isinstance(dims, int):
        dims = jax.tree.map(lambda _: dims, shard)
    x, dim = jax.tree.leaves(shard)[0], jax.tree.leaves(dims)[0]
    pos, block, g = position(schedule), x.shape[dim], schedule.shards_per_step
    parts = gather_parts(schedule.ring_size, schedule.two_way, block, schedule.chunks, g)
    trip = _Trip(schedule, pos, parts, block, dims)
    if g > 1:
        shard = _together(shard, dims, schedule, pos)
    run = _unrolled if schedule.unroll else _rolled
    return run(ring, shard, trip)


def _together(shard: Any, dims: Any, schedule: Schedule, pos: Array) -> Any:
    """The shards of the own group in one, on each of its members."""
    g = schedule.shards_per_step
    chain = GroupChain(schedule.ring_size, -1, g - 1)
    group = jax.tree.map(lambda _: None, shard)
    for i in range(g):
        member = shard_start(pos, chain.within(pos, i), schedule, 1)
        group = jax.tree.map(
            lambda x, d, whole, member=member: put(
                whole, x, d, slot(member, g, x.shape[d]), g * x.shape[d]
            ),
            shard,
            dims,
            group,
        )
        if i < chain.sends:
            shard = jax.tree.map(lambda x: send(x, chain, schedule), shard)
    return group


@dataclass(frozen=True)
class _Trip:
    """What travels on a ring, and where it belongs when it arrives.

    Attributes:
      schedule: how the ring runs.
      pos: this device's position on it.
      parts: what travels of every shard, each by itself.
      block: the size of a shard in the gathered dimension.
      dims: that dimension of each of the shard's arrays.
    """

    schedule: Schedule
    pos: Array
    parts: tuple[Part, ...]
    block: int
    dims: Any

    def pieces(self, shard: Any) -> tuple[Any, ...]:
        """The parts of the own shard."""

        def cut(part: Part) -> Any:
            if part.size == self.block * self.schedule.shards_per_step:
                return shard
            at = part.start, part.start + part.size
            return jax.tree.map(lambda x, d: lax.slice_in_dim(x, *at, axis=d), shard, self.dims)

        return tuple(cut(part) for part in self.parts)

    def send(self, piece: Any, part: Part) -> Any:
        """Send a piece on."""
        return jax.tree.map(lambda x: send(x, part.chain, self.schedule), piece)

    def own(self) -> tuple[Array, int]:
        """Where the own shard starts in the gathered dimension, and the size of that."""
        return self._place(0, 0)

    def place(self, part: Part, i: Any) -> tuple[Array, int]:
        """The same of the part that is here after ``i`` sends."""
        return self._place(part.chain.gathered_offset(i), part.start)

    def _place(self, offset: Any, within: int) -> tuple[Array, int]:
        count = self.schedule.shards_per_step
        start = shard_start(self.pos, offset, self.schedule, self.block, count)
        start = start + start.dtype.type(within) if within else start
        return start, self.block * self.schedule.ring_size


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

    def first(self, shard: Any, start: Array, size: int) -> tuple[Arrivals, States]:
        """Multiply the own shard, which makes the results."""
        return self, self.consume(self.empty(), shard, start, size)

    def empty(self) -> States:
        """No results yet: the first step makes them."""
        return (None,) * (len(self.consumers) + self.return_gathered)

    def consume(self, states: States, piece: Any, start: Array, size: int) -> States:
        """Multiply the piece at ``start`` with every local operand."""
        piece = piece if self.unpack is None else self.unpack(piece)
        new = [
            self.consume_one(consumer, local, state, piece, (start, size))
            for consumer, local, state in zip(self.consumers, self.locals_, states, strict=False)
        ]
        if self.return_gathered:
            new.append(put(states[-1], piece, self.dim, start, size))
        return tuple(new)

    def consume_one(
        self,
        consumer: Consumer,
        local: Array,
        state: Array | None,
        shard: Array,
        place: tuple[Array, int],
    ) -> Array:
        """Multiply what lies at ``place``, (start, whole size), with one local operand."""
        partial, block = consumer.partial, shard.shape[self.dim]
        start, size = place
        label = consumer.gathered_labels()[self.dim]
        if label in consumer.local_labels():
            cut = take_apart if self._sums_much(consumer, shard, local) else take
            local = cut(local, consumer.local_labels().index(label), start, block)
        operands = _ordered(consumer, shard, local)
        if label not in partial.einsum.out:
            part = partial.partial_sum(*operands)
            return part if state is None else add(state, part)
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


def _unrolled(ring: Ring, shard: Any, trip: _Trip) -> States:
    """Every step written out: the sends of step i first, then the einsums of step i."""
    held = trip.pieces(shard)
    states: States = ()
    schedule, sends = trip.schedule, max(part.chain.sends for part in trip.parts)
    for i in range(sends + 1):
        arriving = tuple(
            trip.send(x, part) if i < part.chain.sends else x
            for x, part in zip(held, trip.parts, strict=True)
        )
        if i == 0:  # the own shard, in one einsum
            ring, states = ring.first(shard, *trip.own())
        for x, part in zip(held, trip.parts, strict=True):
            if 0 < i <= part.chain.sends:
                states = ring.consume(states, x, *trip.place(part, i))
        held = arriving
        if schedule.barrier and i < sends:
            held, states = in_turn((held, states))
    return states


def _rolled(ring: Ring, shard: Any, trip: _Trip) -> States:
    """A loop whose program does not grow with the ring; the sends are those of the unrolled one.

    The own shard is peeled off in front (it makes the results, so no buffer is filled first) and
    the last shards behind (nothing is left to send, or one chain has one send more).
    """
    parts = trip.parts
    common = min(part.chain.sends for part in parts)

    def arrive(held: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(trip.send(x, part) for x, part in zip(held, parts, strict=True))

    def consume(states: States, held: tuple[Any, ...], i: Any) -> States:
        for x, part in zip(held, parts, strict=True):
            states = ring.consume(states, x, *trip.place(part, i))
        return states

    def body(i: Array, carry: tuple[tuple[Any, ...], States]) -> Any:
        held, states = carry
        return arrive(held), consume(states, held, i)

    held = arrive(trip.pieces(shard))
    ring, states = ring.first(shard, *trip.own())
    if trip.schedule.barrier:  # a compiler writes out a loop of one turn
        held, states = in_turn((held, states))
    if common > 1:
        held, states = lax.fori_loop(1, common, body, (held, states))
    longest = parts[0]
    extra = [trip.send(held[0], longest)] if longest.chain.sends > common else []
    states = consume(states, held, common)
    for x in extra:
        states = ring.consume(states, x, *trip.place(longest, longest.chain.sends))
    return states


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
