"""Break-even: at which size, link or hidden share a decision would turn; solved, not tried out.

The question is where, for the best of the candidates, ::

    excess(x) = after(x) - (1 - min_gain) * before(x)

is zero, x being the size of one dimension of the einsum, or how slow the links are, everything else
as it is. The cost model is a sum of maxima of straight lines in x, so Newton's method meets the
answer exactly once it is on the right piece. What is hidden already enters as a plain difference
and has a closed form. Every answer is checked against the model before it is told. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from collmm.cost.candidates import Candidate
from collmm.cost.collectives import Ring
from collmm.cost.einsum import GPU_ALIGN
from collmm.cost.estimate import Estimate, Shared, assumed_ring, estimate
from collmm.cost.figures import Chip
from collmm.nesting import inner_collective
from collmm.sites import Collective, EinsumSite

_STEPS = 30
# Newton's method starts here first, and at these multiples where that leads nowhere.
_STARTS = (1, 2, 1 / 2, 8, 1 / 8, 64, 1 / 64)
_FARTHEST = 4096


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """Where a loop begins, or ceases, to pay.

    Attributes:
      what: ``"size"`` of a dimension, ``"link"``: one-way bytes/s of the links, or ``"hidden"``:
        seconds of the collective that other work hides.
      name: of the dimension, its letter in the einsum; empty for the others.
      now: the value there is.
      value: the value at which the decision turns.
      pays_above: whether it pays from ``value`` up, or up to ``value``.
    """

    what: str
    name: str
    now: float
    value: float
    pays_above: bool

    @property
    def pays_now(self) -> bool:
        """Whether it pays at the value there is."""
        return (self.now >= self.value) if self.pays_above else (self.now <= self.value)

    @property
    def factor(self) -> float:
        """How far off the value is, as a factor above 1."""
        ratio = self.value / self.now if self.now else math.inf
        return max(ratio, 1 / ratio) if ratio else math.inf


def break_evens(
    candidates: Sequence[Candidate], chip: Chip, min_gain: float
) -> tuple[BreakEven, ...]:
    """Every break-even of a decision between candidates, the nearest first.

    Args:
      candidates: of one site, the fastest first, each with its members; another one may be the
        fastest at another size.
      chip: the hardware row, per device.
      min_gain: the share of its time that a loop must save.
    """
    first = candidates[0]
    labels = tuple(first.members[0].site.einsum.names())
    found = [_of_size(candidates, label, chip, min_gain) for label in labels]
    found.append(_of_links(candidates, chip, min_gain))
    found.append(_of_hidden(first, min_gain))
    return tuple(sorted((f for f in found if f is not None), key=lambda f: f.factor))


def excess(e: Estimate, min_gain: float) -> float:
    """Seconds by which a loop takes too long to be worth it; negative where it is worth it."""
    return e.after_s + e.doubt_s - (1 - min_gain) * e.before_s


# --- one quantity each ---


def _of_size(
    candidates: Sequence[Candidate], label: int, chip: Chip, min_gain: float
) -> BreakEven | None:
    site = candidates[0].members[0].site
    now = _size_of(site, label)
    unit = math.lcm(*(_unit(c, label) for c in candidates))
    if chip.kind == "gpu" and now % (unit * GPU_ALIGN) == 0:
        unit *= GPU_ALIGN  # what is no multiple is copied to pad it; asked of none of those

    def at(size: float) -> float:
        whole = max(unit, round(size / unit) * unit)
        return min(
            excess(_again(c, chip, members=_all_resized(c, label, whole)), min_gain)
            for c in candidates
        )

    # Slopes are taken over whole tiles, within which padding makes steps.
    tile = unit * (chip.matrix_tile or 1)
    pays = at(now) <= 0
    for start in _STARTS:
        root = _newton(at, now * start, unit, tile, tile)
        if root is None or root == now:
            continue
        above = (root > now) != pays
        value = _settled(at, root, unit, tile, above)
        if value is None or value > now * _FARTHEST:
            continue
        turn = BreakEven("size", site.einsum.names()[label], now, value, above)
        if turn.pays_now == pays:
            return turn
    return None


def _of_links(candidates: Sequence[Candidate], chip: Chip, min_gain: float) -> BreakEven | None:
    first = candidates[0]
    known = first.ring or assumed_ring(chip, first.schedule.ring_size)
    rate = known.network if known.kind == "nodes" else known.link

    def at(slowness: float) -> float:
        return min(excess(_again(c, chip, slowness=slowness), min_gain) for c in candidates)

    pays = at(1.0) <= 0
    for start in _STARTS:
        root = _newton(at, start, 0.0, 1e-4 * start, 1e-6)
        if root is None or not 1 / _FARTHEST < root < _FARTHEST:
            continue
        return BreakEven("link", "", rate, rate / root, (root < 1) != pays)
    return None


def _of_hidden(candidate: Candidate, min_gain: float) -> BreakEven | None:
    """``after + doubt = (1 - min_gain) * (whole - hidden)``, solved for what is hidden."""
    e = candidate.estimate
    if not e.hidden_s:
        return None
    whole = e.before_s + e.hidden_s
    most = whole - (e.after_s + e.doubt_s) / (1 - min_gain)
    return BreakEven("hidden", "", e.hidden_s, most, False) if most > 0 else None


# --- the model again, at other values ---


def _again(
    candidate: Candidate,
    chip: Chip,
    members: tuple[Shared, ...] | None = None,
    slowness: float = 1.0,
) -> Estimate:
    first, *rest = members or candidate.members
    ring, inside = candidate.ring, candidate.inside
    if slowness != 1.0:
        ring = _slower(_ring(candidate, chip), slowness)
        rings = dict(inside.rings)
        inner = candidate.schedule.inner
        if inner is not None:
            rings.setdefault(inner.axes, assumed_ring(chip, inner.ring_size))
            rings[inner.axes] = _slower(rings[inner.axes], slowness)
        inside = dataclasses.replace(inside, rings=tuple(rings.items()))
    return estimate(
        first.site,
        first.collective,
        candidate.schedule,
        chip,
        ring,
        sharing=rest,
        hidden_s=candidate.behind.hidden_s,
        displaced_s=candidate.behind.displaced_s,
        inside=inside,
    )


def _ring(candidate: Candidate, chip: Chip) -> Ring:
    return candidate.ring or assumed_ring(chip, candidate.schedule.ring_size)


def _slower(ring: Ring, factor: float) -> Ring:
    return dataclasses.replace(
        ring, link=ring.link / factor, peer=ring.peer / factor, network=ring.network / factor
    )


def _all_resized(candidate: Candidate, label: int, size: int) -> tuple[Shared, ...]:
    return tuple(_resized(m, candidate, label, size) for m in candidate.members)


def _resized(member: Shared, candidate: Candidate, label: int, size: int) -> Shared:
    """``member`` with one dimension of another size, where it has that dimension.

    The others on a ring have it where it is a dimension of the gathered value.
    """
    first = candidate.members[0]
    mine = label
    if member.site is not first.site:
        labels = _operand_labels(first)
        if label not in labels:
            return member
        mine = _operand_labels(member)[labels.index(label)]
    site = member.site
    old = _size_of(site, mine)

    def scaled(c: Collective) -> Collective:
        labels = site.einsum.out if c.operand is None else _sides(site)[c.operand]
        return c if mine not in labels else dataclasses.replace(c, bytes=c.bytes * size // old)

    lhs, rhs, out = (
        tuple(size if name == mine else n for name, n in zip(labels, shape, strict=True))
        for labels, shape in zip(_sides(site), site.shapes, strict=True)
    )
    collectives = tuple(scaled(c) for c in site.collectives)
    at = site.collectives.index(member.collective)
    new = dataclasses.replace(site, shapes=(lhs, rhs, out), collectives=collectives)
    return Shared(new, collectives[at])


def _sides(site: EinsumSite) -> tuple[tuple[int, ...], ...]:
    return site.einsum.lhs, site.einsum.rhs, site.einsum.out


def _operand_labels(member: Shared) -> tuple[int, ...]:
    operand = member.collective.operand
    return _sides(member.site)[2 if operand is None else operand]


def _size_of(site: EinsumSite, label: int) -> int:
    for labels, shape in zip(_sides(site), site.shapes, strict=True):
        if label in labels:
            return shape[labels.index(label)]
    raise AssertionError(label)


def _unit(candidate: Candidate, label: int) -> int:
    """What a dimension must stay a multiple of: its shards, and the ring where it is looped."""
    site, c = candidate.members[0].site, candidate.collective
    sizes = dict(site.axis_sizes)
    specs = (site.lhs_spec, site.rhs_spec, site.out_spec)
    unit = 1
    for labels, spec in zip(_sides(site), specs, strict=True):
        for name, axes in zip(labels, spec, strict=True):
            if name == label:
                unit = math.lcm(unit, math.prod(sizes[a] for a in axes))
    labels = _operand_labels(candidate.members[0])
    if c.dim >= 0 and labels[c.dim] == label:
        unit *= candidate.schedule.ring_size
    inner = inner_collective(site, c, candidate.schedule)
    if inner is not None and _operand_labels(Shared(site, inner))[inner.dim] == label:
        unit *= site.ring_size(inner)
    return unit


# --- solving ---


def _newton(
    at: Callable[[float], float], start: float, least: float, width: float, within: float
) -> float | None:
    """The zero that Newton's method finds from ``start``; None where it finds none.

    ``width`` is the distance over which a slope is taken, ``least`` the smallest value there is,
    and the answer is known when a step moves it by no more than ``within``.
    """
    x = start
    for _ in range(_STEPS):
        here = at(x)
        slope = (at(x + width) - here) / width
        if slope == 0 or not math.isfinite(slope):
            return None
        new = x - here / slope
        if not least <= new <= start * _FARTHEST * 2:
            return None
        if abs(new - x) <= within:
            return new
        x = new
    return None


def _settled(
    at: Callable[[float], float], root: float, unit: int, tile: int, above: bool
) -> int | None:
    """The last multiple of ``unit`` that pays next to ``root``; None where none does.

    A dimension must divide, and padding makes steps: the answer lies within two tiles of the root.
    """
    bad, good = root - 2 * tile, root + 2 * tile
    if not above:
        bad, good = good, bad
    low, high = (max(0, round(x / unit)) for x in (bad, good))
    if at(high * unit) > 0 or (low > 0 and at(low * unit) <= 0):
        return None
    while abs(high - low) > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle * unit) <= 0 else (middle, high)
    return high * unit or None
