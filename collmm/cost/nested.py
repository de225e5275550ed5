"""A ring inside the first step of another: what it adds to the loop, and what it takes away.

The first step's einsums are cut once more, by the inner ring's shards, and hide that ring's
transfers; the outer ring's first transfer hides behind all of it. Where both use the same links
(rings that span the same axes of a torus) they queue. What was a plain collective before the loop
is gone. On a GPU the inner ring's transfers were not hidden in any schedule that was read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from collmm.cost.collectives import Ring
from collmm.cost.figures import Chip
from collmm.cost.hiding import ALONE, Behind
from collmm.cost.kernels import Shared, pass_s
from collmm.cost.steps import Loop, Phase, first_step_s, loop_of
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, Collective


@dataclasses.dataclass(frozen=True)
class Inside:
    """Where the other rings of a site lie, and how an inner one stands to the program.

    Attributes:
      rings: (axes, links) of the collectives that are not looped, as far as they are known.
      behind: of each einsum on the outer ring, how its inner collective stands to other work.
      hidden_s: seconds of the collectives that are not looped that other work hides.
    """

    rings: tuple[tuple[tuple[str, ...], Ring], ...] = ()
    behind: tuple[Behind, ...] = ()
    hidden_s: float = 0.0

    def ring(self, axes: tuple[str, ...]) -> Ring | None:
        """The links of the ring over ``axes``; None where nothing is known of them."""
        return dict(self.rings).get(axes)

    def of(self, k: int) -> Behind:
        """How the inner collective of einsum ``k`` stands to other work."""
        return self.behind[k] if k < len(self.behind) else ALONE


NOWHERE = Inside()


def with_inner(
    loop: Loop,
    members: Sequence[Shared],
    inners: Sequence[Collective | None],
    schedule: Schedule,
    chip: Chip,
    ring: Ring,
    inner_ring: Ring,
) -> Loop:
    """``loop`` with the inner collectives of its einsums gathered in its first step.

    Args:
      loop: of the outer ring alone.
      members: the einsums on it.
      inners: the collective of each that the inner ring takes over, or None.
      schedule: of both rings.
      chip: the hardware row, per device.
      ring: the outer ring's links.
      inner_ring: those of the inner one.
    """
    assert schedule.inner is not None
    # A first step is one einsum, or one per accumulator, all fed from one inner ring.
    gathers = members[0].collective.kind == ALL_GATHER
    products = 1 if gathers else schedule.accumulators
    rings, alone, passes_s = [], 0.0, loop.passes_s
    for m, inner in zip(members, inners, strict=True):
        if inner is None:
            alone += first_step_s(m, schedule, chip)
            continue
        cut = ((m.label, schedule.ring_size * products),)
        part = Shared(m.site, inner, cut)
        inner_loop = loop_of((part,), schedule.inner, chip, inner_ring)
        rings.append(inner_loop)
        passes_s += inner_loop.passes_s + _copies_s(inner_loop, inner, chip)
        passes_s += _sums_s(part, m.accumulates or not gathers, products, chip)
    inside = [
        Phase(
            steps[0].count,
            products * sum(p.compute for p in steps),
            sum(p.transfer for p in steps),
            sum(p.launch for p in steps),
        )
        for steps in zip(*(r.phases for r in rings), strict=True)
    ]
    inside[0] = dataclasses.replace(inside[0], compute=inside[0].compute + alone)
    first, *rest = loop.phases
    sent_s = sum(r.permute_s for r in rings)
    left = _left(first, inside, 0.0 if _apart(ring, inner_ring) else sent_s)
    if chip.kind == "gpu":
        # XLA keeps one permute in flight, and gives the first einsum to that of the outer ring.
        inside = [
            dataclasses.replace(p, transfer=p.compute + sent_s) if p.transfer else p for p in inside
        ]
    return dataclasses.replace(
        loop,
        phases=(*inside, left, *rest),
        passes_s=passes_s,
        # The gathered operand is there either way; what is on its way comes on top.
        memory_bytes=loop.memory_bytes
        + sum(r.memory_bytes + c.bytes for r, c in zip(rings, _own(inners), strict=True)),
        link_bytes=loop.link_bytes + sum(r.link_bytes for r in rings),
        permutes=loop.permutes + sum(r.permutes for r in rings),
    )


def _own(inners: Sequence[Collective | None]) -> list[Collective]:
    return [c for c in inners if c is not None]


def _sums_s(part: Shared, summed: bool, products: int, chip: Chip) -> float:
    """On a GPU, what slices of a result take more where the outer ring sums, and they are wide."""
    if chip.kind != "gpu" or part.accumulates or not summed:
        return 0.0
    results = products * part.partial(1).results
    return pass_s(2 * results * (part.wide - part.site.itemsizes[2]), chip)


def _copies_s(ring: Loop, c: Collective, chip: Chip) -> float:
    """Seconds in which every shard is written into the gathered operand.

    On a TPU the kernel reads what it writes over, and is slow at it (seen for v5e).
    """
    moves = 3.5 if chip.kind == "tpu" else 2
    return ring.steps * pass_s(moves * c.bytes / ring.steps, chip)


def _apart(ring: Ring, inner: Ring) -> bool:
    """Whether the two rings use different links: they span different axes of a torus."""
    spanned = len(ring.axes) + len(inner.axes)
    return ring.kind == inner.kind == "torus" and spanned <= max(ring.dims, inner.dims)


def _left(first: Phase, inside: Sequence[Phase], queued_s: float) -> Phase:
    """What is left of the outer ring's first transfer after the first step.

    ``queued_s``: what every transfer of the inner ring takes of the same links.
    """
    took = sum(p.count * (p.compute if queued_s else max(p.compute, p.transfer)) for p in inside)
    took -= sum(p.count * queued_s for p in inside if p.transfer)
    left = max(0.0, first.transfer - max(0.0, took))
    return Phase(1, 0.0, left, min(first.launch, left))
