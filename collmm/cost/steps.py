"""What the loops of ``collmm.loops`` do on a device, step by step: compute, transfers, passes.

A step computes while its permutes are on their way, and takes the longer of the two; what the
compilers do besides is said beside each term, as seen in the schedules of libtpu and XLA's GPU
compiler. Seconds throughout; ``transfer`` times contain the launch of the permutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from collmm.cost import collectives
from collmm.cost.collectives import Ring, grouped, inside_group
from collmm.cost.einsum import time_of
from collmm.cost.figures import Chip
from collmm.cost.kernels import Shared as Shared
from collmm.cost.kernels import (
    cut_of,
    fetch_s,
    fetched_s,
    gather_einsum,
    gather_passes,
    gpu_slices_s,
    late,
    leave_s,
    local_bytes,
    pass_s,
    scatter_einsum,
    together_s,
)
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

# Shards whose pieces go on at once although the chip's permutes are late, and how short their
# einsums are to the permutes; as seen.
_SMALL_SHARD = 12 * 2**20
_SHORT = 0.3


# The part of a permute up to which an einsum does not delay the next one's permute; as seen.
_SMALL = 0.25


@dataclasses.dataclass(frozen=True)
class Phase:
    """``count`` equal steps: ``compute`` seconds while ``transfer`` seconds are on their way.

    ``launch`` is the part of ``transfer`` that starts the permutes.
    """

    count: int
    compute: float
    transfer: float = 0.0
    launch: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds of transfer that nothing hides, launches left out."""
        return max(0.0, self.transfer - self.compute - self.launched)

    @property
    def launched(self) -> float:
        """Seconds of launches that nothing hides."""
        return min(self.launch, max(0.0, self.transfer - self.compute))


@dataclasses.dataclass(frozen=True)
class Loop:
    """All steps of one loop.

    Attributes:
      phases: the steps. Their compute is einsums alone; ``passes`` are added apart.
      steps: partial einsums of one site.
      einsum_s: one step's partial einsums, of all that share the ring.
      permute_s: one step's transfer.
      passes_s: copies, slices, updates and adds that are kernels of their own, and hide transfers
        no more than the model says.
      prologue_s, epilogue_s: of the phases' exposed seconds, those before the first and after the
        last einsum.
      doubt_s: what a compiler that orders the steps otherwise may add.
      memory_bytes, link_bytes, permutes: as ``Estimate`` has them.
    """

    phases: tuple[Phase, ...]
    steps: int
    einsum_s: float
    permute_s: float
    passes_s: float = 0.0
    prologue_s: float = 0.0
    epilogue_s: float = 0.0
    doubt_s: float = 0.0
    memory_bytes: int = 0
    link_bytes: int = 0
    permutes: int = 0


def loop_of(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> Loop:
    """The loop of einsums that share a ring, under ``schedule``."""
    kind = members[0].collective.kind
    return _LOOPS[kind](members, schedule, chip, ring)


# --- gather ---


def _gather(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> Loop:
    """Shards travel; each is multiplied while the next is on its way."""
    if schedule.chunked and not schedule.grouped:
        return _chunks(members, schedule, chip, ring)
    n, unroll = schedule.groups, schedule.unroll
    shard = members[0].collective.ring_bytes / n
    meanwhile = together_s(members, schedule, chip, shard)
    within = _within(schedule, shard, ring, meanwhile)
    ring = grouped(ring, schedule.shards_per_step)
    e = sum(gather_einsum(m, n, chip, unroll) for m in members)
    first = sum(gather_einsum(m, n, chip, unroll, "first") for m in members)
    last = sum(gather_einsum(m, n, chip, unroll, "last") for m in members)
    if schedule.unroll:
        first += sum(fetched_s(local_bytes(m, n), chip) for m in members)
    # Before the last step an unrolled loop's result leaves the chip, on which it was made.
    out_s = sum(leave_s(m, chip) for m in members) if schedule.unroll else 0.0
    one = ring.launch_s + collectives.permute_step_s(ring, shard)
    doubt_s = 0.0
    if schedule.two_way and n > 2 and _apart(ring):
        common = (n - 1) // 2
        lag = late(chip) * e if schedule.unroll else 0.0
        phases = [
            Phase(1, first, one, ring.launch_s),
            Phase(common - 1, 2 * e, one + lag, ring.launch_s),
        ]
        if n % 2:
            phases.append(Phase(1, e + last, e + last + out_s))
        else:  # the farthest shard comes one way only
            farthest = max(one + lag, 2 * e + out_s)
            if n == 4:  # whether that permute waits for an einsum too is not known
                farthest, late_s = max(one, 2 * e + out_s), farthest
                doubt_s = late_s - farthest
            phases += [
                Phase(1, 2 * e, farthest, ring.launch_s),
                Phase(1, last),
            ]
    elif n > 2:
        phases = [Phase(1, first, one, ring.launch_s), Phase(n - 3, e, one, ring.launch_s)]
        phases += [Phase(1, e, max(one, e + out_s), ring.launch_s), Phase(1, last)]
    else:
        phases = [Phase(1, first, max(one, first + out_s), ring.launch_s), Phase(1, last)]
    chains = 2 if schedule.two_way and n > 2 else 1
    return Loop(
        (*within, *phases),
        steps=n,
        einsum_s=e,
        permute_s=one,
        doubt_s=doubt_s,
        passes_s=gather_passes(members, schedule, chip, shard),
        prologue_s=sum(p.count * p.exposed for p in within),
        memory_bytes=int(2 * chains * shard) - members[0].collective.bytes,
        link_bytes=int(members[0].collective.ring_bytes - shard / schedule.shards_per_step),
        permutes=schedule.shards_per_step + n - 2,
    )


def _within(
    schedule: Schedule, group: float, ring: Ring, meanwhile: float = 0.0
) -> tuple[Phase, ...]:
    """The permutes within a group, of the ``group`` bytes of its members; no einsum hides them.

    ``meanwhile``: seconds of passes, counted elsewhere, that run behind the first.
    """
    g = schedule.shards_per_step
    if g == 1:
        return ()
    seconds = ring.launch_s + collectives.permute_step_s(inside_group(ring, g), group / g)
    first = max(0.0, seconds - meanwhile)
    return Phase(1, 0.0, first, ring.launch_s), Phase(g - 2, 0.0, seconds, ring.launch_s)


def _chunks(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> Loop:
    """The pieces of each shard travel by themselves, all n - 1 steps, and are multiplied so."""
    n, count, unroll = schedule.ring_size, schedule.chunks, schedule.unroll
    shard = members[0].collective.ring_bytes / n
    e = sum(gather_einsum(m, n * count, chip, unroll) for m in members)
    last = sum(gather_einsum(m, n * count, chip, unroll, "last") for m in members)
    # The own shard is multiplied as a whole.
    first = sum(gather_einsum(m, n, chip, unroll, "first") for m in members)
    out_s = 0.0
    if unroll:
        first += sum(fetched_s(local_bytes(m, n), chip) for m in members)
        out_s = sum(leave_s(m, chip) for m in members)
    one = ring.launch_s + collectives.permute_step_s(ring, shard / count)
    ways = 2 if schedule.two_way and n > 2 and _apart(ring) else 1
    queued = -(-count // ways) * one
    if n > 2:
        # On v6e pieces of small shards go on at once, where links are slow.
        at_once = ring.dims == 2 and shard <= _SMALL_SHARD and e < _SHORT * queued
        lag = late(chip) * e if unroll and not at_once else 0.0
        end = (count - 1) * e + last
        phases = [
            Phase(1, first, queued, ring.launch_s),
            Phase(n - 2, count * e, queued + lag, ring.launch_s),
            Phase(1, end, end + out_s),
        ]
    else:
        phases = _queue(first, [e] * (count - 1) + [last], one, out_s, ring.launch_s)
    return Loop(
        tuple(phases),
        steps=1 + (n - 1) * count,
        doubt_s=late(chip) * e,
        einsum_s=e,
        permute_s=queued,
        # Before the first transfer the shard is cut.
        passes_s=gather_passes(members, schedule, chip, shard) + pass_s(2 * shard, chip),
        memory_bytes=int(2 * shard) - members[0].collective.bytes,
        link_bytes=int((n - 1) * shard),
        permutes=(n - 1) * count,
    )


def _queue(
    first: float, einsums: Sequence[float], one: float, out_s: float, launch: float
) -> list[Phase]:
    """On a ring of two all pieces are sent at once: each waits for those before it."""
    phases, done, compute = [], 0.0, first
    for k, e in enumerate(einsums, 1):
        left = max(compute, k * one - done)
        if k == len(einsums):  # the result leaves the chip before the last einsum
            left = max(left, compute + out_s)
        phases.append(Phase(1, compute, left, launch))
        done, compute = done + left, e
    return [*phases, Phase(1, compute)]


def first_step_s(m: Shared, schedule: Schedule, chip: Chip) -> float:
    """Seconds of what one einsum computes in the first step of a gather or a reduce-scatter."""
    n, count, unroll = schedule.ring_size, schedule.accumulators, schedule.unroll
    if m.collective.kind == ALL_GATHER:
        fetched = fetched_s(local_bytes(m, n), chip) if unroll else 0.0
        return fetched + gather_einsum(m, n, chip, unroll, "first")
    cut = cut_of((m,), schedule)
    later = (count - 1) * scatter_einsum(m, n, count, cut, chip)
    fetched = fetch_s(m.site, chip) if unroll else 0.0
    return later + fetched + scatter_einsum(m, n, count, cut, chip, first=True)


# --- reduce-scatter ---


def _scatter(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> Loop:
    """The accumulator travels, and each device adds its share."""
    n, c, g = schedule.groups, members[0].collective, schedule.shards_per_step
    wide = members[0].wide
    block = c.bytes / n / members[0].site.itemsizes[2] * wide
    count = schedule.accumulators
    cut = cut_of(members, schedule)
    within, ring = _within(schedule, block, ring), grouped(ring, g)
    e = sum(scatter_einsum(m, n, count, cut, chip) for m in members)
    first = sum(scatter_einsum(m, n, count, cut, chip, first=True) for m in members)
    first += e * (count - 1)
    if schedule.unroll:
        first += sum(fetch_s(m.site, chip) for m in members)
    passes_s = 0.0
    permute_s = ring.launch_s + collectives.permute_step_s(ring, block / count)
    if count == 1:
        phases = [Phase(1, first), Phase(n - 1, e, permute_s, ring.launch_s)]
        passes_s = (n - 1) * pass_s(3 * block, chip)
        if chip.kind == "gpu":
            passes_s += sum(gpu_slices_s(m, n, chip) for m in members)
            if wide != members[0].site.itemsizes[2]:
                passes_s += pass_s(
                    block / g + block / g / wide * members[0].site.itemsizes[2], chip
                )
    else:
        ways = 2 if schedule.two_way and _apart(ring) else 1
        delayed = bool(schedule.unroll and late(chip))
        phases = _out_of_phase(n, count, ways, delayed, first, e, permute_s, ring.launch_s)
    passes_s += (g - 1) * pass_s(3 * block / g, chip)
    return Loop(
        (*phases, *within),
        steps=n * count,
        einsum_s=e,
        permute_s=permute_s,
        passes_s=passes_s,
        epilogue_s=sum(p.count * p.exposed for p in within),
        memory_bytes=int(3 * block) - c.bytes,
        link_bytes=int((n - 1 / g) * block),
        permutes=(n - 1) * count + g - 1,
    )


def _out_of_phase(
    n: int,
    count: int,
    ways: int,
    delayed: bool,
    first: float,
    e: float,
    permute_s: float,
    launch_s: float,
) -> list[Phase]:
    """The steps of ``count`` chains in two groups, over links that go ``ways`` ways.

    The first step of every chain, which takes ``first`` seconds in all, comes before the turns.
    ``delayed``: the compiler starts a chain's permute only once that of the one before is there;
    of more than two, where the einsums are no small part of the permutes, all but one together.
    """
    # Transfers that queue for one link, in a turn and in one of its two groups.
    queued, half = -(-count // ways), (count + 1) // 2
    per_way = -(-half // ways)
    turn = max(per_way * permute_s + e * half, queued * permute_s, e * count)
    if delayed and count > 2 and e > _SMALL * permute_s:
        turn = max(turn, queued * permute_s + e * (count - 1))
    turns = Phase(n - 1, e * count, turn, queued * launch_s)
    if not delayed:
        return [Phase(1, first), turns]
    return [Phase(1, first - e), Phase(1, e, permute_s, launch_s), turns]


# --- all-to-all ---


def _exchange(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> Loop:
    """Every peer's block goes straight to it, independent of every other."""
    n, c = schedule.ring_size, members[0].collective
    e = sum(time_of(m.partial(n), chip).seconds for m in members)
    # The links are those of the all-to-all itself.
    block = ring.launch_s + collectives.all_to_all_s(ring, c.bytes * n) / max(1, n - 1)
    return Loop(
        (Phase(n - 1, e, block, ring.launch_s), Phase(1, e)),
        steps=n,
        einsum_s=e,
        permute_s=block,
        memory_bytes=int(2 * c.bytes / n),
        link_bytes=int(c.bytes * (n - 1) / n),
        permutes=n - 1,
    )


# --- what they share ---


def _apart(ring: Ring) -> bool:
    """Whether the two ways round a ring use different links."""
    return ring.kind == "peers" or (ring.kind == "torus" and ring.permute_load[1] == 1)


_LOOPS = {
    ALL_GATHER: _gather,
    REDUCE_SCATTER: _scatter,
    ALL_REDUCE: _scatter,
    ALL_TO_ALL: _exchange,
}
