"""Plan: for every einsum site a schedule, or the reason why it is left alone.

Pure: planning works on shapes and names, without devices.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collmm import plan_file, report
from collmm.constraints import Form, Overrides, form_for, read_overrides
from collmm.cost.candidates import Candidate, Places, RingPlace, Weighing
from collmm.cost.compiled import plain_s
from collmm.cost.einsum import product_of, time_of
from collmm.cost.estimate import Estimate, assumed_ring, estimate
from collmm.cost.figures import Chip
from collmm.cost.hiding import Hidden, hidden_seconds
from collmm.cost.kernels import pass_s
from collmm.cost.steps import Shared
from collmm.errors import Reason
from collmm.explanation import Explanation, explain
from collmm.nesting import inner_collective
from collmm.options import Options
from collmm.schedule import Schedule
from collmm.sites import (
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    EinsumSite,
    worked_after,
)

if TYPE_CHECKING:
    from collmm.memory import Memory


@dataclasses.dataclass(frozen=True)
class Decision:
    """What happens to one site.

    Attributes:
      site: the site.
      collective: the collective that is looped, or would have been; None when there is none.
      schedule: how; None when the site is left alone.
      reason: why it is left alone; None when it is rewritten.
      estimate: the predicted times of the fastest candidate, where a loop exists.
      detail: more about the reason, in words.
      candidates: every way to loop the site that was weighed, the fastest first.
      group: the numbers of the sites that share the ring, its own too; empty when alone.
    """

    site: EinsumSite
    collective: Collective | None = None
    schedule: Schedule | None = None
    reason: Reason | None = None
    estimate: Estimate | None = None
    detail: str = ""
    candidates: tuple[Candidate, ...] = ()
    group: tuple[int, ...] = ()

    @property
    def rewritten(self) -> bool:
        """Whether the site becomes a loop."""
        return self.schedule is not None

    @property
    def judged(self) -> bool:
        """Whether the site is left alone because the cost model says so."""
        return self.reason in (Reason.NOT_WORTH, Reason.ALREADY_HIDDEN, Reason.GATHERED_ONCE)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions of one program, in program order; ``print`` shows them as a table.

    Attributes:
      decisions: one per ``dot_general``.
      policy: the policy they were made under.
      chip: the hardware row they were made for.
      note: one line about the hardware row, or empty.
      program: name of the function.
      min_gain: the share of its time that a loop had to save.
      jax: the version of jax it was made with, or empty.
      row: the hardware row itself, per device.
      memory: what the program takes on each device, ``"before"`` and ``"after"``, where it was
        compiled; planning compiles nothing.
    """

    decisions: tuple[Decision, ...]
    policy: str
    chip: str
    note: str = ""
    program: str = ""
    min_gain: float = Options.min_gain
    jax: str = ""
    row: Chip | None = dataclasses.field(default=None, compare=False, repr=False)
    memory: tuple[tuple[str, Memory], ...] = ()

    @property
    def rewritten(self) -> tuple[Decision, ...]:
        """The decisions that make a loop."""
        return tuple(d for d in self.decisions if d.rewritten)

    def __str__(self) -> str:
        return report.plan_table(self)

    def to_json(self) -> dict:
        """Return the plan as plain dicts, lists, numbers and strings."""
        return report.plan_json(self)

    def explain(self) -> Explanation:
        """Return why every einsum was decided as it was; ``print`` shows it in words."""
        return explain(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a file that ``Options(plan=...)`` reads.

        Raises OptionError when it cannot be written.
        """
        plan_file.save(self, path)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The candidates of one site, the fastest first, and who shares its ring."""

    candidates: tuple[Candidate, ...]
    group: tuple[int, ...] = ()

    @property
    def saving(self) -> float:
        estimate = self.candidates[0].estimate
        return estimate.before_s - estimate.after_s


def _unknown_place(site: EinsumSite, axes: tuple[str, ...]) -> RingPlace:
    return RingPlace()


def make_plan(
    sites: Sequence[EinsumSite],
    options: Options,
    chip: Chip,
    *,
    note: str = "",
    program: str = "",
    places: Places = _unknown_place,
) -> Plan:
    """Decide every site on ``chip`` under ``options``.

    Args:
      sites: of one program, in program order.
      options: the policy and the constraints; all but ``max_permutes``, which ``budget`` holds to.
      chip: the hardware row, per device.
      note: about the row, for the plan.
      program: name of the function, for the plan.
      places: where the ring over some axes of a site's mesh lies.
    """
    overrides = read_overrides(options.overrides)
    sites = worked_after([_forbidden(site, overrides) for site in sites])
    hidden = _hidden(sites, chip, places)
    able = {site.index: site for site in sites if site.refusal is None}
    weigh = Weighing(chip, places, hidden)
    choices = {i: _Choice(weigh(site)) for i, site in able.items()}
    for group in _groups(list(able.values())):
        alone = [m for m in group if not choices[m.site.index].group]
        if len(alone) > 1:
            choices.update(_shared(alone, choices, weigh))
    decisions = []
    for site in sites:
        choice = choices.get(site.index)
        form = form_for(site, overrides)
        if choice is None:
            decisions.append(Decision(site, reason=site.refusal, detail=site.detail))
        elif form is not None:
            best = _forced(site, choice, form, chip, places)
            decisions.append(_made(site, choice, best, f"override {form.text!r}"))
        else:
            decision = _decide(site, choice, options)
            before = choices.get(site.follows)
            if not decision.rewritten and before is not None:
                decision = _chained(decision, choice, before, options, chip)
            decisions.append(decision)
    if options.chains and options.max_permutes is None:
        decisions = _single_in_chains(decisions, options, chip)
    return Plan(
        tuple(decisions),
        options.policy,
        chip.name,
        note,
        program,
        min_gain=options.min_gain,
        row=chip,
    )


def _forbidden(site: EinsumSite, overrides: Overrides) -> EinsumSite:
    """Return a site that an override forbids to loop with that refusal."""
    form = form_for(site, overrides)
    if site.refusal is not None or form is None or form.loop:
        return site
    return dataclasses.replace(site, refusal=Reason.OVERRIDE)


def _forced(site: EinsumSite, choice: _Choice, form: Form, chip: Chip, places: Places) -> Candidate:
    """Return the fastest candidate that has a form, or the fastest one brought into that form.

    An exchange has one form only.
    """
    fitting = [c for c in choice.candidates if form.admits(c.schedule, c.collective.kind)]
    best = fitting[0] if fitting else choice.candidates[0]
    if fitting or best.collective.kind == ALL_TO_ALL:
        return best
    schedule = form.applied(best.schedule, best.collective.kind)
    ring = places(site, best.collective.axes).ring
    times = estimate(site, best.collective, schedule, chip, ring, inside=best.inside)
    members = (Shared(site, best.collective),)
    return Candidate(best.collective, schedule, times, ring, members, inside=best.inside)


def _made(site: EinsumSite, choice: _Choice, best: Candidate, detail: str = "") -> Decision:
    return Decision(
        site,
        best.collective,
        best.schedule,
        estimate=best.estimate,
        detail=detail,
        candidates=choice.candidates,
        group=choice.group,
    )


def _decide(site: EinsumSite, choice: _Choice, options: Options) -> Decision:
    fastest = choice.candidates[0]
    left = dataclasses.replace(_made(site, choice, fastest), schedule=None)
    if options.policy == "never":
        return dataclasses.replace(left, reason=Reason.POLICY_NEVER)
    least = options.min_gain if options.policy == "auto" else -math.inf
    if not fastest.estimate.pays(least):
        reason, detail = _why_not(fastest, options.min_gain)
        return dataclasses.replace(left, reason=reason, detail=detail)
    paying = [c for c in choice.candidates if c.estimate.pays(least)]
    fitting = [c for c in paying if options.fits_memory(c.estimate.memory_bytes)]
    if fitting:
        return _made(site, choice, fitting[0])
    needed = report.human_bytes(min(c.estimate.memory_bytes for c in paying))
    detail = f"it takes {needed} or more"
    return dataclasses.replace(left, reason=Reason.MEMORY_BUDGET, detail=detail)


def _chained(
    left: Decision, own: _Choice, before: _Choice, options: Options, chip: Chip
) -> Decision:
    """Return the decision for a scatter that pays only in one loop with the gather before it.

    A chain writes no gathered result, and all its transfers hide behind all its einsums.
    """
    last, first = _uncut(own.candidates), _uncut(before.candidates)
    if not _can_chain(first, last) or options.max_permutes is not None:
        return left
    able = options.chains and options.policy == "auto" and left.reason is Reason.NOT_WORTH
    if not able or not first.estimate.pays(options.min_gain):
        return left
    if better_apart(last.estimate, options.policy, chip.kind == "tpu"):
        return left  # it would stay a ring of its own
    a, b = first.estimate, last.estimate
    together = _together_s(a, b)
    apart = a.after_s + b.before_s + _between_s(first, chip)
    if 1 - together / apart <= options.min_gain or not options.fits_memory(b.memory_bytes):
        return left
    detail = (
        f"in one loop with the gather of einsum {left.site.follows}: predicted "
        f"{report.seconds(together)} for both, {report.seconds(apart)} with this one as it is"
    )
    return _made(left.site, own, last, detail)


def _together_s(a: Estimate, b: Estimate) -> float:
    """Predicted seconds of a gather and the scatter that follows it in one loop."""
    transfer = a.steps * a.step_permute_s + b.steps * b.step_permute_s
    einsums = a.einsum_s + a.loss_s + b.einsum_s + b.loss_s
    together = a.after_s - a.exposed_s - a.traffic_s + b.after_s - b.exposed_s
    return together + max(0.0, transfer - einsums)


def _between_s(first: Candidate, chip: Chip) -> float:
    """Seconds of the elementwise work on what a gather's ring has made, a pass that a chain saves.

    Only on a GPU: a TPU's compiler fuses it into the einsums on either side.
    """
    if chip.kind != "gpu" or not first.members:
        return 0.0
    return pass_s(2 * product_of(first.members[0].site).out_bytes, chip)


def _can_chain(first: Candidate, last: Candidate) -> bool:
    """Whether a gather and the scatter that follows it can be one loop."""
    kinds = first.collective.kind, last.collective.kind
    same = last.schedule.axes == first.schedule.axes
    cut = _cut(first.collective, first.schedule) or _cut(last.collective, last.schedule)
    return kinds == (ALL_GATHER, REDUCE_SCATTER) and same and not cut


def better_apart(scatter: Estimate | None, policy: str, tpu: bool) -> bool:
    """Whether a scatter ring stays one of its own even where it could be chained.

    libtpu hides less of the transfers of a chain than of its two rings where they take longer than
    the einsums (on v5e an MLP of 8192 x 4096 x 16384 over 8 devices 8.0 ms, as two rings 7.5).
    """
    return policy == "auto" and tpu and scatter is not None and scatter.bound_by_links


def _uncut(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest candidate of which a chain can be made, which cuts shards in its own way."""
    whole = (c for c in candidates if not _cut(c.collective, c.schedule))
    return next(whole, candidates[0])


def _single_in_chains(
    decisions: Sequence[Decision], options: Options, chip: Chip
) -> list[Decision]:
    """Return the decisions without inner rings, chunks and groups where a chain can be made.

    It has none of them: its accumulators cut the shards. Nested rings gain less: libtpu's schedule
    of an 8192 wide MLP on v5e 4x4, both weights gathered over data, takes 15.6 ms with a chain and
    17.0 ms with the first weight's ring nested.
    """
    overrides = read_overrides(options.overrides)
    found = {d.site.index: d for d in decisions}
    for last in decisions:
        first = found.get(last.site.follows)
        last = found[last.site.index]
        if first is None or not first.rewritten or not last.rewritten:
            continue
        rings = [{d.site.index, *d.group} for d in (first, last)]
        free = all(form_for(found[i].site, overrides) is None for ring in rings for i in ring)
        a, b = map(_for_a_chain, (first, last))
        if not free or a is None or b is None or not _can_chain(a, b):
            continue
        together = _together_s(a.estimate, b.estimate) - _between_s(a, chip)
        if options.policy == "auto" and _better_grouped(first, last, together):
            continue
        apart = better_apart(b.estimate, options.policy, chip.kind == "tpu")
        if apart and not (_nested(first) or _nested(last)):
            continue  # chunks stay where no chain is made
        for d, ring, c in ((first, rings[0], a), (last, rings[1], b)):
            at = d.candidates.index(c)
            found.update((i, _as(found[i], found[i].candidates[at])) for i in ring)
    return [found[d.site.index] for d in decisions]


def _better_grouped(first: Decision, last: Decision, together: float) -> bool:
    """Whether two rings, of which one takes several shards a step, are faster than a chain."""
    grouped = any(d.schedule is not None and d.schedule.grouped for d in (first, last))
    if not grouped or first.estimate is None or last.estimate is None:
        return False
    return first.estimate.after_s + last.estimate.after_s < together


def _for_a_chain(d: Decision) -> Candidate | None:
    """The candidate of a decision; the fastest that a chain can be made of where it is none."""
    made = (d.collective, d.schedule)
    for c in d.candidates:
        this = (c.collective, c.schedule)
        if not _cut(*this) if _cut(*made) else this == made:
            return c
    return None


def _nested(d: Decision) -> bool:
    return d.schedule is not None and d.schedule.nested


def _cut(collective: Collective | None, schedule: Schedule | None) -> bool:
    """Whether a loop has an inner ring or several shards a step, or a gather chunks."""
    if collective is None or schedule is None:
        return False
    chunked = schedule.chunked and collective.kind == ALL_GATHER
    return schedule.nested or schedule.grouped or chunked


def _as(d: Decision, c: Candidate) -> Decision:
    return dataclasses.replace(d, collective=c.collective, schedule=c.schedule, estimate=c.estimate)


def _why_not(best: Candidate, min_gain: float) -> tuple[Reason, str]:
    e, kind = best.estimate, best.collective.kind
    before, after, einsum, moved, hidden = map(
        report.seconds, (e.before_s, e.after_s, e.einsum_s, e.collective_s, e.hidden_s)
    )
    alone = dataclasses.replace(e, hidden_s=0.0, displaced_s=0.0)
    if best.once and alone.pays(min_gain):
        return Reason.GATHERED_ONCE, f"before the loop; in it {kind} would take {moved} a turn"
    if e.hidden_s and alone.pays(min_gain):
        return Reason.ALREADY_HIDDEN, f"{hidden} of {moved} of {kind} run behind earlier einsums"
    if e.displaced_s and alone.pays(min_gain):
        later = report.seconds(e.displaced_s)
        return Reason.ALREADY_HIDDEN, f"{later} of other collectives run behind this einsum"
    return Reason.NOT_WORTH, (
        f"predicted {after} as a loop, {before} as it is (einsum {einsum}, {kind} {moved})"
    )


# --- einsums of one gathered value, or of one scattered sum ---


def _groups(sites: Sequence[EinsumSite]) -> list[list[Shared]]:
    """Return the einsums that can share a ring.

    They gather one value in one way, or their results are added before one collective.

    Those with the most bytes in all come first.
    """
    groups: dict[object, list[Shared]] = {}
    for site in sites:
        for c in site.loopable:
            if c.kind == ALL_GATHER and c.operand is not None and site.sources[c.operand] >= 0:
                key = site.sources[c.operand], c.dim, c.axes, c.bytes
                groups.setdefault(key, []).append(Shared(site, c))
            elif c.operand is None and site.one_ring:
                groups.setdefault(site.together, []).append(Shared(site, c))
    return sorted(groups.values(), key=lambda group: -len(group) * group[0].collective.bytes)


def _shared(
    group: Sequence[Shared],
    choices: dict[int, _Choice],
    weigh: Weighing,
) -> dict[int, _Choice]:
    """Return the choices of a group, weighed together: its ring is paid once, and all hide it.

    It stays apart where its members save more by looping collectives of their own.
    """
    first, *rest = group
    found = weigh(first.site, only=first.collective, sharing=rest)
    numbers = tuple(m.site.index for m in group)
    together = _Choice(found, numbers)
    own = {id(m): choices[m.site.index] for m in group}
    apart = sum(
        max(0.0, own[id(m)].saving)
        for m in group
        if own[id(m)].candidates[0].collective != m.collective
    )
    if apart > max(0.0, together.saving):
        return {}
    mine = {m.site.index: m.collective for m in group}
    sites = {m.site.index: m.site for m in group}
    return {
        i: _Choice(tuple(_of_member(c, sites[i], mine[i]) for c in found), numbers) for i in numbers
    }


def _of_member(c: Candidate, site: EinsumSite, collective: Collective) -> Candidate:
    """Return a candidate of a ring as one member has it: not all need have an inner ring."""
    schedule = c.schedule
    if inner_collective(site, collective, schedule) is None:
        schedule = dataclasses.replace(schedule, inner=None)
    return dataclasses.replace(c, collective=collective, schedule=schedule)


def _hidden(sites: Sequence[EinsumSite], chip: Chip, places: Places) -> Hidden:
    """Return what other einsums hide of each collective already, where the compiler does that."""
    if not chip.early_gathers:
        return {}
    einsum_s = {s.index: time_of(product_of(s), chip).seconds for s in sites if s.axis_sizes}
    collective_s = {}
    for site in sites:
        for c in site.loopable:
            ring = places(site, c.axes).ring or assumed_ring(chip, site.ring_size(c))
            collective_s[site.index, c] = plain_s(c, ring)
    return hidden_seconds(sites, einsum_s, collective_s)
