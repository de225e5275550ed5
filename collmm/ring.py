"""Who holds which shard at which step of a ring, and the permutations between the steps.

Pure: imports nothing of jax. ``n`` positions form a ring; ``p`` is a device's own position and
``i`` a step, both from 0. A *chain* is one thing that travels round the ring, a shard or an
accumulator, always the same way: +1 sends from s to s+1 (mod n), -1 to s-1. Where a step takes
``g`` shards, g neighbours are a *group*, and what travels is the shards of one: +g sends from s to
s+g.

Every function below gives an *offset*; the shard meant is ``(p + offset) mod n``. Offsets are
never negative and at most n (n + g within a group), so that ``p + offset`` needs one unsigned
remainder and works for a traced ``p`` or ``i`` as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Pairs = tuple[tuple[int, int], ...]


def permutation(n: int, shift: int) -> Pairs:
    """The pairs ``(source, destination)`` that move everything ``shift`` positions on."""
    return tuple((s, (s + shift) % n) for s in range(n))


def relabelled(
    pairs: Pairs, axes: Sequence[str], order: Sequence[str], sizes: Mapping[str, int]
) -> Pairs:
    """Pairs of positions over ``axes``, as positions over the same axes in another ``order``.

    A position is the index flattened over the axes named, major to minor.
    """
    positions = np.arange(np.prod([sizes[axis] for axis in order], dtype=int))
    grid = positions.reshape([sizes[axis] for axis in order])
    there = grid.transpose([list(order).index(axis) for axis in axes]).ravel()
    return tuple((int(there[s]), int(there[d])) for s, d in pairs)


@dataclass(frozen=True)
class Chain:
    """One thing that travels: ``sends`` permutes of ``shift`` (1 or g, + or -), a ring of ``n``."""

    n: int
    shift: int
    sends: int

    @property
    def permutation(self) -> Pairs:
        """The pairs ``(source, destination)`` of one send."""
        return permutation(self.n, self.shift)

    def gathered_offset(self, i: Any) -> Any:
        """Gather: the shard that is here after ``i`` sends.

        What moved ``shift`` a step came from ``p - shift * i``.
        """
        return -self.shift * i if self.shift < 0 else self.n - self.shift * i

    def scattered_offset(self, i: Any) -> Any:
        """Reduce-scatter: the block to add to the accumulator that is here after ``i`` sends.

        Its sends to come end at the block's owner.
        """
        sends = 1 + i
        return -self.shift * sends if self.shift < 0 else self.n - self.shift * sends


@dataclass(frozen=True)
class GroupChain(Chain):
    """One thing that travels -1 round every group of ``g`` neighbours, ``sends`` = g - 1 times."""

    @property
    def permutation(self) -> Pairs:
        """The pairs ``(source, destination)`` of one send."""
        g = self.sends + 1
        return tuple((s, s // g * g + (s - 1) % g) for s in range(self.n))

    def within(self, p: Any, i: Any) -> Any:
        """The member of its own group that is ``i`` places on from ``p``, as an offset.

        A gather has that one's shard here after ``i`` sends; a reduce-scatter adds to the sum for
        ``1 + i`` then.
        """
        g = self.sends + 1
        return self.n - p % g + (p + i) % g


@dataclass(frozen=True)
class Part:
    """A slice of a block, ``[start, start + size)``, and the chain on which it travels.

    Of a scattered block its sum does, of a gathered shard the slice itself.
    """

    chain: Chain
    start: int
    size: int


def gather_chains(n: int, two_way: bool, g: int = 1) -> tuple[Chain, ...]:
    """The chains of a gather: n - 1 sends in all, each bringing one whole shard.

    With ``g`` > 1, ``n / g - 1`` sends of the shards of a group each.

    One-way, the shard travels -1 for n - 1 steps. Two-way, whole shards travel both ways:
    ``n // 2`` sends of -1 and ``(n - 1) // 2`` of +1, so that any n works, odd ones too; on an
    even ring the farthest shard comes one way only. A chain without sends is left out.
    """
    m = n // g
    chains = (
        (Chain(n, -g, m // 2), Chain(n, +g, (m - 1) // 2)) if two_way else (Chain(n, -g, m - 1),)
    )
    return tuple(chain for chain in chains if chain.sends)


def scatter_parts(n: int, two_way: bool, block: int, chains: int, g: int = 1) -> tuple[Part, ...]:
    """The parts of a reduce-scatter of blocks of size ``block``; every chain has n - 1 sends.

    The block is cut into ``chains`` parts, the first ones the larger if it does not divide, and
    into fewer if it is too small. Each part's accumulator travels -1, or two-way the first +1,
    the second -1 and so on in turn. A block that can't be cut goes -1. With ``g`` > 1 what is cut
    and travels is the blocks of a group, for ``n / g - 1`` sends.
    """
    block *= g
    count = max(1, min(chains, block))
    sizes = [block // count + (k < block % count) for k in range(count)]
    shifts = [+g if two_way and count > 1 and k % 2 == 0 else -g for k in range(count)]
    return tuple(
        Part(Chain(n, shift, n // g - 1), sum(sizes[:k]), sizes[k])
        for k, shift in enumerate(shifts)
    )


def gather_parts(n: int, two_way: bool, block: int, chunks: int, g: int = 1) -> tuple[Part, ...]:
    """What travels of a shard of size ``block``, each part by itself.

    With ``chunks`` below two that is the whole shard, on the chains of ``gather_chains``; else the
    shard is cut as a scattered block is, and every part has n - 1 sends. With ``g`` > 1 all that
    holds of the shards of a group put together, on ``n / g`` positions.
    """
    if min(chunks, g * block) < 2:
        return tuple(Part(chain, 0, g * block) for chain in gather_chains(n, two_way, g))
    return scatter_parts(n, two_way, block, chunks, g)


def gather_permutes(n: int, block: int = 1, chunks: int = 1, g: int = 1) -> int:
    """Sends of one gather ring, of shards of size ``block``: as many one-way and two-way.

    With ``g`` > 1 those that put a group together count as well.
    """
    return g - 1 + sum(part.chain.sends for part in gather_parts(n, False, block, chunks, g))


def scatter_permutes(n: int, block: int, chains: int, g: int = 1) -> int:
    """Sends of one reduce-scatter ring, each of one part of a block, or of ``g`` blocks.

    With ``g`` > 1 those that scatter the sums of a group count as well.
    """
    return g - 1 + (n // g - 1) * len(scatter_parts(n, False, block, chains, g))


def gather_sends_written(
    n: int, two_way: bool, unroll: bool, block: int = 1, chunks: int = 1, g: int = 1
) -> int:
    """Permutes in the text of a gather ring; a rolled one has its loop's body once."""
    if unroll:
        return gather_permutes(n, block, chunks, g)
    parts = gather_parts(n, two_way, block, chunks, g)
    chains = [part.chain for part in parts if part.chain.sends]
    common = min((chain.sends for chain in chains), default=0)
    looped = len(chains) if common > 1 else 0
    return g - 1 + len(chains) + looped + any(chain.sends > common for chain in chains)


def scatter_sends_written(n: int, block: int, chains: int, unroll: bool, g: int = 1) -> int:
    """Permutes in the text of a reduce-scatter ring; a rolled one has its loop's body once."""
    count = len(scatter_parts(n, False, block, chains, g))
    if unroll or n < 2:
        return scatter_permutes(n, block, chains, g)
    if count == 1:
        return g
    return g - 1 + count * min(n // g - 1, 3)
