"""How much of the collectives other work of a program hides already, as it is.

A gather of a parameter depends on no einsum: a compiler that runs collectives asynchronously
starts it early, and it costs nothing while independent einsums stand before its own. One that
waits for the einsum right before it is exposed in full. Collectives over the same mesh axes share
links and queue.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from collmm.cost.figures import Chip
from collmm.sites import ALL_GATHER, Collective, EinsumSite

# (number of the site, place among its collectives) -> seconds hidden.
Hidden = dict[tuple[int, Collective], float]


def hidden_seconds(
    sites: Sequence[EinsumSite],
    einsum_s: Mapping[int, float],
    collective_s: Mapping[tuple[int, Collective], float],
    chip: Chip,
) -> Hidden:
    """Return the seconds of every collective that einsums of its own body hide.

    Args:
      sites: of one program, in program order.
      einsum_s: seconds of every einsum, by number.
      collective_s: seconds of every collective that could be looped.
      chip: whose compiler runs gathers asynchronously.

    A list schedule of the links, linear in the number of sites: each collective starts once its
    value is there and its links are free, and is wanted when its einsum starts.
    """
    clocks = _clocks(sites, einsum_s)
    busy: dict[tuple[int, tuple[str, ...]], float] = defaultdict(float)
    found: Hidden = {}
    seen: dict[object, float] = {}
    for site in sites:
        for c in site.collectives:
            seconds = collective_s.get((site.index, c))
            if seconds is None or c.kind != ALL_GATHER or site.ready is None or c.operand is None:
                continue
            clock = clocks[site.body]
            value = site.body, site.sources[c.operand], c.dim, c.axes
            if site.sources[c.operand] >= 0 and value in seen:
                found[site.index, c] = seen[value]  # gathered once for both
                continue
            link = site.body, c.axes
            begin = max(busy[link], clock.after(site.ready[c.operand]))
            hidden = min(seconds, max(0.0, clock.before(site.index) - begin))
            busy[link] = begin + hidden
            found[site.index, c] = seen[value] = hidden
    return found


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
