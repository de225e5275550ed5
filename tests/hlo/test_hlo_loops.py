import re

import pytest
from hlo_programs import DEVICES, LAYERS
from hlotools import hlo, stored
from hypothesis import given
from hypothesis import strategies as st

from collmm.hlo.calls import executions
from collmm.hlo.loops import trip_count
from collmm.hlo.parse import parse

KNOWN = [
    ("cpu-jax010-ring", [DEVICES]),
    ("cpu-jax012-ring", [DEVICES]),
    ("cpu-jax010-scan", [LAYERS]),
    ("gpu-jax012-ring", [DEVICES]),
    ("gpu-jax012-scan", [LAYERS]),
    ("v5e-jax012-scan", [LAYERS]),
    ("tpu7x-jax012-scan", [LAYERS]),
    ("v5e-jax012-grid", [LAYERS, LAYERS]),
    ("gpu-jax012-grid", [LAYERS, LAYERS]),
    # Two-way rings over 8, so 4 steps each way, and unrolled by two.
    ("v5e-jax012-windowed", [2, 2]),
    ("v5e-jax010-windowed", [2, 2]),
]


def loops(text):
    module = parse(text)
    return [
        trip_count(module, module[name], i)
        for name in module
        for i in module[name]
        if i.opcode == "while"
    ]


@pytest.mark.parametrize(("name", "turns"), KNOWN)
def test_turns_of_the_stored_programs(name, turns):
    assert loops(stored(name)) == turns


@pytest.mark.parametrize(("name", "turns"), KNOWN)
def test_turns_follow_from_the_condition_alone(name, turns):
    """Without the compiler's word, the condition, the start and the step give the same count."""
    text = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", stored(name))

    assert "known_trip_count" not in text
    assert loops(text) == turns


def loop(start="0", bound="10", step="add(%i, %by)", by="1", direction="LT", test="%i.1, %n"):
    return hlo(
        f"""
        %body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
          %s = (s32[], f32[8]{{0}}) parameter(0)
          %i = s32[] get-tuple-element(%s), index=0
          %x = f32[8]{{0}} get-tuple-element(%s), index=1
          %by = s32[] constant({by})
          %next = s32[] {step}
          ROOT %out = (s32[], f32[8]{{0}}) tuple(%next, %x)
        }}

        %cond (s.1: (s32[], f32[8])) -> pred[] {{
          %s.1 = (s32[], f32[8]{{0}}) parameter(0)
          %i.1 = s32[] get-tuple-element(%s.1), index=0
          %n = s32[] constant({bound})
          ROOT %more = pred[] compare({test}), direction={direction}
        }}

        ENTRY %main (p: f32[8], q: s32[]) -> (s32[], f32[8]) {{
          %p = f32[8]{{0}} parameter(0)
          %q = s32[] parameter(1)
          %zero = s32[] constant({start})
          %copied = s32[] copy(%zero)
          %init = (s32[], f32[8]{{0}}) tuple(%copied, %p)
          ROOT %while = (s32[], f32[8]{{0}}) while(%init), condition=%cond, body=%body
        }}
        """
    )


COUNTED = [
    ({}, 10),
    ({"by": "2"}, 5),
    ({"by": "3"}, 4),
    ({"start": "4", "by": "2"}, 3),
    ({"direction": "LE"}, 11),
    ({"direction": "LT", "bound": "0"}, 0),
    ({"direction": "NE", "by": "5"}, 2),
    ({"start": "7", "bound": "0", "by": "-1", "direction": "GT"}, 7),
    ({"start": "7", "bound": "0", "by": "1", "step": "subtract(%i, %by)", "direction": "GE"}, 8),
    ({"test": "%n, %i.1", "direction": "GT"}, 10),
    ({"test": "%n, %i.1", "direction": "NE"}, 10),
    ({"step": "add(%by, %i)"}, 10),
]
UNKNOWN = [
    {"by": "0"},
    {"by": "-1"},
    {"direction": "NE", "by": "3"},
    {"direction": "EQ"},
    {"step": "multiply(%i, %by)"},
    {"test": "%n, %n"},
]


@pytest.mark.parametrize(("parts", "turns"), COUNTED)
def test_counted_loops(parts, turns):
    assert loops(loop(**parts)) == [turns]


@pytest.mark.parametrize("parts", UNKNOWN)
def test_what_cannot_be_counted_is_unknown(parts):
    assert loops(loop(**parts)) == [None]


def test_a_start_that_is_an_argument_is_unknown():
    assert loops(loop().replace("tuple(%copied, %p)", "tuple(%q, %p)")) == [None]


def test_a_bound_carried_through_the_state():
    text = (
        loop()
        .replace("(s32[], f32[8]{0})", "(s32[], f32[8]{0}, s32[])")
        .replace("ROOT %out = ", "%m = s32[] get-tuple-element(%s), index=2\n  ROOT %out = ")
        .replace("tuple(%next, %x)", "tuple(%next, %x, %m)")
        .replace("%n = s32[] constant(10)", "%n = s32[] get-tuple-element(%s.1), index=2")
        .replace("%init = ", "%six = s32[] constant(6)\n  %init = ")
        .replace("tuple(%copied, %p)", "tuple(%copied, %p, %six)")
    )
    assert loops(text) == [6]
    assert loops(text.replace("tuple(%next, %x, %m)", "tuple(%next, %x, %next)")) == [None]


@given(
    st.integers(-20, 20), st.integers(-20, 20), st.integers(-4, 4), st.sampled_from(["LT", "GT"])
)
def test_counts_are_those_of_the_loop_run_by_hand(start, bound, step, direction):
    i, turns = start, 0
    while (i < bound if direction == "LT" else i > bound) and turns < 100:
        i += step
        turns += 1
    text = loop(start=str(start), bound=str(bound), by=str(step), direction=direction)
    assert loops(text) == [turns if turns < 100 else None]


def test_executions_multiply_through_nested_loops_and_add_over_calls():
    text = hlo(
        """
        %leaf (a: f32[8]) -> f32[8] {
          %a = f32[8]{0} parameter(0)
          ROOT %neg = f32[8]{0} negate(%a)
        }

        %inner (s: (f32[8])) -> (f32[8]) {
          %s = (f32[8]{0}) parameter(0)
          %x = f32[8]{0} get-tuple-element(%s), index=0
          %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%leaf
          %z = f32[8]{0} call(%y), to_apply=%leaf
          ROOT %t = (f32[8]{0}) tuple(%z)
        }

        %yes (s.1: (f32[8])) -> pred[] {
          %s.1 = (f32[8]{0}) parameter(0)
          ROOT %go = pred[] constant(true)
        }

        %outer (s.2: (f32[8])) -> (f32[8]) {
          %s.2 = (f32[8]{0}) parameter(0)
          ROOT %w = (f32[8]{0}) while(%s.2), condition=%yes, body=%inner, TURNS_3
        }

        %never (b: f32[8]) -> f32[8] {
          ROOT %b = f32[8]{0} parameter(0)
        }

        ENTRY %main (p: f32[8]) -> (f32[8]) {
          %p = f32[8]{0} parameter(0)
          %q = f32[8]{0} fusion(%p), kind=kLoop, calls=%leaf
          %t.1 = (f32[8]{0}) tuple(%q)
          ROOT %w.1 = (f32[8]{0}) while(%t.1), condition=%yes, body=%outer, TURNS_5
        }
        """
    )
    for n in "35":
        known = f'backend_config={{"known_trip_count":{{"n":"{n}"}}}}'
        text = text.replace(f"TURNS_{n}", known)
    assert executions(parse(text)) == {
        "leaf": 1 + 5 * 3 * 2,
        "inner": 15,
        "yes": 5 * 4 + 6,
        "outer": 5,
        "never": 0,
        "main": 1,
    }
    unknown = executions(parse(text.replace('"known_trip_count":{"n":"5"}', "")))
    assert unknown == {
        "leaf": None,
        "inner": None,
        "yes": None,
        "outer": None,
        "never": 0,
        "main": 1,
    }
