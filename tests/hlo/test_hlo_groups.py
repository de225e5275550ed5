import math

import numpy as np
import pytest
from hlotools import hlo
from hypothesis import given
from hypothesis import strategies as st

from collmm.errors import HloError, OptionError
from collmm.hlo.groups import (
    axes_of_groups,
    axes_of_pairs,
    device_groups,
    device_pairs,
    parse_groups,
    parse_pairs,
    shift_of_pairs,
)
from collmm.hlo.parse import parse

SPELLINGS = [
    ("{}", 3, ((0, 1, 2),)),
    ("{{0,1},{2,3}}", 4, ((0, 1), (2, 3))),
    ("{{0, 2}, {1, 3}}", 4, ((0, 2), (1, 3))),
    ("[2,4]<=[8]", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("[4,2]<=[2,4]T(1,0)", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
    (
        "[2,10]<=[4,5]T(1,0)",  # the example of XLA's own printer
        20,
        ((0, 5, 10, 15, 1, 6, 11, 16, 2, 7), (12, 17, 3, 8, 13, 18, 4, 9, 14, 19)),
    ),
    ("mesh['axis_0'=8] {'axis_0'}", 8, (tuple(range(8)),)),
    ("mesh['a'=2,'b'=4] {'a'}", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("mesh['a'=2,'b'=2] {'b','a'}", 4, ((0, 2, 1, 3),)),
    ("mesh['a'=2,'b'=2] {}", 4, ((0,), (1,), (2,), (3,))),
    ("mesh['a'=1,'b'=2] {'a'}", 2, ((0,), (1,))),
    ("mesh['a'=8] {'a':(2)2}", 8, ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", 4, ((0, 2), (1, 3))),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", 4, ((0, 2), (1, 3))),
    ("@mesh<a=2,b=2>(devices=[2,2]<=[2,2]T(1,0)) {b}", 4, ((0, 2), (1, 3))),
    (
        "@mesh<o=10>(devices=[10]8,3,7,5,4,2,6,0,1,9) {o:(5)2}",
        10,
        ((8, 3), (7, 5), (4, 2), (6, 0), (1, 9)),
    ),
]


@pytest.mark.parametrize(("text", "devices", "groups"), SPELLINGS)
def test_spellings(text, devices, groups):
    assert parse_groups(text, devices) == groups


@pytest.mark.parametrize(
    "text",
    [
        "{{0,1},{2,3}",
        "{0,1}",
        "[2,4]",
        "[2,4]<=[9]",
        "[2,4]<=[2,4]T(0,0)",
        "[8]<=[8]",
        "mesh['a'=2] {'z'}",
        "mesh['a'=8] {'a':(3)2}",
        "mesh['a'=8] {'a':(1)4,'a':(2)2}",
        "mesh['a'=8] {'a'",
        "mesh['a'=4], device_ids=(0,1,2) {'a'}",
        "all of them",
    ],
)
def test_what_is_no_group_is_refused(text):
    if text == "[2,4]":  # an iota of its own shape
        assert parse_groups(text, 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
        return
    with pytest.raises(HloError):
        parse_groups(text, 8)


dims = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(dims, st.data())
def test_iota_is_numpys(source, data):
    total = math.prod(source)
    count = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
    perm = data.draw(st.permutations(range(len(source))))
    text = f"[{count},{total // count}]<=[{','.join(map(str, source))}]"
    if perm != sorted(perm):
        text += f"T({','.join(map(str, perm))})"
    expected = np.arange(total).reshape(source).transpose(perm).reshape(count, -1)
    assert np.array_equal(np.array(parse_groups(text, total)), expected)


@given(dims, st.data())
def test_mesh_axes_are_numpys(sizes, data):
    """Groups over named axes: the devices that differ only in those coordinates, in their order."""
    total = math.prod(sizes)
    over = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    order = data.draw(st.none() | st.permutations(range(total)))
    names = [f"'x{k}'" for k in range(len(sizes))]
    text = f"mesh[{','.join(f'{n}={s}' for n, s in zip(names, sizes, strict=True))}]"
    ids = np.arange(total) if order is None else np.array(order)
    if order is not None:
        text += f", device_ids=({','.join(map(str, order))})"
    text += " {" + ",".join(names[k] for k in over) + "}"
    rest = [k for k in range(len(sizes)) if k not in over]
    per_group = math.prod(sizes[k] for k in over)
    expected = ids.reshape(sizes).transpose(rest + over).reshape(-1, per_group)
    assert np.array_equal(np.array(parse_groups(text, total)), expected)


@given(st.permutations(["a", "b", "c"]), st.integers(0, 3))
def test_lists_iota_and_mesh_agree(order, count):
    """One set of groups in three spellings, and the axes found in each."""
    mesh = {"a": 2, "b": 3, "c": 4}
    over = tuple(sorted(order[:count]))
    from_mesh = parse_groups(
        "mesh['a'=2,'b'=3,'c'=4] {" + ",".join(f"'{a}'" for a in over) + "}", 24
    )
    listed = "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in from_mesh) + "}"
    rest = [k for k, a in enumerate(mesh) if a not in over]
    perm = rest + [k for k, a in enumerate(mesh) if a in over]
    size = math.prod(mesh[a] for a in over)
    iota = f"[{24 // size},{size}]<=[2,3,4]T({','.join(map(str, perm))})"
    assert parse_groups(listed, 24) == from_mesh == parse_groups(iota, 24)
    assert axes_of_groups(from_mesh, mesh) == over


@given(st.integers(2, 9), st.integers(1, 8), st.integers(1, 3))
def test_shift_of_a_ring_along_one_axis(size, step, others):
    step %= size
    mesh = {"other": others, "ring": size}
    pairs = tuple(
        (o * size + s, o * size + (s + step) % size) for o in range(others) for s in range(size)
    )
    if step == 0:
        assert axes_of_pairs(pairs, mesh) == ()
        return
    assert axes_of_pairs(pairs, mesh) == ("ring",)
    shift = shift_of_pairs(pairs, mesh)
    assert shift % size == step
    assert -size / 2 < shift <= size / 2


def test_no_shift_where_there_is_none():
    assert shift_of_pairs(((0, 1), (1, 0), (2, 2)), {"a": 4}) is None
    snake = ((0, 1), (1, 3), (3, 2), (2, 0))
    assert axes_of_pairs(snake, {"a": 2, "b": 2}) == ("a", "b")
    assert shift_of_pairs(snake, {"a": 2, "b": 2}) is None


def test_groups_across_part_of_an_axis_have_no_axes():
    assert axes_of_groups(((0, 1), (2, 3)), {"a": 4}) is None
    assert axes_of_groups(((0, 3), (1, 2)), {"a": 2, "b": 2}) is None


def test_a_mesh_too_small_is_refused():
    with pytest.raises(OptionError, match="hold 4 devices and the module names device 7"):
        axes_of_groups(((0, 7),), {"a": 4})


@pytest.mark.parametrize("text", ["{{0,1},{2}}", "{0,1}", "", "{{0,1,2}}"])
def test_bad_pairs_are_refused(text):
    with pytest.raises(HloError, match="source_target_pairs"):
        parse_pairs(text)


def instruction(attributes, opcode="all-reduce"):
    text = hlo(
        f"""
        ENTRY %main (p: f32[8]) -> f32[8] {{
          %p = f32[8]{{0}} parameter(0)
          ROOT %c = f32[8]{{0}} {opcode}(%p), {attributes}
        }}
        """
    )
    return parse(text).entry.root


# XLA's group modes, on 2 replicas of 3 partitions: device = replica * 3 + partition.
MODES = [
    ("replica_groups={{0,1}}", "all-reduce", ((0, 3), (1, 4), (2, 5))),
    ("channel_id=1, replica_groups={{0},{1}}", "all-reduce", ((0, 1, 2), (3, 4, 5))),
    ("channel_id=1, replica_groups={}", "all-gather", ((0, 1, 2, 3, 4, 5),)),
    (
        "channel_id=1, replica_groups={{0,5},{1,2,3,4}}, use_global_device_ids=true",
        "reduce-scatter-start",
        ((0, 5), (1, 2, 3, 4)),
    ),
    ("channel_id=1, replica_groups={{0,1,2}}", "all-to-all", ((0, 1, 2), (3, 4, 5))),
    ("replica_groups={{0,1}}", "all-to-all", ((0, 3), (1, 4), (2, 5))),
]


@pytest.mark.parametrize(("attributes", "opcode", "groups"), MODES)
def test_group_modes(attributes, opcode, groups):
    i = instruction(attributes, opcode)
    assert device_groups(i, replicas=2, partitions=3) == groups


def test_permutes_are_over_partitions_with_a_channel_and_replicas_without():
    over = "source_target_pairs={{0,1},{1,0}}"
    with_channel = instruction(f"channel_id=1, {over}", "collective-permute")
    assert device_pairs(with_channel, replicas=2, partitions=2) == ((0, 1), (1, 0), (2, 3), (3, 2))
    without = instruction(over, "collective-permute")
    assert device_pairs(without, replicas=2, partitions=2) == ((0, 2), (2, 0), (1, 3), (3, 1))


def test_errors_name_the_line():
    with pytest.raises(HloError, match=r"line 5: .*replica groups"):
        device_groups(instruction("replica_groups=some"), replicas=1, partitions=8)
    with pytest.raises(HloError, match=r"line 5: .*source_target_pairs"):
        device_pairs(instruction("channel_id=1", "collective-permute"), replicas=1, partitions=8)
