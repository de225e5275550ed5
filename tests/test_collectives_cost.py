"""Collective times, each expected number worked out from sizes and link rates by hand."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collmm.cost.collectives import (
    Ring,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    gpu_ring,
    network_ring,
    permute_ring_s,
    permute_step_s,
    reduce_scatter_s,
    slowdown,
    torus_ring,
)
from collmm.cost.hardware import chip, load_profile
from collmm.errors import OptionError

MB = 1e6


def test_all_gather_on_a_wrapping_axis():
    ring = torus_ring(chip("v5e"), [16])
    # 90 MB over W = 2 x 45 GB/s.
    assert all_gather_s(ring, 90 * MB) == pytest.approx(1e-3)
    assert reduce_scatter_s(ring, 90 * MB) == pytest.approx(1e-3)
    assert all_reduce_s(ring, 90 * MB) == pytest.approx(2e-3)
    # One-way: 15/16 of 90 MB over 45 GB/s.
    assert all_gather_s(ring, 90 * MB, two_way=False) == pytest.approx(1.875e-3)


def test_all_gather_without_wraparound_is_the_books_v5e_example():
    ring = torus_ring(chip("v5e"), [4])
    # 34 MB: 3/4 of it over 45 GB/s; the book predicts 560 us and measures 680.
    assert all_gather_s(ring, 34 * MB) == pytest.approx(566.67e-6, rel=1e-4)
    # 128 kB: 2.13 us of bandwidth, but 3 hops of 1 us.
    assert all_gather_s(ring, 128e3) == pytest.approx(3e-6)


def test_all_gather_over_several_axes():
    # Two wrapping axes: 180 MB over 2 x 2 x 45 GB/s.
    assert all_gather_s(torus_ring(chip("v5e"), [16, 16]), 180 * MB) == pytest.approx(1e-3)
    # Three on v4.
    assert all_gather_s(torus_ring(chip("v4"), [4, 4, 8]), 270 * MB) == pytest.approx(1e-3)
    # A grid of 2x4 without wraparound: 7/8 of 90 MB over 2 x 45 GB/s.
    assert all_gather_s(torus_ring(chip("v5e"), [2, 4]), 90 * MB) == pytest.approx(0.875e-3)
    # One axis wraps, the other does not: 63/64 of 135 MB over (2 + 1) x 45 GB/s.
    mixed = torus_ring(chip("v5e"), [16, 4])
    assert mixed.wraps == (True, False)
    assert all_gather_s(mixed, 135 * MB) == pytest.approx(63 / 64 * 1e-3)


def test_the_latency_floor_counts_hops():
    # A wrapping axis of 16: 8 hops both ways, 15 one way; two axes add up.
    assert all_gather_s(torus_ring(chip("v5e"), [16]), 1) == pytest.approx(8e-6)
    assert all_gather_s(torus_ring(chip("v5e"), [16]), 1, two_way=False) == pytest.approx(15e-6)
    assert all_gather_s(torus_ring(chip("v5e"), [16, 16]), 1) == pytest.approx(16e-6)
    assert all_reduce_s(torus_ring(chip("v5e"), [4]), 1) == pytest.approx(6e-6)
    # A switch is one latency of 5 us away.
    assert all_gather_s(gpu_ring(chip("h100"), 8), 1) == pytest.approx(5e-6)


def test_all_to_all():
    # V/(4W) with W = 90 GB/s; without wraparound V/(4 x 45 GB/s).
    assert all_to_all_s(torus_ring(chip("v5e"), [16]), 360 * MB) == pytest.approx(1e-3)
    assert all_to_all_s(torus_ring(chip("v5e"), [8]), 180 * MB) == pytest.approx(1e-3)
    # Over 16x16 each axis carries 16/256 of V per ring.
    both = torus_ring(chip("v5e"), [16, 16])
    assert all_to_all_s(both, 16 * 360 * MB) == pytest.approx(1e-3)
    # 8 GPUs: V x 7/64 over 360 GB/s.
    assert all_to_all_s(gpu_ring(chip("h100"), 8), 640 * MB) == pytest.approx(70e6 / 360e9)
    # 2 nodes of 8: V/4 through 8 x 50 GB/s.
    assert all_to_all_s(gpu_ring(chip("h100"), 8, 2), 1600 * MB) == pytest.approx(1e-3)


def test_permute_ring_on_a_wrapping_axis():
    ring = torus_ring(chip("v5e"), [16])
    # One shard of 4.5 MB over 45 GB/s; two-way half of it over each link.
    assert permute_step_s(ring, 4.5 * MB) == pytest.approx(100e-6)
    assert permute_step_s(ring, 4.5 * MB, two_way=True) == pytest.approx(50e-6)
    assert permute_step_s(ring, 1.0) == pytest.approx(1e-6)
    # 2V/W and V/W.
    assert permute_ring_s(ring, 90 * MB) == pytest.approx(2e-3)
    assert permute_ring_s(ring, 90 * MB, two_way=True) == pytest.approx(1e-3)
    assert permute_ring_s(ring, 1.0) == pytest.approx(15e-6)


def test_permute_ring_on_a_line_of_chips_gains_nothing_from_two_ways():
    ring = torus_ring(chip("v5e"), [4])
    assert (ring.permute_load, ring.neighbour_hops) == ((1, 2), 3)
    assert permute_step_s(ring, 4.5 * MB) == pytest.approx(100e-6)
    assert permute_step_s(ring, 4.5 * MB, two_way=True) == pytest.approx(100e-6)
    # The closing edge is 3 hops.
    assert permute_step_s(ring, 1.0) == pytest.approx(3e-6)
    # 3 steps of V/4 over 45 GB/s: as the all-gather.
    assert permute_ring_s(ring, 60 * MB) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("axes", "one_way", "two_way"),
    [
        ([16], 2, 1),  # one wrapping axis
        ([16, 16], 4, 2),  # two of them
        ([8], 1, 1),  # a line
        ([2, 4], 2, 1),  # a grid with a cycle through it
        ([3, 5], 2, 2),  # a grid without one
        ([1], 1, 1),  # nothing to gather
    ],
)
def test_slowdown_on_tori(axes, one_way, two_way):
    ring = torus_ring(chip("v5e"), axes)
    assert slowdown(ring) == pytest.approx(one_way)
    assert slowdown(ring, two_way=True) == pytest.approx(two_way)


def test_slowdown_on_three_wrapping_axes_of_v4():
    ring = torus_ring(chip("v4"), [4, 4, 4])
    assert slowdown(ring) == pytest.approx(6)
    assert slowdown(ring, two_way=True) == pytest.approx(3)


def test_gpus_of_one_node():
    ring = gpu_ring(chip("h100"), 8)
    assert ring.kind == "switch"
    # 7/8 of 360 MB over 0.8 x 450 GB/s.
    assert all_gather_s(ring, 360 * MB) == pytest.approx(0.875e-3)
    assert all_gather_s(gpu_ring(chip("h100"), 8, basis="nominal"), 450 * MB) == pytest.approx(
        0.875e-3
    )
    # A ring uses the whole egress already: m = 1 both ways.
    assert permute_ring_s(ring, 360 * MB) == pytest.approx(0.875e-3)
    assert permute_ring_s(ring, 360 * MB, two_way=True) == pytest.approx(0.875e-3)
    assert slowdown(ring) == slowdown(ring, two_way=True) == pytest.approx(1)
    assert (ring.launch_s, ring.step_s) == (5e-6, 6e-6)


def test_gpus_of_several_nodes():
    # 2 nodes of 8: NVLink 7/8 V / 360 GB/s = V / 411 GB/s, network V / (8 x 50 GB/s).
    ring = gpu_ring(chip("h100"), 8, nodes=2)
    assert ring.size == 16
    assert all_gather_s(ring, 400 * MB) == pytest.approx(1e-3)
    # One GPU of each node: its own NIC.
    assert all_gather_s(gpu_ring(chip("h100"), 1, nodes=4), 50 * MB) == pytest.approx(1e-3)
    # On A100 the network of 8 x 25 GB/s is well below NVLink.
    assert all_gather_s(gpu_ring(chip("a100"), 8, nodes=2), 200 * MB) == pytest.approx(1e-3)
    # B200's NVLink is not the limit either: 8 x 50 GB/s.
    assert all_gather_s(gpu_ring(chip("b200"), 8, nodes=2), 400 * MB) == pytest.approx(1e-3)


def test_a_permute_ring_across_nodes_leaves_each_node_by_one_nic():
    ring = gpu_ring(chip("h100"), 8, nodes=2)
    assert permute_step_s(ring, 5 * MB) == pytest.approx(100e-6)
    assert permute_step_s(ring, 5 * MB, two_way=True) == pytest.approx(50e-6)
    assert slowdown(ring) == pytest.approx(8)
    assert slowdown(ring, two_way=True) == pytest.approx(4)
    alone = gpu_ring(chip("h100"), 1, nodes=4)
    assert slowdown(alone) == slowdown(alone, two_way=True) == pytest.approx(1)


def test_point_to_point_peers_make_a_neighbour_ring_slow():
    ring = gpu_ring(chip("mi300x"), 8)
    assert ring.kind == "peers"
    # All 7 wires of 64 GB/s: 7/8 of 512 MB over 448 GB/s.
    assert all_gather_s(ring, 512 * MB) == pytest.approx(1e-3)
    assert permute_ring_s(ring, 64 * MB) == pytest.approx(0.875e-3)
    assert slowdown(ring) == pytest.approx(7)
    assert slowdown(ring, two_way=True) == pytest.approx(3.5)
    # Of two GPUs only the wire between them is of use.
    pair = gpu_ring(chip("mi300x"), 2)
    assert all_gather_s(pair, 128 * MB) == pytest.approx(1e-3)
    assert slowdown(pair) == slowdown(pair, two_way=True) == pytest.approx(1)


def test_slices_over_the_data_centre_network():
    # 2 v5p slices, one member in each: 6.25 GB/s per chip.
    assert all_gather_s(network_ring(chip("v5p"), nodes=2), 6.25 * MB) == pytest.approx(1e-3)


def test_an_unknown_wraparound_rule_is_noted_and_taken_as_none():
    ring = torus_ring(chip("tpu7x"), [4])
    assert ring.wraps == (False,)
    assert ring.note == "tpu7x: no rule is published; taken not to wrap"
    assert torus_ring(chip("tpu7x"), [4], wraps=[True]).note == ""
    assert torus_ring(chip("v4"), [4]).note == ""


def test_the_slice_decides_whether_an_axis_wraps():
    assert torus_ring(chip("v4"), [4], slice_shape=(4, 4, 4)).wraps == (True,)
    assert torus_ring(chip("v4"), [4], slice_shape=(2, 2, 4)).wraps == (False,)


def test_impossible_rings_are_refused():
    with pytest.raises(OptionError, match="h100 is a gpu and has no torus"):
        torus_ring(chip("h100"), [8])
    with pytest.raises(OptionError, match="v4 is a tpu and has no NVLink"):
        gpu_ring(chip("v4"), 8)
    with pytest.raises(OptionError, match="16 h100 do not fit one NVLink domain of 8"):
        gpu_ring(chip("h100"), 16)
    with pytest.raises(OptionError, match="each must be at least 1"):
        torus_ring(chip("v4"), [4, 0])
    with pytest.raises(OptionError, match="1 entries for 2 torus axes"):
        torus_ring(chip("v4"), [4, 4], wraps=[True])
    assert gpu_ring(chip("gb200"), 72).size == 72


def test_a_network_of_unknown_speed_is_refused_and_not_free():
    row = dataclasses.replace(chip("v4"), dcn=None)
    with pytest.raises(OptionError, match=r'no network bandwidth is known for v4; set "dcn"'):
        network_ring(row, nodes=2)


def test_a_measured_link_changes_the_time(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"h100": {"link": 3.5e11}}')
    ring = gpu_ring(chip("h100", load_profile(path)), 8)
    assert all_gather_s(ring, 400 * MB) == pytest.approx(1e-3)


RINGS = st.one_of(
    st.builds(
        torus_ring,
        st.sampled_from(["v4", "v5e", "v5p", "v6e"]).map(chip),
        st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=3),
    ),
    st.builds(
        gpu_ring,
        st.sampled_from(["h100", "mi300x"]).map(chip),
        st.integers(1, 8),
        st.integers(1, 4),
    ),
)


@given(RINGS, st.floats(1e9, 1e12))
def test_a_permute_ring_of_large_shards_is_m_times_the_all_gather(ring: Ring, full: float):
    for two_way in (False, True):
        ratio = slowdown(ring, two_way)
        assert ratio >= 1
        if ring.size == 1:
            assert all_gather_s(ring, full) == permute_ring_s(ring, full, two_way) == 0
        elif full > 1e11:
            # Far above every latency floor. Where the collective is held up by more than the ring
            # is (m capped at 1), it is the slower of the two.
            measured = permute_ring_s(ring, full, two_way) / all_gather_s(ring, full)
            assert max(1.0, measured) == pytest.approx(ratio)


@given(RINGS, st.floats(1, 1e12), st.floats(1, 10))
def test_times_are_finite_and_grow_with_size(ring: Ring, full: float, factor: float):
    for time in (all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s, permute_ring_s):
        small, large = time(ring, full), time(ring, full * factor)
        assert 0 <= small <= large < math.inf
    assert permute_ring_s(ring, full, True) <= permute_ring_s(ring, full, False)
