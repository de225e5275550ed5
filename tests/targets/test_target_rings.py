"""Rings of mesh axes on made-up devices: spans, wraparound, link loads and better orders."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collmm.cost.collectives import all_gather_s, slowdown
from collmm.cost.hardware import chip
from collmm.errors import TargetError
from collmm.targets import rings

# The order in which jax lays a mesh axis of 8 on a v5e 2x4 slice.
V5E_2X4 = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 3), (0, 3), (1, 2), (0, 2)]


def tpus(places):
    return np.array([[SimpleNamespace(coords=[*p, 0]) for p in group] for group in places])


def grid(*sizes):
    return list(itertools.product(*map(range, sizes)))


def ring_of(name, shape, places, wrap=None):
    wrap = wrap or tuple(bool(chip(name).wraps(size, shape)) for size in shape)
    return rings.tpu_ring_of(chip(name), shape, wrap, tpus(places), "achievable")


def test_one_wrapping_axis():
    ring = ring_of("v5e", (16, 16), [[(r, c) for c in range(16)] for r in range(16)])
    assert (ring.axes, ring.wraps) == ((16,), (True,))
    assert (ring.permute_load, ring.neighbour_hops) == ((1, 1), 1)
    assert slowdown(ring, two_way=True) == 1


def test_part_of_a_wrapping_axis_does_not_wrap():
    halves = [[(0, c) for c in range(8)], [(0, c) for c in range(8, 16)]]
    ring = ring_of("v5e", (16, 16), halves)
    assert (ring.axes, ring.wraps) == ((8,), (False,))
    # The step from 7 to 0 is 7 hops back; through the wraparound it would be 9.
    assert ring.neighbour_hops == 7


def test_a_line_of_chips_loads_its_links_twice_when_both_ways_run():
    ring = ring_of("v5e", (4, 4), [[(r, c) for c in range(4)] for r in range(4)])
    assert (ring.wraps, ring.permute_load, ring.neighbour_hops) == ((False,), (1, 2), 3)
    assert slowdown(ring) == slowdown(ring, two_way=True) == 1


def test_the_mesh_order_of_jax_on_v5e_is_no_ring_and_a_better_one_is_found():
    ring = ring_of("v5e", (2, 4), [V5E_2X4])
    assert (ring.axes, ring.wraps) == ((2, 4), (False, False))
    assert (ring.permute_load, ring.neighbour_hops) == ((1, 2), 2)
    assert slowdown(ring, two_way=True) == pytest.approx(2)
    order = rings.ring_order((2, 4), (False, False), tpus([V5E_2X4]))
    assert sorted(order) == list(range(8))
    assert order[0] == 0
    better = ring_of("v5e", (2, 4), [[V5E_2X4[i] for i in order]])
    assert (better.permute_load, better.neighbour_hops) == ((1, 1), 1)
    assert slowdown(better, two_way=True) == pytest.approx(1)
    assert all_gather_s(better, 1e8) == all_gather_s(ring, 1e8)


def test_a_ring_that_is_best_as_it_is_keeps_its_order():
    assert rings.ring_order((4, 16), (False, True), tpus([[(0, c) for c in range(16)]])) == [
        *range(16)
    ]


def test_a_line_is_visited_in_steps_of_two_hops():
    # 0 2 4 6 7 5 3 1 in place of seven single hops and one of seven.
    line = [[(r, c) for c in range(8)] for r in range(8)]
    order = rings.ring_order((8, 8), (False, False), tpus(line))
    assert order == [0, 2, 4, 6, 7, 5, 3, 1]
    ring = ring_of("v5e", (8, 8), [[group[i] for i in order] for group in line])
    assert (ring.permute_load, ring.neighbour_hops) == ((1, 2), 2)
    # No cycle of single hops exists in a grid with an odd number of chips.
    order = rings.ring_order((3, 3), (False, False), tpus([grid(3, 3)]))
    odd = ring_of("v5e", (3, 3), [[grid(3, 3)[i] for i in order]])
    assert odd.neighbour_hops <= 2


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_an_even_grid_has_a_cycle_of_single_hops(sizes):
    cycle = rings._cycle([range(size) for size in sizes])
    assert sorted(cycle) == grid(*sizes)
    longest = max(
        sum(abs(a - b) for a, b in zip(p, q, strict=True))
        for p, q in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    )
    if len(cycle) % 2 == 0 and sum(size > 1 for size in sizes) > 1:
        assert longest == 1


def test_one_order_serves_all_groups():
    groups = [[(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 2), (1, 2), (0, 3), (1, 3)]]
    order = rings.ring_order((2, 4), (False, False), tpus(groups))
    moved = [[group[i] for i in order] for group in groups]
    ring = ring_of("v5e", (2, 4), moved)
    assert (ring.axes, ring.permute_load, ring.neighbour_hops) == ((2, 2), (1, 1), 1)


def test_groups_that_share_links_add_up():
    # Two groups interleaved on one line: each step of each is 2 hops over links both use.
    alone = ring_of("v5e", (2, 8), [[(0, 0), (0, 2), (0, 4), (0, 6)]])
    shared = ring_of(
        "v5e", (2, 8), [[(0, 0), (0, 2), (0, 4), (0, 6)], [(0, 1), (0, 3), (0, 5), (0, 7)]]
    )
    assert alone.permute_load[0] == 1
    assert shared.permute_load[0] == 2


def test_both_devices_of_a_chip_share_its_links():
    places = [[place for place in grid(2, 2, 2) for _ in range(2)]]
    devices = np.array([[SimpleNamespace(coords=list(p)) for p in places[0]]])
    ring = rings.tpu_ring_of(chip("tpu7x"), (2, 2, 2), (False,) * 3, devices, "achievable")
    assert (ring.axes, ring.per_chip, ring.size) == ((2, 2, 2), 2, 16)
    order = rings.ring_order((2, 2, 2), (False,) * 3, devices)
    better = rings.tpu_ring_of(
        chip("tpu7x"), (2, 2, 2), (False,) * 3, devices[:, order], "achievable"
    )
    assert (better.permute_load, better.neighbour_hops) == ((1, 1), 1)


def test_an_unknown_wraparound_rule_is_noted():
    line = [[(x, 0, 0) for x in range(4)]]
    note = ring_of("tpu7x", (4, 4, 4), line).note
    assert note == "tpu7x: no rule is published; taken not to wrap"
    assert ring_of("v4", (4, 4, 4), line).note == ""


def gpus(hosts):
    return np.array([[SimpleNamespace(process_index=host) for host in group] for group in hosts])


def test_gpu_rings_by_host():
    inside = rings.gpu_ring_of(chip("h100"), gpus([[0] * 8, [1] * 8]), "achievable")
    assert (inside.kind, inside.axes) == ("switch", (8,))
    across = rings.gpu_ring_of(chip("h100"), gpus([[0, 1]] * 8), "achievable")
    assert (across.kind, across.axes) == ("nodes", (2, 1))
    whole = rings.gpu_ring_of(chip("h100"), gpus([[0] * 8 + [1] * 8]), "achievable")
    assert whole.axes == (2, 8)
    with pytest.raises(TargetError, match="unequal numbers of GPUs per host"):
        rings.gpu_ring_of(chip("h100"), gpus([[0, 0, 1]]), "achievable")


def test_groups_of_a_mesh():
    devices = np.arange(12).reshape(2, 3, 2)
    one = rings.groups(devices, ("a", "b", "c"), ("b",))
    assert one.tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    both = rings.groups(devices, ("a", "b", "c"), ("c", "a"))
    assert both.tolist() == [[0, 6, 1, 7], [2, 8, 3, 9], [4, 10, 5, 11]]
    with pytest.raises(TargetError, match="no axis 'd'; its axes are a, b, c"):
        rings.groups(devices, ("a", "b", "c"), ("d",))
