"""Plan files: what is saved is followed, and what no longer fits is told site by site."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from steptools import ALWAYS, answer, arguments, make_mesh, make_step, permutes, same

import collmm
from collmm import (
    OptionError,
    Options,
    PlanMismatch,
    PlanMismatchWarning,
    Reason,
    overlap_collectives,
)
from collmm.plan_file import read, shown_path, text


@pytest.fixture
def mesh():
    return make_mesh()


@pytest.fixture
def saved(mesh, tmp_path):
    """The path of the plan of ``make_step``, every loop made."""
    path = tmp_path / "plan.json"
    overlap_collectives(make_step(mesh), ALWAYS).plan(*arguments(mesh)).save(path)
    return path


def edited(path, change):
    """Write the file anew with ``change(content)`` made."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def pinned(mesh, path, step=None, **options):
    return overlap_collectives(step or make_step(mesh), Options(plan=path, **options))


def schedules(plan):
    return [(d.collective.describe(), d.schedule) for d in plan.rewritten]


# --- following ---


def test_a_saved_plan_is_followed_where_the_cost_model_says_no(mesh, saved):
    args = arguments(mesh)
    assert not overlap_collectives(make_step(mesh), Options()).plan(*args).rewritten
    again = pinned(mesh, saved)
    plan = again.plan(*args)
    always = overlap_collectives(make_step(mesh), ALWAYS).plan(*args)
    assert schedules(plan) == schedules(always)
    assert len(plan.rewritten) == 2
    assert f"decided as {saved} says" in plan.note
    same(again(*args), answer(*args))
    assert permutes(again.lower(*args).compile()) > 0


def test_a_plan_is_written_the_same_every_time_and_read_back_whole(mesh, saved):
    args = arguments(mesh)
    first = saved.read_text()
    plan = overlap_collectives(make_step(mesh), ALWAYS).plan(*args)
    assert text(plan) == first
    document = json.loads(first)
    assert document == plan.to_json()
    assert (document["format"], document["program"], document["jax"]) == (
        1,
        "step",
        jax.__version__,
    )
    assert document["mesh"] == {"d": 2, "m": 4}
    assert document["chip"] == "v5e"
    assert max(map(len, first.splitlines())) <= 120
    # Following it and saving again keeps every decision.
    again = pinned(mesh, saved).plan(*args)
    kept = ("decision", "looped", "schedule", "einsum", "collectives", "file", "line")
    for old, new in zip(document["sites"], again.to_json()["sites"], strict=True):
        assert {k: old[k] for k in kept} == {k: new[k] for k in kept}


def test_decisions_can_be_edited(mesh, saved):
    def leave_first(content):
        content["sites"][0]["decision"] = "leave"
        content["sites"][1]["schedule"] = {
            "axes": ["m"],
            "ring_size": 4,
            "two_way": False,
            "unroll": False,
        }

    edited(saved, leave_first)
    args = arguments(mesh)
    step = pinned(mesh, saved)
    first, second = step.plan(*args).decisions
    assert (first.schedule, first.reason) == (None, Reason.PLAN_FILE)
    assert (second.schedule.two_way, second.schedule.unroll) == (False, False)
    same(step(*args), answer(*args))


def test_every_field_of_a_schedule_comes_back(mesh, saved):
    whole = {
        "axes": ["m"],
        "ring_size": 4,
        "two_way": True,
        "unroll": True,
        "barrier": False,
        "chains": 2,
        "order": [0, 2, 1, 3],
    }
    edited(saved, lambda content: content["sites"][1].update(schedule=whole))
    _, second = pinned(mesh, saved).plan(*arguments(mesh)).decisions
    got = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(second.schedule).items()}
    assert {k: got[k] for k in whole} == whole
    _, stored = second, json.loads(text(pinned(mesh, saved).plan(*arguments(mesh))))
    assert stored["sites"][1]["schedule"] == whole


def test_a_site_that_has_no_loop_stays_as_it_is(mesh, tmp_path):
    def step(x, up, down):
        return make_step(mesh)(x, up, down), jnp.einsum("kf,kf->f", up, up)

    path = tmp_path / "plan.json"
    args = arguments(mesh)
    overlap_collectives(step, ALWAYS).plan(*args).save(path)
    plan = pinned(mesh, path, step).plan(*args)
    assert len(plan.rewritten) == 2
    assert plan.decisions[2].reason is not Reason.PLAN_FILE


def test_a_pinned_plan_of_scattered_sums_is_the_same_plan(mesh, tmp_path):
    """Plain tensor parallelism: the gather appears only once the sum before it is scattered."""

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    def block(x, w, v):
        for _ in range(2):
            h = jnp.maximum(x @ w, 0)
            x = x + jax.lax.with_sharding_constraint(h @ v, on("d", None))
        return x

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on(*spec))

    args = (
        array(8, 16, spec=("d", None)),
        array(16, 32, spec=(None, "m")),
        array(32, 16, spec=("m", None)),
    )
    plan = overlap_collectives(block, ALWAYS).plan(*args)
    kinds = {d.collective.kind for d in plan.rewritten}
    assert kinds == {"all-gather", "all-reduce"}
    plan.save(tmp_path / "plan.json")
    again = pinned(mesh, tmp_path / "plan.json", block).plan(*args)
    assert schedules(again) == schedules(plan)


def test_a_plan_file_counts_inside_an_outer_jit(mesh, saved):
    args = arguments(mesh)
    outer = jax.jit(pinned(mesh, saved))
    assert permutes(outer.lower(*args).compile()) > 0
    same(outer(*args), answer(*args))


def test_lines_may_move(mesh, saved):
    edited(saved, lambda content: [site.update(line=1) for site in content["sites"]])
    assert len(pinned(mesh, saved).plan(*arguments(mesh)).rewritten) == 2


# --- what no longer fits ---


def changed_header(key, value):
    return lambda content: content.update({key: value})


HEADERS = {
    "program": ("other", "program: the plan file has other, here it is step"),
    "jax": ("0.1.2", f"jax: the plan file has 0.1.2, here it is {jax.__version__}"),
    "mesh": ({"d": 4, "m": 2}, "mesh: the plan file has d=4 m=2, here it is d=2 m=4"),
    "chip": ("h100", "chip: the plan file has h100, here it is v5e"),
}


@pytest.mark.parametrize(("key", "case"), HEADERS.items(), ids=HEADERS)
def test_another_origin_stops(mesh, saved, key, case):
    value, line = case
    edited(saved, changed_header(key, value))
    step = pinned(mesh, saved)
    for call in (step.plan, step, step.lower):
        with pytest.raises(PlanMismatch) as e:
            call(*arguments(mesh))
        assert e.value.differences == (line,)
        assert str(e.value) == (
            f"the plan {saved} does not fit: {line}; make it anew, or set "
            'Options(on_mismatch="replan")'
        )


def test_another_mesh_and_other_shapes_are_told_site_by_site(mesh, saved):
    args = arguments(mesh, batch=8)
    with pytest.raises(PlanMismatch) as e:
        pinned(mesh, saved).plan(*args)
    lines = [re.sub(r":\d+\)", ")", line) for line in e.value.differences]
    assert lines == [
        "site 0 (steptools.py): shapes was [[4, 8, 8], [8, 16], [4, 8, 16]], "
        "is [[8, 8, 8], [8, 16], [8, 8, 16]]",
        "site 0 (steptools.py): collectives was all-gather lhs[1] over m of 512 bytes, "
        "is all-gather lhs[1] over m of 1024 bytes",
        "site 1 (steptools.py): shapes was [[4, 8, 16], [16, 8], [4, 8, 8]], "
        "is [[8, 8, 16], [16, 8], [8, 8, 8]]",
        "site 1 (steptools.py): collectives was reduce-scatter result[1] over m of 512 bytes, "
        "is reduce-scatter result[1] over m of 1024 bytes",
    ]
    assert "; and 1 more; make it anew" in str(e.value)
    assert "\n" not in str(e.value)


def test_einsums_that_came_and_went_are_named(mesh, saved):
    def longer(x, up, down):
        return make_step(mesh)(x, up, down), up.T @ up

    def shorter(x, up, down):
        return jnp.einsum("bsk,kf->bsf", x, up)

    for step, line in [
        (longer, r"site 2 \(test_plan_file.py:\d+, .*\) is new"),
        (shorter, r"site 1 \(steptools.py:\d+, .*\) is gone"),
    ]:
        edited(saved, changed_header("program", step.__name__))
        with pytest.raises(PlanMismatch) as e:
            pinned(mesh, saved, step).plan(*arguments(mesh))
        assert re.fullmatch(line, e.value.differences[-1])


def test_einsums_behind_a_new_one_are_not_told_as_unable_to_follow(mesh, saved):
    def earlier(x, up, down):
        return up.T @ up, make_step(mesh)(x, up, down)

    edited(saved, changed_header("program", "earlier"))
    with pytest.raises(PlanMismatch) as e:
        pinned(mesh, saved, earlier).plan(*arguments(mesh))
    [line] = e.value.differences
    assert re.fullmatch(r"site 0 \(test_plan_file.py:\d+, .*\) is new", line)


def test_a_schedule_of_another_ring_does_not_fit(mesh, saved):
    def longer(content):
        content["sites"][0]["schedule"]["ring_size"] = 8

    with pytest.raises(PlanMismatch, match="and it can only be left alone: plan-file"):
        pinned(mesh, edited(saved, longer)).plan(*arguments(mesh))


def test_replanning_warns_and_decides_anew(mesh, saved):
    edited(saved, changed_header("jax", "0.1.2"))
    step = pinned(mesh, saved, on_mismatch="replan", policy="always")
    args = arguments(mesh)
    with pytest.warns(PlanMismatchWarning, match=r"does not fit: jax: .*; planned anew") as caught:
        plan = step.plan(*args)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert len(plan.rewritten) == 2
    assert "decided as" not in plan.note
    same(step(*args), answer(*args))  # planned once: no further warning


def test_an_outer_jit_stops_too(mesh, saved):
    edited(saved, changed_header("jax", "0.1.2"))
    with pytest.raises(PlanMismatch, match=r"the plan file has 0\.1\.2"):
        jax.jit(pinned(mesh, saved))(*arguments(mesh))


# --- files that are none ---

BAD = {
    "no-json": ("{", "is not JSON: "),
    "other": ("[]", "is no plan file; make one with plan.save"),
    "format": ('{"format": 99, "sites": []}', "has format 99 and this collmm reads 1"),
    "sites": ('{"format": 1, "sites": [1]}', '"sites" must be a list of objects'),
    "site": ('{"format": 1, "sites": [{}]}', "site 0 has no 'einsum'"),
}


@pytest.mark.parametrize(("content", "expected"), BAD.values(), ids=BAD)
def test_what_is_no_plan_file_is_one_line(mesh, tmp_path, content, expected):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(OptionError) as e:
        pinned(mesh, path)(*arguments(mesh))
    assert expected in str(e.value)
    assert "\n" not in str(e.value)


BAD_SITES = {
    "decision": ({"decision": "maybe"}, "decision is 'maybe'; use 'rewrite' or 'leave'"),
    "looped": ({"looped": "all-gather lhs[0]"}, '"looped" is .*; use one of all-gather lhs\\[1\\]'),
    "schedule": ({"schedule": None}, 'a rewritten site needs a "schedule" object, not None'),
    "field": ({"schedule": {"speed": 1}}, "a schedule has no 'speed'; it has axes, ring_size"),
    "value": (
        {"schedule": {"axes": ["m"], "ring_size": 4, "two_way": 3, "unroll": True}},
        "Schedule two_way must be True or False, got 3",
    ),
    "missing": ({"schedule": {"axes": ["m"]}}, "ring_size"),
}


@pytest.mark.parametrize(("fields", "expected"), BAD_SITES.values(), ids=BAD_SITES)
def test_a_bad_site_is_one_line(mesh, saved, fields, expected):
    edited(saved, lambda content: content["sites"][0].update(fields))
    with pytest.raises(OptionError, match=f"the plan .*, site 0.*{expected}"):
        read(saved)


def test_a_missing_file_says_how_to_make_one(mesh, tmp_path):
    step = pinned(mesh, tmp_path / "none.json")
    with pytest.raises(OptionError, match=r"cannot read the plan .*none\.json: No such file") as e:
        step(*arguments(mesh))
    assert "plan.save" in str(e.value)
    with pytest.raises(OptionError, match=r"cannot write the plan to .*: No such file"):
        overlap_collectives(make_step(mesh)).plan(*arguments(mesh)).save(tmp_path / "no" / "p.json")


def test_the_options_of_plan_files_are_checked():
    assert Options(plan=pathlib.Path("plan.json")).plan == "plan.json"
    with pytest.raises(OptionError, match="plan=3; give the path of a file"):
        Options(plan=3)
    with pytest.raises(OptionError, match="on_mismatch='ask'; use one of stop, replan"):
        Options(on_mismatch="ask")
    hash(dataclasses.replace(Options(), plan="plan.json"))


def test_paths_are_shown_from_the_folder_at_hand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(str(tmp_path / "models" / "gpt.py")) == "models/gpt.py"
    assert shown_path("/usr/lib/python3/site-packages/flax/nn.py") == "flax/nn.py"
    assert shown_path("/elsewhere/gpt.py") == "/elsewhere/gpt.py"
    assert collmm.__file__.endswith("collmm/__init__.py")
