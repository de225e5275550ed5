"""A predicted schedule as a trace-event file, for ui.perfetto.dev and chrome://tracing.

The format is Google's Trace Event Format: complete events (``ph: X``) in microseconds, one thread
per lane, with metadata events that name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collmm.hlo.timeline import COMPUTE, COPIES, WAIT, Segment, Timeline

_NAMES = {COMPUTE: "compute", WAIT: "exposed (waiting)", COPIES: "copies"}


def trace_events(timelines: Mapping[str, Timeline], note: str = "") -> dict[str, Any]:
    """Return the trace document of one or more timelines, each a process of its own.

    ``timelines`` maps a title, such as ``"original"``, to a timeline; ``note`` goes into the file
    as it is. Dump it with ``json.dump``.
    """
    events: list[dict[str, Any]] = []
    for pid, (title, timeline) in enumerate(timelines.items(), 1):
        name = f"{title}, predicted" + ("" if timeline.complete else " (lower bound)")
        events.append(_named("process_name", pid, 0, name))
        events.append(
            {
                "ph": "M",
                "name": "process_sort_index",
                "pid": pid,
                "tid": 0,
                "args": {"sort_index": pid},
            }
        )
        events += _process(pid, timeline)
    data = {"predicted": True, "note": note} if note else {"predicted": True}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": data}


def _process(pid: int, timeline: Timeline) -> list[dict[str, Any]]:
    threads: dict[tuple[str, int], int] = {}
    busy: dict[str, list[float]] = {}
    events = []
    for s in timeline.slices():
        row = 0 if s.lane == COMPUTE else _row(busy.setdefault(s.lane, []), s)
        key = (s.lane, row)
        tid = threads.setdefault(key, len(threads) + 1)
        # Both ends on whole nanoseconds, so that what nests or touches still does.
        start, end = round(s.start * 1e9), round((s.start + s.seconds) * 1e9)
        event = {
            "ph": "X",
            "name": s.name,
            "cat": s.kind or s.lane,
            "pid": pid,
            "tid": tid,
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": _args(s, timeline),
        }
        events.append(event)
    order = {lane: k for k, lane in enumerate(timeline.lanes())}
    head = []
    for (lane, row), tid in threads.items():
        label = _NAMES.get(lane, f"links {lane}") + (f" ({row + 1})" if row else "")
        head.append(_named("thread_name", pid, tid, label))
        head.append(
            {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": pid,
                "tid": tid,
                "args": {"sort_index": 100 * order[lane] + row},
            }
        )
    return head + events


def _row(ends: list[float], s: Segment) -> int:
    """The first row of a lane that is free: events of one thread may nest, but not overlap."""
    for row, end in enumerate(ends):
        if end <= s.start * (1 + 1e-12):
            ends[row] = s.start + s.seconds
            return row
    ends.append(s.start + s.seconds)
    return len(ends) - 1


def _args(s: Segment, timeline: Timeline) -> dict[str, Any]:
    args: dict[str, Any] = {"predicted": True}
    if s.origin:
        args["time from"] = s.origin
    if s.turns > 1:
        args["turns"] = s.turns
    if s.finding is not None:
        f = timeline.findings[s.finding]
        args |= {
            "bytes": f.bytes,
            "axes": ", ".join(f.axes or ()),
            "where": str(f.source or ""),
            "verdict": f.verdict.value,
            "why": f.because,
            "exposed_us": None if f.exposed is None else f.exposed * 1e6,
        }
    return args


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
