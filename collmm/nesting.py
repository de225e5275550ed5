"""Nesting: which collective of an einsum a ring inside the first step of another can take.

    y = all-gather(x, "model") @ all-gather(w, "data")

Looping x over ``model``, w may stay a plain gather before the loop, or be gathered on a ring over
``data`` while the first shard of x is multiplied (``collmm.loops.nested``). A schedule with
``inner`` says so, and names the axes; which operand is meant follows from them.

Refuses unless the outer collective is an all-gather or reduce-scatter, the inner one an all-gather
of another operand along a dimension that is not the outer one's, the only one over its axes; and
where an axis is shared, either value is made of a narrower one, a dimension does not divide, or the
einsum stands in a ``shard_map``. Pure: nothing of jax is imported.
"""

from __future__ import annotations

import math

from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, REDUCE_SCATTER, Collective, EinsumSite


def inner_collectives(site: EinsumSite, outer: Collective) -> tuple[Collective, ...]:
    """The collectives of ``site`` that can be nested in the loop of ``outer``."""
    if site.manual or outer.kind not in (ALL_GATHER, REDUCE_SCATTER):
        return ()
    if outer.narrow_bytes or outer.early or not _divides(site, outer):
        return ()
    able = [c for c in site.loopable if _fits(site, outer, c)]
    return tuple(c for c in able if sum(c.axes == other.axes for other in able) == 1)


def inner_collective(
    site: EinsumSite, outer: Collective, schedule: Schedule | None
) -> Collective | None:
    """The collective that the inner ring of ``schedule`` takes over; None where there is none."""
    if schedule is None or schedule.inner is None:
        return None
    axes = schedule.inner.axes
    return next((c for c in inner_collectives(site, outer) if c.axes == axes), None)


def runs(site: EinsumSite, outer: Collective, schedule: Schedule) -> bool:
    """Whether the rings of ``schedule`` are those of ``outer`` and of one that it can nest."""
    if (schedule.axes, schedule.ring_size) != (outer.axes, site.ring_size(outer)):
        return False
    if schedule.inner is None:
        return True
    inner = inner_collective(site, outer, schedule)
    return inner is not None and schedule.inner.ring_size == site.ring_size(inner)


def _fits(site: EinsumSite, outer: Collective, c: Collective) -> bool:
    if c.kind != ALL_GATHER or c.operand == outer.operand or c.narrow_bytes or c.early:
        return False
    if set(c.axes) & set(outer.axes) or not _divides(site, c):
        return False
    return _label(site, c) != _label(site, outer)


def _label(site: EinsumSite, c: Collective) -> int:
    einsum = site.einsum
    labels = einsum.out if c.operand is None else (einsum.lhs, einsum.rhs)[c.operand]
    return labels[c.dim]


def _divides(site: EinsumSite, c: Collective) -> bool:
    """Whether the dimension of ``c`` divides into its shards."""
    which = 2 if c.operand is None else c.operand
    spec = (site.lhs_spec, site.rhs_spec, site.out_spec)[which]
    sizes = dict(site.axis_sizes)
    shards = math.prod(sizes[a] for a in (*spec[c.dim], *c.axes))
    return site.shapes[which][c.dim] % shards == 0
