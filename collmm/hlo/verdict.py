"""The verdict on one collective: from what ran meanwhile, and how long it was waited for."""

from __future__ import annotations

from collections.abc import Sequence

from collmm.hlo.describe import later_work
from collmm.hlo.findings import Finding, Verdict, Work
from collmm.hlo.instruction import Computation, Instruction

# Below this share of its transfer time a collective counts as hidden, above one minus it as
# exposed: the figures are models, a percent is within what they can tell.
_TOLERANCE = 0.01

Judgement = tuple[Verdict, str, tuple[str, ...]]
"""The verdict, why, and the instructions a serialised collective waits for or holds up."""


def judge(
    computation: Computation,
    done: Instruction,
    finding: Finding,
    *,
    work: Sequence[Work],
    exposed: float | None,
    queued: float,
    queued_behind: tuple[str, ...],
) -> Judgement:
    """Judge a collective that lands at ``done``.

    Args:
      computation: where it runs.
      done: the instruction that waits for it.
      finding: what it is, and its time alone on its links.
      work: what ran while it was in flight.
      exposed: seconds that nothing else ran; None when there is no link model.
      queued: seconds before its links were free.
      queued_behind: the collectives that held them; empty too where it held others up itself.
    """
    if not finding.asynchronous:
        return Verdict.EXPOSED, "it is synchronous", ()
    transfer = finding.transfer
    if exposed is not None and transfer is not None:
        if exposed <= _TOLERANCE * transfer:
            return Verdict.HIDDEN, "what runs meanwhile takes longer", ()
        if queued_behind and exposed <= queued + _TOLERANCE * transfer:
            return Verdict.SERIALISED, "its link is taken by another collective", queued_behind
    if not work:
        after = next(later_work(computation, done), None)
        if after is not None and after[1]:
            return Verdict.SERIALISED, "the next work needs its result", (after[0].name,)
        return Verdict.EXPOSED, "nothing runs between its start and its done", ()
    if exposed is None or transfer is None:
        return Verdict.UNKNOWN, "no link time was given", ()
    if all(w.seconds is None for w in work):
        return Verdict.UNKNOWN, "what runs meanwhile has no known time", ()
    untimed = sum(not w.complete for w in work)
    but = f"; the time of {untimed} of {len(work)} is not fully known" if untimed else ""
    if exposed >= (1 - _TOLERANCE) * transfer:
        return Verdict.EXPOSED, "what runs meanwhile is too short to matter" + but, ()
    return Verdict.PARTLY_EXPOSED, "what runs meanwhile is too short" + but, ()
