"""The candidates of a site: which of its collectives to loop, and under which schedules.

Only what the loops can run, and on each kind of chip only what its compiler keeps intact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from collmm.cost.collectives import Ring
from collmm.cost.estimate import Estimate, estimate
from collmm.cost.figures import Chip
from collmm.cost.steps import Shared
from collmm.schedule import MAX_UNROLLED_RING, Schedule
from collmm.sites import ALL_TO_ALL, Collective, EinsumSite


@dataclasses.dataclass(frozen=True)
class RingPlace:
    """Where a ring lies: its links, and the order in which to visit its members.

    ``ring`` None: nothing is known, one torus axis or switch is assumed. ``order`` None: that of
    the mesh.
    """

    ring: Ring | None = None
    order: tuple[int, ...] | None = None


# Where the ring over some axes of a site's mesh lies.
Places = Callable[[EinsumSite, tuple[str, ...]], RingPlace]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to loop a site, and what it would take.

    Attributes:
      collective: the one that is looped.
      schedule: how.
      estimate: what it takes.
      ring: the links that was made with; None where they were assumed.
      members: the einsums on the ring, the one it was made for first.
      hidden_s: seconds of the collective that other work hides already.
    """

    collective: Collective
    schedule: Schedule
    estimate: Estimate
    ring: Ring | None = None
    members: tuple[Shared, ...] = ()
    hidden_s: float = 0.0


def candidates(
    site: EinsumSite,
    chip: Chip,
    places: Places,
    *,
    only: Collective | None = None,
    sharing: Sequence[Shared] = (),
    hidden: Mapping[tuple[int, Collective], float] = MappingProxyType({}),
) -> tuple[Candidate, ...]:
    """Every way to loop ``site``, the fastest first; none where no loop takes it.

    Args:
      site: the einsum.
      chip: the hardware row, per device.
      places: where its rings lie.
      only: the one of its collectives to loop; any of them without.
      sharing: further einsums on the ring of ``only``.
      hidden: seconds of each collective that other work hides already.
    """
    found = []
    for collective in site.loopable if only is None else (only,):
        place = places(site, collective.axes)
        for schedule in schedules(collective, site.ring_size(collective), chip):
            schedule = dataclasses.replace(schedule, order=place.order)
            already_s = hidden.get((site.index, collective), 0.0)
            times = estimate(
                site, collective, schedule, chip, place.ring, sharing=sharing, hidden_s=already_s
            )
            members = (Shared(site, collective), *sharing)
            found.append(Candidate(collective, schedule, times, place.ring, members, already_s))
    return tuple(sorted(found, key=lambda c: c.estimate.after_s - c.estimate.before_s))


def schedules(collective: Collective, ring_size: int, chip: Chip) -> Iterator[Schedule]:
    """The schedules under which a ring of ``ring_size`` can be run on ``chip``."""
    axes = collective.axes
    if collective.kind == ALL_TO_ALL:
        yield Schedule(axes, ring_size, two_way=False, unroll=True)
        return
    if chip.kind == "gpu":
        # The compiler merges the dots of an unrolled ring, and the two ways of a ring would share
        # one GPU's egress; either loses the overlap.
        yield Schedule(axes, ring_size, two_way=False, unroll=False)
        return
    unroll = ring_size <= MAX_UNROLLED_RING
    if ring_size > 2:  # on two, both ways are the same pair of links
        yield Schedule(axes, ring_size, two_way=True, unroll=unroll)
    yield Schedule(axes, ring_size, two_way=False, unroll=unroll)
