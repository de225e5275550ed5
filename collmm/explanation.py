"""Why a plan decides as it does: every candidate with its terms, the winner, what would turn it.

    site 0  model.py:45  ab,bc->ac
      as it is     einsum 310 us + all-gather 900 us = 1.21 ms
      candidates   a line each: einsum, loss, traffic, launch, exposed, rest, total, gain
      declined: the 310 us einsum cannot hide 900 us of transfer, 640 us stay exposed;
      pays from a = 6144 up (now 2048)

Pure: nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from typing import TYPE_CHECKING, Any

from collmm import plan_file, report
from collmm.breakeven import BreakEven, break_evens
from collmm.cost.candidates import Candidate
from collmm.cost.estimate import Estimate
from collmm.errors import Reason
from collmm.sites import ALL_GATHER, ALL_TO_ALL, EinsumSite

if TYPE_CHECKING:
    from collmm.plan import Decision, Plan

_TURNS_TOLD = 3
_WIDTH = 100
# What can be done about a reason that does not come from the cost model.
REMEDIES: dict[Reason, str] = {
    Reason.ALL_REDUCE: "shard the result over the summed axes where it is next used",
    Reason.POLICY_NEVER: 'set policy="auto"',
    Reason.OVERRIDE: "drop the override",
    Reason.PLAN_FILE: 'set "decision" to "rewrite" in the plan file',
    Reason.MEMORY_BUDGET: "raise memory_budget",
    Reason.PERMUTE_BUDGET: "raise max_permutes, or force a rolled loop with an override",
    Reason.NO_OVERLAP: "trace it outside collmm.no_overlap()",
    Reason.UNEVEN_SHARDS: "make the dimension a multiple of its mesh axes",
    Reason.SHARED_RESULT: "constrain every use of the result to one sharding",
    Reason.UNKNOWN_MESH: "name the mesh in the sharding of an argument",
}


@dataclasses.dataclass(frozen=True)
class SiteExplanation:
    """Why one site was decided as it was.

    Attributes:
      decision: what was decided.
      winner: the candidate that was made, or came closest; None where no loop exists.
      turns: where the decision for the winner would turn, the nearest first.
      words: the reason and what would change it, in sentences.
    """

    decision: Decision
    winner: Candidate | None
    turns: tuple[BreakEven, ...]
    words: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, numbers and strings."""
        d, best = self.decision, self.winner
        return {
            "site": d.site.index,
            "file": plan_file.shown_path(d.site.location.file),
            "line": d.site.location.line,
            "einsum": d.site.einsum.equation(),
            "decision": plan_file.REWRITE if d.rewritten else plan_file.LEAVE,
            "reason": d.reason.code if d.reason is not None else None,
            "detail": d.detail,
            "group": list(d.group),
            "baseline": None if best is None else _baseline(best.estimate),
            "candidates": [
                {
                    "looped": c.collective.describe(),
                    "schedule": plan_file.schedule_json(c.schedule),
                    "made": d.rewritten and c is best,
                    "predicted": c.estimate.to_json(),
                }
                for c in _shown(d, best)
            ],
            # Dimensions are named as in the einsum of the first site on the ring.
            "break_even": [
                {**dataclasses.asdict(turn), "site": d.group[0] if d.group else d.site.index}
                for turn in self.turns
            ],
            "words": list(self.words),
        }


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a plan decides as it does; ``print`` shows it in words.

    Attributes:
      plan: the plan.
      sites: one per einsum, in program order.
    """

    plan: Plan
    sites: tuple[SiteExplanation, ...]

    def __str__(self) -> str:
        head = f"times are predicted, for {self.plan.chip}"
        if self.plan.note:
            head += f"\nnote: {self.plan.note}"
        made, count = len(self.plan.rewritten), len(self.plan.decisions)
        tail = f"{made} of {count} einsums rewritten (policy {self.plan.policy})"
        return "\n\n".join([head, *map(_text, self.sites), tail])

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, numbers and strings."""
        head = {**plan_file.header(self.plan), "policy": self.plan.policy, "note": self.plan.note}
        return {**head, "min_gain": self.plan.min_gain, "sites": [s.to_json() for s in self.sites]}


def explain(plan: Plan) -> Explanation:
    """Explain every decision of ``plan``."""
    known: dict[Any, tuple[BreakEven, ...]] = {}
    return Explanation(plan, tuple(_explained(d, plan, known) for d in plan.decisions))


def _explained(d: Decision, plan: Plan, known: dict[Any, tuple[BreakEven, ...]]) -> SiteExplanation:
    """``known``: the break-evens of rings that were explained already."""
    winner = _winner(d)
    turns: tuple[BreakEven, ...] = ()
    if winner is not None and winner.members and plan.row is not None:
        first = winner.members[0]
        ring = first.site.index, first.collective, winner.schedule, winner.estimate.einsums
        if ring not in known:
            rivals = [c for c in d.candidates if c is not winner and c.members]
            known[ring] = break_evens([winner, *rivals], plan.row, plan.min_gain)
        turns = known[ring]
    return SiteExplanation(d, winner, turns, _words(d, winner, turns, plan.min_gain))


def _winner(d: Decision) -> Candidate | None:
    """The candidate that was made, or the fastest."""
    for c in d.candidates:
        if (c.collective, c.schedule) == (d.collective, d.schedule):
            return c
    if d.schedule is not None and d.collective is not None and d.estimate is not None:
        return Candidate(d.collective, d.schedule, d.estimate)
    return d.candidates[0] if d.candidates else None


def _shown(d: Decision, winner: Candidate | None) -> tuple[Candidate, ...]:
    """The candidates, and the one that was made where it is none of them."""
    made = () if winner is None or winner in d.candidates else (winner,)
    return (*d.candidates, *made)


# --- in words ---


def _words(
    d: Decision, winner: Candidate | None, turns: tuple[BreakEven, ...], min_gain: float
) -> tuple[str, ...]:
    if winner is None:
        assert d.reason is not None
        return tuple(filter(None, (_left(d), REMEDIES.get(d.reason))))
    pays = winner.estimate.pays(min_gain)
    if d.rewritten:
        first = _made(d, winner)
    elif d.judged:
        first = f"declined: {_why_not(winner, min_gain)}"
    else:
        assert d.reason is not None
        first = f"{_left(d)}; {_worth(winner.estimate)}"
    remedy = REMEDIES.get(d.reason) if d.reason is not None else None
    sided = [t for t in turns if t.pays_now == pays][:_TURNS_TOLD]
    told = [_alone(d) + _turn(t, winner, pays) for t in sided]
    if not pays and not any(t.what == "size" for t in turns) and winner.members:
        told.append("no other size of one dimension alone makes it pay")
    return tuple(filter(None, (first, remedy, *told)))


def _left(d: Decision) -> str:
    assert d.reason is not None
    return f"left alone: {d.reason.meaning}" + (f" ({d.detail})" if d.detail else "")


def _made(d: Decision, winner: Candidate) -> str:
    e, kind = winner.estimate, winner.collective.kind
    many = f" for {e.einsums} einsums of one ring" if e.einsums > 1 else ""
    text = f"rewritten as {winner.schedule.describe()}{many}: {_alone(d)}{_worth(e)}"
    hidden = e.collective_s - e.hidden_s - e.rest_s - e.exposed_s
    if hidden > 0:
        text += f", {_s(hidden)} of the {_s(e.collective_s)} {kind} run behind the einsum"
    if d.detail:
        text += f" ({d.detail})"
    rivals = [c for c in d.candidates if c is not winner]
    if rivals and d.detail == "":
        slower = rivals[0].estimate.after_s - rivals[0].estimate.before_s
        slower -= e.after_s - e.before_s
        text += f"; next best is {_name(rivals[0])}, {_s(slower)} slower"
    return text


def _alone(d: Decision) -> str:
    """Stands before the figures of a scatter that was made for one loop with its gather."""
    return "by itself " if d.rewritten and d.site.follows is not None and d.detail else ""


def _worth(e: Estimate) -> str:
    verb = "saves" if e.gain >= 0 else "costs"
    part = f"{100 * abs(e.gain):.1f} %"
    return f"a loop {verb} {part} ({_s(e.before_s)} as it is, {_s(e.after_s)} as a loop)"


def _why_not(c: Candidate, min_gain: float) -> str:
    """The largest thing that stands against the best candidate."""
    e, kind = c.estimate, c.collective.kind
    if c.once:
        return f"the compiler runs the {kind} once, before the loop, and {_worth(e)}"
    if e.hidden_s > 0.5 * e.collective_s:
        return (
            f"{_s(e.hidden_s)} of the {_s(e.collective_s)} {kind} run behind earlier einsums as it "
            f"is, and {_worth(e)}"
        )
    if e.gain > min_gain:
        return f"{_worth(e)}, but may take longer by {_s(e.doubt_s)}"
    reach = e.collective_s - e.hidden_s - e.rest_s
    if reach < min_gain * e.before_s:
        return (
            f"the {kind} takes {_s(reach)} of {_s(e.before_s)}: hiding all of it would save "
            f"{100 * reach / e.before_s:.1f} %, less than the {100 * min_gain:g} % asked for"
        )
    moved = _transfer(c)
    costs = {
        "exposed": e.exposed_s,
        "launch": e.launch_s,
        "loss": e.loss_s,
        "traffic": e.traffic_s,
        "displaced": e.displaced_s,
    }
    largest = max(costs, key=lambda name: costs[name])
    if largest == "exposed":
        return (
            f"the {_s(e.einsum_s)} einsum cannot hide {_s(moved)} of transfer, {_s(e.exposed_s)} "
            f"stay exposed; {_worth(e)}"
        )
    cost = {
        "launch": f"starting {e.steps} steps takes {_s(e.launch_s)}",
        "loss": f"{e.steps} smaller einsums take {_s(e.loss_s)} longer than the whole one",
        "traffic": f"slices and accumulators move for {_s(e.traffic_s)}",
        "displaced": f"{_s(e.displaced_s)} of collectives that run behind the einsum would wait",
    }[largest]
    return f"{cost}, and there is {_s(reach)} of {kind} to hide; {_worth(e)}"


def _transfer(c: Candidate) -> float:
    """Seconds of transfer of all steps of the busiest way."""
    n, schedule = c.schedule.groups, c.schedule
    if c.collective.kind == ALL_GATHER and schedule.two_way and not schedule.chunked:
        sends = n // 2
    elif c.collective.kind == ALL_GATHER and schedule.chunked:
        # Those of one step are of one way's pieces.
        sends = n - 1
    elif c.collective.kind in (ALL_GATHER, ALL_TO_ALL) or schedule.accumulators == 1:
        sends = n - 1
    else:
        sends = 2 * (n - 1)
    # Those within a group move all but one of its shards as well, one by one.
    return (sends + 1 - 1 / schedule.shards_per_step) * c.estimate.step_permute_s


def _turn(turn: BreakEven, c: Candidate, pays: bool) -> str:
    """What would change the decision, and whether it pays on this side of it."""
    if turn.what == "hidden":
        return (
            f"pays once no more than {_s(turn.value)} of the {c.collective.kind} is hidden "
            f"already (now {_s(turn.now)})"
            if not pays
            else f"would not pay if more than {_s(turn.value)} of it were hidden already"
        )
    if turn.what == "link":
        value, now = (f"{x / 1e9:.3g} GB/s" for x in (turn.value, turn.now))
        if pays:
            side = "slower" if turn.pays_above else "faster"
            return f"would not pay on links {side} than {value} ({now} reckoned with)"
        side = "faster" if turn.pays_above else "slower"
        return f"pays on links of {value} and {side} ({now} reckoned with)"
    value, now = f"{turn.name} = {turn.value:g}", f"(now {turn.now:g})"
    if pays:
        return f"would not pay {'below' if turn.pays_above else 'above'} {value} {now}"
    return f"pays from {value} up {now}" if turn.pays_above else f"pays up to {value} {now}"


# --- as text ---

_COLUMNS = ("einsum", "loss", "traffic", "launch", "exposed", "rest", "total", "gain")


def _text(s: SiteExplanation) -> str:
    d = s.decision
    lines = [f"site {d.site.index}  {_place(d.site)}  {d.site.einsum.equation()}  {_types(d.site)}"]
    words = list(s.words)
    if s.winner is not None and d.group and d.site.index != d.group[0]:
        lines.append(f"  {s.winner.collective.describe()}, on the ring of site {d.group[0]}")
        words = words[:1]
    elif s.winner is not None:
        lines += [f"  {line}" for line in _baseline_text(s.winner)]
        rows = [_row(c, d.rewritten and c is s.winner) for c in _shown(d, s.winner)]
        headers = ("", "candidate", *_COLUMNS, "memory", "permutes")
        lines += [f"  {line}" for line in report.table(headers, rows).splitlines()]
        if s.winner.estimate.note:
            lines.append(f"  note: {s.winner.estimate.note}")
    for word in words:
        lines.append(textwrap.fill(word, _WIDTH, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


def _baseline(e: Estimate) -> dict[str, float]:
    return {
        "einsum_s": e.einsum_s,
        "collective_s": e.collective_s,
        "others_s": e.others_s,
        "hidden_s": e.hidden_s,
        "before_s": e.before_s,
    }


def _baseline_text(c: Candidate) -> list[str]:
    e = c.estimate
    size = report.human_bytes(c.collective.bytes)
    many = f"{e.einsums} einsums" if e.einsums > 1 else "einsum"
    parts = f"{many} {_s(e.einsum_s)} + {c.collective.kind} {_s(e.collective_s)}"
    if e.others_s:
        parts += f" + other collectives {_s(e.others_s)}"
    if e.hidden_s:
        parts += f" - hidden already {_s(e.hidden_s)}"
    return [
        f"{c.collective.describe()} x{c.schedule.ring_size}, {size}",
        f"as it is: {parts} = {_s(e.before_s)}",
    ]


def _row(c: Candidate, made: bool) -> tuple[str, ...]:
    e = c.estimate
    rest = e.rest_s + e.displaced_s + e.others_s - e.inner_s
    times = (e.einsum_s, e.loss_s, e.traffic_s, e.launch_s, e.exposed_s, rest, e.after_s)
    gain = f"{100 * e.gain:+.1f} %"
    memory = f"{'-' if e.memory_bytes < 0 else ''}{report.human_bytes(abs(e.memory_bytes))}"
    return ("->" if made else "", _name(c), *map(_s, times), gain, memory, str(e.permutes))


def _name(c: Candidate) -> str:
    return f"{c.collective.kind} {c.schedule.describe()}"


def _place(site: EinsumSite) -> str:
    return f"{os.path.basename(site.location.file)}:{site.location.line}"


def _types(site: EinsumSite) -> str:
    lhs, rhs, out = (
        f"{dtype}{json.dumps(list(shape)).replace(' ', '')}"
        for dtype, shape in zip(site.dtypes, site.shapes, strict=True)
    )
    return f"{lhs} x {rhs} -> {out}"


def _s(value: float) -> str:
    return f"-{report.seconds(-value)}" if value < 0 else report.seconds(value)
