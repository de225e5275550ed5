"""Einsums whose sum over a ring is scattered: the accumulator travels, and gathers the shares.

    y = psum_scatter(dot(lhs, rhs))   ==>     for i in range(n):
                                                  acc = ppermute(acc)
                                                  acc += dot(lhs[block], rhs[block])

Each step multiplies the slice of the operands that belongs to the block whose accumulator is
here. One-way, the share does not depend on the accumulator, so that it is multiplied while the
accumulator is on its way. Two-way, the two halves of every block travel opposite ways, out of
phase: one accumulator is on its way while the other half's share is multiplied and added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from collmm.errors import OptionError
from collmm.loops.partial import PartialEinsum, add
from collmm.loops.ringops import position, put, send, shard_start, take
from collmm.ring import Part, scatter_parts
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
    shape, out_dtype = _check(terms, scatter_dim, schedule.ring_size)
    block = shape[scatter_dim] // schedule.ring_size
    if schedule.ring_size == 1:
        if len(terms) == 1:
            lhs, rhs, partial = terms[0]
            return partial.dot(lhs, rhs)
        return lax.convert_element_type(_sum_of_terms(terms), out_dtype)
    parts = scatter_parts(schedule.ring_size, schedule.two_way, block)
    ring = _Scatter(schedule, tuple(terms), scatter_dim, block, position(schedule))
    if len(parts) == 1:
        return lax.convert_element_type(_one_way(ring, parts[0]), out_dtype)
    halves = _two_way(ring, parts[0], parts[1])
    result = None
    for half, part in zip(halves, parts, strict=True):
        # Two writes into one buffer: a concatenate would copy both halves once more.
        half = lax.convert_element_type(half, out_dtype)
        result = put(result, half, scatter_dim, part.start, block)
    assert result is not None
    return result


@dataclass(frozen=True)
class _Scatter:
    """One ring: what every step needs besides the accumulator that has arrived."""

    schedule: Schedule
    terms: tuple[Term, ...]
    dim: int
    block: int
    pos: Array

    def slices(self, part: Part, i: Any) -> tuple[Term, ...]:
        """The terms' operands cut to ``part`` of the block to be added at step ``i``."""
        n = self.schedule.ring_size
        start = shard_start(self.pos, part.chain.scattered_offset(i), n, self.block)
        start = start + start.dtype.type(part.start)
        cut = []
        for lhs, rhs, partial in self.terms:
            einsum = partial.einsum
            label = einsum.out[self.dim]
            if label in einsum.lhs:
                lhs = take(lhs, einsum.lhs.index(label), start, part.size)
            if label in einsum.rhs:
                rhs = take(rhs, einsum.rhs.index(label), start, part.size)
            cut.append((lhs, rhs, partial))
        return tuple(cut)

    def share(self, part: Part, i: Any) -> Array:
        """This device's share of the block at step ``i``; depends on no accumulator."""
        return _sum_of_terms(self.slices(part, i))

    def add_overlapped(self, acc: Array, part: Part, i: Any) -> Array:
        """Send the accumulator while the share is multiplied, then add."""
        arrived = send(acc, part.chain, self.schedule)
        share = self.share(part, i)
        if self.schedule.barrier:
            # Else a compiler may fold the add into the multiplication, which then waits.
            share = lax.optimization_barrier(share)
        return add(arrived, share)

    def add_arrived(self, arrived: Array, part: Part, i: Any) -> Array:
        """Multiply and add once the accumulator is here, so that the add fuses and costs nothing.

        It fuses only if it does not read the permute itself, which the barrier hides.
        """
        cut = self.slices(part, i)
        if self.schedule.barrier:
            operands = tuple((lhs, rhs) for lhs, rhs, _ in cut)
            arrived, operands = lax.optimization_barrier((arrived, operands))
            cut = tuple(
                (lhs, rhs, partial)
                for (lhs, rhs), (_, _, partial) in zip(operands, cut, strict=True)
            )
        return add(arrived, _sum_of_terms(cut))


def _one_way(ring: _Scatter, part: Part) -> Array:
    """n steps; the first makes the accumulator, each of the others sends and adds."""
    n = ring.schedule.ring_size
    acc = ring.share(part, 0)
    if ring.schedule.unroll:
        for i in range(1, n):
            acc = ring.add_overlapped(acc, part, i)
        return acc
    return lax.fori_loop(1, n, lambda i, acc: ring.add_overlapped(acc, part, i), acc)


def _two_way(ring: _Scatter, a: Part, b: Part) -> tuple[Array, Array]:
    """Half a is one half-step ahead: it travels while b is multiplied, and the reverse."""
    schedule, n = ring.schedule, ring.schedule.ring_size

    def step(i: Any, acc_a: Array, arrived_b: Array) -> tuple[Array, Array]:
        arrived_a = send(acc_a, a.chain, schedule)
        acc_b = ring.add_arrived(arrived_b, b, i)
        arrived_b = send(acc_b, b.chain, schedule)
        return ring.add_arrived(arrived_a, a, i + 1), arrived_b

    # Peeled: b has no accumulator before its first share, and nothing to send after its last.
    acc_a = ring.share(a, 0)
    arrived_a = send(acc_a, a.chain, schedule)
    arrived_b = send(ring.share(b, 0), b.chain, schedule)
    acc_a = ring.add_arrived(arrived_a, a, 1)
    if schedule.unroll:
        for i in range(1, n - 1):
            acc_a, arrived_b = step(i, acc_a, arrived_b)
    elif n > 2:
        acc_a, arrived_b = lax.fori_loop(
            1, n - 1, lambda i, carry: step(i, *carry), (acc_a, arrived_b)
        )
    return acc_a, ring.add_arrived(arrived_b, b, n - 1)


def _sum_of_terms(terms: Sequence[Term]) -> Array:
    total = None
    for lhs, rhs, partial in terms:
        part = partial.partial_sum(lhs, rhs)
        total = part if total is None else add(total, part)
    assert total is not None
    return total


def _check(terms: Sequence[Term], dim: int, n: int) -> tuple[tuple[int, ...], Any]:
    """The result's whole shape and dtype, the same for all terms."""
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
    return shape, dtype
