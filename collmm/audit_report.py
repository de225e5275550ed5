"""Audits of compiled schedules as text and as JSON. Pure: nothing of jax is imported."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from collmm import memory, report
from collmm.hlo.findings import Finding, Work
from collmm.hlo.gantt import gantt
from collmm.memory import Memory
from collmm.prediction import Candidate, Prediction

_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Audited:
    """One compiled program.

    Attributes:
      title: such as ``"original"``.
      prediction: its schedule; None where the compiler refused it.
      memory: what it takes on each device, where that is known.
      options: the compiler options it was compiled with, each with its reason.
      brief: whether only its totals matter.
      failure: what the compiler said against the program; empty where it took it, or where all it
        said is in ``memory``.
    """

    title: str
    prediction: Prediction | None
    memory: Memory | None = None
    options: tuple[tuple[str, str], ...] = ()
    brief: bool = False
    failure: str = ""


_RULE = "by the published rule, which a plan refines by what smaller einsums and more kernels lose"


def text(programs: Sequence[Audited], width: int = 80) -> str:
    """Return the whole audit: totals, each program's collectives and schedule, memory, sources."""
    parts = [totals(programs)]
    for p in programs:
        if p.prediction is not None and not p.brief:
            parts.append(_program(p, width))
    rows = {p.title: p.memory for p in programs if p.memory is not None}
    if rows:
        parts.append(memory.table(rows))
    parts.append(_footing(programs))
    return "\n\n".join(filter(None, parts))


def totals(programs: Sequence[Audited]) -> str:
    """Return one line per program: predicted step, what it goes to, and how collectives fare."""
    headers = ("predicted", "step", "compute", "exposed", "copies", "collectives")
    rows = []
    for p in programs:
        line = p.prediction.timeline if p.prediction else None
        cells: tuple[str, ...]
        if p.prediction is None:
            why = "does not compile" if p.failure else "does not fit"
            cells = (why, "-", "-", "-", "-")
        elif line is None:
            cells = ("unknown", "unknown", "unknown", "unknown", _fates(p.prediction))
        else:
            bound = "" if line.complete else ">= "
            times = (line.step, line.compute, line.exposed, line.copying)
            cells = (*(bound + report.seconds(t) for t in times), _fates(p.prediction))
        rows.append((p.title, *cells))
    return report.table(headers, rows)


def to_json(programs: Sequence[Audited]) -> list[dict[str, Any]]:
    """Return every program as plain dicts, lists, numbers and strings; times are seconds."""
    return [_json(p) for p in programs]


def findings_table(findings: Sequence[Finding]) -> str:
    """Return the collectives of a schedule, alike ones that follow each other in one line."""
    if not findings:
        return "no collectives"
    headers = ("collective", "runs", "bytes", "ring", "where", "meanwhile", "takes", "exposed")
    groups = itertools.groupby(_sorted(findings), key=_likeness)
    return report.table((*headers, "verdict"), [_row(list(group)) for _, group in groups])


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    """Alike findings together, by the first of each kind."""
    first: dict[Any, int] = {}
    for k, f in enumerate(findings):
        first.setdefault(_likeness(f), k)
    return sorted(findings, key=lambda f: first[_likeness(f)])


def _likeness(f: Finding) -> tuple:
    return (f.kind, f.bytes, f.axes, f.shift, f.source, f.verdict.value, f.because, f.computation)


def _row(alike: list[Finding]) -> tuple[str, ...]:
    f = alike[0]
    executed = [x.executed for x in alike]
    runs = "?" if None in executed else str(sum(e for e in executed if e))
    takes = "unknown" if f.transfer is None else report.seconds(f.transfer)
    every = [x.exposed * x.executed for x in alike if x.exposed is not None and x.executed]
    known = all(x.exposed is not None and x.executed is not None for x in alike)
    exposed = report.seconds(sum(every)) if known else _each(alike)
    where = f"{os.path.basename(f.source.file)}:{f.source.line}" if f.source else "?"
    verdict = f"{f.verdict.value}: {f.because}"
    if f.behind:
        verdict += f" ({f.behind[0]}{', ...' if len(f.behind) > 1 else ''})"
    size = report.human_bytes(f.bytes)
    return (f.kind, runs, size, ring(f), where, meanwhile(f.work), takes, exposed, verdict)


def _each(alike: list[Finding]) -> str:
    """What is exposed where it is not known how often, or for how long."""
    each = [x.exposed for x in alike]
    if None in each:
        return "unknown"
    return f"{report.seconds(sum(e for e in each if e))} a run"


def ring(f: Finding) -> str:
    """Describe who takes part: ``model x8``, ``model +1`` for a permute, ``4 groups of 2``."""
    if f.pairs:
        if f.axes is None or not f.axes:
            return f"{len(f.pairs)} pairs"
        return ",".join(f.axes) + (f" {f.shift:+d}" if f.shift is not None else " permute")
    size = len(f.groups[0]) if f.groups else 0
    if f.axes:
        return f"{','.join(f.axes)} x{size}"
    return f"{len(f.groups)} group{'' if len(f.groups) == 1 else 's'} of {size}"


def meanwhile(work: Sequence[Work]) -> str:
    """Describe what runs between a start and its done: the longest, how many more, their time."""
    if not work:
        return "nothing"
    longest = max(work, key=lambda w: w.seconds or 0.0)
    more = f" + {len(work) - 1} more" if len(work) > 1 else ""
    known = [w.seconds for w in work if w.seconds is not None]
    if not known:
        return f"{longest.name}{more}, unknown time"
    bound = "" if all(w.complete for w in work) else ">= "
    return f"{longest.name}{more}, {bound}{report.seconds(sum(known))}"


def _fates(prediction: Prediction) -> str:
    count = Counter(f.verdict.value for f in prediction.findings)
    return ", ".join(f"{n} {verdict}" for verdict, n in count.items()) or "none"


def _program(p: Audited, width: int) -> str:
    prediction = p.prediction
    assert prediction is not None
    lines = [f"{p.title}:", findings_table(prediction.findings)]
    if prediction.timeline is not None:
        lines += ["", gantt(prediction.timeline, width)]
    if prediction.candidates:
        lines += ["", f"exposed beside an einsum, could be overlapped; {_RULE}:"]
        lines.append(_candidates(prediction.candidates))
    return "\n".join(lines)


def _candidates(candidates: Sequence[Candidate]) -> str:
    headers = ("collective", "bytes", "ring", "where", "einsum", "would save, predicted")
    rows = []
    for c in candidates:
        f = c.finding
        where = f"{os.path.basename(f.source.file)}:{f.source.line}" if f.source else "?"
        names = ", ".join(e.name for e in c.einsums[:_NAMED])
        if len(c.einsums) > _NAMED:
            names += f" + {len(c.einsums) - _NAMED} more"
        saving = (
            "unknown" if c.saving is None else report.seconds(c.saving) if c.saving else "nothing"
        )
        rows.append(
            (f"{f.kind} {f.name}", report.human_bytes(f.bytes), ring(f), where, names, saving)
        )
    return report.table(headers, rows)


def _footing(programs: Sequence[Audited]) -> str:
    """Where the figures come from, what is not known, what was assumed."""
    lines: list[str] = []
    options: dict[tuple[str, str], list[str]] = {}
    for p in programs:
        for option in p.options:
            options.setdefault(option, []).append(p.title)
    for (name, reason), who in options.items():
        lines.append(f"compiled with {name} ({'; '.join(who)}): {reason}")
    lines += [f"{p.title} does not compile: {p.failure}" for p in programs if p.failure]
    for p in programs:
        if p.prediction is None:
            continue
        line = p.prediction.timeline
        if p.prediction.sources and not p.brief:
            lines += [f"{p.title} is predicted from:", *(f"  {s}" for s in p.prediction.sources)]
        if line is not None and line.untimed:
            kinds = Counter(line.untimed.values())
            what = ", ".join(kind if n == 1 else f"{kind} ({n} times)" for kind, n in kinds.items())
            lines.append(f"{p.title}: no time is known for {what}; its totals are lower bounds")
    notes = dict.fromkeys(n for p in programs if p.prediction for n in p.prediction.notes)
    return "\n".join([*lines, *(f"note: {n}" for n in notes)])


def _json(p: Audited) -> dict[str, Any]:
    out: dict[str, Any] = {
        "title": p.title,
        "compiler_options": dict(p.options),
        "memory": p.memory.to_json() if p.memory else None,
        "failure": p.failure or None,
        "fits": None if p.memory is None else not p.memory.excess,
    }
    if p.prediction is None:
        return out
    line = p.prediction.timeline
    out["predicted"] = (
        None
        if line is None
        else {
            "step_s": line.step,
            "compute_s": line.compute,
            "exposed_s": line.exposed,
            "copies_s": line.copying,
            "complete": line.complete,
            "untimed": dict(line.untimed),
        }
    )
    out["collectives"] = [_finding_json(f) for f in p.prediction.findings]
    out["candidates"] = [
        {
            "collective": c.finding.name,
            "einsums": [e.name for e in c.einsums],
            "saving_s": c.saving,
        }
        for c in p.prediction.candidates
    ]
    out["sources"] = list(p.prediction.sources)
    out["notes"] = list(p.prediction.notes)
    return out


def _finding_json(f: Finding) -> dict[str, Any]:
    return {
        "kind": f.kind,
        "name": f.name,
        "computation": f.computation,
        "line": f.line,
        "file": f.source.file if f.source else None,
        "source_line": f.source.line if f.source else None,
        "bytes": f.bytes,
        "ring": ring(f),
        "axes": None if f.axes is None else list(f.axes),
        "shift": f.shift,
        "executed": f.executed,
        "asynchronous": f.asynchronous,
        "meanwhile": [{"name": w.name, "seconds": w.seconds} for w in f.work],
        "transfer_s": f.transfer,
        "exposed_s": f.exposed,
        "verdict": f.verdict.value,
        "because": f.because,
        "behind": list(f.behind),
    }


def timelines(programs: Sequence[Audited]) -> Mapping[str, Any]:
    """Return title to timeline, of the programs that have one."""
    return {
        p.title: p.prediction.timeline
        for p in programs
        if p.prediction is not None and p.prediction.timeline is not None
    }
