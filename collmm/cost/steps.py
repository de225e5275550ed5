"""What the loops of ``collmm.loops`` do on a device, step by step: compute, transfers, passes.

A step computes while its permutes are on their way, and takes the longer of the two; what the
compilers do besides is said beside each term, as seen in the schedules of libtpu and XLA's GPU
compiler. Seconds throughout; ``transfer`` times contain the launch of the permutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from collmm.cost import collectives
from collmm.cost.collectives import Ring
from collmm.cost.einsum import Place, Product, copied, product_of, time_of
from collmm.cost.figures import Chip
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Collective, EinsumSite

# A larger result of a rolled loop leaves no room on the chip for a smaller operand; as seen.
# How much more room than other results a sum takes on the chip; as seen.
_SUM_ROOM = 1.3
_MOSTLY = 0.7
_CARRIED = 14 * 2**20
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
    unroll = schedule.unroll
    e = sum(_gather_einsum(m, n, chip, unroll) for m in members)
    first = sum(_gather_einsum(m, n, chip, unroll, "first") for m in members)
    last = sum(_gather_einsum(m, n, chip, unroll, "last") for m in members)
    if schedule.unroll:
        first += sum(_fetch_s(_local_bytes(m, n), chip) for m in members)
    # Before the last step an unrolled loop's result leaves the chip, on which it was made.
    out_s = sum(_leave_s(m, chip) for m in members) if schedule.unroll else 0.0
    one = ring.launch_s + collectives.permute_step_s(ring, shard)
    permute_s = one
    if schedule.two_way and n > 2:
        permute_s = one if _apart(ring) else 2 * one
        common = (n - 1) // 2
        late = _late(chip) * e if schedule.unroll else 0.0
        phases = [
            Phase(1, first, permute_s, ring.launch_s),
            Phase(common - 1, 2 * e, permute_s + late, ring.launch_s),
        ]
        if n % 2:
            phases.append(Phase(1, e + last, e + last + out_s))
        else:  # the farthest shard comes one way only
            phases += [
                Phase(1, 2 * e, max(one + late, 2 * e + out_s), ring.launch_s),
                Phase(1, last),
            ]
    elif n > 2:
        phases = [Phase(1, first, one, ring.launch_s), Phase(n - 3, e, one, ring.launch_s)]
        phases += [Phase(1, e, max(one, e + out_s), ring.launch_s), Phase(1, last)]
    else:
        phases = [Phase(1, first, max(one, first + out_s), ring.launch_s), Phase(1, last)]
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


def _local_bytes(m: Shared, n: int) -> int:
    """Bytes of the operand that is not gathered, all of it."""
    part = m.partial(n)
    local = part.lhs_bytes if m.collective.operand == 1 else part.rhs_bytes
    return n * local if m.accumulates else local


def _gather_einsum(
    m: Shared, n: int, chip: Chip, unroll: bool, step: Literal["first", "middle", "last"] = "middle"
) -> float:
    """One step's einsum: the first one does not find its shard on the chip, of an unrolled loop the
    last one leaves its result in the memory."""
    part = m.partial(n)
    gathered, local = part.lhs_bytes, part.rhs_bytes
    if m.collective.operand == 1:
        gathered, local = local, gathered
    if m.accumulates:
        # The sum so far is read and written by the kernel that adds to it.
        part = dataclasses.replace(part, itemsizes=(*part.itemsizes[:2], m.wide))
        sums = 2.0 * part.out_bytes
        if _result_stays(_SUM_ROOM * part.out_bytes, chip):
            sums = 0.0
        elif chip.shape is not None:  # a large one is on the chip every other step
            sums /= 2
        onchip = local if step != "first" and _stays(local, chip) else 0
        moved = gathered + local - onchip + sums
        return time_of(part, chip, moved=moved, onchip=onchip, result="sum").seconds
    whole_out = part.out_bytes * n
    kept = unroll and step != "last" and _result_stays(whole_out, chip)
    pushed_out = not unroll and local <= _CARRIED < whole_out
    onchip = local if step != "first" and _stays(local, chip) and not pushed_out else 0
    moved = gathered + local - onchip + (0 if kept else part.out_bytes)
    place: Place = "chip" if kept else "memory"
    return time_of(part, chip, moved=moved, onchip=onchip, result=place).seconds


def _leave_s(m: Shared, chip: Chip) -> float:
    """Seconds in which the result of a gather's loop is copied from the chip to the memory."""
    out = product_of(m.site).out_bytes
    if m.accumulates or not _result_stays(out, chip):
        return 0.0
    return out / chip.hbm_bytes_per_s()


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
    tile = chip.matrix_tile or 1
    if chip.kind == "gpu":
        passes_s += sum(_gpu_gather_pass_s(m, n, chip) for m in members)
    elif chip.shape is not None:
        for m in members:
            out = product_of(m.site)
            if m.accumulates:  # the sums are rounded and leave the chip
                passes_s += _pass_s(out.out_bytes, chip)
            elif out.columns % tile:  # no einsum writes to a part of a tile
                passes_s += 2 * out.out_bytes / chip.hbm_bytes_per_s()
    return passes_s


def _gpu_gather_pass_s(m: Shared, n: int, chip: Chip) -> float:
    """The updates of the result; or of a sum the slices of the local operand, and its rounding."""
    part = m.partial(n)
    if not m.accumulates:
        return n * _pass_s(2 * part.out_bytes, chip)
    sliced, padded = part.lhs_bytes, copied(part)[0]
    if m.collective.operand == 0:
        sliced, padded = part.rhs_bytes, copied(part)[1]
    # A slice that is padded as well is copied once.
    rounded = part.results * (m.wide + part.itemsizes[2]) if m.wide != part.itemsizes[2] else 0
    return n * _pass_s(2 * (sliced - padded), chip) + _pass_s(rounded, chip)


# --- reduce-scatter ---


def _scatter(members: Sequence[Shared], schedule: Schedule, chip: Chip, ring: Ring) -> Loop:
    """The accumulator travels, and each device adds its share."""
    n, c = schedule.ring_size, members[0].collective
    wide = members[0].wide
    block = c.bytes / n / members[0].site.itemsizes[2] * wide
    count = schedule.accumulators
    e = sum(_scatter_einsum(m, n, count, chip) for m in members)
    first = e * (count - 1) + sum(_scatter_einsum(m, n, count, chip, first=True) for m in members)
    if schedule.unroll:
        first += sum(fetch_s(m.site, chip) for m in members)
    passes_s = 0.0
    permute_s = ring.launch_s + collectives.permute_step_s(ring, block / count)
    launches = ring.launch_s
    if count == 1:
        phases = [Phase(1, first), Phase(n - 1, e, permute_s, launches)]
        passes_s = (n - 1) * _pass_s(3 * block, chip)
        if chip.kind == "gpu":
            passes_s += sum(_gpu_slices_s(m, n, chip) for m in members)
            if wide != members[0].site.itemsizes[2]:
                passes_s += _pass_s(block + block / wide * members[0].site.itemsizes[2], chip)
    else:
        # Transfers that queue for one link, in a turn and in one of its two groups.
        ways = 2 if schedule.two_way and _apart(ring) else 1
        queued, half = -(-count // ways), (count + 1) // 2
        grouped = -(-half // ways)
        turn = max(grouped * permute_s + e * half, queued * permute_s, e * count)
        launches = queued * launches
        # The first step of every chain is outside of the turns.
        phases = [Phase(1, first)]
        ahead = _ahead(n, count, ring.launch_s / permute_s) if schedule.unroll else 0
        if ahead and _late(chip):
            # Each chain runs ahead of the next, so that no more than two run at a time.
            phases += [
                Phase(n, e, e + permute_s, ring.launch_s),
                Phase(ahead - 1, 2 * e, e + permute_s, ring.launch_s),
            ]
        else:
            phases.append(Phase(n - 1, e * count, turn, launches))
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


def _ahead(n: int, count: int, launched: float) -> int:
    """By how many steps libtpu lets the first of ``count`` chains run ahead of the last; as seen.

    By half of the ring per chain; of a short ring only where they are many, or where the launch
    is most of a permute.
    """
    if n > 4:
        return (count - 1) * (n // 2)
    if count > 2:
        return max(1, (count - 1) * (n // 2) - 2)
    return n // 2 if launched > _MOSTLY else 0


def _scatter_einsum(m: Shared, n: int, count: int, chip: Chip, first: bool = False) -> float:
    """One accumulator's einsum; the first one finds one operand on the chip, later ones both."""
    part = m.partial(n * count)
    part = dataclasses.replace(part, itemsizes=(*part.itemsizes[:2], m.wide))
    cut, whole = _cut_and_whole(m, part)
    sums = 2 if count > 1 else 1  # the arrived sum is read by the kernel that adds to it
    kept = _result_stays(part.out_bytes, chip)
    onchip = whole if not first and _stays(whole, chip) else 0
    moved = cut + whole - onchip + (0 if kept else sums * part.out_bytes)
    place: Place = "memory" if not kept else "chip" if first or count == 1 else "arrived"
    return time_of(part, chip, moved=moved, onchip=onchip, result=place).seconds


def _cut_and_whole(m: Shared, part: Product) -> tuple[int, int]:
    """Bytes of the operand that has the scattered label, and of the other."""
    in_rhs = m.site.einsum.out[m.collective.dim] in m.site.einsum.rhs
    return (part.rhs_bytes, part.lhs_bytes) if in_rhs else (part.lhs_bytes, part.rhs_bytes)


def _gpu_slices_s(m: Shared, n: int, chip: Chip) -> float:
    """The slices of the operand that has the scattered label, where padding does not copy them."""
    part = m.partial(n)
    in_rhs = m.site.einsum.out[m.collective.dim] in m.site.einsum.rhs
    sliced, _ = _cut_and_whole(m, part)
    return n * _pass_s(2 * (sliced - copied(part)[in_rhs]), chip)


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


def _result_stays(size: float, chip: Chip) -> bool:
    return chip.shape is not None and size <= chip.shape.result_fits.value


def fetch_s(site: EinsumSite, chip: Chip) -> float:
    """Seconds in which the larger operand is fetched onto the chip, where no gather hides that."""
    product = product_of(site)
    return _fetch_s(max(product.lhs_bytes, product.rhs_bytes), chip)


def _fetch_s(size: float, chip: Chip) -> float:
    return size / chip.hbm_bytes_per_s() if _stays(size, chip) else 0.0


def _late(chip: Chip) -> float:
    return 0.0 if chip.shape is None else chip.shape.late.value


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
