"""Plan: for every einsum site a schedule, or the reason why it is left alone.

Pure: planning works on shapes and names, without devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from collmm import report
from collmm.cost.figures import Chip
from collmm.cost.rule import Estimate, estimate
from collmm.errors import Reason
from collmm.options import Options
from collmm.schedule import Schedule, default_schedule
from collmm.sites import ALL_GATHER, ALL_TO_ALL, Collective, EinsumSite


@dataclasses.dataclass(frozen=True)
class Decision:
    """What happens to one site.

    Attributes:
      site: the site.
      collective: the collective that is looped, or would have been; None when there is none.
      schedule: how; None when the site is left alone.
      reason: why it is left alone; None when it is rewritten.
      estimate: the predicted times behind the decision, where a loop exists.
      detail: more about the reason, in words.
    """

    site: EinsumSite
    collective: Collective | None = None
    schedule: Schedule | None = None
    reason: Reason | None = None
    estimate: Estimate | None = None
    detail: str = ""

    @property
    def rewritten(self) -> bool:
        """Whether the site becomes a loop."""
        return self.schedule is not None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions of one program, in program order; ``print`` shows them as a table.

    Attributes:
      decisions: one per ``dot_general``.
      policy: the policy they were made under.
      chip: the hardware row they were made for.
      note: one line about the hardware row, or empty.
      program: name of the function.
    """

    decisions: tuple[Decision, ...]
    policy: str
    chip: str
    note: str = ""
    program: str = ""

    @property
    def rewritten(self) -> tuple[Decision, ...]:
        """The decisions that make a loop."""
        return tuple(d for d in self.decisions if d.rewritten)

    def __str__(self) -> str:
        return report.plan_table(self)

    def to_json(self) -> dict:
        """Return the plan as plain dicts, lists, numbers and strings."""
        return report.plan_json(self)


_Choice = tuple[Collective, Schedule, Estimate]


# The order in which a ring over some axes of a site's mesh should visit its members; None: as is.
RingOrder = Callable[[EinsumSite, tuple[str, ...]], tuple[int, ...] | None]


def make_plan(
    sites: Sequence[EinsumSite],
    options: Options,
    chip: Chip,
    *,
    note: str = "",
    program: str = "",
    ring_order: RingOrder = lambda site, axes: None,
) -> Plan:
    """Decide every site on ``chip`` under ``options``."""
    choices = {
        site.index: _choose(site, chip, ring_order) for site in sites if site.refusal is None
    }
    choices.update(_shared(sites, choices))
    decisions = tuple(_decide(site, choices.get(site.index), options) for site in sites)
    return Plan(decisions, options.policy, chip.name, note, program)


def _decide(site: EinsumSite, choice: _Choice | None, options: Options) -> Decision:
    if choice is None:
        return Decision(site, reason=site.refusal, detail=site.detail)
    collective, schedule, figures = choice
    if options.policy == "never":
        return Decision(site, collective, reason=Reason.POLICY_NEVER, estimate=figures)
    if options.policy == "auto" and not figures.pays:
        before, after, einsum, moved = map(
            report.seconds,
            (figures.before_s, figures.after_s, figures.einsum_s, figures.collective_s),
        )
        detail = (
            f"predicted {after} as a loop, {before} as it is "
            f"(einsum {einsum}, {collective.kind} {moved})"
        )
        return Decision(site, collective, None, Reason.NOT_WORTH, figures, detail)
    return Decision(site, collective, schedule, estimate=figures)


def _choose(site: EinsumSite, chip: Chip, ring_order: RingOrder) -> _Choice:
    """Pick which collective of the site to loop.

    The published choice between two: if the einsum takes less than either, the one with fewer
    bytes per step; otherwise the one that takes longer.
    """
    options = []
    for collective in site.loopable:
        schedule = _schedule(collective, site.ring_size(collective), chip)
        schedule = dataclasses.replace(schedule, order=ring_order(site, collective.axes))
        options.append((collective, schedule, estimate(site, collective, schedule, chip)))
    if all(e.einsum_s < e.collective_s for _, _, e in options):
        return min(options, key=lambda o: o[0].bytes / o[1].ring_size)
    return max(options, key=lambda o: o[2].collective_s)


def _schedule(collective: Collective, ring_size: int, chip: Chip) -> Schedule:
    if collective.kind == ALL_TO_ALL:
        return Schedule(collective.axes, ring_size, two_way=False, unroll=True)
    if chip.kind == "gpu":
        # The compiler merges the dots of an unrolled ring, and the two ways of a ring would share
        # one GPU's egress; either loses the overlap.
        return Schedule(collective.axes, ring_size, two_way=False, unroll=False)
    return default_schedule(collective.axes, ring_size)


def _shared(sites: Sequence[EinsumSite], choices: dict[int, _Choice]) -> dict[int, _Choice]:
    """Return the choices of einsums that gather one value, weighed together.

    They share one ring, so the gather is paid once and every one of them hides it.
    """
    groups: dict[object, list[int]] = {}
    for site in sites:
        if site.index not in choices:
            continue
        collective, _, _ = choices[site.index]
        if collective.kind == ALL_GATHER and collective.operand is not None:
            source = site.sources[collective.operand]
            key = source, collective.dim, collective.axes, collective.bytes
            groups.setdefault(key, []).append(site.index)
    weighed = {}
    for members in groups.values():
        einsum_s = sum(choices[i][2].einsum_s for i in members)
        for i in members:
            collective, schedule, figures = choices[i]
            figures = dataclasses.replace(figures, einsum_s=einsum_s, einsums=len(members))
            weighed[i] = collective, schedule, figures
    return weighed
