"""The training examples: run as a user runs them, and shown to be able to fail."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import side_by_side  # noqa: E402
import text_data  # noqa: E402

ROW = re.compile(r"^ *(\d+) +(\d+\.\d{6}) +(\d+\.\d{6}) +(\S+)$", re.MULTILINE)
SMALL_MLP = ("--steps=20", "--layers=1")


def run(script, *args, cwd, **environment):
    """Run a script in a fresh interpreter, in which warnings are errors."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    path = os.pathsep.join([str(ROOT), str(EXAMPLES)])
    env |= {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "1"} | environment
    command = [sys.executable, "-W", "error", str(script), *args]
    return subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, check=False)


def assert_trained(result, steps):
    """The table is there, its numbers bear out what is said of them, and the loss fell."""
    assert result.returncode == 0, result.stdout + result.stderr
    rows = ROW.findall(result.stdout)
    assert [int(row[0]) for row in rows] == list(range(steps))
    plain, overlapped = (np.array([float(row[i]) for row in rows]) for i in (1, 2))
    np.testing.assert_allclose(overlapped, plain, rtol=0, atol=1.1e-5)
    assert "losses are equal: " in result.stdout
    # A model that knows nothing of a byte has a loss of log(256) = 5.55.
    assert overlapped[-1] < min(overlapped[0], np.log(256))
    assert "the loss falls " in result.stdout
    assert result.stderr == ""


# With few tokens the activations travel (over model), with more of them some weights (over data).
@pytest.mark.parametrize(
    ("d_model", "length", "rings"), [(96, 16, ["model x4"]), (64, 24, ["data x2", "model x4"])]
)
def test_gpt_trains_alike_with_and_without_the_decorator(d_model, length, rings, tmp_path):
    args = ("--steps=20", "--layers=2", "--batch=4", f"--d_model={d_model}", f"--length={length}")
    result = run(EXAMPLES / "train_gpt.py", *args, "--show_plan", cwd=tmp_path)
    assert_trained(result, 20)
    # Weights are in 6 einsums of the scanned layer (q, k, v, out, up, down), in the 5 of them that
    # the backward pass computes again (not down), and in twice 6 of the backward pass proper; the
    # logits are 1 and 2 more. The 2 of attention, 2 again and 4 backward, are local to a device.
    assert "26 of 34 einsums rewritten" in result.stdout
    assert result.stdout.count("leave: no-collective") == 8
    assert all(ring in result.stdout for ring in rings)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_flax_model_trains_alike_with_and_without_the_decorator(api, tmp_path):
    result = run(EXAMPLES / "flax_mlp.py", *SMALL_MLP, f"--api={api}", cwd=tmp_path)
    assert_trained(result, 20)
    # first, up, down and logits, each forward and twice backward
    assert "12 of 12 einsums rewritten" in result.stdout


def test_policy_of_the_command_line_reaches_the_plan(tmp_path):
    result = run(EXAMPLES / "flax_mlp.py", *SMALL_MLP, "--policy=auto", cwd=tmp_path)
    assert_trained(result, 20)
    assert "0 of 12 einsums rewritten" in result.stdout


def test_a_ring_that_sends_nothing_is_noticed(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        "import os, runpy, sys\n"
        "os.environ['JAX_PLATFORMS'] = 'cpu'\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n"
        "import jax\n"
        "jax.lax.ppermute = lambda x, axis_name, perm: x\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
    )
    result = run(script, str(EXAMPLES / "flax_mlp.py"), *SMALL_MLP, cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "losses are NOT EQUAL" in result.stdout


def test_a_model_that_does_not_learn_is_noticed(tmp_path):
    args = ("--learning_rate=0", "--steps=4", "--layers=1", "--policy=never")
    result = run(EXAMPLES / "flax_mlp.py", *args, cwd=tmp_path)
    assert result.returncode == 1
    assert "the loss DOES NOT FALL" in result.stdout


@pytest.mark.parametrize("script", ["train_gpt.py", "flax_mlp.py"])
def test_too_few_devices_are_said_in_one_line(script, tmp_path):
    flags = "--xla_force_host_platform_device_count=4"
    result = run(EXAMPLES / script, cwd=tmp_path, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "4 cpu devices, 8 are needed; for simulated ones set "
        "JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8\n"
    )


@pytest.mark.parametrize(
    ("script", "flag", "complaint"),
    [
        ("train_gpt.py", "--heads=6", "must be a multiple of 4"),
        ("train_gpt.py", "--d_model=66", "--d_model must be a multiple of --heads"),
        ("flax_mlp.py", "--length=6", "must be a multiple of 4"),
        ("flax_mlp.py", "--api=haiku", "value should be one of <linen|nnx>"),
    ],
)
def test_flags_that_the_mesh_cannot_split_are_refused(script, flag, complaint, tmp_path):
    result = run(EXAMPLES / script, flag, cwd=tmp_path)
    assert result.returncode == 1
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


FALLING = [5.0, 4.0, 3.0, 2.0]


def test_losses_within_the_bound_are_equal():
    report, ok = side_by_side.compare(FALLING, [x + 0.9e-3 for x in FALLING], 1e-3)
    assert ok
    assert "losses are equal: they differ by at most 9.0e-04, allowed is 1.0e-03" in report
    assert "the loss falls from 5.001 to 2.001 (means of the first and the last 1)" in report
    assert len(ROW.findall(report)) == 4


@pytest.mark.parametrize("step", range(4))
def test_one_loss_outside_the_bound_is_not_equal(step):
    other = list(FALLING)
    other[step] -= 1.1e-3
    report, ok = side_by_side.compare(FALLING, other, 1e-3)
    assert not ok
    assert "losses are NOT EQUAL: they differ by at most 1.1e-03" in report


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_not_equal(bad):
    for plain, overlapped in (([5.0, bad], [5.0, 4.0]), ([5.0, 4.0], [5.0, bad])):
        report, ok = side_by_side.compare(plain, overlapped, 1e-3)
        assert not ok
        assert "NOT EQUAL" in report


@pytest.mark.parametrize("losses", [[5.0, 4.6], [4.0, 5.0], [5.0, 1.0, 1.0, 6.0]])
def test_equal_losses_that_do_not_fall_are_not_accepted(losses):
    report, ok = side_by_side.compare(losses, losses, 1e-3)
    assert not ok
    assert "losses are equal" in report
    assert "the loss DOES NOT FALL" in report


def test_losses_of_different_numbers_of_steps_cannot_be_compared():
    with pytest.raises(ValueError, match="shape"):
        side_by_side.compare(FALLING, FALLING[:3], 1e-3)


def test_the_text_is_real_and_its_windows_are_stretches_of_it():
    text = text_data.topics()
    assert len(text) > 300_000
    assert b"statement" in text.tobytes()
    windows = next(text_data.windows(text, 5, 40, seed=1))
    assert (windows.shape, windows.dtype) == ((5, 40), np.int32)
    assert all(row.astype(np.uint8).tobytes() in text.tobytes() for row in windows)
    again, other = (next(text_data.windows(text, 5, 40, seed=s)) for s in (1, 2))
    np.testing.assert_array_equal(windows, again)
    assert not np.array_equal(windows, other)
