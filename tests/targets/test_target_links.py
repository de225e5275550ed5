"""What transfers take on the links of a target, and which queue. Devices made by hand; no jax."""

import dataclasses

import pytest

from collmm.cost import collectives
from collmm.errors import TargetError
from collmm.hlo.findings import Finding
from collmm.targets import parse_target
from collmm.targets.links import Links

LINK, HOP, LAUNCH = 45e9, 1e-6, 5e-6  # of v5e
BIG = 45_000_000  # bytes: 1 ms on one link


@dataclasses.dataclass(frozen=True)
class Device:
    coords: tuple[int, ...] = ()
    process_index: int = 0


def line(*places):
    return [Device(coords=(x, y, 0)) for x, y in places]


def permute(*pairs, size=BIG, shift=None, axes=("model",)):
    facts = ("collective-permute", "p", "main", 1, None, "", size, size, True, 1)
    return Finding(*facts, pairs=pairs, axes=axes, shift=shift)


def grouped(kind, groups, operand=BIG, result=BIG, rings=None, axes=("model",)):
    facts = (kind, "c", "main", 1, None, "", operand, result, False, 1)
    return Finding(*facts, groups=groups, axes=axes, rings=rings)


def cycle(n, step=1):
    return tuple((k, (k + step) % n) for k in range(n))


# --- torus ---

# Four chips in a row; and eight in the order of a mesh of a v5e 2x4 slice.
ROW = line((0, 0), (0, 1), (0, 2), (0, 3))
SNAKE = line((0, 0), (1, 0), (0, 1), (1, 1), (1, 3), (0, 3), (1, 2), (0, 2))
LOOP = [SNAKE[k] for k in (0, 2, 7, 5, 4, 6, 3, 1)]


def tpu(devices=None, name="tpu:v5e:2x4"):
    return Links(parse_target(name), devices)


def test_a_permute_to_a_neighbour_takes_its_bytes_over_one_link():
    t = tpu(ROW).transfer(permute((0, 1), (2, 3)))
    assert t.seconds == pytest.approx(BIG / LINK + LAUNCH)
    assert len(t.links) == 2


def test_the_busiest_link_decides():
    # 0 -> 2 and 1 -> 3 both cross 1 -> 2.
    t = tpu(ROW).transfer(permute((0, 2), (1, 3)))
    assert t.seconds == pytest.approx(2 * BIG / LINK + LAUNCH)


def test_a_small_message_takes_its_hops():
    t = tpu(ROW).transfer(permute((0, 3), size=8))
    assert t.seconds == pytest.approx(3 * HOP + LAUNCH)


def test_a_ring_without_wraparound_comes_back_through_its_own_reverse_links():
    links = tpu(ROW)
    there, back = permute(*cycle(4), shift=1), permute(*cycle(4, -1), shift=-1)
    assert links.transfer(there).seconds == pytest.approx(BIG / LINK + LAUNCH)
    assert links.shares(there, back)


def test_a_ring_with_wraparound_has_a_link_for_each_direction():
    target = parse_target("tpu:v4:4x4x4")
    devices = [Device(coords=(0, 0, z)) for z in range(4)]
    links = Links(target, devices)
    there, back = permute(*cycle(4), shift=1), permute(*cycle(4, -1), shift=-1)
    launch = target.hardware.launch.value
    assert links.transfer(there).seconds == pytest.approx(BIG / LINK + launch)
    assert not links.shares(there, back)
    assert links.shares(there, there)
    assert (links.transfer(there).lanes, links.transfer(back).lanes) == (("model +",), ("model -",))


def test_the_order_of_a_ring_decides_whether_its_directions_share_links():
    there, back = permute(*cycle(8), shift=1), permute(*cycle(8, -1), shift=-1)
    assert tpu(SNAKE).shares(there, back)
    assert not tpu(LOOP).shares(there, back)


def test_collectives_take_what_the_cost_model_says_of_their_links():
    links, group = tpu(SNAKE), (tuple(range(8)),)
    full = 8 * BIG
    gather = grouped("all-gather", group, BIG, full)
    ring = links.ring(gather)
    assert (ring.axes, ring.wraps) == ((2, 4), (False, False))
    for kind, seconds in (
        ("all-gather", collectives.all_gather_s(ring, full)),
        ("reduce-scatter", collectives.reduce_scatter_s(ring, full)),
        ("all-reduce", collectives.all_reduce_s(ring, full)),
        ("all-to-all", collectives.all_to_all_s(ring, 8 * full)),
    ):
        t = links.transfer(grouped(kind, group, full, full))
        assert t.seconds == pytest.approx(seconds + LAUNCH), kind
        assert (t.lanes, t.note) == (("model +", "model -"), "")


def test_a_reduce_scatter_of_a_single_ring_uses_one_direction_and_says_so():
    links, group = tpu(SNAKE), (tuple(range(8)),)
    t = links.transfer(grouped("reduce-scatter", group, 8 * BIG, BIG, rings=1))
    assert t.seconds == pytest.approx(7 * BIG / LINK + LAUNCH)
    assert t.lanes == ("model +",)
    assert "taken to use one direction" in t.note
    two = links.transfer(grouped("reduce-scatter", group, 8 * BIG, BIG, rings=2))
    assert two.seconds < t.seconds


def test_groups_on_other_links_do_not_queue():
    links = tpu(SNAKE)
    rows = grouped("all-gather", ((0, 1), (2, 3), (7, 6), (5, 4)), axes=("x",))
    columns = grouped("all-gather", ((0, 2), (1, 3)), axes=("y",))
    assert not links.shares(rows, columns)
    assert links.shares(rows, grouped("all-gather", (tuple(range(8)),)))


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(TargetError, match=r"tpu:v5e:2x4 has 4 devices and the program names d"):
        tpu(ROW).transfer(permute((0, 7)))


def test_two_devices_of_one_chip_share_its_links():
    target = parse_target("tpu:tpu7x:2x2x1")
    links = Links(target, [Device(coords=(0, 0, 0))] * 2 + [Device(coords=(0, 1, 0))] * 2)
    launch = target.hardware.launch.value
    both = links.transfer(permute((0, 2), (1, 3)))
    assert both.seconds == pytest.approx(2 * BIG / 90e9 + launch)
    within = links.transfer(permute((0, 1), (2, 3)))
    assert within.links == frozenset()


def test_without_devices_neighbours_are_taken():
    t = tpu().transfer(permute(*cycle(8)))
    assert t.seconds == pytest.approx(BIG / LINK + LAUNCH)
    gather = tpu().transfer(grouped("all-gather", (tuple(range(8)),), BIG, 8 * BIG))
    assert gather.seconds == pytest.approx(7 * BIG / LINK + LAUNCH)


def test_a_permute_to_itself_takes_nothing():
    assert tpu(ROW).transfer(permute((0, 0), (1, 1))).seconds == 0.0


# --- GPUs ---

HOST = [Device(process_index=0) for _ in range(8)]
HOSTS = [Device(process_index=k // 8) for k in range(16)]
NVLINK, NCCL = 360e9, 5e-6


def test_both_directions_of_a_switch_share_what_a_gpu_sends():
    links = Links(parse_target("gpu:h100:8"), HOST)
    there, back = permute(*cycle(8), shift=1), permute(*cycle(8, -1), shift=-1)
    assert links.transfer(there).seconds == pytest.approx(BIG / NVLINK + NCCL)
    assert links.shares(there, back)
    assert links.transfer(there).lanes == links.transfer(back).lanes == ("model",)
    assert not links.shares(permute((0, 1)), permute((2, 3)))


def test_between_hosts_the_network_decides():
    links = Links(parse_target("gpu:h100:2x8"), HOSTS)
    across, within = permute((0, 8), (8, 0)), permute((0, 1), (8, 9))
    assert links.transfer(across).seconds == pytest.approx(BIG / 50e9 + NCCL)
    assert links.transfer(within).seconds == pytest.approx(BIG / NVLINK + NCCL)
    assert not links.shares(across, within)
    gather = grouped("all-gather", (tuple(range(16)),), BIG, 16 * BIG)
    assert links.ring(gather).axes == (2, 8)
    assert links.shares(gather, across)
    assert links.shares(gather, within)
