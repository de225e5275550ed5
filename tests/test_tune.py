"""Tuning: every candidate is run, the fastest by the clock stays, and the plan can be followed."""

import json

import jax
import numpy as np
import pytest

from collmm import Options, overlap_collectives
from collmm.cli.main import run
from collmm.timing import interleaved, medians
from collmm.tuning import open_runnable, tune

PROGRAM = """
import functools
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = {"model": 4}

def build(mesh):
    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(x, up, down):
        return jax.lax.with_sharding_constraint(jnp.maximum(x @ up, 0) @ down, on("model", None))

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on(*spec))

    return step, (
        array(16, 16, spec=("model", None)),
        array(16, 64, spec=(None, "model")),
        array(64, 16, spec=("model", None)),
    )
"""


pytestmark = pytest.mark.usefixtures("kept_environment")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def clock(favourite):
    """A measure that runs every call once and finds the one at ``favourite`` fastest."""
    groups = []

    def measure(calls, rounds):
        for call in calls:
            call.prepare()
            jax.block_until_ready(call())
        groups.append(len(calls))
        return [0.5 if i == favourite(len(calls)) else 1.0 + i for i in range(len(calls))]

    return measure, groups


@pytest.mark.parametrize("favourite", [0, 1, 2])
def test_what_the_clock_finds_fastest_is_planned(path, favourite, tmp_path):
    program = open_runnable(path, "cpu:4")
    measure, groups = clock(lambda count: favourite if count > 2 else 0)
    tuned = tune(program, measure=measure)
    # Left alone, two ways with chunks and without and one for the gather; for the scattered sum two
    # ways in four parts and in two, and one; then both programs.
    assert groups == [4, 4, 2]
    assert [sites for sites, _ in tuned.trials] == [(0,), (1,)]
    for _, trials in tuned.trials:
        assert [t.chosen for t in trials] == [i == favourite for i in range(len(trials))]
    decisions = tuned.plan.decisions
    if favourite == 0:
        assert not tuned.plan.rewritten
    for d in decisions:
        if favourite:
            assert d.schedule == d.candidates[favourite - 1].schedule
    saved = tmp_path / "plan.json"
    tuned.plan.save(saved)
    followed = overlap_collectives(program.fn, Options(plan=saved)).plan(*program.args)
    assert [d.schedule for d in followed.decisions] == [d.schedule for d in decisions]
    assert "tuned on 4 simulated CPU devices" in tuned.plan.note


def test_a_gain_within_the_margin_is_no_reason(path):
    program = open_runnable(path, "cpu:4")
    tuned = tune(program, measure=lambda calls, rounds: [1.0, *[0.99] * (len(calls) - 1)])
    assert not tuned.plan.rewritten
    tuned = tune(
        program, measure=lambda calls, rounds: [1.0, *[0.99] * (len(calls) - 1)], min_gain=0.005
    )
    assert len(tuned.plan.rewritten) == 2


def test_contenders_take_turns():
    seen = []

    def call(name):
        return lambda: seen.append(name) or np.zeros(1)

    taken = interleaved([call("a"), call("b"), call("c")], 2)
    assert "".join(seen) == "abc" + "abc" + "bca"
    assert [len(times) for times in taken] == [2, 2, 2]
    assert all(seconds >= 0 for seconds in medians([call("a")], 3))


def test_the_command_tunes_and_saves(path, tmp_path, capsys):
    saved = tmp_path / "plan.json"
    argv = ["tune", str(path), "--target=cpu:4", "--rounds=1", "--most=1", f"--save={saved}"]
    assert run([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["devices"].startswith("4 simulated CPU devices on ")
    assert [g["sites"] for g in document["groups"]] == [[0], [1]]
    for group in document["groups"]:
        assert sum(t["chosen"] for t in group["trials"]) == 1
        assert all(t["seconds"] > 0 for t in group["trials"])
    assert document["original_s"] > 0
    assert json.loads(saved.read_text()) == document["plan"]


def test_a_target_without_devices_is_one_line_and_status_2(path, capsys):
    assert run(["tune", str(path), "--target=tpu:v5e:2x4"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "collmm tune: tune runs the program and tpu:v5e:2x4 is only compiled for; use cpu:N\n"
    )
