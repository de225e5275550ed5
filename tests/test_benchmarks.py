"""The benchmarks run and count what they say; no time is asserted."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run(*flags):
    # XLA_FLAGS is left out: the script sets its own number of devices.
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    command = [sys.executable, str(ROOT / "benchmarks" / "planning.py"), *flags]
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planning_counts_einsums_and_compares_both_ways():
    out = run("--json", "--layers=1,2", "--leaves=20", "--repetitions=1")
    result = json.loads(out)
    assert [p["layers"] for p in result["planning"]] == [1, 2]
    # Four einsums in a layer and eight in its gradients, each on a ring under "always".
    assert [p["einsums"] for p in result["planning"]] == [12, 24]
    for planned in result["planning"]:
        assert planned["rewritten"] > planned["einsums"] / 2
        assert planned["plan_s"] > 0
        assert planned["jax_s"] > 0
    assert [(d["devices"], d["leaves"]) for d in result["dispatch"]] == [(1, 20), (8, 20)]
    assert all(d["ratio"] > 0 for d in result["dispatch"])


def test_planning_prints_tables():
    lines = run("--layers=1", "--leaves=2", "--repetitions=1").splitlines()
    assert any(line.split()[:2] == ["layers", "einsums"] for line in lines)
    assert any(line.split()[:3] == ["1", "12", "12"] for line in lines)
    assert any(line.split()[:2] == ["8", "2"] for line in lines)
