"""Overrides and budgets: which einsum a pattern names, what is allowed, and what is said if not."""

import dataclasses

import pytest

from collmm import OptionError, Options
from collmm.constraints import form_for, matches, read_overrides, read_size, scopes, unmatched
from collmm.einsum import Einsum
from collmm.schedule import Schedule
from collmm.sites import REDUCE_SCATTER, EinsumSite, Location


def site(file="/home/me/model.py", line=120, name_stack=""):
    einsum = Einsum((0, 1), (1, 2), (0, 2))
    shapes = ((4, 4),) * 3
    return EinsumSite(
        0,
        einsum,
        shapes,
        ("float32",) * 3,
        (4,) * 3,
        location=Location(file, line, "f", name_stack),
    )


MATCHES = [
    ("model.py:120", True),
    ("me/model.py:120", True),
    ("/home/me/model.py:120", True),
    ("model.py:12", False),
    ("odel.py:120", False),
    ("you/model.py:120", False),
    ("decoder/mlp", True),
    ("decoder", True),
    ("mlp", True),
    ("layer_3/decoder/mlp", True),
    ("layer_*/decoder", True),
    ("layer_?/*/mlp", True),
    ("/decoder/mlp/", True),
    ("layer_3/mlp", False),
    ("deco", False),
    ("mlp/decoder", False),
    ("Decoder", False),
    ("step", True),
]


@pytest.mark.parametrize(("pattern", "expected"), MATCHES, ids=str)
def test_a_pattern_names_a_line_or_a_scope(pattern, expected):
    stack = "jit(step)/layer_3/transpose(jvp(decoder))/mlp/ab,bc->ac"
    at = Location("/home/me/model.py", 120, "f", stack)
    assert matches(pattern, at) is expected


def test_scopes_are_the_names_without_transformations():
    assert scopes("jit(step)/transpose(jvp(decoder))/mlp") == ("step", "decoder", "mlp")
    assert scopes("jit(f)/jvp()/checkpoint/rematted_computation/x") == (
        "f",
        "checkpoint",
        "rematted_computation",
        "x",
    )
    assert scopes("transpose(jvp(a/b))/c") == ("a", "b", "c")
    assert scopes("") == ()


def test_the_last_override_that_matches_counts():
    overrides = read_overrides({"model.py:120": "never", "decoder": "always"})
    assert form_for(site(name_stack="decoder"), overrides).loop
    assert not form_for(site(), overrides).loop
    assert form_for(site(line=1), overrides) is None


def test_a_form_says_what_a_schedule_must_be():
    two_way = Schedule(("m",), 4, two_way=True, unroll=True, chains=4)
    form = form_for(site(), read_overrides({"model.py:120": "rolled one-way"}))
    assert form.loop
    assert not form.admits(two_way)
    assert form.applied(two_way) == Schedule(("m",), 4, two_way=False, unroll=False)
    half = form_for(site(), read_overrides({"model.py:120": "two-way"}))
    assert half.admits(two_way)
    assert half.applied(two_way) is two_way


def test_a_form_says_whether_a_gather_sends_chunks():
    shards = Schedule(("m",), 4, two_way=True, unroll=True)
    four = Schedule(("m",), 4, two_way=True, unroll=True, chains=4)
    chunked = form_for(site(), read_overrides({"model.py:120": "chunked"}))
    assert not chunked.admits(shards)
    assert chunked.applied(shards) == Schedule(("m",), 4, True, True, chains=2)
    assert chunked.applied(four) is four
    both = form_for(site(), read_overrides({"model.py:120": "chunked one-way rolled"}))
    assert both.applied(four) == Schedule(("m",), 4, False, False, chains=2)
    whole = form_for(site(), read_overrides({"model.py:120": "whole"}))
    assert whole.applied(four) == shards
    # The parts of a scattered block are no chunks.
    for form in (chunked, whole):
        assert form.applied(four, REDUCE_SCATTER) is four
        assert form.applied(shards, REDUCE_SCATTER) is shards


def test_a_form_says_whether_a_step_takes_several_shards():
    one = Schedule(("m",), 8, two_way=True, unroll=True)
    two = dataclasses.replace(one, shards_per_step=2)
    grouped = form_for(site(), read_overrides({"model.py:120": "grouped"}))
    assert grouped.applied(one) == grouped.applied(one, REDUCE_SCATTER) == two
    four = dataclasses.replace(one, shards_per_step=4)
    assert grouped.applied(four) is four
    rolled = form_for(site(), read_overrides({"model.py:120": "rolled"}))
    assert rolled.applied(four) == dataclasses.replace(four, unroll=False)
    alone = form_for(site(), read_overrides({"model.py:120": "ungrouped"}))
    assert alone.applied(four) == one
    inner = Schedule(("d",), 2, two_way=False, unroll=True)
    assert grouped.applied(dataclasses.replace(one, inner=inner)) == two
    for stays in (
        Schedule(("m",), 5, two_way=True, unroll=True),
        dataclasses.replace(one, order=(0, 2, 7, 5, 4, 6, 3, 1)),
    ):
        assert grouped.applied(stays) == stays
    follows = dataclasses.replace(one, order=(1, 0, 3, 2, 7, 6, 5, 4))
    assert grouped.applied(follows).shards_per_step == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shards_per_step": 0}, "must be an int >= 1, got 0"),
        ({"shards_per_step": True}, "must be an int >= 1, got True"),
        ({"shards_per_step": 3}, "=3 must divide the ring of 8 into two groups or more"),
        ({"shards_per_step": 8}, "=8 must divide the ring of 8 into two groups or more"),
        ({"shards_per_step": 2, "order": (0, 2, 1, 3, 4, 5, 6, 7)}, "each run of 2 one after"),
        ({"shards_per_step": 2, "inner": Schedule(("d",), 2, False, True)}, "with an inner ring"),
    ],
)
def test_groups_that_cannot_be_are_refused(fields, message):
    with pytest.raises(OptionError, match=message):
        Schedule(("m",), 8, True, True, **fields)


def test_what_matches_nothing_names_the_nearest_sites():
    sites = [site(line=n, name_stack=f"layer_{n}/attention") for n in (10, 50, 118, 124)]
    (line,) = unmatched(read_overrides({"model.py:120": "never"}), sites, " of step")
    assert line == (
        "overrides: 'model.py:120' matches no einsum of step; "
        "nearest: model.py:118, model.py:124, model.py:50"
    )
    (scope,) = unmatched(read_overrides({"layer_50/atention": "never"}), sites)
    assert "nearest: layer_50/attention" in scope
    (other,) = unmatched(read_overrides({"other.py:7": "never"}), sites)
    assert "nearest: model.py:10" in other
    assert unmatched(read_overrides({"model.py:118": "always"}), sites) == []
    assert unmatched(read_overrides({"a": "never"}), []) == [
        "overrides: 'a' matches no einsum; the program has no einsum"
    ]


BAD_OVERRIDES = {
    "kind": (["never"], r"overrides=\['never'\]; give a dict such as"),
    "pattern": ({"": "never"}, "overrides: '' names no einsum; write 'file.py:120' or a name sc"),
    "number": ({7: "never"}, "overrides: 7 names no einsum"),
    "value": ({"a": "nevr"}, r"overrides\['a'\]='nevr'; use 'never', 'always', or a form of one-w"),
    "bool": ({"a": False}, r"overrides\['a'\]=False; use 'never'"),
    "empty": ({"a": ""}, r"overrides\['a'\]=''; use 'never'"),
    "mixed": ({"a": "always rolled"}, r"'always rolled'; 'always': use 'never', 'always', or"),
    "twice": ({"a": "rolled unrolled"}, "says one thing twice"),
}


@pytest.mark.parametrize(("given", "expected"), BAD_OVERRIDES.values(), ids=BAD_OVERRIDES)
def test_bad_overrides_are_told_in_one_line(given, expected):
    with pytest.raises(OptionError, match=expected) as e:
        Options(overrides=given)
    assert "\n" not in str(e.value)


def test_overrides_are_kept_as_pairs_that_can_be_replaced_and_hashed():
    options = Options(overrides={"b.py:1": "never", "a": "one-way"})
    assert options.overrides == (("b.py:1", "never"), ("a", "one-way"))
    assert dataclasses.replace(options, policy="always").overrides == options.overrides
    assert hash(options) == hash(dataclasses.replace(options))


SIZES = {
    0: 0,
    1024: 1024,
    "2GiB": 2 << 30,
    "512 MiB": 512 << 20,
    "1.5kb": 1500,
    "10": 10,
    "7 B": 7,
    "1TB": 10**12,
}


@pytest.mark.parametrize(("given", "expected"), SIZES.items(), ids=str)
def test_sizes(given, expected):
    assert Options(memory_budget=given).memory_budget == expected
    assert read_size(given, "x") == expected


@pytest.mark.parametrize("given", [-1, 1.5, True, "much", "2 XB", "", "-3", [1]], ids=str)
def test_bad_sizes(given):
    with pytest.raises(OptionError, match=r"memory_budget=.*; give bytes as a whole number"):
        Options(memory_budget=given)


BAD_VALUES = {
    "min_gain": (["much", True, -0.1, 1.0, float("nan")], "use a part of the time from 0 to below"),
    "max_permutes": ([-1, 2.0, True, "3"], "use None or a whole number from 0 up"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_numbers(name):
    values, expected = BAD_VALUES[name]
    for value in values:
        with pytest.raises(OptionError, match=f"{name}={value!r}; {expected}"):
            Options(**{name: value})
