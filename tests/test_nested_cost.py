"""When two rings on one einsum are planned: where the compilers' own schedules say so."""

import dataclasses

import pytest

from collmm.breakeven import break_evens
from collmm.cost.candidates import RingPlace, candidates
from collmm.cost.collectives import torus_ring
from collmm.cost.hardware import chip
from collmm.cost.hiding import Behind
from collmm.einsum import Einsum
from collmm.nesting import inner_collective, inner_collectives, runs
from collmm.options import Options
from collmm.plan import make_plan
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective, EinsumSite

V5E, H100 = (chip(name).per_device() for name in ("v5e", "h100"))
DATA, MODEL = 4, 4


def up(tokens, width, hidden, *, index=0, **fields):
    """[tokens, width] @ [width, hidden]: x gathered over model, w over data."""
    x = Collective(ALL_GATHER, 0, 0, ("model",), tokens // DATA * width * 2)
    w = Collective(ALL_GATHER, 1, 0, ("data",), width * hidden // MODEL * 2)
    return EinsumSite(
        index,
        Einsum((0, 1), (1, 2), (0, 2)),
        ((tokens, width), (width, hidden), (tokens, hidden)),
        ("bfloat16",) * 3,
        (2,) * 3,
        (("data",), ()),
        ((), ("model",)),
        (("data",), ("model",)),
        (x, w),
        axis_sizes=(("data", DATA), ("model", MODEL)),
        **fields,
    )


def down(tokens, width, hidden, *, index=1, **fields):
    """[tokens, hidden] @ [hidden, width]: w gathered over data, the result scattered over model."""
    w = Collective(ALL_GATHER, 1, 1, ("data",), width * hidden // MODEL * 2)
    y = Collective(REDUCE_SCATTER, None, 0, ("model",), tokens // DATA * width * 2)
    return EinsumSite(
        index,
        Einsum((0, 1), (1, 2), (0, 2)),
        ((tokens, hidden), (hidden, width), (tokens, width)),
        ("bfloat16",) * 3,
        (2,) * 3,
        (("data",), ("model",)),
        (("model",), ()),
        (("data",), ()),
        (w, y),
        axis_sizes=(("data", DATA), ("model", MODEL)),
        **fields,
    )


def lines(site, axes):
    """Each ring a line of four chips on its own axis of the torus, as on v5e 4x4."""
    ring = torus_ring(V5E, (4,), wraps=(False,))
    return RingPlace(dataclasses.replace(ring, dims=2, neighbour_hops=2))


def planned(*sites, row=V5E, places=lines, **options):
    return make_plan(sites, Options(**options), row, places=places).decisions


BIG = (32768, 8192, 32768)


def inner_axes(schedule):
    return schedule.inner.axes if schedule.nested else ()


def test_an_exposed_weight_gather_is_nested_on_a_torus():
    (d,) = planned(up(*BIG))
    assert (d.collective.axes, d.schedule.inner.axes) == (("model",), ("data",))
    single = next(c for c in d.candidates if not c.schedule.nested)
    assert d.estimate.before_s == single.estimate.before_s
    assert d.estimate.after_s < single.estimate.after_s
    assert d.estimate.inner_s > 0
    assert d.estimate.permutes == 3 + 3


def test_the_inner_ring_of_a_gpu_is_not_hidden_and_not_planned():
    (d,) = planned(up(*BIG), row=H100, places=lambda site, axes: RingPlace())
    assert not d.schedule.nested
    assert any(c.schedule.nested for c in d.candidates)


def test_rings_that_share_their_links_queue():
    def exposed(dims):
        ring = dataclasses.replace(torus_ring(V5E, (2, 2), wraps=(False, False)), dims=dims)
        (d,) = planned(up(*BIG), places=lambda site, axes: RingPlace(ring))
        return [c.estimate.exposed_s for c in d.candidates if c.schedule.nested]

    # Two rings of 2x2 chips have a plane of a 4D torus each, but of a square both have all.
    assert min(exposed(dims=2)) > min(exposed(dims=4))


@pytest.mark.parametrize("behind", [Behind(hidden_s=1.0), Behind(common=True)])
def test_what_is_hidden_or_gathered_anyhow_is_not_nested(behind):
    site = up(*BIG)
    found = candidates(site, V5E, lines, hidden={(0, site.collectives[1]): behind})
    assert inner_axes(found[0].schedule) != ("data",)
    inner = [c for c in found if c.schedule.inner and c.schedule.inner.axes == ("data",)]
    assert inner
    assert all(c.estimate.inner_s == 0 for c in inner)


def test_a_weight_that_is_prefetched_behind_another_einsum_stays_plain():
    first = up(*BIG, index=0, ready=(-1, -1), sources=(0, 1))
    second = up(*BIG, index=1, ready=(0, -1), sources=(2, 3))
    decisions = planned(first, second)
    assert [d.schedule.nested for d in decisions] == [True, False]


def test_a_value_that_two_einsums_gather_is_gathered_once():
    first = up(*BIG, index=0, ready=(-1, -1), sources=(0, 1))
    second = up(*BIG, index=1, ready=(0, 0), sources=(2, 1))
    assert not any(inner_axes(d.schedule) == ("data",) for d in planned(first, second))


def test_a_chain_goes_before_nested_rings_and_chunks():
    def closing(site, axes):
        return RingPlace(torus_ring(V5E, (4,), wraps=(axes == ("model",),)))

    for hidden in (16384, 8192):
        sites = up(65536, 4096, hidden), down(65536, 4096, hidden, follows=0)
        gather, scatter = planned(*sites, chains=False, places=closing)
        assert scatter.schedule.nested
        assert gather.schedule.nested if hidden == 16384 else gather.schedule.chunked
        chained = planned(*sites, places=closing)
        assert not any(d.schedule.nested for d in chained)
        assert not chained[0].schedule.chunked
        assert [d.collective.kind for d in chained] == [ALL_GATHER, REDUCE_SCATTER]


def test_break_evens_of_nested_rings_are_where_the_model_turns():
    (d,) = planned(up(*BIG))
    best = next(c for c in d.candidates if c.schedule == d.schedule)
    rivals = [c for c in d.candidates if c is not best]
    turns = break_evens([best, *rivals], V5E, 0.02)
    assert {t.what for t in turns} >= {"size", "link"}
    assert all(t.pays_now for t in turns)


def test_einsums_of_one_gather_have_inner_rings_where_they_have_a_second_gather():
    whole = dataclasses.replace(up(*BIG, index=1, sources=(0, 2)), collectives=())
    whole = dataclasses.replace(whole, collectives=up(*BIG).collectives[:1])
    first = up(*BIG, index=0, sources=(0, 1))
    decisions = planned(first, whole)
    assert decisions[0].group == decisions[1].group == (0, 1)
    nested = [c for c in decisions[0].candidates if c.schedule.nested]
    assert nested
    assert not any(c.schedule.nested for c in decisions[1].candidates)
    assert len(decisions[0].candidates) == len(decisions[1].candidates)


def test_the_gate_names_what_can_be_nested():
    site = up(*BIG)
    x, w = site.collectives
    assert inner_collectives(site, x) == (w,)
    assert inner_collectives(site, w) == (x,)
    y = down(*BIG)
    assert inner_collectives(y, y.collectives[1]) == (y.collectives[0],)
    assert inner_collectives(y, y.collectives[0]) == ()  # a reduce-scatter is never the inner one
    schedule = Schedule(("model",), 4, False, True, inner=Schedule(("data",), 4, False, True))
    assert inner_collective(site, x, schedule) == w
    assert runs(site, x, schedule)
    assert not runs(site, w, schedule)
    assert not runs(dataclasses.replace(site, axis_sizes=(("data", 2), ("model", 4))), x, schedule)


def changed(which, **fields):
    site = up(*BIG)
    collectives = list(site.collectives)
    collectives[which] = dataclasses.replace(collectives[which], **fields)
    return dataclasses.replace(site, collectives=tuple(collectives))


REFUSED = {
    "one label for both": changed(0, dim=1),
    "a shared axis": changed(1, axes=("data", "model")),
    "a narrow inner value": changed(1, narrow_bytes=1),
    "a narrow outer value": changed(0, narrow_bytes=1),
    "one operand": changed(1, operand=0, dim=1),
    "an all-reduce outside": changed(0, kind=ALL_REDUCE, operand=None),
    "in a shard_map": dataclasses.replace(up(*BIG), manual=True),
    "uneven outer shards": up(BIG[0] + 1, *BIG[1:]),
    "uneven inner shards": up(BIG[0], BIG[1] + 1, BIG[2]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_gate_refuses(name):
    site = REFUSED[name]
    assert inner_collectives(site, site.collectives[0]) == ()
