"""Pinning: a plan made to say what a plan file says, as far as the program allows it.

Before, decided by the cost model::

    site 0  rewrite all-gather lhs[1] over model: two-way x4 unrolled
    site 1  leave: not-worth

after, decided by the file::

    site 0  rewrite all-gather lhs[1] over model: one-way x4 rolled
    site 1  rewrite reduce-scatter result[0] over model: two-way x4 unrolled

A site that is not the one of its pin, or cannot follow it, is left alone:
``plan_file.differences`` tells of it. Pure: nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from collmm.cost.estimate import Estimate
from collmm.errors import Reason
from collmm.plan import Decision, Plan
from collmm.plan_file import Pin, PlanFile, follows
from collmm.schedule import Schedule
from collmm.sites import Collective, EinsumSite

# Predicts one site under a schedule that the cost model did not choose.
Price = Callable[[EinsumSite, Collective, Schedule], Estimate]
# Reasons that are a choice: a pin may say so of a site that a loop exists for.
_CHOICES = (
    Reason.NOT_WORTH,
    Reason.ALREADY_HIDDEN,
    Reason.GATHERED_ONCE,
    Reason.POLICY_NEVER,
    Reason.OVERRIDE,
    Reason.PLAN_FILE,
    Reason.MEMORY_BUDGET,
    Reason.PERMUTE_BUDGET,
)


def pin_plan(plan: Plan, pinned: PlanFile, price: Price) -> Plan:
    """Return ``plan`` with every site that a loop exists for decided as ``pinned`` says."""
    decisions = []
    for d in plan.decisions:
        if d.site.refusal is not None:
            decisions.append(d)
            continue
        pin = pinned.pin_of(d.site)
        decisions.append(_decide(d, pin, price))
    note = "; ".join(filter(None, (plan.note, f"decided as {pinned.path} says")))
    return dataclasses.replace(plan, decisions=tuple(decisions), note=note)


def _decide(d: Decision, pin: Pin | None, price: Price) -> Decision:
    collective = pin.collective(d.site) if pin is not None else None
    if pin is None or pin.schedule is None or collective is None:
        reason = pin.reason if pin is not None and pin.reason in _CHOICES else Reason.PLAN_FILE
        return dataclasses.replace(d, schedule=None, reason=reason, detail="")
    if not follows(d.site, collective, pin.schedule):
        return dataclasses.replace(d, schedule=None, reason=Reason.PLAN_FILE, detail="")
    if (d.collective, d.schedule) == (collective, pin.schedule):
        return d
    figures = price(d.site, collective, pin.schedule)
    return Decision(d.site, collective, pin.schedule, estimate=figures)
