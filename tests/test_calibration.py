"""Calibration: known figures are found again, and what is measured is what is said."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collmm import OptionError, Options, overlap_collectives
from collmm.calibration import calibrate_devices
from collmm.cli.main import run
from collmm.cost.collectives import gpu_ring, network_ring, torus_ring
from collmm.cost.einsum import Product
from collmm.cost.figures import Figure, Rate
from collmm.cost.fit import (
    EINSUM,
    GATHER,
    MEMORY,
    PERMUTE,
    SCATTER,
    Sample,
    fit,
    predicted,
    split,
    with_figures,
)
from collmm.cost.hardware import chip, load_profile
from collmm.measuring import COLLECTIVES, Sizes, collective_loop, einsum_loop, memory_loop, per_step

TINY = Sizes(
    collectives=(1 << 12, 1 << 13, 1 << 14),
    memory=(1 << 16, 1 << 17),
    rows=(8, 16, 32),
    widths=(32,),
    dtypes=("float32",),
    least_s=0.001,
    rounds=2,
)
SIZES = [1 << k for k in range(14, 28)]
PRODUCTS = [
    Product(1, rows, width, width)
    for rows, width in itertools.product((64, 128, 512, 2048, 8192), (1024, 4096, 8192))
]


pytestmark = pytest.mark.usefixtures("kept_environment")


def figure(value, unit="s"):
    return Figure(value, unit, "made up")


def rate(value, unit):
    return Rate(figure(value, unit), figure(value, unit))


def value(f):
    return f.value() if isinstance(f, Rate) else f.value


def samples_of(row, ring, noise=0.0):
    """What a machine with the figures of ``row`` would be measured to take."""
    ring = with_figures(ring, row)
    blank = [Sample(kind, 1.0, size) for kind in (PERMUTE, GATHER, SCATTER) for size in SIZES]
    blank += [Sample(MEMORY, 1.0, size) for size in SIZES[8:]]
    blank += [Sample(EINSUM, 1.0, p.flops, p) for p in PRODUCTS]
    random = np.random.default_rng(0)
    return [
        dataclasses.replace(
            s, seconds=predicted(s, row, ring) * random.uniform(1 - noise, 1 + noise)
        )
        for s in blank
    ]


ODD = {
    "bf16": rate(311e12, "flop/s"),
    "hbm": rate(611e9, "bytes/s"),
    "link": rate(31e9, "bytes/s"),
    "launch": figure(9e-6),
    "step_launch": figure(3.3e-6),
    "permute_share": figure(0.7, "1"),
    "scatter_share": figure(0.9, "1"),
}
RINGS = {
    "torus": ("v5e", lambda row: torus_ring(row, (16,))),
    "line": ("v5p", lambda row: torus_ring(row, (2,))),
    "two-axes": ("v4", lambda row: torus_ring(row, (4, 4), (4, 4, 4))),
    "switch": ("h100", lambda row: gpu_ring(row, 8)),
}


@pytest.mark.parametrize(("base", "make"), RINGS.values(), ids=RINGS)
def test_the_figures_of_a_machine_are_found_again(base, make):
    base = chip(base).per_device()
    real = dataclasses.replace(base, **ODD)
    found = fit(samples_of(real, make(base)), base, make(base), "here", "lab")
    assert found.chip.name == "lab"
    for name in ("bf16", "hbm", "link", "launch", "step_launch"):
        got, want = getattr(found.chip, name), getattr(real, name)
        assert value(got) == pytest.approx(value(want), rel=0.05), name
        assert "here" in str(got)
    assert found.chip.share("permute_share") == pytest.approx(0.7, rel=0.05)
    assert found.chip.share("scatter_share") == pytest.approx(0.9, rel=0.05)
    for error in found.errors:
        assert error.held_out > 0
        assert error.worst < 0.05, error
    assert found.chip.int8 == base.int8  # nothing was measured of it


def test_noise_is_told_and_does_not_move_the_figures_far():
    base = chip("h100")
    real = dataclasses.replace(base, **ODD)
    found = fit(samples_of(real, gpu_ring(base, 8), 0.2), base, gpu_ring(base, 8), "here", "lab")
    assert found.chip.link_bytes_per_s() == pytest.approx(31e9, rel=0.15)
    assert found.chip.bf16.value() == pytest.approx(311e12, rel=0.25)
    for error in found.errors:
        assert 0.01 < error.median < 0.2
        assert error.median <= error.worst < 0.45


def test_a_launch_that_is_not_seen_is_small_but_something():
    base = chip("h100")
    free = dataclasses.replace(base, step_launch=figure(1e-30))
    found = fit(samples_of(free, gpu_ring(base, 8)), base, gpu_ring(base, 8), "here", "lab")
    assert 1e-10 < found.chip.step_launch.value < 1e-7
    assert all(e.worst < 0.05 for e in found.errors)


def test_between_nodes_the_network_is_fitted():
    base = chip("h100")
    real = dataclasses.replace(base, dcn=rate(17e9, "bytes/s"))
    samples = samples_of(real, network_ring(base, 4, 2))
    found = fit(samples, base, network_ring(base, 4, 2), "here", "lab")
    assert found.chip.dcn_bytes_per_s() == pytest.approx(17e9, rel=0.05)
    assert found.chip.link == base.link
    assert "dcn" in found.fields


def test_peers_are_scaled_with_the_links():
    base = chip("mi300x")
    real = dataclasses.replace(
        base, link=base.link.scaled(0.5, "x"), peer=base.peer.scaled(0.5, "x")
    )
    found = fit(samples_of(real, gpu_ring(base, 8)), base, gpu_ring(base, 8), "here", "lab")
    assert found.chip.peer_bytes_per_s() == pytest.approx(32e9, rel=0.05)
    assert "peer" in found.fields


def test_what_was_not_measured_stays_as_it_was():
    base = chip("v5e")
    einsums = [Sample(EINSUM, 2 * p.flops / 197e12 + 1e-6, p.flops, p) for p in PRODUCTS]
    found = fit(einsums, base, None, "here", "v5e")
    assert found.chip.link == base.link
    assert found.chip.launch == base.launch
    assert found.chip.hbm == base.hbm
    assert set(found.fields) == {"bf16", "step_launch"}
    assert fit([], base, None, "nothing", "v5e").fields == ()


def test_every_second_size_is_held_out_but_never_the_ends():
    samples = [Sample(GATHER, 1.0, size) for size in (5, 1, 3, 2, 4)]
    samples += [Sample(MEMORY, 1.0, 7)]
    used, held_out = split(samples)
    assert [s.bytes for s in held_out] == [2, 4]
    assert [(s.kind, s.bytes) for s in used] == [
        (GATHER, 1),
        (GATHER, 3),
        (GATHER, 5),
        (MEMORY, 7),
    ]


# --- measuring ---


def mesh_of(count):
    devices = np.array(jax.devices()[:count])
    return jax.sharding.Mesh(devices, ("ring",), axis_types=(jax.sharding.AxisType.Auto,))


OPERATIONS = {PERMUTE: "collective-permute", GATHER: "all-gather", SCATTER: "reduce-scatter"}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_step_is_one_whole_collective(kind):
    loop = collective_loop(kind, mesh_of(4), None, 4096, jnp.dtype("float32"))
    text = loop.jitted.lower(np.full((1,), 3, np.int32), *loop.operands).compile().as_text()
    found = re.findall(r" = \S+ (all-[\w-]+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    assert found == [OPERATIONS[kind]]
    assert loop.bytes == (1024 if kind == PERMUTE else 4096)
    shape = "f32[256]" if kind != GATHER else "f32[1024]"
    assert f"{shape}" in next(line for line in text.splitlines() if f" {found[0]}(" in line)


def test_a_permute_ring_visits_its_members_in_their_order():
    order = (0, 2, 3, 1)
    loop = collective_loop(PERMUTE, mesh_of(4), order, 16, jnp.dtype("float32"))
    x = jax.device_put(np.arange(4, dtype=np.float32), loop.operands[0].sharding)
    moved = np.asarray(loop.jitted(np.ones((1,), np.int32), x))
    # What was on member 0 is on 2, what was on 2 on 3, and so on round.
    np.testing.assert_array_equal(moved, [1, 3, 0, 2])


def test_loops_make_what_their_steps_say():
    (shard,) = collective_loop(GATHER, mesh_of(2), None, 8, jnp.dtype("float32")).operands
    assert shard.shape == (2,)
    loop = memory_loop(jax.devices()[0], 64, jnp.dtype("float32"))
    assert loop.bytes == 128
    np.testing.assert_array_equal(np.asarray(loop(5)), np.ones(16))
    loop, product = einsum_loop(jax.devices()[0], 8, 16, "float32")
    x, w = map(np.asarray, loop.operands)
    np.testing.assert_allclose(np.asarray(loop(2)), x @ w @ w, rtol=1e-4, atol=1e-4)
    assert (product.rows, product.depth, product.columns, product.flops) == (8, 16, 16, 4096)


def test_a_step_takes_what_many_take_less_what_few_do(monkeypatch):
    clock = [0.0]

    def run(steps):
        clock[0] += 1.0 + 0.5 * steps  # dispatch, and every step
        return np.zeros(1)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert per_step(run, dataclasses.replace(TINY, least_s=10.0)) == pytest.approx(0.5)


def test_simulated_devices_are_measured_and_labelled(tmp_path):
    done = calibrate_devices(jax.devices()[:2], sizes=TINY)
    assert (done.name, done.base) == ("cpu", "v5e")
    assert done.measured.startswith("measured on 2 simulated CPU devices on ")
    assert done.notes == (
        "simulated devices share memory and cores: these are no figures of any link",
    )
    kinds = {s.curve for s in done.samples}
    assert kinds == {PERMUTE, GATHER, SCATTER, MEMORY, "einsum float32"}
    assert all(0 < s.seconds < 10 for s in done.samples)
    assert {"link", "launch", "hbm", "f32", "step_launch"} <= set(done.fit.fields)
    text = str(done)
    assert "error of the predictions on sizes that were held out of the fit" in text
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"lab": {"base": "h100"}}))
    done.save(path)
    table = load_profile(path)
    assert "lab" in table
    assert table["cpu"] == done.fit.chip
    plan = overlap_collectives(lambda x: x @ x, Options(profile=path, chip="cpu")).plan(
        jax.ShapeDtypeStruct((4, 4), jnp.float32)
    )
    assert plan.chip == "cpu"
    assert plan.note == f"cpu is that of {path}"


def test_one_device_has_no_collectives():
    done = calibrate_devices(jax.devices()[:1], name="alone", sizes=TINY)
    assert {s.kind for s in done.samples} == {MEMORY, EINSUM}
    assert "one device: no collective was measured" in done.notes
    assert done.fit.chip.link == chip("v5e").link
    assert done.name == "alone"


# --- the command ---


def test_the_command_writes_a_profile_that_plans_use(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("collmm.calibration.SIMULATED", TINY)
    path = tmp_path / "profile.json"
    assert run(["calibrate", "--target=cpu:2", f"--out={path}", "--json", "--name=mine"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "mine"
    assert json.loads(path.read_text()) == {"mine": document["row"]}
    assert {e["curve"] for e in document["errors"]} == {s["curve"] for s in document["samples"]}
    assert run(["calibrate", "--target=cpu:2", f"--out={path}"]) == 0
    out = capsys.readouterr().out
    assert "note: simulated devices share memory and cores" in out
    assert f'wrote cpu to {path}; plan with it: Options(profile="{path}", chip="cpu")' in out
    alone = tmp_path / "alone.json"
    assert run(["calibrate", "--target=cpu:2", f"--out={alone}"]) == 0
    assert f'plan with it: Options(profile="{alone}")' in capsys.readouterr().out
    assert set(json.loads(path.read_text())) == {"mine", "cpu"}


def test_where_a_profile_cannot_be_written_nothing_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("collmm.calibration.calibrate_devices", lambda *_: pytest.fail("measured"))
    notes = tmp_path / "notes.txt"
    notes.write_text("[]")
    wrong = {
        tmp_path: "it is a directory",
        tmp_path / "no" / "p.json": "there is no directory",
        notes: "must be an object of chips, not a list; name another file",
    }
    for out, message in wrong.items():
        assert run(["calibrate", "--target=cpu:2", f"--out={out}"]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert message in captured.err


BAD = {
    "argument": (["calibrate", "x.py"], "calibrate takes no arguments, and got 'x.py'"),
    "target": (["calibrate", "--target=abacus"], "target 'abacus' is not one of cpu:N"),
    "unknown": (["calibrate", "--target=tpu:v9:2x4"], "no compiler for 'v9' is known; "),
    "untimed": (["calibrate", "--target=gpu:a100:8"], "its compiler states no times"),
}


@pytest.mark.parametrize(("argv", "expected"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2(argv, expected, capsys):
    assert run(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert captured.err.count("\n") == 1


def test_a_file_that_is_no_profile_is_kept(tmp_path):
    done = calibrate_devices(jax.devices()[:1], sizes=TINY)
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(OptionError, match=r"notes\.txt' is not JSON: .*; name another file to"):
        done.save(path)
    assert path.read_text() == "my notes"
    path.write_text('{"lab": {"base": "h1"}}')
    with pytest.raises(OptionError, match=r"\"base\" is 'h1'; .*; name another file to"):
        done.save(path)
    with pytest.raises(OptionError, match=r"cannot write the profile .*: there is no directory"):
        done.save(tmp_path / "no" / "profile.json")
