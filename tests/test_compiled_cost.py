"""Collectives as libtpu makes them: spans and padding are those that its debug texts report."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from collmm.capture import capture
from collmm.cost.collectives import Ring, torus_ring
from collmm.cost.compiled import beside_s, padded_tiles, plain_s
from collmm.cost.estimate import estimate
from collmm.cost.hardware import chip
from collmm.cost.steps import Shared, loop_of
from collmm.einsum import Einsum
from collmm.schedule import Schedule
from collmm.sites import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Collective,
    EinsumSite,
    worked_after,
)

MATMUL = Einsum((0, 1), (1, 2), (0, 2))
N = ("n",)
TWO_WAY = Schedule(N, 8, two_way=True, unroll=True)


def ring_of(name: str, axes: tuple[int, ...]) -> Ring:
    return torus_ring(chip(name).per_device(), axes, wraps=(False,) * len(axes))


def scatter_site(rows: int, columns: int, n: int, *, itemsize: int = 2) -> EinsumSite:
    c = Collective(REDUCE_SCATTER, None, 0, N, itemsize * rows * columns)
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    shapes = (rows, 1024), (1024, columns), (rows, columns)
    specs = ((), N), (N, ()), ((), ())
    return EinsumSite(
        0, MATMUL, shapes, (dtype,) * 3, (itemsize,) * 3, *specs, (c,), axis_sizes=(("n", n),)
    )


def gather_site(depth: int, columns: int, n: int, rows: int = 2048) -> EinsumSite:
    """Weights that are gathered by columns."""
    c = Collective(ALL_GATHER, 1, 1, N, 2 * depth * columns)
    shapes = (rows * n, depth), (depth, columns), (rows * n, columns)
    specs = (N, ()), ((), ()), (N, ())
    sizes = (2,) * 3
    return EinsumSite(
        0, MATMUL, shapes, ("bfloat16",) * 3, sizes, *specs, (c,), axis_sizes=(("n", n),)
    )


# chip, axes of the ring, rows and columns of the value, bytes of an element, and the rows of a
# block after padding, as libtpu 0.0.50 compiles it. The last six were compiled after the rule.
BLOCKS = (
    ("v4", (2, 2), 4096, 1024, 2, 1056),
    ("v4", (4,), 2816, 1536, 2, 720),
    ("v4", (4, 4), 4096, 1024, 2, 256),
    ("v4", (8,), 2048, 2048, 2, 256),
    ("v5e", (16,), 1280, 5120, 2, 96),
    ("v5e", (2, 2), 3328, 3584, 2, 840),
    ("v5e", (2, 4), 2048, 2048, 2, 256),
    ("v5e", (2, 4), 4096, 4096, 2, 512),
    ("v5e", (4,), 4096, 1024, 2, 1032),
    ("v5e", (4, 8), 3328, 3584, 2, 120),
    ("v5e", (4, 8), 4096, 1024, 2, 128),
    ("v5p", (2, 2), 2048, 1024, 2, 512),
    ("v5p", (2, 2), 2048, 2048, 2, 528),
    ("v5p", (4,), 8192, 2048, 2, 2080),
    ("v5p", (4,), 3328, 3584, 2, 840),
    ("v5p", (4, 4), 2816, 1536, 2, 192),
    ("v5p", (4, 4), 2048, 2048, 2, 128),
    ("v6e", (2, 4), 1792, 7168, 2, 240),
    ("v6e", (4, 8), 6144, 3072, 2, 192),
    ("v6e", (8,), 1280, 5120, 2, 160),
    ("v5e", (2, 4), 16384, 8192, 2, 2048),
    ("v5e", (2, 4), 8192, 7168, 2, 1040),
    ("v5e", (2, 4), 1792, 3584, 4, 240),
    ("v5e", (2, 4), 12288, 5120, 2, 1568),
    ("v5e", (2,), 4096, 4096, 2, 2128),
    ("v4", (2,), 2048, 4096, 2, 1064),
    ("v4", (2, 2), 4096, 4096, 2, 1120),
)


@pytest.mark.parametrize(("name", "axes", "rows", "columns", "itemsize", "padded"), BLOCKS)
def test_blocks_are_padded_as_libtpu_reports(name, axes, rows, columns, itemsize, padded):
    n = math.prod(axes)
    row = chip(name).per_device()
    tiles = rows // n // 8
    assert 8 * padded_tiles(tiles, columns * itemsize, itemsize, row, ring_of(name, axes)) == padded
    site = scatter_site(rows, columns, n, itemsize=itemsize)
    exchanged = beside_s(site, site.collectives[0], row, ring_of(name, axes))
    assert (exchanged > 0) == (padded > rows // n)


def test_what_follows_a_padded_reduce_scatter_is_what_the_schedule_shows():
    """v5e 16x16: 535.2 us in all, of which 145.6 us are the exchange and its copies."""
    site, ring = scatter_site(1280, 5120, 16), ring_of("v5e", (16,))
    seconds = beside_s(site, site.collectives[0], chip("v5e").per_device(), ring)
    shown = 3.3 + 1.2 + 26.8 + 48.7 + 37.8 + 8.4 + 5.9  # slices, three permutes, concatenation
    assert seconds == pytest.approx(1e-6 * shown, rel=0.05)


def test_a_slice_is_kept_of_what_libtpu_makes_an_all_reduce():
    site, row = scatter_site(2048, 1024, 8), chip("v5p").per_device()
    kept = beside_s(site, site.collectives[0], row, ring_of("v5p", (2, 2, 2)))
    assert 1e-6 < kept < 3e-6
    alone = plain_s(site.collectives[0], ring_of("v5p", (2, 2, 2)))
    e = estimate(
        site,
        site.collectives[0],
        TWO_WAY,
        row,
        ring_of("v5p", (2, 2, 2)),
    )
    assert e.collective_s == alone + kept


@pytest.mark.parametrize(("columns", "copied"), [(1800, 30.7e-6), (1824, 0.0)])
def test_gathered_blocks_that_do_not_fill_their_tiles_are_copied(columns, copied):
    """Of 12 blocks of 150 columns v4 copies all that was gathered, twice 18.4 MB, of 152 none."""
    site, row = gather_site(5120, columns, 12), chip("v4").per_device()
    seconds = beside_s(site, site.collectives[0], row, ring_of("v4", (2, 2, 3)))
    assert seconds == pytest.approx(copied, rel=0.01)


def test_a_gpu_has_neither():
    site = scatter_site(4096, 1024, 4)
    assert beside_s(site, site.collectives[0], chip("h100"), ring_of("v5e", (4,))) == 0


def test_operand_and_result_share_the_chip():
    """Of 64 MiB each v4 keeps the operand alone, of 36 and 27 MiB both: then the result leaves."""
    row, schedule = chip("v4").per_device(), TWO_WAY

    def leaves(site: EinsumSite) -> float:
        loop = loop_of(
            (Shared(site, site.collectives[0]),), schedule, row, ring_of("v4", (2, 2, 2))
        )
        return max(0.0, max(p.transfer - p.compute for p in loop.phases))

    assert leaves(gather_site(4096, 4096, 8, rows=8192)) == 0
    assert leaves(gather_site(2304, 3072, 8, rows=6144)) > 20e-6


def test_work_on_the_result_is_a_pass_after_the_loop():
    """Four bytes an element of 64 MiB: v5p took 134 us for a relu or a gelu of it, and the share of
    the bandwidth that fits all passes of v5p best makes that 154."""
    plain = gather_site(4096, 4096, 8, rows=8192)
    worked = dataclasses.replace(plain, worked=True)
    row, ring = chip("v5p").per_device(), ring_of("v5p", (2, 2, 2))
    times = [estimate(s, s.collectives[0], TWO_WAY, row, ring) for s in (plain, worked)]
    assert times[0].before_s == times[1].before_s
    assert 134e-6 <= times[1].after_s - times[0].after_s <= 1.2 * 134e-6


def test_work_that_the_next_reduce_scatter_does_in_its_steps_is_no_pass():
    first = dataclasses.replace(gather_site(4096, 4096, 8), worked=True)
    scatter = dataclasses.replace(scatter_site(4096, 1024, 8), index=1, follows=0)
    assert [s.worked for s in worked_after([first, scatter])] == [False, False]
    gather = dataclasses.replace(first, index=1, follows=0)
    assert [s.worked for s in worked_after([first, gather])] == [True, True]


@pytest.mark.parametrize(
    ("after", "worked"),
    [
        (lambda y: y, False),
        (lambda y: y @ y, False),
        (lambda y: jnp.max(y), False),
        (jax.nn.gelu, True),
        (lambda y: 2 + jax.lax.optimization_barrier(y), False),
        (lambda y: (y + 1) @ y, True),
    ],
)
def test_capture_sees_work_on_a_result(after, worked):
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    captured = capture(jax.jit(lambda a, b: after(a @ b)).trace(x, x).jaxpr)
    assert captured.dots[0].worked is worked
