"""Einsums whose sum over a ring is scattered: the accumulator travels, and gathers the shares.

    y = psum_scatter(dot(lhs, rhs))   ==>     for i in range(n):
                                                  acc = ppermute(acc)
                                                  acc += dot(lhs[block], rhs[block])

Each step multiplies the slice of the operands that belongs to the block whose accumulator is
here. With one accumulator the share does not wait for it, and is multiplied while it is on its
way. With several, each for a part of the block and out of phase, some are on their way while the
others' shares are multiplied and added to them in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from collmm.cutting import Step, cut_along
from collmm.errors import OptionError
from collmm.loops.partial import PartialEinsum, add
from collmm.loops.ringops import Place, position, put_at, send, shard_start, slot, take
from collmm.ring import GroupChain, Part, scatter_parts
from collmm.schedule import Schedule

Term = tuple[Array, Array, PartialEinsum]
"""``(lhs, rhs, partial)``: one einsum of the sum, operands whole in the scattered label."""


def einsum_reduce_scatter(terms: Sequence[Term], scatter_dim: int, schedule: Schedule) -> Array:
    """``psum_scatter(sum of the einsums, schedule.axes, scatter_dimension=.., tiled=True)``.

    Runs inside ``shard_map``. Every term has the same result shape and ``out_dtype``; the label
    of dimension ``scatter_dim`` of the result may be free or batch in each. The result is this
    device's block, ``1 / ring_size`` of that dimension, in ``out_dtype``: summed over terms and
    ring in the accumulation dtype and rounded once.

    Raises ``OptionError`` when the terms do not fit each other or the mesh, or when the
    dimension does not divide into blocks.
    """
    block, out_dtype = check(terms, scatter_dim, schedule.ring_size)
    if schedule.ring_size == 1:
        if len(terms) == 1:
            lhs, rhs, partial = terms[0]
            return partial.dot(lhs, rhs)
        return lax.convert_element_type(sum_of_terms(terms), out_dtype)
    steps = [_step_of(term, scatter_dim, block) for term in terms]
    cut = cut_along(steps, scatter_dim, schedule)
    ring = Scattered(schedule, tuple(terms), scatter_dim, block, position(schedule), cut)
    return ring.go_round(out_dtype)


def _step_of(term: Term, dim: int, block: int) -> Step:
    lhs, rhs, partial = term
    einsum = partial.einsum
    sizes = {**einsum.sizes(lhs.shape, rhs.shape), einsum.out[dim]: block}
    return Step(einsum, sizes, (lhs.dtype.itemsize, rhs.dtype.itemsize))


@dataclass(frozen=True)
class Scattered:
    """One ring: what every step needs besides the accumulator that has arrived.

    ``cut_along``: the dimension in which the accumulators share out a block, ``dim`` or another.
    ``made``: the own shares of the parts of the first block, where they are made already.
    """

    schedule: Schedule
    terms: tuple[Term, ...]
    dim: int
    block: int
    pos: Array
    cut_along: int
    made: tuple[Array, ...] | None = None

    def go_round(self, out_dtype: Any) -> Array:
        """Send the accumulators round the ring and return this device's block."""
        parts, grouped = self.parts, self.schedule.grouped
        if len(parts) > 1:
            made = _out_of_phase(self, parts, None if grouped else out_dtype)
        else:
            made = _one_chain(self, parts[0])
        if grouped:
            made = _apart(self, made)
        return lax.convert_element_type(made, out_dtype)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the block, each with its accumulator."""
        schedule = self.schedule
        return scatter_parts(
            schedule.ring_size,
            schedule.two_way,
            self.cut_size,
            schedule.accumulators,
            schedule.shards_per_step,
        )

    @property
    def cut_size(self) -> int:
        """The size of a block in the dimension in which it is cut."""
        if self.cut_along == self.dim:
            return self.block
        lhs, rhs, partial = self.terms[0]
        return partial.einsum.out_shape(lhs.shape, rhs.shape)[self.cut_along]

    def first(self, part: Part) -> Array:
        """The share with which the accumulator of ``part`` starts."""
        if self.made is not None:
            return self.made[self.parts.index(part)]
        return self.share(part, self.start(part, 0))

    def start(self, part: Part, i: Any) -> Array:
        """Where ``part`` of the block to be added at step ``i`` starts."""
        offset = part.chain.scattered_offset(i)
        count = self.schedule.shards_per_step
        start = shard_start(self.pos, offset, self.schedule, self.block, count)
        return start + start.dtype.type(part.start) if self.cut_along == self.dim else start

    def share(self, part: Part, start: Array) -> Array:
        """This device's share of the part at ``start``; depends on no accumulator."""
        return sum_of_terms(self.cut(self.terms, part, start))

    def cut(self, terms: Sequence[Term], part: Part, start: Array) -> list[Term]:
        """``terms`` with their operands cut to the part at ``start``."""
        cut = []
        for lhs, rhs, partial in terms:
            einsum = partial.einsum
            for dim, at, size in self._places(part, start):
                label = einsum.out[dim]
                if label in einsum.lhs:
                    lhs = take(lhs, einsum.lhs.index(label), at, size)
                if label in einsum.rhs:
                    rhs = take(rhs, einsum.rhs.index(label), at, size)
            cut.append((lhs, rhs, partial))
        return cut

    def _places(self, part: Part, start: Array) -> tuple[Place, ...]:
        """Where the part at ``start`` lies in the result."""
        if self.cut_along == self.dim:
            return ((self.dim, start, part.size),)
        return (self.dim, start, self.block), (self.cut_along, part.start, part.size)

    def send(self, acc: Array, part: Part) -> Array:
        """Send the accumulator of ``part`` on."""
        return send(acc, part.chain, self.schedule)

    def add_apart(self, arrived: Array, part: Part, i: Any) -> Array:
        """Add a share that was multiplied while the accumulator was on its way."""
        share = self.share(part, self.start(part, i))
        if self.schedule.barrier:
            # Else a compiler may fold the add into the multiplication, which then waits.
            share = lax.optimization_barrier(share)
        return add(arrived, share)

    def add_fused(
        self, arrived: Array, part: Part, i: Any, after: Array | None = None
    ) -> tuple[Array, Array | None]:
        """Multiply and add once the accumulator is here: the add fuses and costs no pass.

        Given ``after``, not before that value is there either; it is handed back for use.
        """
        start = self.start(part, i)
        if self.schedule.barrier:
            # The slice's start waits, not the slice, so that the slice still fuses as well.
            arrived, start, after = lax.optimization_barrier((arrived, start, after))
            if arrived.dtype == jnp.float32:
                # Changes no number. TPU's compiler fuses no add that reads a permute directly.
                arrived = lax.reduce_precision(arrived, 8, 23)
        return add(arrived, self.share(part, start)), after


def _one_chain(ring: Scattered, part: Part) -> Array:
    """A step per group; the first makes the accumulator, each of the others sends and adds."""

    def step(i: Any, acc: Array) -> Array:
        return ring.add_apart(ring.send(acc, part), part, i)

    n = ring.schedule.groups
    acc = ring.first(part)
    if not ring.schedule.unroll:
        return lax.fori_loop(1, n, step, acc)
    for i in range(1, n):
        acc = step(i, acc)
    return acc


def _apart(ring: Scattered, sums: Array) -> Array:
    """Scatter the sums for the own group, ``[.., g blocks, ..]`` on each of its members.

    One block is sent on and added to in every step, and no einsum is left to hide that.
    """
    schedule, pos = ring.schedule, ring.pos
    g = schedule.shards_per_step
    chain = GroupChain(schedule.ring_size, -1, g - 1)

    def block(i: int) -> Array:
        member = shard_start(pos, chain.within(pos, 1 + i), schedule, 1)
        return take(sums, ring.dim, slot(member, g, ring.block), ring.block)

    acc = block(0)
    for i in range(1, g):
        acc = add(send(acc, chain, schedule), block(i))
    return acc


_Arrays = tuple[Array, ...]


def _out_of_phase(ring: Scattered, parts: tuple[Part, ...], out_dtype: Any | None) -> Array:
    """Two groups of chains: one is on its way while the other is multiplied, and the reverse.

    Group a is half a step ahead. ``in_step``, each waits for what the other has added before: for
    some chips libtpu lets it run on alone else, and nothing hides its transfers. Peeled off the
    loop: the first step, before which nothing has arrived, and the last, after which nothing is
    sent.
    """
    n, half = ring.schedule.groups, (len(parts) + 1) // 2
    in_step = ring.schedule.in_step and ring.schedule.unroll
    a, b = parts[:half], parts[half:]

    def send_all(accs: _Arrays, group: tuple[Part, ...]) -> _Arrays:
        return tuple(ring.send(acc, part) for acc, part in zip(accs, group, strict=True))

    def first(group: tuple[Part, ...]) -> _Arrays:
        return tuple(ring.first(part) for part in group)

    def add_all(arrived: _Arrays, group: tuple[Part, ...], i: Any, others: _Arrays) -> _Arrays:
        sums: list[Array] = []
        for acc, part in zip(arrived, group, strict=True):
            before = (*others, *sums)[-1] if in_step else None
            # What is handed back of the sum before would not be sent until this one has arrived.
            sums.append(ring.add_fused(acc, part, i, before)[0])
        return tuple(sums)

    def step(i: Any, carry: tuple[_Arrays, _Arrays]) -> tuple[_Arrays, _Arrays]:
        accs_a, arrived_b = carry
        arrived_a = send_all(accs_a, a)
        accs_b = add_all(arrived_b, b, i, accs_a)
        return add_all(arrived_a, a, i + 1, accs_b), send_all(accs_b, b)

    first_a, accs_b = first(a), first(b)
    arrived_a, arrived_b = send_all(first_a, a), send_all(accs_b, b)
    if n > 2:
        carry = add_all(arrived_a, a, 1, accs_b), arrived_b
        if not ring.schedule.unroll and n > 3:
            carry = lax.fori_loop(1, n - 2, step, carry)
        else:
            for i in range(1, n - 2):
                carry = step(i, carry)
        accs_a, arrived_b = carry
        arrived_a = send_all(accs_a, a)
        accs_b = add_all(arrived_b, b, n - 2, accs_a)
        arrived_b = send_all(accs_b, b)
    before = accs_b[-1] if in_step else None
    return _finish(ring, parts, (*arrived_a, *arrived_b), before, out_dtype)


def _finish(
    ring: Scattered,
    parts: tuple[Part, ...],
    arrived: _Arrays,
    before: Array | None,
    out_dtype: Any | None,
) -> Array:
    """The last step of every chain, rounded (unless ``out_dtype`` is None), into one buffer.

    A concatenate would copy every part once more. Each part waits for the one before, or the
    scheduler may wait for all the permutes first and multiply then; the first one waits for the
    sum ``before``.
    """
    last, result = ring.schedule.groups - 1, None
    whole = ring.cut_size * ring.schedule.shards_per_step
    for acc, part in zip(arrived, parts, strict=True):
        if result is None:
            acc, _ = ring.add_fused(acc, part, last, before)
        else:
            acc, result = ring.add_fused(acc, part, last, result)
        block = acc if out_dtype is None else lax.convert_element_type(acc, out_dtype)
        result = put_at(result, block, ((ring.cut_along, part.start, whole),))
    assert result is not None
    return result


def sum_of_terms(terms: Sequence[Term]) -> Array:
    """The sum of whole einsums, in the accumulation dtype."""
    total = None
    for lhs, rhs, partial in terms:
        part = partial.partial_sum(lhs, rhs)
        total = part if total is None else add(total, part)
    assert total is not None
    return total


def check(terms: Sequence[tuple[Any, Any, PartialEinsum]], dim: int, n: int) -> tuple[int, Any]:
    """The size of the blocks of the result and its dtype, the same for all terms.

    Raises ``OptionError`` when the terms do not fit each other or a ring of ``n``.
    """
    if not terms:
        raise OptionError("einsum_reduce_scatter got no terms; give at least one")
    found = {
        (partial.einsum.out_shape(lhs.shape, rhs.shape), jnp.dtype(partial.out_dtype))
        for lhs, rhs, partial in terms
    }
    if len(found) > 1:
        kinds = ", ".join(sorted(f"{dtype.name}{list(shape)}" for shape, dtype in found))
        raise OptionError(f"the terms of one reduce-scatter must have one result type, got {kinds}")
    shape, dtype = found.pop()
    if not 0 <= dim < len(shape):
        raise OptionError(f"scatter_dim={dim} is not a dimension of the result {shape}")
    if shape[dim] % n:
        raise OptionError(
            f"dimension {dim} of the result {shape} does not divide into {n} blocks; pad it first"
        )
    return shape[dim] // n, dtype
