"""The candidates of a site: which of its collectives to loop, and under which schedules.

Only what the loops can run, and on each kind of chip only what its compiler keeps intact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

from collmm.cost.collectives import Ring
from collmm.cost.estimate import Estimate, estimate
from collmm.cost.figures import Chip
from collmm.cost.hiding import ALONE, Behind, Hidden
from collmm.cost.kernels import late
from collmm.cost.nested import NOWHERE, Inside
from collmm.cost.steps import Shared
from collmm.nesting import inner_collective, inner_collectives
from collmm.schedule import MAX_UNROLLED_RING, Schedule, group_sizes
from collmm.sites import ALL_GATHER, ALL_TO_ALL, Collective, EinsumSite

# Beyond this the text of a loop, and the time to compile it, grow too long.
_LONGEST_UNROLLED = 2 * MAX_UNROLLED_RING
# Shards per step on a GPU, where a permute to any peer takes the same. On a torus one that passes
# the links of several members takes that many times longer, and never paid in a schedule.
_GROUPS = (2, 4)


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
      behind: how the collective stands to other work of the program.
      inside: the same of an inner ring.
    """

    collective: Collective
    schedule: Schedule
    estimate: Estimate
    ring: Ring | None = None
    members: tuple[Shared, ...] = ()
    behind: Behind = ALONE
    inside: Inside = NOWHERE

    @property
    def once(self) -> bool:
        """Whether the compiler gathers once, before the loop that the einsums stand in."""
        c = self.members[0].collective if self.members else self.collective
        return c.operand is not None and bool(self.members) and self.members[0].site.once[c.operand]


def candidates(
    site: EinsumSite,
    chip: Chip,
    places: Places,
    *,
    only: Collective | None = None,
    sharing: Sequence[Shared] = (),
    hidden: Hidden = MappingProxyType({}),
) -> tuple[Candidate, ...]:
    """Every way to loop ``site``, the fastest first; none where no loop takes it.

    Args:
      site: the einsum.
      chip: the hardware row, per device.
      places: where its rings lie.
      only: the one of its collectives to loop; any of them without.
      sharing: further einsums on the ring of ``only``.
      hidden: how each collective stands to other work of the program.
    """
    found = []
    for collective in site.loopable if only is None else (only,):
        place = places(site, collective.axes)
        members = (Shared(site, collective), *sharing)
        behind = hidden.get((site.index, collective), ALONE)
        for schedule, inside in _with_inner(members, chip, places, hidden):
            times = estimate(
                site,
                collective,
                schedule,
                chip,
                place.ring,
                sharing=sharing,
                hidden_s=behind.hidden_s,
                displaced_s=behind.displaced_s,
                inside=inside,
            )
            found.append(
                Candidate(collective, schedule, times, place.ring, members, behind, inside)
            )
    return tuple(sorted(found, key=lambda c: c.estimate.after_s - c.estimate.before_s))


class Weighing:
    """``candidates`` for the einsums of one program: those that are alike are weighed once.

    ``chip``, ``places`` and ``hidden`` are as for ``candidates``.
    """

    def __init__(self, chip: Chip, places: Places, hidden: Hidden) -> None:
        self._chip, self._places, self._hidden = chip, places, hidden
        self._known: dict[object, tuple[Candidate, ...]] = {}

    def __call__(
        self, site: EinsumSite, *, only: Collective | None = None, sharing: Sequence[Shared] = ()
    ) -> tuple[Candidate, ...]:
        """What ``candidates`` gives; the members of each are the einsums asked about."""
        key = only, self._key(site), tuple((m.collective, self._key(m.site)) for m in sharing)
        found = self._known.get(key)
        if found is not None:
            return tuple(
                dataclasses.replace(c, members=(Shared(site, c.collective), *sharing))
                for c in found
            )
        found = candidates(
            site, self._chip, self._places, only=only, sharing=sharing, hidden=self._hidden
        )
        self._known[key] = found
        return found

    def _key(self, site: EinsumSite) -> tuple[object, ...]:
        """Everything about an einsum that its candidates depend on."""
        behind = (self._hidden.get((site.index, c), ALONE) for c in site.loopable)
        return (*(getattr(site, name) for name in _ALIKE), *behind)


# The fields of a site that say where in the program it stands, and not what it takes.
_PLACE = frozenset(
    {
        *("index", "location", "scope", "refusal", "detail", "body", "ready", "needed"),
        *("sources", "follows", "together", "one_ring"),
    }
)
_ALIKE = tuple(f.name for f in dataclasses.fields(EinsumSite) if f.name not in _PLACE)


def _with_inner(
    members: Sequence[Shared], chip: Chip, places: Places, hidden: Hidden
) -> Iterator[tuple[Schedule, Inside]]:
    """The schedules of a ring, each alone and with every ring that can be nested in it."""
    site, collective = members[0].site, members[0].collective
    order = places(site, collective.axes).order
    inner_axes = dict.fromkeys(
        c.axes for m in members for c in inner_collectives(m.site, m.collective)
    )
    rings = tuple(
        (axes, ring)
        for axes in dict.fromkeys(c.axes for m in members for c in m.site.loopable)
        if (ring := places(site, axes).ring) is not None
    )
    others = [(m.site.index, c) for m in members for c in m.site.loopable if c != m.collective]
    hidden_s = sum(hidden.get(key, ALONE).hidden_s for key in others)
    size = site.ring_size(collective)
    summed = any(m.accumulates for m in members)
    for schedule in schedules(collective, size, chip, summed=summed):
        if schedule.grouped and schedule.shards_per_step not in group_sizes(size, order):
            continue
        schedule = dataclasses.replace(schedule, order=order)
        yield schedule, Inside(rings, hidden_s=hidden_s)
        cut = schedule.grouped or (schedule.chunked and collective.kind == ALL_GATHER)
        for axes in () if cut else inner_axes:
            members_in = math.prod(dict(site.axis_sizes)[a] for a in axes)
            place = places(site, axes)
            for inner in schedules(Collective(ALL_GATHER, 0, 0, axes, 0), members_in, chip):
                if inner.grouped or inner.chunked:
                    continue
                inner = dataclasses.replace(inner, order=place.order)
                nested = dataclasses.replace(schedule, inner=inner)
                chosen = [inner_collective(m.site, m.collective, nested) for m in members]
                behind = tuple(
                    ALONE if c is None else hidden.get((m.site.index, c), ALONE)
                    for m, c in zip(members, chosen, strict=True)
                )
                yield nested, Inside(rings, behind, hidden_s)


def schedules(
    collective: Collective, ring_size: int, chip: Chip, *, summed: bool = False
) -> Iterator[Schedule]:
    """The schedules under which a ring of ``ring_size`` can be run on ``chip``.

    ``summed``: whether an einsum on it sums over the gathered dimension.
    """
    axes = collective.axes
    if collective.kind == ALL_TO_ALL:
        yield Schedule(axes, ring_size, two_way=False, unroll=True)
        return
    if chip.kind == "gpu":
        yield from _on_gpu(collective, ring_size)
        return
    for unroll in (True, False):
        if unroll and ring_size > _LONGEST_UNROLLED:
            continue
        if not unroll and ring_size <= MAX_UNROLLED_RING:
            continue
        for two_way in (True, False):
            if two_way and ring_size <= 2:  # both ways are the same pair of links
                continue
            if collective.kind == ALL_GATHER:
                chunks = _chunks(ring_size, two_way, chip, summed) if unroll else ()
                yield from (
                    Schedule(axes, ring_size, two_way, unroll, chains=c) for c in (None, *chunks)
                )
                continue
            for chains in _accumulators(two_way, unroll):
                # Else the compiler of a chip whose permutes start late lets the chains run apart.
                in_step = unroll and chains > 1 and late(chip) > 0
                yield Schedule(axes, ring_size, two_way, unroll, chains=chains, in_step=in_step)


def _on_gpu(collective: Collective, ring_size: int) -> Iterator[Schedule]:
    """One way only: the two ways of a ring would share one GPU's egress.

    A rolled gather copies the shards that it carries; of an unrolled reduce-scatter XLA starts the
    permutes too late.
    """
    longest = MAX_UNROLLED_RING if collective.kind == ALL_GATHER else 0
    for g in (1, *_GROUPS):
        if g == 1 or g in group_sizes(ring_size, None):
            unroll = ring_size // g <= longest
            yield Schedule(collective.axes, ring_size, False, unroll, shards_per_step=g)


def _chunks(ring_size: int, two_way: bool, chip: Chip, summed: bool) -> tuple[int, ...]:
    """Pieces of shards, where schedules of libtpu show that they can pay.

    On a short even ring, where whole shards need one send more one way than the other; longer ones
    start too many permutes. On a ring of two, to end with a piece's einsum; where permutes are late
    that gained nothing, and of two pieces libtpu waits for the second first. Every piece is a pass
    over a sum: up to twice the time where permutes are late, and more on a ring of two.
    """
    if chip.shape is None or (summed and (late(chip) or ring_size == 2)):
        return ()
    if two_way:
        return (2,) if ring_size % 2 == 0 and ring_size <= MAX_UNROLLED_RING else ()
    return (4,) if ring_size == 2 and not late(chip) else ()


def _accumulators(two_way: bool, unroll: bool) -> tuple[int, ...]:
    if not two_way:
        return (1,)
    return (4, 2) if unroll else (2,)
