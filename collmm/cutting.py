"""Which dimension of its block the accumulators of a reduce-scatter share out among them.

    block [1024 rows, 8192 columns], two accumulators, lhs [1024, k], rhs [k, 8192]

    by rows     2 * ([512, k] @ [k, 8192])     reads rhs twice
    by columns  2 * ([1024, k] @ [k, 4096])    reads lhs twice, which is less

A block is sent in as many parts either way; what differs is how much of the operands every step
reads again, and how well its einsums fill the matrix unit. Pure: imports nothing of jax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collmm.einsum import Einsum
from collmm.schedule import Schedule

# A part of the last two dimensions fills whole tiles of a TPU, or writing it costs a pass.
_TILE = (8, 128)


@dataclass(frozen=True)
class Step:
    """One einsum of one step, of a whole block.

    Attributes:
      einsum: its labels.
      sizes: of each label on one device, that of the scattered one the size of a block.
      itemsizes: bytes of an element of lhs and rhs.
    """

    einsum: Einsum
    sizes: Mapping[int, int]
    itemsizes: tuple[int, int]

    def read(self, label: int, parts: int) -> int:
        """Bytes of the operands that ``parts`` einsums read, cut along ``label``."""
        both = (self.einsum.lhs, self.itemsizes[0]), (self.einsum.rhs, self.itemsizes[1])
        return sum(
            math.prod(self.sizes[x] for x in labels) * size * (1 if label in labels else parts)
            for labels, size in both
        )


def cut_dim(steps: Sequence[Step], dim: int, parts: int) -> int:
    """The dimension of the result along which a block is cut into ``parts``.

    The scattered dimension ``dim``, unless cutting another one reads less; that must divide into
    parts of whole tiles. ``steps`` are the einsums that are summed, whose results are alike.
    """
    first = steps[0]
    out = first.einsum.out
    if parts < 2 or first.sizes[out[dim]] < parts:
        return dim
    units = dict(zip(range(len(out) - len(_TILE), len(out)), _TILE, strict=True))
    able = [
        d
        for d in range(len(out))
        if d != dim and first.sizes[out[d]] % (parts * units.get(d, 1)) == 0
    ]

    def read(d: int) -> int:
        return sum(step.read(step.einsum.out[d], parts) for step in steps)

    return min((dim, *able), key=read)


def cut_along(steps: Sequence[Step], dim: int, schedule: Schedule) -> int:
    """``cut_dim`` for the loop of ``schedule``: other than ``dim`` where that is unrolled only.

    In a rolled loop libtpu makes the slices of a whole operand again every turn; an inner ring, and
    the sums of a group, are cut along ``dim``.
    """
    if schedule.nested or schedule.grouped or not schedule.unroll:
        return dim
    return cut_dim(steps, dim, schedule.accumulators)
