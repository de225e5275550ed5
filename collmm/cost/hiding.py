"""How much of the collectives other work of a program hides already, as it is.

A gather of a parameter depends on no einsum: a compiler that runs collectives asynchronously
starts it early, and it costs nothing while independent einsums stand before its own. One that
waits for the einsum right before it is exposed in full. Collectives over the same mesh axes share
links and queue.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from collmm.sites import ALL_GATHER, Collective, EinsumSite


@dataclasses.dataclass(frozen=True)
class Behind:
    """Of one collective of one site: how much of it is hidden, and what a ring would push aside.

    Attributes:
      hidden_s: seconds of the collective that other einsums hide as it is.
      displaced_s: seconds of other collectives over the same axes that run behind this site's
        einsum; a ring would use their links meanwhile, and they would come that much later.
      common: whether another einsum of the body reads the same gathered value: the compiler gathers
        it once for both, and still does where one of them has a ring of its own.
    """

    hidden_s: float = 0.0
    displaced_s: float = 0.0
    common: bool = False


ALONE = Behind()

# (number of the site, one of its collectives) -> how it stands to the rest of the program.
Hidden = Mapping[tuple[int, Collective], Behind]


def hidden_seconds(
    sites: Sequence[EinsumSite],
    einsum_s: Mapping[int, float],
    collective_s: Mapping[tuple[int, Collective], float],
) -> Hidden:
    """Return how the collectives of a program stand to the einsums of their bodies.

    Args:
      sites: of one program, in program order.
      einsum_s: seconds of every einsum, by number.
      collective_s: seconds of every collective that could be looped.

    A list schedule of the links, linear in the number of sites: each gather starts once its value
    is there and its links are free, and is wanted when its einsum starts. What is gathered once,
    before a loop, costs the turns of the loop nothing.
    """
    clocks = _clocks(sites, einsum_s)
    links: dict[object, _Link] = defaultdict(_Link)
    hidden: dict[tuple[int, Collective], float] = {}
    seen: dict[object, float] = {}
    for site in sites:
        for c in site.collectives:
            seconds = collective_s.get((site.index, c))
            if seconds is None or c.kind != ALL_GATHER or site.ready is None or c.operand is None:
                continue
            if site.once[c.operand]:
                hidden[site.index, c] = seconds  # before the loop, and not in every turn
                continue
            (value,) = _value(site, c) or ((site.index, c),)
            if value in seen:
                hidden[site.index, c] = seen[value]  # gathered once for both
                continue
            clock, link = clocks[site.body], links[site.body, c.axes]
            ready, wanted = clock.after(site.ready[c.operand]), clock.before(site.index)
            hidden[site.index, c] = seen[value] = link.take(ready, wanted, seconds)
    values = Counter(value for site in sites for c in site.collectives for value in _value(site, c))
    found = {}
    numbered = {site.index: site for site in sites}
    for key in collective_s:
        site = numbered[key[0]]
        start = clocks[site.body].before(site.index)
        link = links[site.body, key[1].axes]
        displaced = link.busy(start, start + einsum_s.get(site.index, 0.0))
        common = any(values[value] > 1 for value in _value(site, key[1]))
        found[key] = Behind(hidden.get(key, 0.0), displaced, common)
    return found


def _value(site: EinsumSite, c: Collective) -> tuple[object, ...]:
    """Return what a gather makes, where that is known: equal ones are one gather."""
    if c.kind != ALL_GATHER or c.operand is None or site.sources[c.operand] < 0:
        return ()
    return ((site.body, site.sources[c.operand], c.dim, c.axes),)


class _Link:
    """When the links over some axes carry what einsums hide, on the clock of one body."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def take(self, ready: float, wanted: float, seconds: float) -> float:
        """Carry a collective as soon as may be; return the seconds before it is wanted."""
        begin = max(ready, self._ends[-1] if self._ends else 0.0)
        hidden = min(seconds, max(0.0, wanted - begin))
        if hidden:
            self._begins.append(begin)
            self._ends.append(begin + hidden)
        return hidden

    def busy(self, start: float, end: float) -> float:
        """Seconds of ``start`` to ``end`` in which they carry something."""
        total = 0.0
        at = bisect.bisect_right(self._ends, start)
        while at < len(self._begins) and self._begins[at] < end:
            total += min(end, self._ends[at]) - max(start, self._begins[at])
            at += 1
        return total


class _Clock:
    """When the einsums of one body run, if nothing is ever waited for."""

    def __init__(self, numbers: Sequence[int], seconds: Sequence[float]) -> None:
        self._numbers = list(numbers)
        self._ends = [0.0, *itertools.accumulate(seconds)]

    def before(self, number: int) -> float:
        """When the einsum ``number`` starts."""
        return self._ends[bisect.bisect_left(self._numbers, number)]

    def after(self, number: int) -> float:
        """When everything up to ``number`` has ended."""
        return self._ends[bisect.bisect_right(self._numbers, number)]


def _clocks(sites: Sequence[EinsumSite], einsum_s: Mapping[int, float]) -> dict[int, _Clock]:
    bodies: dict[int, list[int]] = defaultdict(list)
    for site in sites:
        bodies[site.body].append(site.index)
    return {
        body: _Clock(numbers, [einsum_s.get(n, 0.0) for n in numbers])
        for body, numbers in bodies.items()
    }
