"""Sums that are looped whole or not at all: einsums that are added before one collective.

Before, where an override forbids one of them::

    site 0  rewrite reduce-scatter result[0] over model
    site 1  leave: override                                # added to site 0 and scattered with it

after::

    site 0  leave: override, with einsum 1, to which it is added
    site 1  leave: override

Pure: nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses

from collmm.errors import Reason
from collmm.plan import Decision, Plan


def whole_sums(plan: Plan) -> Plan:
    """Return ``plan`` without the loops of sums that others of the same sum are not in."""
    by_number = {d.site.index: d for d in plan.decisions}
    decisions = tuple(_with_the_others(d, by_number) for d in plan.decisions)
    return dataclasses.replace(plan, decisions=decisions)


def _with_the_others(d: Decision, by_number: dict[int, Decision]) -> Decision:
    if not _loops_the_sum(d):
        return d
    for i in d.site.together:
        if not _loops_the_sum(by_number[i]):
            reason = by_number[i].reason or Reason.NOT_WORTH
            detail = f"einsum {i} is left, and its result is added before the collective"
            return dataclasses.replace(d, schedule=None, reason=reason, detail=detail)
    return d


def _loops_the_sum(d: Decision) -> bool:
    return d.rewritten and d.collective is not None and d.collective.operand is None
