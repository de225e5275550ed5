"""What a site takes as it is, and what it would take as a loop under a schedule.

As it is, an einsum and its collective run one after the other, less what other work hides::

    before = einsum + collective + others - hidden

As a loop, one shard is on its way while another is multiplied, step by step::

    after = sum over steps of max(partial einsums, permute)  +  first and last step  +  others

which is the same as what this module gives term by term::

    after = einsum + loss + traffic + launch + exposed + rest + others

``loss`` is what smaller einsums lose: tiles, shape, and the local operand read again each step.
Everything is a pure function of shapes and rates; nothing is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from collmm.cost import collectives
from collmm.cost.collectives import Ring
from collmm.cost.einsum import Product, product_of, time_of
from collmm.cost.figures import Chip
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Collective, EinsumSite


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one site on one device, before and after, and its memory and traffic.

    Attributes:
      einsum_s: the undecomposed einsum; of all einsums that share the ring.
      collective_s: the collective that is looped, as the compiler runs it, its launch included.
      others_s: the site's other collectives, which stay as they are.
      hidden_s: the part of ``collective_s`` that other work of the program hides already.
      steps: partial einsums of one site.
      step_einsum_s: one step's partial einsums of all that share the ring, in the middle of it.
      step_permute_s: one step's transfer on the busiest link, its launch included.
      loss_s: what all partial einsums take beyond ``einsum_s``.
      traffic_s: slices, updates of results and accumulators that are passes of their own.
      launch_s: starting the steps.
      prologue_s: exposed before the first einsum can start.
      epilogue_s: exposed after the last einsum.
      exposed_s: transfer that nothing hides, prologue and epilogue included.
      rest_s: the part of the collective that stays one: the gather of an all-reduce.
      memory_bytes: buffers of the loop on one device, less those it makes unnecessary; may be
        negative.
      link_bytes: bytes one device sends.
      permutes: instructions that send.
      einsums: how many einsums share the ring.
      note: what had to be assumed, or empty.
    """

    einsum_s: float
    collective_s: float
    others_s: float = 0.0
    hidden_s: float = 0.0
    steps: int = 1
    step_einsum_s: float = 0.0
    step_permute_s: float = 0.0
    loss_s: float = 0.0
    traffic_s: float = 0.0
    launch_s: float = 0.0
    prologue_s: float = 0.0
    epilogue_s: float = 0.0
    exposed_s: float = 0.0
    rest_s: float = 0.0
    memory_bytes: int = 0
    link_bytes: int = 0
    permutes: int = 0
    einsums: int = 1
    note: str = ""

    @property
    def before_s(self) -> float:
        """Einsum and collectives, one after the other, less what is hidden."""
        return self.einsum_s + self.collective_s - self.hidden_s + self.others_s

    @property
    def after_s(self) -> float:
        """The overlapped loop and what stays beside it."""
        own = self.einsum_s + self.loss_s + self.traffic_s + self.launch_s + self.exposed_s
        return own + self.rest_s + self.others_s

    @property
    def gain(self) -> float:
        """The share of ``before_s`` that the loop saves; negative where it loses."""
        return 1 - self.after_s / self.before_s if self.before_s else 0.0

    def pays(self, min_gain: float = 0.0) -> bool:
        """Whether the loop saves more than ``min_gain`` of what the site takes now."""
        return self.gain > min_gain

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the totals."""
        totals = {"before_s": self.before_s, "after_s": self.after_s, "gain": self.gain}
        return {**dataclasses.asdict(self), **totals}


@dataclasses.dataclass(frozen=True)
class Shared:
    """An einsum that shares the ring: its site, and its collective that the ring replaces."""

    site: EinsumSite
    collective: Collective


def estimate(
    site: EinsumSite,
    collective: Collective,
    schedule: Schedule,
    chip: Chip,
    ring: Ring | None = None,
    *,
    sharing: Sequence[Shared] = (),
    hidden_s: float = 0.0,
) -> Estimate:
    """The times of one site and of its loop on one device of ``chip``.

    Args:
      site: the einsum.
      collective: the one of its collectives that is looped.
      schedule: how.
      chip: the hardware row, per device.
      ring: the members' links in the order in which the loop visits them; without one, that of
        ``assumed_ring``.
      sharing: further einsums on the same ring.
      hidden_s: seconds of other work behind which the compiler can hide the collective as it is.
    """
    ring = ring or assumed_ring(chip, schedule.ring_size)
    members = (Shared(site, collective), *sharing)
    whole = [time_of(product_of(m.site), chip) for m in members]
    einsum_s = sum(t.seconds for t in whole)
    collective_s = plain_s(collective, ring)
    others = [c for m in members for c in m.site.loopable if c is not m.collective]
    notes = dict.fromkeys(filter(None, (ring.note, *(t.note for t in whole))))
    loop = _LOOPS[collective.kind](members, schedule, chip, ring)
    compute_s = sum(p.count * p.compute for p in loop.phases)
    return Estimate(
        einsum_s=einsum_s,
        collective_s=collective_s,
        others_s=sum(plain_s(c, assumed_ring(chip, site.ring_size(c))) for c in others),
        hidden_s=min(hidden_s, collective_s),
        steps=loop.steps,
        step_einsum_s=loop.einsum_s,
        step_permute_s=loop.permute_s,
        loss_s=compute_s - einsum_s,
        traffic_s=loop.traffic_s,
        launch_s=loop.steps * ring.step_s,
        prologue_s=loop.prologue_s,
        epilogue_s=loop.epilogue_s,
        exposed_s=sum(p.count * p.exposed for p in loop.phases) + loop.prologue_s + loop.epilogue_s,
        rest_s=plain_s(dataclasses.replace(collective, kind=ALL_GATHER), ring)
        if collective.kind == ALL_REDUCE
        else 0.0,
        memory_bytes=loop.memory_bytes,
        link_bytes=loop.link_bytes,
        permutes=loop.permutes,
        einsums=len(members),
        note="; ".join(notes),
    )


def plain_s(collective: Collective, ring: Ring) -> float:
    """Seconds of a collective as the compiler runs it, its launch included."""
    if ring.size == 1:
        return 0.0
    size = collective.bytes
    seconds = {
        ALL_GATHER: collectives.all_gather_s,
        REDUCE_SCATTER: collectives.reduce_scatter_s,
        ALL_REDUCE: collectives.all_reduce_s,
        ALL_TO_ALL: lambda ring, size: collectives.all_to_all_s(ring, size * ring.size),
    }[collective.kind](ring, size)
    return seconds + ring.launch_s


def assumed_ring(chip: Chip, size: int) -> Ring:
    """The ring of ``size`` devices where nothing is known of them.

    One torus axis, or as few NVLink domains as hold it.
    """
    if chip.kind == "tpu":
        return collectives.torus_ring(chip, (size,))
    nodes = -(-size // chip.domain)
    while size % nodes:
        nodes += 1
    return collectives.gpu_ring(chip, size // nodes, nodes)


# --- loops ---


@dataclasses.dataclass(frozen=True)
class _Phase:
    """``count`` equal steps: ``compute`` seconds while ``transfer`` seconds are on their way."""

    count: int
    compute: float
    transfer: float

    @property
    def exposed(self) -> float:
        return max(0.0, self.transfer - self.compute)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What a loop does, step by step."""

    phases: tuple[_Phase, ...]
    steps: int
    einsum_s: float
    permute_s: float
    traffic_s: float = 0.0
    prologue_s: float = 0.0
    epilogue_s: float = 0.0
    memory_bytes: int = 0
    link_bytes: int = 0
    permutes: int = 0


def _gather_loop(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> _Loop:
    """Shards travel; each is multiplied while the next is on its way."""
    n = schedule.ring_size
    shard = members[0].collective.ring_bytes / n
    parts = [_partial(m, n) for m in members]
    e = sum(time_of(p, chip).seconds for p in parts)
    one = ring.launch_s + collectives.permute_step_s(ring, shard)
    if schedule.two_way and n > 2:
        both = ring.launch_s + collectives.permute_step_s(ring, 2 * shard, two_way=True)
        common, more = (n - 1) // 2, 1 - n % 2
        phases = [_Phase(1, e, both), _Phase(common - 1, 2 * e, both)]
        phases += [_Phase(1, 2 * e, one), _Phase(1, e, 0.0)] if more else [_Phase(1, 2 * e, 0.0)]
        permute_s = both
    else:
        phases = [_Phase(n - 1, e, one), _Phase(1, e, 0.0)]
        permute_s = one
    return _Loop(
        tuple(phases),
        steps=n,
        einsum_s=e,
        permute_s=permute_s,
        traffic_s=_gather_traffic(members, schedule, chip, shard),
        memory_bytes=int((4 if schedule.two_way else 2) * shard) - members[0].collective.bytes,
        link_bytes=int((n - 1) * shard),
        permutes=n - 1,
    )


def _gather_traffic(
    members: Sequence[Shared], schedule: Schedule, chip: Chip, shard: float
) -> float:
    """Sums that are added up in memory, and copies of the shards that a rolled loop carries."""
    n = schedule.ring_size
    moved = 0.0
    for m in members:
        einsum, operand = m.site.einsum, m.collective.operand
        label = (einsum.lhs, einsum.rhs)[operand or 0][m.collective.dim]
        if label in einsum.contracting:
            product = product_of(m.site)
            wide = product.out_bytes // product.itemsizes[2] * max(4, product.itemsizes[2])
            moved += 2 * (n - 1) * wide
    if not schedule.unroll:
        moved += 2 * (n - 2) * shard
    return moved / chip.hbm_bytes_per_s()


def _scatter_loop(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> _Loop:
    """The accumulator travels, and each device adds its share."""
    n = schedule.ring_size
    c = members[0].collective
    out = members[0].site
    wide = max(4, out.itemsizes[2]) if out.dtypes[2] in _SUMMED_WIDE else out.itemsizes[2]
    block = c.bytes / n / out.itemsizes[2] * wide
    count = schedule.accumulators
    parts = [_partial(m, n * count) for m in members]
    e = count * sum(time_of(p, chip).seconds for p in parts)
    traffic = 0.0
    if count == 1:
        p = ring.launch_s + collectives.permute_step_s(ring, block)
        phases = [_Phase(1, e, 0.0), _Phase(n - 1, e, p)]
        traffic = 3 * (n - 1) * block / chip.hbm_bytes_per_s()
        prologue = epilogue = 0.0
    else:
        # One group of accumulators is on its way while the other is multiplied.
        group = block * ((count + 1) // 2) / count
        p = ring.launch_s + collectives.permute_step_s(ring, group, schedule.two_way)
        phases = [_Phase(1, e / 2, 0.0), _Phase(2 * (n - 1), e / 2, p), _Phase(1, e / 2, 0.0)]
        prologue = epilogue = 0.0
    return _Loop(
        tuple(phases),
        steps=n * count,
        einsum_s=e / count,
        permute_s=p,
        traffic_s=traffic,
        prologue_s=prologue,
        epilogue_s=epilogue,
        memory_bytes=int(3 * block) - c.bytes,
        link_bytes=int((n - 1) * block),
        permutes=(n - 1) * count,
    )


_SUMMED_WIDE = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def _exchange_loop(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> _Loop:
    """Every peer's block goes straight to it, independent of every other."""
    n = schedule.ring_size
    c = members[0].collective
    e = sum(time_of(_partial(m, n), chip).seconds for m in members)
    # The links are those of the all-to-all itself.
    block = ring.launch_s + collectives.all_to_all_s(ring, c.bytes * n) / max(1, n - 1)
    phases = (_Phase(n - 1, e, block), _Phase(1, e, 0.0))
    return _Loop(
        phases,
        steps=n,
        einsum_s=e,
        permute_s=block,
        memory_bytes=int(2 * c.bytes / n),
        link_bytes=int(c.bytes * (n - 1) / n),
        permutes=n - 1,
    )


def _partial(member: Shared, parts: int) -> Product:
    """One step's einsum: the label of the collective cut into ``parts``."""
    c, einsum = member.collective, member.site.einsum
    sent = c.kind == ALL_TO_ALL and c.operand is None
    dim = c.split_dim if sent else c.dim
    labels = einsum.out if c.operand is None else (einsum.lhs, einsum.rhs)[c.operand]
    return product_of(member.site, {labels[dim]: parts})


_LOOPS = {
    ALL_GATHER: _gather_loop,
    REDUCE_SCATTER: _scatter_loop,
    ALL_REDUCE: _scatter_loop,
    ALL_TO_ALL: _exchange_loop,
}
