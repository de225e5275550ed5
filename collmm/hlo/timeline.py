"""The predicted schedule of a module: what runs when, and what the step takes.

Nothing here is measured. Every figure has its origin: the compiler's own estimates in the text,
else bytes and operations over the rates that the caller gives, else nothing, and then it is named
as unknown and the totals are lower bounds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from collmm.hlo.audit import check
from collmm.hlo.durations import Durations
from collmm.hlo.findings import Finding, same_links
from collmm.hlo.parse import Module
from collmm.hlo.walk import COMPUTE, COPIES, WAIT, Lanes, Segment, SharesLink, TransferTime, Walker

__all__ = ["COMPUTE", "COPIES", "WAIT", "Origin", "Timeline", "timeline"]


@dataclass(frozen=True, slots=True)
class Origin:
    """How many runs of instructions got their time from one place, and how much time that is."""

    runs: int
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """What a scheduled module is predicted to do, in seconds per run of the program.

    Attributes:
      findings: the collectives, judged, in the order they run.
      compute: of kernels.
      exposed: in which nothing computes because a collective is waited for.
      copying: in which nothing computes because an asynchronous copy is waited for.
      untimed: instructions whose time is not known, with the reason; when there are any, the
        times are lower bounds.
      origins: where the times of kernels come from.
      segments: what runs when, per computation, from the computation's own start.
      lengths: seconds of each computation.
      entry: the computation that is the program.
    """

    findings: tuple[Finding, ...]
    compute: float
    exposed: float
    copying: float
    untimed: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    segments: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict, repr=False)
    lengths: Mapping[str, float] = field(default_factory=dict, repr=False)
    entry: str = ""

    @property
    def step(self) -> float:
        """The whole program."""
        return self.compute + self.exposed + self.copying

    @property
    def complete(self) -> bool:
        """Whether every time is known."""
        return not self.untimed

    def slices(self, limit: int = 100_000) -> Iterator[Segment]:
        """Every segment of the program at its place in time, loops turn by turn.

        Loops and calls themselves come as well, before what they run. Of loops of more turns than
        fit into about ``limit`` segments in all, the first turns are given.
        """
        sizes: dict[str, int] = {}
        total = self._size(self.entry, sizes)
        share = min(1.0, limit / total) if total else 1.0
        yield from self._expanded(self.entry, 0.0, share)

    def lanes(self) -> list[str]:
        """The lanes that are used: compute, waiting, copies, then the directions of links."""
        used = {s.lane for segments in self.segments.values() for s in segments}
        fixed = [lane for lane in (COMPUTE, WAIT, COPIES) if lane in used]
        return fixed + sorted(used.difference(fixed))

    def _size(self, name: str, sizes: dict[str, int]) -> int:
        if name not in sizes:
            sizes[name] = sum(
                1 + s.turns * sum(self._size(b, sizes) for b in s.bodies)
                for s in self.segments.get(name, ())
            )
        return sizes[name]

    def _expanded(self, name: str, start: float, share: float) -> Iterator[Segment]:
        for s in self.segments.get(name, ()):
            placed = replace(s, start=start + s.start)
            yield placed
            if not s.bodies:
                continue
            now = placed.start
            for _ in range(max(1, math.ceil(s.turns * share)) if s.turns else 0):
                for body in s.bodies:
                    yield from self._expanded(body, now, share)
                    now += self.lengths[body]


def timeline(
    module: Module,
    *,
    mesh_axes: Mapping[str, int] | None = None,
    transfer_time: TransferTime,
    durations: Durations,
    shares_link: SharesLink = same_links,
    lanes: Lanes | None = None,
) -> Timeline:
    """Predict the schedule of ``module``.

    Args:
      module: a scheduled module.
      mesh_axes: the mesh's axes with their sizes, in order, to name the axes of each collective.
      transfer_time: seconds of a collective alone on its links, None where it is not known.
      durations: the times of kernels and copies.
      shares_link: whether two collectives queue for the same link.
      lanes: the directions of links a collective runs over.

    A loop takes its turns one after the other, and nothing runs across a turn's end; of the
    branches of a conditional the shortest is taken. Raises HloError and OptionError as ``audit``.
    """
    check(module, mesh_axes)
    walker = Walker(
        module,
        mesh_axes=mesh_axes,
        transfer_time=transfer_time,
        durations=durations,
        shares_link=shares_link,
        lanes=lanes,
    )
    total = walker.walk(module.entry_name)
    return Timeline(
        findings=tuple(walker.findings),
        compute=total.compute,
        exposed=total.exposed,
        copying=total.copying,
        untimed=dict(walker.untimed),
        origins=_origins(walker),
        segments={name: tuple(s) for name, s in walker.segments.items()},
        lengths={name: span.seconds for name, span in walker.spans.items()},
        entry=module.entry_name,
    )


def _origins(walker: Walker) -> dict[str, Origin]:
    """Kernels by where their times come from, each as often as it runs; once if that is unknown."""
    runs: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, found in walker.durations_of.items():
        times = walker.describer.executions[name]
        for duration in found:
            runs[duration.origin] += 1 if times is None else times
            seconds[duration.origin] += duration.seconds * (1 if times is None else times)
    return {origin: Origin(runs[origin], seconds[origin]) for origin in runs}
