"""What steps of several shards cost: links by hand, and where they are weighed."""

import pytest

from collmm.cost.candidates import RingPlace, candidates, schedules
from collmm.cost.collectives import gpu_ring, grouped, inside_group, permute_step_s, torus_ring
from collmm.cost.estimate import estimate
from collmm.cost.hardware import chip
from collmm.einsum import Einsum
from collmm.options import Options
from collmm.plan import make_plan
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, REDUCE_SCATTER, Collective, EinsumSite

MB = 1e6
H100 = chip("h100").per_device()
GATHER = Collective(ALL_GATHER, 0, 0, ("m",), 2 * 6144 * 3072)
SCATTER = Collective(REDUCE_SCATTER, None, 0, ("m",), 2 * 6144 * 3072)


def site(collective, n=8):
    """bf16 [6144, 3072] @ [3072, 2304 n] gathered by rows, or [6144, 2304 n] @ [.., 3072]."""
    wide = 2304 * n
    shapes = ((6144, 3072), (3072, wide), (6144, wide))
    specs = (((), ()), ((), ("m",)), ((), ("m",)))
    if collective.kind == REDUCE_SCATTER:
        shapes = ((6144, wide), (wide, 3072), (6144, 3072))
        specs = (((), ("m",)), (("m",), ()), ((), ()))
    einsum = Einsum((0, 1), (1, 2), (0, 2))
    dtypes = ("bfloat16",) * 3
    return EinsumSite(
        0, einsum, shapes, dtypes, (2, 2, 2), *specs, (collective,), axis_sizes=(("m", n),)
    )


def of(collective, chip, n=8, **fields):
    schedule = Schedule(("m",), n, False, collective.kind == ALL_GATHER, **fields)
    return estimate(site(collective, n), collective, schedule, chip)


def test_a_switch_takes_a_permute_to_any_peer_alike_and_a_torus_one_hop_after_the_other():
    switch, torus = gpu_ring(H100, 8), torus_ring(chip("v5e"), [16])
    assert grouped(switch, 2) == inside_group(switch, 2) == switch
    assert permute_step_s(grouped(torus, 2), 90 * MB) == 2 * permute_step_s(torus, 90 * MB)
    assert permute_step_s(grouped(torus, 4), 0.0) == 4 * permute_step_s(torus, 0.0)
    # Two neighbours exchange theirs; of four, the last one's goes back past the others.
    assert inside_group(torus, 2) == torus
    assert inside_group(torus, 4) == grouped(torus, 3)


def test_a_group_within_a_node_does_not_leave_it():
    nodes = gpu_ring(H100, 6, 2)
    for g, link in ((2, nodes.link), (3, nodes.link), (4, nodes.network)):
        assert permute_step_s(inside_group(nodes, g), 90 * MB) == pytest.approx(90 * MB / link)
    assert grouped(nodes, 2) == nodes


@pytest.mark.parametrize("kind", [ALL_GATHER, REDUCE_SCATTER])
def test_only_rings_of_gpus_are_weighed_with_groups(kind):
    def sizes(name, n):
        found = schedules(Collective(kind, None, 0, ("m",), 0), n, chip(name))
        return [s.shards_per_step for s in found]

    assert [sizes("h100", n) for n in (2, 3, 4, 6, 8, 9, 12)] == [
        [1],
        [1],
        [1, 2],
        [1, 2],
        [1, 2, 4],
        [1],
        [1, 2, 4],
    ]
    assert all(set(sizes(name, n)) == {1} for name in ("v5e", "v4", "v5p") for n in (4, 8, 16))


def test_an_order_that_splits_groups_has_none():
    for order, most in ((None, 4), ((0, 1, 4, 5, 2, 3, 6, 7), 2), ((0, 2, 1, 3, 4, 6, 5, 7), 4)):
        found = candidates(site(GATHER), H100, lambda *_, order=order: RingPlace(None, order))
        assert max(c.schedule.shards_per_step for c in found) == most
    assert {c.schedule.shards_per_step for c in found} == {1, 4}


@pytest.mark.parametrize("collective", [GATHER, SCATTER])
def test_every_byte_moves_once_in_fewer_permutes(collective):
    one, two, four = (of(collective, H100, shards_per_step=g) for g in (1, 2, 4))
    assert [e.permutes for e in (one, two, four)] == [7, 4, 4]
    assert [e.steps for e in (one, two, four)] == [8, 4, 2]
    assert one.link_bytes == two.link_bytes == four.link_bytes
    assert one.loss_s > two.loss_s > four.loss_s


def test_what_puts_a_group_together_is_exposed_but_for_the_copy_of_the_own_shard():
    e = of(GATHER, H100, shards_per_step=2)
    ring, shard = gpu_ring(H100, 8), GATHER.bytes / 8
    copied = 2 * shard / H100.hbm_bytes_per_s()
    waited = ring.launch_s + permute_step_s(ring, shard) - copied
    assert e.prologue_s + e.launch_s == pytest.approx(waited)
    assert e.epilogue_s == 0
    s = of(SCATTER, H100, shards_per_step=2)
    assert s.epilogue_s > 0
    assert s.prologue_s == 0


def test_groups_never_pay_where_every_hop_costs():
    for name in ("v5e", "v4", "v6e"):
        row = chip(name).per_device()
        for collective in (GATHER, SCATTER):
            chains = {} if collective is GATHER else {"chains": 1}
            one = of(collective, row, 16, **chains)
            assert of(collective, row, 16, shards_per_step=2, **chains).after_s > one.after_s


def test_the_plan_takes_them_where_partial_einsums_are_small():
    (d,) = make_plan([site(GATHER)], Options(), H100).decisions
    assert d.schedule.describe() == "one-way x8 unrolled, 2 shards a step"
    (d,) = make_plan([site(GATHER, 4)], Options(), H100).decisions
    assert d.schedule.describe() == "one-way x4 unrolled"
