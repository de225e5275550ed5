"""Chained einsums: what one ring gathers is worked on and scattered again by the same ring.

    h = dot(all_gather(shard), w)             x = shard
    a = elementwise(h)                ==>     for i in range(n):
    y = psum_scatter(dot(a, v))                   x, acc = ppermute(x), ppermute(acc)
                                                  acc += dot(elementwise(dot(x, w)), v)

The accumulator travels with the shard it belongs to, so no gathered operand and no whole hidden
value exists unless somebody else reads it. A device starts with its neighbour's shard and ends with
its own, which nothing has to be sent for: gather and scatter take n - 1 sends each, as two rings
would. The front half of the own shard is multiplied first, while the neighbour's is on its way.

Two-way, the shard is cut in two: one part goes each way, and the accumulator of one is on its way
while the other is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from collmm.loops.gather import Consumer
from collmm.loops.partial import PartialEinsum, add
from collmm.loops.ringops import in_turn, position, put, send, shard_start, take
from collmm.ring import Part, scatter_parts
from collmm.schedule import Schedule


@dataclass(frozen=True)
class ChainLoop:
    """One chain on one device.

    Attributes:
      schedule: how the ring runs; two-way cuts the shard in two.
      shard: this device's block of the gathered operand.
      dim: its gathered dimension.
      locals_, consumers: the einsums of the gathered operand, as in ``all_gather_einsum``.
      takes: the consumers whose results the elementwise part reads.
      middle: elementwise: (slices of the taken results, slices of the extras) -> slices.
      middle_dim: the dimension of the hidden value that is cut.
      extras: other operands of the elementwise part, with the dimension in which each is cut, or
        None.
      operands: per term (lhs, rhs): the number of one of middle's results, or an array.
      terms: the einsums whose sum is scattered.
      out_dim: the scattered dimension of their result.
      kept_consumers, kept_middle: whose results somebody else reads.
      keep_gathered: whether somebody else reads the gathered operand.
    """

    schedule: Schedule
    shard: Array
    dim: int
    locals_: tuple[Array, ...]
    consumers: tuple[Consumer, ...]
    takes: tuple[int, ...]
    middle: Callable[..., Sequence[Array]]
    middle_dim: int
    extras: tuple[tuple[Array, int | None], ...]
    operands: tuple[tuple[Any, Any], ...]
    terms: tuple[PartialEinsum, ...]
    out_dim: int
    kept_consumers: tuple[int, ...]
    kept_middle: tuple[int, ...]
    keep_gathered: bool = False

    @property
    def block(self) -> int:
        """Size of one shard in the cut dimension."""
        return self.shard.shape[self.dim]

    def run(self) -> list[Array]:
        """Return this device's block of the sum, then what is kept.

        That is consumers' results, middle's results and the gathered operand, in this order.
        """
        schedule = self.schedule
        parts = scatter_parts(
            schedule.ring_size, schedule.two_way, self.block, schedule.accumulators
        )
        run = _unrolled if schedule.unroll or schedule.ring_size < 4 else _rolled
        block, states = run(self, parts, position(schedule))
        kept = [
            lax.convert_element_type(state, self.consumers[k].partial.out_dtype)
            for k, state in zip(self.kept_consumers, states, strict=False)
        ]
        return [block, *kept, *states[len(kept) :]]

    def cut(self, part: Part) -> Array:
        """The part of the own shard that travels its own way."""
        return lax.slice_in_dim(self.shard, part.start, part.start + part.size, axis=self.dim)

    def start(self, pos: Array, part: Part, sends: Any) -> Array:
        """Where the part that is here after ``sends`` sends starts."""
        start = shard_start(pos, part.chain.gathered_offset(sends), self.schedule, self.block)
        return start + start.dtype.type(part.start)

    def front(
        self, states: _States, x: Array, part: Part, start: Array
    ) -> tuple[_States, tuple[Array, ...]]:
        """Multiply what has arrived and run the elementwise part on it."""
        pieces = [self._consume(k, x, part, start) for k in range(len(self.consumers))]
        extras = [x if dim is None else take(x, dim, start, part.size) for x, dim in self.extras]
        values = tuple(self.middle(*(pieces[k] for k in self.takes), *extras))
        kept = [
            self._keep(states[i], k, pieces[k], start) for i, k in enumerate(self.kept_consumers)
        ]
        whole = self.block * self.schedule.ring_size
        for state, k in zip(states[len(kept) :], self.kept_middle, strict=False):
            kept.append(put(state, values[k], self.middle_dim, start, whole))
        if self.keep_gathered:
            kept.append(put(states[-1], x, self.dim, start, whole))
        return tuple(kept), values

    def _consume(self, k: int, x: Array, part: Part, start: Array) -> Array:
        consumer, local = self.consumers[k], self.locals_[k]
        labels = consumer.local_labels()
        label = consumer.gathered_labels()[self.dim]
        if label in labels:
            local = take(local, labels.index(label), start, part.size)
        operands = (local, x) if consumer.gathered_operand else (x, local)
        partial = consumer.partial
        if label in partial.einsum.out:
            return partial.dot(*operands)
        return partial.partial_sum(*operands)

    def _keep(self, state: Array | None, k: int, piece: Array, start: Array) -> Array:
        einsum = self.consumers[k].partial.einsum
        label = self.consumers[k].gathered_labels()[self.dim]
        if label not in einsum.out:
            return piece if state is None else add(state, piece)
        whole = self.block * self.schedule.ring_size
        return put(state, piece, einsum.out.index(label), start, whole)

    def back(
        self,
        arrived: Array | None,
        values: tuple[Array, ...],
        part: Part,
        start: Array,
    ) -> Array:
        """Add this device's share to the accumulator of what has arrived."""
        if arrived is None:
            return self._share(values, part, start)
        if not self.schedule.two_way:
            # The accumulator may be on its way still: multiply first and keep the add apart, or a
            # compiler folds it into the multiplication, which then waits.
            share = self._share(values, part, start)
            if self.schedule.barrier:
                share = lax.optimization_barrier(share)
            return add(arrived, share)
        if self.schedule.barrier:
            # The accumulator came while the front half was multiplied: the add fuses.
            arrived, *rest = lax.optimization_barrier((arrived, *values))
            values = tuple(rest)
            if arrived.dtype == jnp.float32:
                # Changes no number. TPU's compiler fuses no add that reads a permute directly.
                arrived = lax.reduce_precision(arrived, 8, 23)
        return add(arrived, self._share(values, part, start))

    def _share(self, values: tuple[Array, ...], part: Part, start: Array) -> Array:
        total = None
        for partial, sources in zip(self.terms, self.operands, strict=True):
            einsum = partial.einsum
            label = einsum.out[self.out_dim]
            sides = []
            for labels, source in zip((einsum.lhs, einsum.rhs), sources, strict=True):
                if isinstance(source, int):
                    sides.append(values[source])
                elif label in labels:
                    sides.append(take(source, labels.index(label), start, part.size))
                else:
                    sides.append(source)
            share = partial.partial_sum(*sides)
            total = share if total is None else add(total, share)
        assert total is not None
        return total

    @property
    def out_dtype(self) -> Any:
        """Element type of the scattered sum."""
        return self.terms[0].out_dtype


_States = tuple[Any, ...]
_Arrays = tuple[Any, ...]
_Carry = tuple[_Arrays, _Arrays, _States]


def _unrolled(ring: ChainLoop, parts: tuple[Part, ...], pos: Array) -> tuple[Array, _States]:
    n = ring.schedule.ring_size
    own, carry = _begin(ring, parts, pos)
    for i in range(2, n):
        if ring.schedule.barrier and not ring.schedule.two_way:
            carry = in_turn(carry)
        carry = _step(ring, parts, pos, i, carry, last=i == n - 1)
    return _end(ring, parts, pos, own, carry)


def _rolled(ring: ChainLoop, parts: tuple[Part, ...], pos: Array) -> tuple[Array, _States]:
    """The own shard and the first to arrive are peeled off, before anything has been summed, and
    the last, after which no shard is sent."""

    def body(i: Array, carry: _Carry) -> _Carry:
        return _step(ring, parts, pos, i, carry, last=False)

    n = ring.schedule.ring_size
    own, carry = _begin(ring, parts, pos)
    carry = lax.fori_loop(2, n - 1, body, carry)
    carry = _step(ring, parts, pos, n - 1, carry, last=True)
    return _end(ring, parts, pos, own, carry)


def _begin(
    ring: ChainLoop, parts: tuple[Part, ...], pos: Array
) -> tuple[list[tuple[Array, ...]], _Carry]:
    """Run the front half of some of the own shard, then all of the first shard to arrive.

    Returns the hidden values of the own parts, and the shards, sums and states to go on with.
    """
    cuts = tuple(ring.cut(part) for part in parts)
    xs = _send(ring, parts, cuts)
    kept = len(ring.kept_consumers) + len(ring.kept_middle) + ring.keep_gathered
    states: _States = (None,) * kept
    own = []
    for x, part in zip(cuts[: (len(parts) + 1) // 2], parts, strict=False):
        states, values = ring.front(states, x, part, ring.start(pos, part, 0))
        own.append(values)
    if ring.schedule.barrier:
        # A scheduler sees that the own part is not needed before the end, and puts it there.
        xs, own = lax.optimization_barrier((xs, own))
    onward = _send(ring, parts, xs) if ring.schedule.ring_size > 2 else ()
    sums: _Arrays = (None,) * len(parts)
    states, sums = _work(ring, parts, pos, 1, xs, sums, states)
    return own, (onward, sums, states)


def _step(
    ring: ChainLoop, parts: tuple[Part, ...], pos: Array, i: Any, carry: _Carry, *, last: bool
) -> _Carry:
    """Send sums and shards on, and work on the shards that came with the i-th send."""
    xs, sums, states = carry
    arrived = _send(ring, parts, sums)
    onward = () if last else _send(ring, parts, xs)
    states, sums = _work(ring, parts, pos, i, xs, arrived, states)
    return onward, sums, states


def _work(
    ring: ChainLoop,
    parts: tuple[Part, ...],
    pos: Array,
    i: Any,
    xs: _Arrays,
    arrived: _Arrays,
    states: _States,
) -> tuple[_States, _Arrays]:
    """All front halves, then all back halves.

    The transfers of a rolled loop end with their iteration: so the sums have something to hide
    behind there.
    """
    hidden = []
    for x, part in zip(xs, parts, strict=True):
        start = ring.start(pos, part, i)
        states, values = ring.front(states, x, part, start)
        hidden.append((values, start))
    sums = tuple(
        ring.back(acc, values, part, start)
        for acc, part, (values, start) in zip(arrived, parts, hidden, strict=True)
    )
    return states, sums


def _send(ring: ChainLoop, parts: tuple[Part, ...], values: _Arrays) -> _Arrays:
    return tuple(send(x, p.chain, ring.schedule) for x, p in zip(values, parts, strict=True))


def _end(
    ring: ChainLoop,
    parts: tuple[Part, ...],
    pos: Array,
    own: list[tuple[Array, ...]],
    carry: _Carry,
) -> tuple[Array, _States]:
    """Add the own shares, rounded once and written into one buffer."""
    _, sums, states = carry
    cuts = tuple(ring.cut(part) for part in parts)
    result = None
    for k, (part, acc) in enumerate(zip(parts, _send(ring, parts, sums), strict=True)):
        start = ring.start(pos, part, 0)
        if k < len(own):
            values = own[k]
        else:
            states, values = ring.front(states, cuts[k], part, start)
        acc = ring.back(acc, values, part, start)
        block = lax.convert_element_type(acc, ring.out_dtype)
        result = put(result, block, ring.out_dim, part.start, ring.block)
    assert result is not None
    return result, states
