"""Two rings on one einsum: one operand is gathered during the first step of the other's ring.

    g = all_gather(x, "model")                for i in range(n):              # over model
    w = all_gather(shard, "data")     ==>         if i == 0:
    y = dot(g, w)                                     for j in range(m):      # over data
                                                          y[x.id, j] = dot(x, shard)
                                                          w[j] = shard
                                                          shard = ppermute(shard)
                                                  else:
                                                      y[x.id] = dot(x, w)
                                                  x = ppermute(x)

The inner ring has one step of the outer one to hide behind, and moves its operand only once: from
the second step on it is whole. The same in front of a reduce-scatter: the inner ring makes the
shares with which the accumulators start. The two rings run over different links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import Array, lax

from collmm.loops.gather import Arrivals, Consumer, States, check, go_round, rounded
from collmm.loops.partial import PartialEinsum, add
from collmm.loops.ringops import Place, position, put, put_at, take
from collmm.loops.scatter import Scattered, Term, sum_of_terms
from collmm.loops.scatter import check as check_terms
from collmm.schedule import Schedule


@dataclass(frozen=True)
class Inner:
    """The second ring of an einsum.

    Attributes:
      operand: 0 for lhs, 1 for rhs: which of its operands comes in shards.
      dim: the dimension of that operand that the ring gathers.
      schedule: how the ring runs.
    """

    operand: int
    dim: int
    schedule: Schedule

    def whole(self, shard: Array) -> jax.ShapeDtypeStruct:
        """The type of the gathered operand."""
        shape = list(shard.shape)
        shape[self.dim] *= self.schedule.ring_size
        return jax.ShapeDtypeStruct(tuple(shape), shard.dtype)


def nested_gather_einsum(
    shard: Array,
    locals_: Sequence[Array],
    consumers: Sequence[Consumer],
    inners: Sequence[Inner | None],
    schedule: Schedule,
    *,
    gathered_dim: int,
    return_gathered: bool = False,
) -> list[Array]:
    """``all_gather_einsum`` whose local operands come in shards, where they have an inner ring.

    Args:
      shard: this device's block of the gathered operand.
      locals_: the other operands; ``locals_[k]`` a shard where ``inners[k]`` is not None.
      consumers: the einsums.
      inners: the inner ring of each, or None.
      schedule: how the outer ring runs.
      gathered_dim: the dimension of the gathered operand that the outer ring joins.
      return_gathered: give the gathered operand as well, as the last result.

    Raises ``OptionError`` when the operands do not fit each other or the mesh.
    """
    whole = [
        x if inner is None else inner.whole(x) for x, inner in zip(locals_, inners, strict=True)
    ]
    check(shard, whole, consumers, schedule.ring_size, gathered_dim)
    ring = _Outer(
        schedule,
        tuple(locals_),
        tuple(consumers),
        gathered_dim,
        return_gathered,
        inners=tuple(inners),
    )
    return rounded(go_round(ring, shard, gathered_dim), consumers)


def nested_reduce_scatter(
    terms: Sequence[Term], inners: Sequence[Inner | None], scatter_dim: int, schedule: Schedule
) -> Array:
    """``einsum_reduce_scatter`` of terms one of whose operands comes in shards.

    Args:
      terms: (lhs, rhs, einsum) each, with a shard for the operand of its inner ring.
      inners: the inner ring of each term, or None.
      scatter_dim: the dimension of the result that is scattered.
      schedule: how the outer ring runs.

    Raises ``OptionError`` when the terms do not fit each other or the mesh, or when the dimension
    does not divide into blocks.
    """
    whole = [_whole_term(term, inner) for term, inner in zip(terms, inners, strict=True)]
    block, out_dtype = check_terms(whole, scatter_dim, schedule.ring_size)
    ring = Scattered(schedule, tuple(terms), scatter_dim, block, position(schedule), scatter_dim)
    return _started(ring, inners).go_round(out_dtype)


@dataclass(frozen=True)
class _Outer(Arrivals):
    """An outer ring before its first step."""

    inners: tuple[Inner | None, ...] = ()

    def first(self, shard: Any, start: Array, size: int) -> tuple[Arrivals, States]:
        """Run the inner rings on the own shard; the ring that goes on has whole operands."""
        locals_, states = [], []
        for consumer, local, inner in zip(self.consumers, self.locals_, self.inners, strict=True):
            if inner is None:
                states.append(self.consume_one(consumer, local, None, shard, (start, size)))
                locals_.append(local)
                continue
            product = _first_product(consumer, shard, inner, (self.dim, start, size))
            (made,), whole = _gathered([product], local, inner)
            states.append(made)
            locals_.append(whole)
        if self.return_gathered:
            states.append(put(None, shard, self.dim, start, size))
        ring = Arrivals(
            self.schedule, tuple(locals_), self.consumers, self.dim, self.return_gathered
        )
        return ring, tuple(states)


def _first_product(consumer: Consumer, own: Array, inner: Inner, place: Place) -> _Product:
    """The first step of a gather ring: the own shard, which is the slice ``place``."""
    dim, start, size = place
    partial, block = consumer.partial, own.shape[dim]
    label, local = consumer.gathered_labels()[dim], consumer.local_labels()
    return _Product(
        partial,
        inner,
        own,
        cut=(local.index(label), start, block) if label in local else None,
        into=(partial.einsum.out.index(label), start, size)
        if label in partial.einsum.out
        else None,
        summed=label not in partial.einsum.out,
    )


def _started(ring: Scattered, inners: Sequence[Inner | None]) -> Scattered:
    """The ring with its accumulators' first shares made, and with whole operands."""
    parts = ring.parts
    starts = [ring.start(part, 0) for part in parts]
    shares: list[list[Array]] = [[] for _ in parts]
    terms = []
    for term, inner in zip(ring.terms, inners, strict=True):
        if inner is None:
            made = [
                sum_of_terms(ring.cut([term], part, start))
                for part, start in zip(parts, starts, strict=True)
            ]
            terms.append(term)
        else:
            products = [
                _first_share(term, inner, ring.dim, start, part.size)
                for part, start in zip(parts, starts, strict=True)
            ]
            lhs, rhs, partial = term
            made, whole = _gathered(products, (lhs, rhs)[inner.operand], inner)
            terms.append((whole, rhs, partial) if inner.operand == 0 else (lhs, whole, partial))
        for share, new in zip(shares, made, strict=True):
            share.append(new)
    sums = []
    for first, *rest in shares:
        for part in rest:
            first = add(first, part)
        sums.append(first)
    return replace(ring, terms=tuple(terms), made=tuple(sums))


def _first_share(term: Term, inner: Inner, dim: int, start: Array, size: int) -> _Product:
    """The first share of one accumulator: the slice at ``start`` of the scattered dimension."""
    lhs, rhs, partial = term
    other = (rhs, lhs)[inner.operand]
    einsum = partial.einsum
    label = einsum.out[dim]
    mine, its = (einsum.lhs, einsum.rhs)[:: 1 if inner.operand == 0 else -1]
    if label in its:
        other = take(other, its.index(label), start, size)
    cut = (mine.index(label), start, size) if label in mine else None
    return _Product(partial, inner, other, cut=cut, into=None, summed=True)


def _whole_term(term: Term, inner: Inner | None) -> tuple[Any, Any, PartialEinsum]:
    if inner is None:
        return term
    lhs, rhs, partial = term
    return (
        (inner.whole(lhs), rhs, partial) if inner.operand == 0 else (lhs, inner.whole(rhs), partial)
    )


# --- the inner ring ---


@dataclass(frozen=True)
class _Product:
    """One einsum of the operand that an inner ring gathers.

    Attributes:
      partial: the einsum.
      inner: the ring.
      other: its other operand, cut for the outer ring already.
      cut: (dimension, start, size) of what is multiplied of each shard that arrives; None is all.
      into: (dimension, start, whole size) of the result, of which this is a slice; None if it is
        all of it.
      summed: whether the outer ring adds to it, so that it is kept in the accumulation dtype.
    """

    partial: PartialEinsum
    inner: Inner
    other: Array
    cut: Place | None
    into: Place | None
    summed: bool

    @property
    def _label(self) -> int:
        einsum = self.partial.einsum
        return (einsum.lhs, einsum.rhs)[self.inner.operand][self.inner.dim]

    def with_shard(self, made: Array | None, shard: Array, start: Array) -> Array:
        """``made`` and what the shard at ``start`` adds to it."""
        einsum, label, block = self.partial.einsum, self._label, shard.shape[self.inner.dim]
        labels = (einsum.rhs, einsum.lhs)[self.inner.operand]
        other = (
            take(self.other, labels.index(label), start, block) if label in labels else self.other
        )
        shard = shard if self.cut is None else take(shard, *self.cut)
        operands = (shard, other) if self.inner.operand == 0 else (other, shard)
        if label not in einsum.out:
            part = self.partial.partial_sum(*operands)
            return part if made is None else add(made, part)
        part = self.partial.partial_sum(*operands) if self.summed else self.partial.dot(*operands)
        places = [(einsum.out.index(label), start, block * self.inner.schedule.ring_size)]
        return put_at(made, part, places if self.into is None else [*places, self.into])

    def finished(self, made: Array) -> Array:
        """A sum over the inner ring as the outer one wants it."""
        if self.summed or self._label in self.partial.einsum.out:
            return made
        made = lax.convert_element_type(made, self.partial.out_dtype)
        return made if self.into is None else put_at(None, made, [self.into])


@dataclass(frozen=True)
class _InnerRing:
    """An inner ring: every shard goes into the products, and into the gathered operand."""

    schedule: Schedule
    dim: int
    products: tuple[_Product, ...]

    def first(self, shard: Array, start: Array, size: int) -> tuple[_InnerRing, States]:
        return self, self.consume((None,) * (1 + len(self.products)), shard, start, size)

    def consume(self, states: States, shard: Array, start: Array, size: int) -> States:
        made = [
            product.with_shard(state, shard, start)
            for product, state in zip(self.products, states, strict=False)
        ]
        whole = put(states[-1], shard, self.dim, start, size)
        return (*made, whole)


def _gathered(
    products: Sequence[_Product], shard: Array, inner: Inner
) -> tuple[list[Array], Array]:
    """Gather an operand: (what the products are, the operand)."""
    ring = _InnerRing(inner.schedule, inner.dim, tuple(products))
    *made, whole = go_round(ring, shard, inner.dim)
    return [product.finished(x) for product, x in zip(products, made, strict=True)], whole
