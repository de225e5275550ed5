"""The budget of permutes: which loops of a plan are made when not all may be.

Before, with ``max_permutes=10``::

    site 0  rewrite, 7 permutes, saves 0.9 ms
    site 1  rewrite, 7 permutes, saves 0.2 ms

after::

    site 0  rewrite, 7 permutes
    site 1  rewrite, 2 permutes: the fastest of its candidates that fits and pays

Loops that save most come first. Where none fits the site is left alone. What an override forces
is counted and never given up. Pure: nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from collmm.constraints import form_for, read_overrides
from collmm.cost.candidates import Candidate
from collmm.errors import Reason
from collmm.nesting import inner_collective
from collmm.options import Options
from collmm.plan import Decision, Plan
from collmm.ring import gather_sends_written, scatter_sends_written
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, ALL_TO_ALL, Collective, EinsumSite

_Ring = tuple[Decision, ...]


def permutes(site: EinsumSite, collective: Collective, schedule: Schedule) -> int:
    """The permutes that a loop has in the text of the program."""
    n = schedule.ring_size
    inner = _inner_permutes(site, collective, schedule)
    if collective.kind == ALL_TO_ALL:
        return n - 1
    if collective.kind == ALL_GATHER:
        block = _block(site, collective)
        way = n, schedule.two_way, schedule.unroll
        g = schedule.shards_per_step
        return inner + gather_sends_written(*way, block, schedule.chunks, g)
    block = _block(site, collective)
    how = schedule.accumulators, schedule.unroll, schedule.shards_per_step
    return inner + scatter_sends_written(n, block, *how)


def _inner_permutes(site: EinsumSite, collective: Collective, schedule: Schedule | None) -> int:
    """The permutes of the site's inner ring; every einsum of one outer ring has its own."""
    inner = schedule.inner if schedule is not None else None
    if inner is None or inner_collective(site, collective, schedule) is None:
        return 0
    return gather_sends_written(inner.ring_size, inner.two_way, inner.unroll)


def within_permutes(plan: Plan, options: Options, done: Collection[int] = ()) -> Plan:
    """Return ``plan`` with no more permutes than ``options.max_permutes``.

    ``done`` are the numbers of sites that are carried out already, which nothing can change.
    """
    if options.max_permutes is None:
        return plan
    overrides = read_overrides(options.overrides)
    left = options.max_permutes
    free: list[_Ring] = []
    for ring in _rings(plan):
        if any(d.site.index in done or form_for(d.site, overrides) for d in ring):
            left -= _cost(ring)
        else:
            free.append(ring)
    changed: dict[int, Decision] = {}
    for ring in sorted(free, key=_saving, reverse=True):
        fitting = _fitting(ring, left, options)
        changed.update((d.site.index, _decided(d, ring, fitting, left, options)) for d in ring)
        if fitting is not None:
            left -= _written(ring, fitting)
    decisions = tuple(changed.get(d.site.index, d) for d in plan.decisions)
    return dataclasses.replace(plan, decisions=decisions)


def _rings(plan: Plan) -> list[_Ring]:
    """The rewritten sites by the ring they are on; those of one gathered value share one."""
    rings: dict[object, list[Decision]] = {}
    for d in plan.rewritten:
        assert d.schedule is not None
        # Of einsums on one ring not all need have an inner one.
        outer = dataclasses.replace(d.schedule, inner=None)
        key = (d.group, outer) if d.group else d.site.index
        rings.setdefault(key, []).append(d)
    return [tuple(ring) for ring in rings.values()]


def _cost(ring: _Ring) -> int:
    first, *rest = ring
    assert first.collective is not None
    assert first.schedule is not None
    inner = sum(_inner_permutes(d.site, d.collective, d.schedule) for d in rest if d.collective)
    return permutes(first.site, first.collective, first.schedule) + inner


def _written(ring: _Ring, chosen: Candidate) -> int:
    """The permutes of a ring that runs as a candidate of its first member says."""
    return _cost(tuple(_as(d, _own(d, ring, chosen)) for d in ring))


def _own(d: Decision, ring: _Ring, chosen: Candidate) -> Candidate:
    """The candidate of ``d`` that goes with that of the first on its ring: they are in step."""
    return d.candidates[ring[0].candidates.index(chosen)]


def _as(d: Decision, c: Candidate) -> Decision:
    return dataclasses.replace(d, collective=c.collective, schedule=c.schedule, estimate=c.estimate)


def _saving(ring: _Ring) -> float:
    e = ring[0].estimate
    return e.before_s - e.after_s if e is not None else 0.0


def _fitting(ring: _Ring, left: int, options: Options) -> Candidate | None:
    """The fastest candidate with at most ``left`` permutes; under "auto" one that pays."""
    for c in ring[0].candidates:
        pays = options.policy == "always" or c.estimate.pays(options.min_gain)
        fits = options.fits_memory(c.estimate.memory_bytes)
        if pays and fits and _written(ring, c) <= left:
            return c
    return None


def _decided(
    d: Decision, ring: _Ring, chosen: Candidate | None, left: int, options: Options
) -> Decision:
    """Return ``d`` as the choice for its ring has it; each site of a ring has it in its own way.

    ``left`` are the permutes that other loops leave of ``max_permutes``.
    """
    if chosen is None:
        assert options.max_permutes is not None
        taken = options.max_permutes - left
        others = f" with {taken} in other loops" if taken else ""
        detail = f"max_permutes={options.max_permutes}{others}, and this loop has {_cost(ring)}"
        return dataclasses.replace(d, schedule=None, reason=Reason.PERMUTE_BUDGET, detail=detail)
    choice = _own(d, ring, chosen)
    if choice.schedule == d.schedule and choice.collective == d.collective:
        return d
    return _as(d, choice)


def _block(site: EinsumSite, collective: Collective) -> int:
    """Size, on one device, of what is gathered or scattered: a shard, or a block of the sum."""
    which = 2 if collective.operand is None else collective.operand
    spec = (site.lhs_spec, site.rhs_spec, site.out_spec)[which]
    size, sizes = site.shapes[which][collective.dim], dict(site.axis_sizes)
    for axis in (*spec[collective.dim], *collective.axes):
        size = -(-size // sizes[axis])
    return size
