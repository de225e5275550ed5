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
from collmm.options import Options
from collmm.plan import Decision, Plan
from collmm.ring import gather_sends_written, scatter_sends_written
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, ALL_TO_ALL, Collective, EinsumSite

_Ring = tuple[Decision, ...]


def permutes(site: EinsumSite, collective: Collective, schedule: Schedule) -> int:
    """The permutes that a loop has in the text of the program."""
    n = schedule.ring_size
    if collective.kind == ALL_TO_ALL:
        return n - 1
    if collective.kind == ALL_GATHER:
        return gather_sends_written(n, schedule.two_way, schedule.unroll)
    block = _scattered_size(site, collective) // n
    return scatter_sends_written(n, block, schedule.accumulators, schedule.unroll)


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
            left -= _cost(ring[0])
        else:
            free.append(ring)
    changed: dict[int, Decision] = {}
    for ring in sorted(free, key=_saving, reverse=True):
        fitting = _fitting(ring[0], left, options)
        if fitting is not None:
            left -= permutes(ring[0].site, fitting.collective, fitting.schedule)
        changed.update((d.site.index, _decided(d, fitting, options)) for d in ring)
    decisions = tuple(changed.get(d.site.index, d) for d in plan.decisions)
    return dataclasses.replace(plan, decisions=decisions)


def _rings(plan: Plan) -> list[_Ring]:
    """The rewritten sites by the ring they are on; those of one gathered value share one."""
    rings: dict[object, list[Decision]] = {}
    for d in plan.rewritten:
        key = (d.group, d.schedule) if d.group else d.site.index
        rings.setdefault(key, []).append(d)
    return [tuple(ring) for ring in rings.values()]


def _cost(d: Decision) -> int:
    assert d.collective is not None
    assert d.schedule is not None
    return permutes(d.site, d.collective, d.schedule)


def _saving(ring: _Ring) -> float:
    e = ring[0].estimate
    return e.before_s - e.after_s if e is not None else 0.0


def _fitting(d: Decision, left: int, options: Options) -> Candidate | None:
    """The fastest candidate with at most ``left`` permutes; under "auto" one that pays."""
    for c in d.candidates:
        pays = options.policy == "always" or c.estimate.pays(options.min_gain)
        fits = options.fits_memory(c.estimate.memory_bytes)
        if pays and fits and permutes(d.site, c.collective, c.schedule) <= left:
            return c
    return None


def _decided(d: Decision, chosen: Candidate | None, options: Options) -> Decision:
    """Return ``d`` as the choice for its ring has it; each site of a ring has it in its own way."""
    choice = None if chosen is None else next(c for c in d.candidates if _same(c, chosen))
    if choice is None:
        detail = f"max_permutes={options.max_permutes}, and this loop has {_cost(d)}"
        return dataclasses.replace(d, schedule=None, reason=Reason.PERMUTE_BUDGET, detail=detail)
    if choice.schedule == d.schedule and choice.collective == d.collective:
        return d
    return dataclasses.replace(
        d, collective=choice.collective, schedule=choice.schedule, estimate=choice.estimate
    )


def _same(c: Candidate, other: Candidate) -> bool:
    return (c.collective.kind, c.schedule) == (other.collective.kind, other.schedule)


def _scattered_size(site: EinsumSite, collective: Collective) -> int:
    """Elements, on one device before the scatter, of the dimension that is scattered."""
    sizes = dict(site.axis_sizes)
    size = site.shapes[2][collective.dim]
    for axis in site.out_spec[collective.dim]:
        size //= sizes[axis]
    return size
