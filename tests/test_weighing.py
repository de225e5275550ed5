"""Einsums of a program that are alike are weighed once; each keeps its own place in the plan."""

import dataclasses

import pytest

import collmm.cost.candidates as weighing
from collmm.cost.candidates import RingPlace, Weighing, candidates
from collmm.cost.hardware import chip
from collmm.cost.hiding import Behind
from collmm.cost.steps import Shared
from collmm.einsum import Einsum
from collmm.sites import ALL_GATHER, Collective, EinsumSite

V5E = chip("v5e").per_device()
GATHER = Collective(ALL_GATHER, 0, 0, ("model",), 2 * 8192 * 4096)
SITE = EinsumSite(
    0,
    Einsum((0, 1), (1, 2), (0, 2)),
    ((8192, 4096), (4096, 8192), (8192, 8192)),
    ("bfloat16",) * 3,
    (2, 2, 2),
    ((), ()),
    ((), ("model",)),
    ((), ("model",)),
    (GATHER,),
    axis_sizes=(("model", 8),),
)
LATER = dataclasses.replace(SITE, index=7, body=1, sources=(3, 4), ready=(-1, -1), needed=9)


def anywhere(site, axes):
    return RingPlace()


@pytest.fixture
def asked(monkeypatch):
    """The sites that were really weighed."""
    seen = []

    def counted(site, *args, **kwargs):
        seen.append(site.index)
        return candidates(site, *args, **kwargs)

    monkeypatch.setattr(weighing, "candidates", counted)
    return seen


def test_the_same_einsum_further_on_is_not_weighed_again(asked):
    weigh = Weighing(V5E, anywhere, {})
    assert weigh(SITE) == candidates(SITE, V5E, anywhere)
    assert weigh(LATER) == candidates(LATER, V5E, anywhere)
    assert asked == [0]


def test_einsums_on_one_ring_keep_their_own_members(asked):
    weigh = Weighing(V5E, anywhere, {})
    for first, other in ((SITE, 1), (LATER, 8)):
        sharing = [Shared(dataclasses.replace(first, index=other), GATHER)]
        found = weigh(first, only=GATHER, sharing=sharing)
        assert found == candidates(first, V5E, anywhere, only=GATHER, sharing=sharing)
    assert asked == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "highest"},
        {"worked": True},
        {"once": (True, False)},
        {"itemsizes": (1, 2, 2)},
        {"collectives": (dataclasses.replace(GATHER, narrow_bytes=8192 * 4096),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_differs_is_weighed_by_itself(asked, change):
    weigh = Weighing(V5E, anywhere, {})
    other = dataclasses.replace(LATER, **change)
    weigh(SITE)
    assert weigh(other) == candidates(other, V5E, anywhere)
    assert asked == [0, 7]


def test_what_other_work_hides_differs_too(asked):
    hidden = {(7, GATHER): Behind(hidden_s=1e-4)}
    weigh = Weighing(V5E, anywhere, hidden)
    weigh(SITE)
    assert weigh(LATER) == candidates(LATER, V5E, anywhere, hidden=hidden)
    assert asked == [0, 7]
