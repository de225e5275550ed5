"""Plans and collectives as text and as JSON. Pure: nothing of jax is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from collmm import plan_file
from collmm.nesting import inner_collective

if TYPE_CHECKING:
    from collmm.cost.estimate import Estimate
    from collmm.hlo.collectives import CollectiveCount
    from collmm.plan import Decision, Plan


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return left-aligned columns under ``headers``."""
    widths = [
        max(len(headers[i]), *(len(row[i]) for row in rows)) if rows else len(headers[i])
        for i in range(len(headers))
    ]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()

    return "\n".join([line(headers), line(["-" * w for w in widths]), *map(line, rows)])


def human_bytes(count: float) -> str:
    """Return a byte count with a binary unit, e.g. ``32.0 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def seconds(value: float) -> str:
    """Return a duration in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError


def plan_table(plan: Plan) -> str:
    """Return the plan as a table, one line per einsum, and a summary line."""
    headers = ("site", "where", "einsum", "collective", "ring", "bytes", "decision")
    rows = [
        (
            str(d.site.index),
            _where(d),
            d.site.einsum.equation(),
            _collectives(d),
            _ring(d),
            human_bytes(d.collective.bytes) if d.collective else "-",
            _decision(d),
        )
        for d in plan.decisions
    ]
    name = f" of {plan.program}" if plan.program else ""
    summary = (
        f"{len(plan.rewritten)} of {len(plan.decisions)} einsums{name} rewritten "
        f"(policy {plan.policy}; times are predicted, for {plan.chip})"
    )
    notes = [f"note: {plan.note}"] if plan.note else []
    return "\n".join([table(headers, rows), summary, *memory_lines(plan), *notes])


def memory_lines(plan: Plan) -> list[str]:
    """Return what the planned program takes on each device, and by how much it does not fit."""
    if not plan.memory:
        return []
    parts = [
        f"{'' if m.compiled else 'at least '}{human_bytes(m.peak)} {when}"
        for when, m in plan.memory
    ]
    capacity = next((m.capacity for _, m in plan.memory if m.capacity is not None), None)
    of = "" if capacity is None else f", of {human_bytes(capacity)}"
    lines = [f"memory of each device, as compiled: {', '.join(parts)}{of}"]
    for when, m in plan.memory:
        if m.excess:
            what = "the plan" if when == "after" else "the original program"
            least = "" if m.compiled else "at least "
            lines.append(f"{what} does not fit: {least}{human_bytes(m.excess)} too much")
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain dicts, lists, numbers and strings; ``plan_file`` reads it again."""
    return {
        "format": plan_file.FORMAT,
        **plan_file.header(plan),
        "policy": plan.policy,
        "note": plan.note,
        "rewritten": len(plan.rewritten),
        "memory": {when: m.to_json() for when, m in plan.memory},
        "sites": [_decision_json(d) for d in plan.decisions],
    }


def collectives_table(
    before: Mapping[str, CollectiveCount], after: Mapping[str, CollectiveCount]
) -> str:
    """Return the collectives of two optimized programs, one line per kind.

    The columns for each: instructions in the text, how often they run in one call, and the bytes
    per device that all those runs move (gathered, or before the reduction). ``?`` where a loop
    does not say how often it runs.
    """
    headers = ("collective", "before", "runs", "bytes", "after", "runs", "bytes")
    kinds = [*before, *(k for k in after if k not in before)]
    rows = [(kind, *_count(before.get(kind)), *_count(after.get(kind))) for kind in kinds]
    if not rows:
        return "no collectives, before or after"
    return table(headers, rows)


def collectives_json(counts: Mapping[str, CollectiveCount]) -> dict[str, dict[str, int | None]]:
    """Return {kind: {count, bytes, executed, executed_bytes}}; None where that is unknown."""
    return {
        kind: {
            "count": c.count,
            "bytes": c.bytes,
            "executed": c.executed,
            "executed_bytes": c.executed_bytes,
        }
        for kind, c in counts.items()
    }


def _count(c: CollectiveCount | None) -> tuple[str, str, str]:
    if c is None:
        return "-", "-", "-"
    if c.executed is None or c.executed_bytes is None:
        return str(c.count), "?", "?"
    return str(c.count), str(c.executed), human_bytes(c.executed_bytes)


def _where(d: Decision) -> str:
    location = d.site.location
    return f"{os.path.basename(location.file)}:{location.line}"


def _collectives(d: Decision) -> str:
    return ", ".join(c.describe() for c in d.site.collectives) or "-"


def _ring(d: Decision) -> str:
    if d.collective is None:
        return "-"
    return f"{','.join(d.collective.axes)} x{d.site.ring_size(d.collective)}"


def _decision(d: Decision) -> str:
    if d.schedule is not None:
        assert d.collective is not None
        assert d.estimate is not None
        times = f"{seconds(d.estimate.before_s)} -> {seconds(d.estimate.after_s)}"
        if d.estimate.einsums > 1:
            times += f" for {d.estimate.einsums} einsums of one ring"
        inner = inner_collective(d.site, d.collective, d.schedule)
        both = d.collective.kind if inner is None else f"{d.collective.kind} + {inner.describe()}"
        return f"rewrite {both}: {d.schedule.describe()}, {times}"
    assert d.reason is not None
    return f"leave: {d.reason.code}" + (f" ({d.detail})" if d.detail else "")


def _decision_json(d: Decision) -> dict[str, Any]:
    site, e = d.site, d.estimate
    return {
        "site": site.index,
        "file": plan_file.shown_path(site.location.file),
        "line": site.location.line,
        "function": site.location.function,
        **plan_file.identity(site),
        "decision": plan_file.REWRITE if d.rewritten else plan_file.LEAVE,
        "looped": d.collective.describe() if d.collective is not None else None,
        "schedule": plan_file.schedule_json(d.schedule) if d.schedule is not None else None,
        "nested": _nested(d),
        "reason": d.reason.code if d.reason is not None else None,
        "meaning": d.reason.meaning if d.reason is not None else None,
        "detail": d.detail,
        "predicted": None if e is None else _predicted(e),
    }


def _nested(d: Decision) -> str | None:
    """The collective that an inner ring takes over; for the reader, as the schedule says it too."""
    if d.collective is None:
        return None
    inner = inner_collective(d.site, d.collective, d.schedule)
    return None if inner is None else inner.describe()


def _predicted(e: Estimate) -> dict[str, Any]:
    """The totals of an estimate, rounded: a plan file is compared by eye."""
    return {
        "before_s": float(f"{e.before_s:.4g}"),
        "after_s": float(f"{e.after_s:.4g}"),
        "memory_bytes": e.memory_bytes,
        "permutes": e.permutes,
        "einsums": e.einsums,
    }
