"""A predicted schedule as a picture. Needs matplotlib, the extra ``collmm[plot]``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from collmm.errors import OptionError
from collmm.hlo.timeline import COMPUTE, COPIES, WAIT, Timeline

_COLOURS = {COMPUTE: "tab:blue", WAIT: "tab:red", COPIES: "tab:gray"}
_NAMES = {WAIT: "exposed"}


def plot(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Draw timelines, title to timeline, one below the other over one time axis.

    ``path`` ends in ``.png``, ``.svg`` or whatever else matplotlib writes. Raises OptionError when
    matplotlib is not installed or cannot write that.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError('a picture needs matplotlib: pip install "collmm[plot]"') from None
    rows = [max(1, len(t.lanes())) for t in timelines.values()]
    figure = Figure(figsize=(12, 1 + 0.4 * sum(rows) + 0.8 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)
    for ax, (title, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        _draw(ax, title, timeline)
    axes[-1, 0].set_xlabel("predicted time, ms")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise OptionError(f"cannot draw {os.fspath(path)!r}: {e}") from None


def _draw(ax, title: str, timeline: Timeline) -> None:
    lanes = timeline.lanes()
    bars: dict[str, list[tuple[float, float]]] = {lane: [] for lane in lanes}
    for s in timeline.slices():
        if not s.bodies:
            bars[s.lane].append((s.start * 1e3, s.seconds * 1e3))
    for row, lane in enumerate(lanes):
        colour = _COLOURS.get(lane, "tab:orange")
        ax.broken_barh(bars[lane], (row - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)
    ax.set_yticks(range(len(lanes)), [_NAMES.get(lane, lane) for lane in lanes])
    ax.invert_yaxis()
    bound = "" if timeline.complete else "at least "
    ax.set_title(f"{title}: {bound}{timeline.step * 1e3:.3g} ms predicted", loc="left", fontsize=10)
