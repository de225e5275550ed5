"""Where chunks of gathered shards are planned: where schedules of libtpu show that they pay."""

import pytest

from collmm.cost.candidates import RingPlace, candidates, schedules
from collmm.cost.collectives import torus_ring
from collmm.cost.estimate import estimate
from collmm.cost.hardware import chip
from collmm.einsum import Einsum
from collmm.options import Options
from collmm.plan import make_plan
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, REDUCE_SCATTER, Collective, EinsumSite

CHIPS = {name: chip(name).per_device() for name in ("v4", "v5e", "v5p", "v6e", "tpu7x", "h100")}
GATHER = Collective(ALL_GATHER, 0, 0, ("m",), 0)


def site(rows, depth, columns, *, ring=4, side=0, index=0, **fields):
    """[rows, depth] @ [depth, columns]: lhs gathered by rows, or rhs by depth, which is summed."""
    sizes = (rows, depth), (depth, columns), (rows, columns)
    moved = 2 * (rows * depth if side == 0 else depth * columns)
    other = ((), ("m",)) if side == 0 else ((), ())
    return EinsumSite(
        index,
        Einsum((0, 1), (1, 2), (0, 2)),
        sizes,
        ("bfloat16",) * 3,
        (2, 2, 2),
        ((), ()) if side == 0 else (("m",), ()),
        other,
        ((), ("m",)) if side == 0 else (("m",), ()),
        (Collective(ALL_GATHER, side, 0, ("m",), moved),),
        axis_sizes=(("m", ring),),
        **fields,
    )


def pieces(name, ring, summed=False):
    """Per direction, the pieces that are weighed on a chip."""
    found = {}
    for s in schedules(GATHER, ring, CHIPS[name], summed=summed):
        found.setdefault("two-way" if s.two_way else "one-way", set()).add(s.chunks)
    return found


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e"])
@pytest.mark.parametrize("ring", [4, 6, 8])
def test_short_even_rings_of_a_tpu_weigh_halves_both_ways(name, ring):
    assert pieces(name, ring) == {"two-way": {1, 2}, "one-way": {1}}
    summed = pieces(name, ring, summed=True)
    assert summed["two-way"] == ({1, 2} if name == "v5e" else {1})


def test_a_ring_of_two_weighs_quarters_where_permutes_are_early():
    assert pieces("v5e", 2) == {"one-way": {1, 4}}
    assert pieces("v5e", 2, summed=True) == {"one-way": {1}}
    assert pieces("v6e", 2) == {"one-way": {1}}


@pytest.mark.parametrize(
    ("name", "ring"), [("v5e", 3), ("v5e", 16), ("h100", 2), ("h100", 4), ("tpu7x", 4)]
)
def test_nowhere_else_are_shards_cut(name, ring):
    assert all(found == {1} for found in pieces(name, ring).values())


# Microseconds of the schedules that libtpu 0.0.50 makes on v5e 2x2: whole shards, and halves.
COMPILED = [
    ((8192, 2048, 8192), 511, 459),
    ((8192, 4096, 4096), 848, 743),
    ((3072, 5120, 2560), 388, 338),
    ((16384, 8192, 12288), 4757, 4625),
]


@pytest.mark.parametrize(("sizes", "whole", "halves"), COMPILED)
def test_the_estimate_is_what_was_compiled(sizes, whole, halves):
    ring = torus_ring(CHIPS["v5e"], (4,), wraps=(True,))
    best, *rest = candidates(site(*sizes), CHIPS["v5e"], lambda site, axes: RingPlace(ring))
    assert best.schedule == Schedule(("m",), 4, True, True, chains=2)
    shards = next(c for c in rest if c.schedule.two_way)
    assert best.estimate.after_s * 1e6 == pytest.approx(halves, rel=0.03)
    assert shards.estimate.after_s * 1e6 == pytest.approx(whole, rel=0.03)


def test_pieces_that_are_sent_at_once_are_waited_for_one_by_one():
    """On a ring of two: compiled on v5e 2x2 in 254 us, with whole shards in 285."""
    s = site(4096, 2048, 4096, ring=2)
    ring = torus_ring(CHIPS["v5e"], (2,), wraps=(False,))
    best, shards = candidates(s, CHIPS["v5e"], lambda site, axes: RingPlace(ring))
    assert best.schedule.chunks == 4
    assert best.estimate.after_s * 1e6 == pytest.approx(254, rel=0.03)
    assert shards.estimate.after_s * 1e6 == pytest.approx(285, rel=0.03)


@pytest.mark.parametrize("two_way", [False, True])
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("name", ["v5e", "v4", "h100"])
def test_chunks_send_as_much_in_more_permutes_and_hold_no_more(name, unroll, two_way):
    s = site(4096, 2048, 4096)
    (c,) = s.collectives

    def made(chains):
        schedule = Schedule(("m",), 4, two_way, unroll, chains=chains)
        return estimate(s, c, schedule, CHIPS[name])

    whole, halves = made(None), made(2)
    assert halves.link_bytes == whole.link_bytes
    assert (whole.permutes, halves.permutes) == (3, 6)
    assert (whole.steps, halves.steps) == (4, 7)
    assert halves.memory_bytes <= whole.memory_bytes
    parts = (halves.einsum_s, halves.loss_s, halves.traffic_s, halves.launch_s, halves.exposed_s)
    assert halves.after_s == pytest.approx(sum(parts))


def test_chunks_give_way_to_a_chain_and_stay_where_none_is_made():
    def planned(rows, width, hidden, **options):
        up = site(rows, width, hidden)
        y = Collective(REDUCE_SCATTER, None, 0, ("m",), 2 * rows * width)
        down = EinsumSite(
            1,
            up.einsum,
            ((rows, hidden), (hidden, width), (rows, width)),
            up.dtypes,
            up.itemsizes,
            ((), ("m",)),
            (("m",), ()),
            ((), ()),
            (y,),
            axis_sizes=up.axis_sizes,
            follows=0,
        )
        return make_plan([up, down], Options(**options), CHIPS["v5e"]).decisions

    # Bound by links, the scatter stays a ring of its own: compiled 2.05 ms, and 2.17 of whole ones.
    gather, scatter = planned(8192, 4096, 4096)
    assert scatter.estimate.bound_by_links
    assert gather.schedule.chunked
    sizes = 8192, 1024, 12288
    assert planned(*sizes, chains=False)[0].schedule.chunked
    gather, scatter = planned(*sizes)
    assert scatter.rewritten
    assert not scatter.estimate.bound_by_links
    assert not gather.schedule.chunked
