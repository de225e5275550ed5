"""What the loops of ``collmm.loops`` do on a device, step by step: compute, transfers, passes.

A step computes while its permutes are on their way, and takes the longer of the two; what the
compilers do besides is said beside each term, as seen in the schedules of libtpu and XLA's GPU
compiler. Seconds throughout; ``transfer`` times contain the launch of the permutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from collmm.cost import collectives
from collmm.cost.collectives import Ring
from collmm.cost.einsum import Product, product_of, time_of
from collmm.cost.figures import Chip
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Collective, EinsumSite

# Permutes of a turn of four chains that are waited for where the chains run one by one; as seen.
_APART = 2.5
_SUMMED_WIDE = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Shared:
    """An einsum of a ring: its site, and its collective that the ring replaces."""

    site: EinsumSite
    collective: Collective

    def partial(self, parts: int) -> Product:
        """One step's einsum: the label of the collective cut into ``parts``."""
        c, einsum = self.collective, self.site.einsum
        sent = c.kind == ALL_TO_ALL and c.operand is None
        dim = c.split_dim if sent else c.dim
        labels = einsum.out if c.operand is None else (einsum.lhs, einsum.rhs)[c.operand]
        return product_of(self.site, {labels[dim]: parts})

    @property
    def accumulates(self) -> bool:
        """Whether the gathered label is summed over, so that every step adds to one result."""
        c, einsum = self.collective, self.site.einsum
        labels = einsum.out if c.operand is None else (einsum.lhs, einsum.rhs)[c.operand]
        return labels[c.dim] in einsum.contracting

    @property
    def wide(self) -> int:
        """Bytes of an element of a sum across shards."""
        size = self.site.itemsizes[2]
        return max(4, size) if self.site.dtypes[2] in _SUMMED_WIDE else size


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
      memory_bytes, link_bytes, permutes: as ``Estimate`` has them.
    """

    phases: tuple[Phase, ...]
    steps: int
    einsum_s: float
    permute_s: float
    passes_s: float = 0.0
    prologue_s: float = 0.0
    epilogue_s: float = 0.0
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
    n = schedule.ring_size
    shard = members[0].collective.ring_bytes / n
    e = sum(_gather_einsum(m, n, chip) for m in members)
    first = sum(_gather_einsum(m, n, chip, first=True) for m in members)
    one = ring.launch_s + collectives.permute_step_s(ring, shard)
    permute_s = one
    if schedule.two_way and n > 2:
        permute_s = one if _apart(ring) else 2 * one
        common = (n - 1) // 2
        phases = [
            Phase(1, first, permute_s, ring.launch_s),
            Phase(common - 1, 2 * e, permute_s, ring.launch_s),
        ]
        if n % 2:
            phases.append(Phase(1, 2 * e))
        else:  # the farthest shard comes one way only
            phases += [Phase(1, 2 * e, one, ring.launch_s), Phase(1, e)]
    else:
        phases = [Phase(1, first, one, ring.launch_s), Phase(n - 2, e, one, ring.launch_s)]
        phases.append(Phase(1, e))
    chains = 2 if schedule.two_way and n > 2 else 1
    return Loop(
        tuple(phases),
        steps=n,
        einsum_s=e,
        permute_s=permute_s,
        passes_s=_gather_passes(members, schedule, chip, shard),
        memory_bytes=int(2 * chains * shard) - members[0].collective.bytes,
        link_bytes=int((n - 1) * shard),
        permutes=n - 1,
    )


def _gather_einsum(m: Shared, n: int, chip: Chip, first: bool = False) -> float:
    """One step's einsum; the first one finds nothing on the chip."""
    part = m.partial(n)
    gathered, local = part.lhs_bytes, part.rhs_bytes
    if m.collective.operand == 1:
        gathered, local = local, gathered
    if m.accumulates:
        # The sum so far is read and written by the kernel that adds to it.
        part = dataclasses.replace(part, itemsizes=(*part.itemsizes[:2], m.wide))
        sums = 2 * part.out_bytes
        kept = _stays(sums, chip)
        onchip = sums if kept else 0
        moved = gathered + local + sums - onchip
        return time_of(part, chip, moved=moved, onchip=onchip, kept=kept).seconds
    if not first and _stays(local, chip):
        moved, onchip = gathered + part.out_bytes, local
    else:
        moved, onchip = gathered + local + part.out_bytes, 0
    return time_of(part, chip, moved=moved, onchip=onchip).seconds


def _gather_passes(
    members: Sequence[Shared], schedule: Schedule, chip: Chip, shard: float
) -> float:
    """Kernels beside the einsums: of a rolled loop the copies of the shards that it carries.

    On a GPU also the updates of the result, which a TPU's compiler fuses into the einsum.
    """
    n = schedule.ring_size
    chains = 2 if schedule.two_way and n > 2 else 1
    turns = 0 if schedule.unroll else (n - 1) // chains - 1
    passes_s = turns * (chains * _pass_s(2 * shard, chip) + _turn_s(chip))
    if chip.kind == "gpu":
        updated = sum(m.partial(n).out_bytes for m in members if not m.accumulates)
        passes_s += n * _pass_s(2 * updated, chip)
    return passes_s


# --- reduce-scatter ---


def _scatter(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> Loop:
    """The accumulator travels, and each device adds its share."""
    n, c = schedule.ring_size, members[0].collective
    wide = members[0].wide
    block = c.bytes / n / members[0].site.itemsizes[2] * wide
    count = schedule.accumulators
    e = sum(_scatter_einsum(m, n, count, chip) for m in members)
    first = e * (count - 1) + sum(_scatter_einsum(m, n, count, chip, first=True) for m in members)
    passes_s = 0.0
    permute_s = ring.launch_s + collectives.permute_step_s(ring, block / count)
    launches = ring.launch_s
    if count == 1:
        phases = [Phase(1, first), Phase(n - 1, e, permute_s, launches)]
        passes_s = (n - 1) * _pass_s(3 * block, chip)
    else:
        # Transfers that queue for one link, in a turn and in one of its two groups.
        ways = 2 if schedule.two_way and _apart(ring) else 1
        queued, half = -(-count // ways), (count + 1) // 2
        grouped = -(-half // ways)
        turn = max(grouped * permute_s + e * half, queued * permute_s, e * count)
        if count > 2 and chip.kind == "tpu":
            # libtpu runs many short chains one after the other rather than side by side.
            apart_s = e * count + _APART * permute_s
            part = max(ring.launch_s / permute_s, 0.5 if n <= 4 else 0.0)
            turn += part * max(0.0, apart_s - turn)
        # The first step of every chain is outside of the turns.
        phases = [Phase(1, first), Phase(n - 1, e * count, turn, queued * launches)]
    return Loop(
        tuple(phases),
        steps=n * count,
        einsum_s=e,
        permute_s=permute_s,
        passes_s=passes_s,
        memory_bytes=int(3 * block) - c.bytes,
        link_bytes=int((n - 1) * block),
        permutes=(n - 1) * count,
    )


def _scatter_einsum(m: Shared, n: int, count: int, chip: Chip, first: bool = False) -> float:
    """One accumulator's einsum; the first one finds nothing on the chip."""
    part = m.partial(n * count)
    part = dataclasses.replace(part, itemsizes=(*part.itemsizes[:2], m.wide))
    label = m.site.einsum.out[m.collective.dim]
    cut, whole = part.lhs_bytes, part.rhs_bytes
    if label in m.site.einsum.rhs:
        cut, whole = whole, cut
    sums = 2 if count > 1 else 1  # the arrived sum is read by the kernel that adds to it
    kept = _stays(part.out_bytes, chip)
    result = sums * part.out_bytes
    onchip = (whole if not first and _stays(whole, chip) else 0) + (result if kept else 0)
    moved = cut + whole + result - onchip
    return time_of(part, chip, moved=moved, onchip=onchip, kept=kept).seconds


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


def _stays(size: float, chip: Chip) -> bool:
    """Whether what every step reads stays in the memory on the chip."""
    return chip.shape is not None and size <= chip.shape.onchip_fits.value


def _pass_s(size: float, chip: Chip) -> float:
    """Seconds of an elementwise kernel that moves ``size`` bytes."""
    shape = chip.shape
    if shape is None:
        return size / chip.hbm_bytes_per_s()
    return shape.pass_start.value + size / chip.hbm_bytes_per_s() / shape.pass_share.value


def _turn_s(chip: Chip) -> float:
    """Seconds in which a turn of a rolled loop finds out which shard it has."""
    return 0.0 if chip.shape is None else chip.shape.pass_start.value


_LOOPS = {
    ALL_GATHER: _gather,
    REDUCE_SCATTER: _scatter,
    ALL_REDUCE: _scatter,
    ALL_TO_ALL: _exchange,
}
