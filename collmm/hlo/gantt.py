"""A predicted schedule as lines of text, one per lane, for a terminal."""

from __future__ import annotations

from collmm.hlo.timeline import COMPUTE, COPIES, WAIT, Timeline

_FILL = " ▁▂▃▄▅▆▇█"
_NAMES = {COMPUTE: "compute", WAIT: "exposed", COPIES: "copies"}


def gantt(timeline: Timeline, width: int = 80) -> str:
    """Return the lanes of a timeline over time; how full a cell is tells how busy the lane is.

    ``width`` is the number of cells. Times below are predicted. A lane ``exposed`` shows when
    nothing computes because a transfer or copy is waited for.
    """
    if timeline.step <= 0:
        return "nothing with a known time runs"
    cells = {lane: [0.0] * width for lane in timeline.lanes()}
    cell = timeline.step / width
    for s in timeline.slices():
        if not s.bodies:
            _fill(cells[s.lane], s.start / cell, (s.start + s.seconds) / cell)
    label = max(len(_NAMES.get(lane, lane)) for lane in cells)
    lines = [
        f"{_NAMES.get(lane, lane):{label}} │{''.join(map(_block, row))}│"
        for lane, row in cells.items()
    ]
    return "\n".join([*lines, _axis(timeline, label, width)])


def _fill(row: list[float], start: float, end: float) -> None:
    for k in range(max(0, int(start)), min(len(row), int(end) + 1)):
        row[k] += max(0.0, min(end, k + 1) - max(start, k))


def _block(share: float) -> str:
    """The character for a share of a cell: blank only for nothing at all."""
    if share <= 1e-9:
        return _FILL[0]
    return _FILL[max(1, min(8, round(share * 8)))]


def _axis(timeline: Timeline, label: int, width: int) -> str:
    scales = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
    unit, factor = next((s for s in scales if timeline.step * s[1] >= 1), scales[-1])
    end = f"{timeline.step * factor:.3g} {unit} predicted"
    if not timeline.complete:
        end = f"at least {end}"
    return f"{'':{label}}  0{end:>{width - 1}}"
