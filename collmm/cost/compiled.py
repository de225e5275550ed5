"""Collectives as the compilers make them: which algorithm, and the kernels that come with it.

    reduce-scatter of blocks that libtpu's spans do not fit      all-gather of blocks of 150 rows
    ==>  pad, reduce-scatter larger blocks                       ==>  gather, then reshape:
         permute what belongs to the next members                     copy every row to its tile
         concatenate, slice the own block

As seen in the schedules and debug texts of libtpu 0.0.50, which reports spans and padding.
"""

from __future__ import annotations

import math

from collmm.cost import collectives
from collmm.cost.collectives import Ring
from collmm.cost.figures import Chip
from collmm.cost.kernels import pass_s
from collmm.sites import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    EinsumSite,
    shard_shape,
)

_GRID_SHARD = 5 * 2**16
# Rows of a tile.
_ROWS = 8
# A slice that begins at any row takes as long as moving its bytes so often.
_SLICED = 5


def plain_s(collective: Collective, ring: Ring) -> float:
    """Seconds of a collective as the compiler runs it, its launch included."""
    if ring.size == 1:
        return 0.0
    size = collective.bytes
    seconds = {
        ALL_GATHER: compiled_all_gather_s,
        REDUCE_SCATTER: compiled_reduce_scatter_s,
        ALL_REDUCE: collectives.all_reduce_s,
        ALL_TO_ALL: lambda ring, size: collectives.all_to_all_s(ring, size * ring.size),
    }[collective.kind](ring, size)
    return seconds + ring.launch_s


def compiled_all_gather_s(ring: Ring, full_bytes: float) -> float:
    """Seconds of an all-gather as libtpu makes it: small ones over a large grid as an all-reduce.

    On 8x8 chips without wraparound; up to 256 KiB a shard seen for v5e and v6e, 364 KiB not.
    """
    grid = ring.kind == "torus" and len(ring.axes) == 2 and min(ring.axes) >= 8
    if grid and not any(ring.wraps) and full_bytes / ring.size < _GRID_SHARD:
        return collectives.all_reduce_s(ring, full_bytes)
    return collectives.all_gather_s(ring, full_bytes)


def compiled_reduce_scatter_s(ring: Ring, full_bytes: float) -> float:
    """Seconds of a reduce-scatter as libtpu makes it, which is not always the fastest.

    Over three torus axes, or a square of a 2D pod, it makes an all-reduce and keeps a slice; over
    two equal axes of a 3D pod a reduce-scatter; else one ring through all members, which uses one
    direction of its links (seen for v4, v5e, v5p and v6e).
    """
    if ring.kind != "torus" or ring.size <= 2:
        return collectives.reduce_scatter_s(ring, full_bytes)
    if _as_all_reduce(ring):
        return collectives.all_reduce_s(ring, full_bytes)
    if _both_axes(ring):
        return collectives.reduce_scatter_s(ring, full_bytes)
    one_ring = full_bytes / ring.scatter_share * (ring.size - 1) / ring.size / ring.link
    return max(one_ring, (ring.size - 1) * ring.hop_s)


def _as_all_reduce(ring: Ring) -> bool:
    """Whether libtpu keeps a slice of an all-reduce: over three axes, or a square of a 2D pod."""
    square = len(ring.axes) == 2 and ring.axes[0] == ring.axes[1] > 2
    return len(ring.axes) > 2 or (ring.dims == 2 and square)


def _both_axes(ring: Ring) -> bool:
    """Whether libtpu's reduce-scatter uses both axes at a time: two equal ones of a 3D pod."""
    return len(ring.axes) == 2 and ring.axes[0] == ring.axes[1] and ring.dims > 2


# --- kernels beside them ---


def beside_s(site: EinsumSite, collective: Collective, chip: Chip, ring: Ring) -> float:
    """Seconds of the copies and the exchange that libtpu makes beside a collective of ``site``."""
    if chip.shape is None or ring.kind != "torus" or ring.size <= 1:
        return 0.0
    if collective.kind == ALL_GATHER:
        return _reshaped_s(site, collective, chip, ring)
    if collective.kind != REDUCE_SCATTER:
        return 0.0
    if _as_all_reduce(ring):
        return _sliced_s(collective.bytes / ring.size, chip)
    return _exchange_s(site, collective, chip, ring)


def _reshaped_s(site: EinsumSite, c: Collective, chip: Chip, ring: Ring) -> float:
    """The copy of a gathered value whose blocks do not fill their tiles."""
    shape = _local(site, c)
    tiled = len(shape) - c.dim <= 2 <= len(shape)
    whole_tiles = shape[c.dim] // ring.size % _ROWS == 0
    return 0.0 if whole_tiles or not tiled else 2 * c.bytes / chip.hbm_bytes_per_s()


def _exchange_s(site: EinsumSite, c: Collective, chip: Chip, ring: Ring) -> float:
    """What brings the rows of padded blocks to where they belong; 0 where none are padded."""
    shape = _local(site, c)
    if c.dim != len(shape) - 2 or math.prod(shape[: c.dim]) != 1:
        return 0.0
    row = c.bytes / shape[c.dim]
    tiles, rest = divmod(shape[c.dim], ring.size * _ROWS)
    padded = _ROWS * padded_tiles(tiles, row, site.itemsizes[2], chip, ring) if tiles else 0
    block = _ROWS * tiles
    over = (ring.size - 1) * (padded - block)
    if rest or not over:
        return 0.0
    members = -(-over // padded)
    last = over - (members - 1) * padded
    sent = [hops * padded * row for hops in range(1, members)] + [members * last * row]
    permuted_s = sum(ring.launch_s + collectives.permute_step_s(ring, size) for size in sent)
    joined_s = 2 * (over + padded) * row / chip.hbm_bytes_per_s()
    return _sliced_s(last * row, chip) + permuted_s + joined_s + _sliced_s(block * row, chip)


def padded_tiles(tiles: int, row: float, itemsize: int, chip: Chip, ring: Ring) -> int:
    """Tiles of ``_ROWS`` rows in a block of libtpu's reduce-scatter, where it holds ``tiles``.

    ``row`` is the bytes of one row of the value, ``itemsize`` those of an element. libtpu reduces
    in spans, each of as many tiles of every block as fit the memory of a kernel, sums and transfers
    included; then all spans are made equally long.
    """
    assert chip.shape is not None
    wide = max(4, itemsize) / itemsize
    colors = 2 if _both_axes(ring) else 1
    room = chip.shape.span_fits.value / (1 + 3 / ring.size) / wide
    fit = max(1, int(room // (colors * ring.size * _ROWS * row)))
    each = -(-tiles // colors)
    spans = -(-each // fit)
    return colors * spans * -(-each // spans)


def _sliced_s(size: float, chip: Chip) -> float:
    """Seconds of a kernel that cuts out ``size`` bytes from any row on."""
    return pass_s(0.0, chip) + _SLICED * size / chip.hbm_bytes_per_s()


def _local(site: EinsumSite, c: Collective) -> tuple[int, ...]:
    """Shape on one device of the value that is gathered, or whose sum is scattered, whole."""
    at = 2 if c.operand is None else c.operand
    spec = (site.lhs_spec, site.rhs_spec, site.out_spec)[at]
    return shard_shape(site.shapes[at], spec, dict(site.axis_sizes))
