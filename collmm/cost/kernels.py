"""What the kernels of one step take: partial einsums, and copies, slices and updates beside them.

gather   : shard @ local operand, written to its place in the result or added to a sum
scatter  : a block of the cut operand @ the whole one, added to the sum that has arrived

On a TPU what fits stays on the chip from step to step, as seen in the schedules of libtpu: operands
are fetched before the first step, and the result of an unrolled gather is copied out before the
last. On a GPU slices, updates and padding are kernels of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from collmm.cost.einsum import Place, Product, copied, product_of, time_of
from collmm.cost.figures import Chip
from collmm.cutting import Step, cut_along
from collmm.schedule import Schedule
from collmm.sites import ALL_TO_ALL, Collective, EinsumSite

_NONE: Mapping[int, int] = {}
# Where results of this size stay on the chip, there is room to read operands ahead; as seen.
_READ_AHEAD = 16 * 2**20
# A larger result of a rolled loop leaves no room on the chip for a smaller operand; as seen.
_CARRIED = 14 * 2**20
# How much more room than other results a sum takes on the chip; as seen.
_SUM_ROOM = 1.3
# What the chip has room for in all: an operand and a result of more are not both kept; as seen.
_ROOM = 112 * 2**20
# Of an operand whose rows stream by, what the matrix unit waits for; as seen.
_WINDOW = 8 * 2**20
# How much longer a pass of real elementwise work takes than a copy; as seen of gelu and relu.
_WORK = 1.75
_SUMMED_WIDE = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Shared:
    """An einsum of a ring: its site, and its collective that the ring replaces.

    ``cut``: (label, parts) of what an outer ring has cut already.
    """

    site: EinsumSite
    collective: Collective
    cut: tuple[tuple[int, int], ...] = ()

    def partial(self, parts: int, also: Mapping[int, int] = _NONE) -> Product:
        """One step's einsum: the label of the collective cut into ``parts``.

        ``also``: into how many parts further labels are cut.
        """
        return product_of(self.site, {**dict(self.cut), self.label: parts, **also})

    @property
    def label(self) -> int:
        """The label of the dimension that is gathered, scattered or split by peer."""
        c, einsum = self.collective, self.site.einsum
        sent = c.kind == ALL_TO_ALL and c.operand is None
        labels = einsum.out if c.operand is None else (einsum.lhs, einsum.rhs)[c.operand]
        return labels[c.split_dim if sent else c.dim]

    @property
    def accumulates(self) -> bool:
        """Whether the gathered label is summed over, so that every step adds to one result."""
        return self.label in self.site.einsum.contracting

    @property
    def wide(self) -> int:
        """Bytes of an element of a sum across shards."""
        size = self.site.itemsizes[2]
        return max(4, size) if self.site.dtypes[2] in _SUMMED_WIDE else size


# --- gather ---


def gather_einsum(
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
    kept = unroll and step != "last" and _made_on_chip(m, chip)
    pushed_out = not unroll and whole_out > max(_CARRIED, local)
    onchip = local if step != "first" and _stays(local, chip) and not pushed_out else 0
    moved = gathered + local - onchip + (0 if kept else part.out_bytes)
    place: Place = "chip" if kept else "memory"
    if m.collective.operand == 1:
        onchip = min(onchip, _WINDOW)
    return time_of(part, chip, moved=moved, onchip=onchip, result=place).seconds


def _made_on_chip(m: Shared, chip: Chip) -> bool:
    """Whether the result of a gather's unrolled loop is made on the chip, beside the operand."""
    whole = m.partial(1)
    local = whole.lhs_bytes if m.collective.operand == 1 else whole.rhs_bytes
    beside = local if _stays(local, chip) else 0
    return _result_stays(whole.out_bytes, chip) and beside + whole.out_bytes <= _ROOM


def leave_s(m: Shared, chip: Chip) -> float:
    """Seconds in which the result of a gather's loop is copied from the chip to the memory."""
    out = m.partial(1).out_bytes
    if m.accumulates or not _made_on_chip(m, chip):
        return 0.0
    return out / chip.hbm_bytes_per_s()


def work_s(m: Shared, chip: Chip) -> float:
    """Seconds of elementwise work on a result that a gather's loop has put together.

    The whole einsum does it on the way out; after the loop it is a pass over the result.
    """
    if chip.shape is None or not m.site.worked or m.accumulates:
        return 0.0
    return _WORK * pass_s(2 * m.partial(1).out_bytes, chip)


def gather_passes(members: Sequence[Shared], schedule: Schedule, chip: Chip, shard: float) -> float:
    """Kernels beside the einsums: of a rolled loop the copies of the shards that it carries.

    On a GPU also the updates of the result, which a TPU's compiler fuses into the einsum.
    """
    n, g, chunks = schedule.groups, schedule.shards_per_step, schedule.chunks
    chains = 2 if schedule.two_way and n > 2 and not schedule.chunked else 1
    turns = 0 if schedule.unroll else (n - 1) // chains - 1
    passes_s = turns * (chains * chunks * pass_s(2 * shard / chunks, chip) + _turn_s(chip))
    if g > 1:  # a group's shards are put together
        passes_s += g * pass_s(2 * shard / g, chip)
    tile = chip.matrix_tile or 1
    if chip.kind == "gpu":
        passes_s += sum(_gpu_gather_pass_s(m, n, chip) for m in members)
    elif chip.shape is not None:
        for m in members:
            out = m.partial(1)
            passes_s += work_s(m, chip)
            if m.accumulates:  # the sums are rounded and leave the chip
                passes_s += pass_s(out.out_bytes, chip)
            elif out.columns % tile:  # no einsum writes to a part of a tile
                passes_s += 2 * out.out_bytes / chip.hbm_bytes_per_s()
    return passes_s


def _gpu_gather_pass_s(m: Shared, n: int, chip: Chip) -> float:
    """The updates of the result; or of a sum the slices of the local operand, and its rounding."""
    part = m.partial(n)
    if not m.accumulates:
        return n * pass_s(2 * part.out_bytes, chip)
    rounded = part.results * (m.wide + part.itemsizes[2]) if m.wide != part.itemsizes[2] else 0
    return _local_slices_s(m, n, chip) + pass_s(rounded, chip)


def _local_slices_s(m: Shared, n: int, chip: Chip) -> float:
    """The slices of the local operand of a gathered sum, where padding does not copy them."""
    part = m.partial(n)
    sliced, padded = part.lhs_bytes, copied(part)[0]
    if m.collective.operand == 0:
        sliced, padded = part.rhs_bytes, copied(part)[1]
    return n * pass_s(2 * (sliced - padded), chip)


def together_s(members: Sequence[Shared], schedule: Schedule, chip: Chip, group: float) -> float:
    """The passes that run while the first shard of a ``group`` is on its way to the own one.

    The own one is put into its place; and XLA's GPU compiler makes all slices of an unrolled ring
    in one kernel, and first.
    """
    passes_s = pass_s(2 * group / schedule.shards_per_step, chip)
    if chip.kind == "gpu" and schedule.unroll:
        n = schedule.groups
        passes_s += sum(_local_slices_s(m, n, chip) for m in members if m.accumulates)
    return passes_s


def local_bytes(m: Shared, n: int) -> int:
    """Bytes of the operand that is not gathered, all of it."""
    part = m.partial(n)
    local = part.lhs_bytes if m.collective.operand == 1 else part.rhs_bytes
    return n * local if m.accumulates else local


# --- reduce-scatter ---


def cut_of(members: Sequence[Shared], schedule: Schedule) -> int:
    """The dimension of the result along which the loop cuts a block for its accumulators."""
    steps = []
    for m in members:
        sizes = {label: -(-size // shards) for label, (size, shards) in m.site.label_shards.items()}
        sizes[m.label] = -(-sizes[m.label] // schedule.ring_size)
        steps.append(Step(m.site.einsum, sizes, m.site.itemsizes[:2]))
    return cut_along(steps, members[0].collective.dim, schedule)


def scatter_einsum(
    m: Shared, n: int, count: int, cut_along: int, chip: Chip, first: bool = False
) -> float:
    """One accumulator's einsum; the first one finds one operand on the chip, later ones both.

    ``cut_along``: the dimension of the result in which the accumulators share out a block.
    """
    if cut_along == m.collective.dim:
        part, pieces = m.partial(n * count), 1
    else:
        part, pieces = m.partial(n, {m.site.einsum.out[cut_along]: count}), count
    part = dataclasses.replace(part, itemsizes=(*part.itemsizes[:2], m.wide))
    cut, whole = _cut_and_whole(m, part)
    sums = 2 if count > 1 else 1  # the arrived sum is read by the kernel that adds to it
    kept = _result_stays(part.out_bytes, chip)
    onchip = whole if not first and _stays(whole * pieces, chip) else 0
    moved = cut + whole - onchip + (0 if kept else sums * part.out_bytes)
    place: Place = "memory" if not kept else "chip" if first or count == 1 else "arrived"
    seconds = time_of(part, chip, moved=moved, onchip=onchip, result=place).seconds
    if count > 1 and not onchip and _little_room(whole, chip):
        seconds += (cut + whole) / chip.hbm_bytes_per_s()
    return seconds


def _little_room(size: float, chip: Chip) -> bool:
    """Whether an operand of ``size`` is read in pieces that the einsum waits for; as seen on v5p.

    There no larger results are kept on the chip either.
    """
    return chip.shape is not None and chip.shape.result_fits.value < min(size, _READ_AHEAD)


def _cut_and_whole(m: Shared, part: Product) -> tuple[int, int]:
    """Bytes of the operand that has the scattered label, and of the other."""
    in_rhs = m.site.einsum.out[m.collective.dim] in m.site.einsum.rhs
    return (part.rhs_bytes, part.lhs_bytes) if in_rhs else (part.lhs_bytes, part.rhs_bytes)


def gpu_slices_s(m: Shared, n: int, chip: Chip) -> float:
    """The slices of the operand that has the scattered label, where padding does not copy them."""
    part = m.partial(n)
    in_rhs = m.site.einsum.out[m.collective.dim] in m.site.einsum.rhs
    sliced, _ = _cut_and_whole(m, part)
    return n * pass_s(2 * (sliced - copied(part)[in_rhs]), chip)


# --- what they share ---


def _stays(size: float, chip: Chip) -> bool:
    """Whether what every step reads stays in the memory on the chip."""
    return chip.shape is not None and size <= chip.shape.onchip_fits.value


def _result_stays(size: float, chip: Chip) -> bool:
    return chip.shape is not None and size <= chip.shape.result_fits.value


def fetch_s(site: EinsumSite, chip: Chip) -> float:
    """Seconds in which the larger operand is fetched onto the chip, where no gather hides that."""
    product = product_of(site)
    return fetched_s(max(product.lhs_bytes, product.rhs_bytes), chip)


def fetched_s(size: float, chip: Chip) -> float:
    """Seconds in which an operand of that many bytes is fetched; 0 where it does not fit."""
    return size / chip.hbm_bytes_per_s() if _stays(size, chip) else 0.0


def late(chip: Chip) -> float:
    """Whether the chip's compiler starts permutes late: 1 or 0."""
    return 0.0 if chip.shape is None else chip.shape.late.value


def pass_s(size: float, chip: Chip) -> float:
    """Seconds of an elementwise kernel that moves ``size`` bytes."""
    shape = chip.shape
    if shape is None:
        return size / chip.hbm_bytes_per_s()
    return shape.pass_start.value + size / chip.hbm_bytes_per_s() / shape.pass_share.value


def _turn_s(chip: Chip) -> float:
    """Seconds in which a turn of a rolled loop finds out which shard it has."""
    return 0.0 if chip.shape is None else chip.shape.pass_start.value
