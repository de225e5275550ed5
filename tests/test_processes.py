"""One training step over several processes: the numbers and the plan are those of one process."""

import functools
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import process_step
import pytest
from jax.sharding import Mesh

ROOT = pathlib.Path(__file__).parents[1]
SECONDS = 240


@functools.cache
def alone():
    shape = process_step.DATA, process_step.MODEL
    devices = np.array(jax.devices()[:8]).reshape(shape)
    return process_step.run(Mesh(devices, ("data", "model")))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(process, processes, port, folder):
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    program = [sys.executable, process_step.__file__, str(process), str(processes)]
    with open(folder / f"{process}.log", "w") as log:
        return subprocess.Popen(
            [*program, f"127.0.0.1:{port}", str(folder / f"{process}.npz")],
            env={**kept, "PYTHONPATH": path},
            stdout=log,
            stderr=log,
        )


def run_together(processes, folder):
    """Run all of them; return what each saved. One that fails ends the others at once."""
    port = free_port()
    running = [start(i, processes, port, folder) for i in range(processes)]
    deadline = time.monotonic() + SECONDS
    try:
        while any(p.poll() is None for p in running):
            assert time.monotonic() < deadline, f"not done in {SECONDS} s: {logs(folder)}"
            assert not any(p.poll() for p in running), logs(folder)
            time.sleep(0.1)
        assert not any(p.poll() for p in running), logs(folder)
    finally:
        for p in running:
            p.kill()
            p.wait()
    return [dict(np.load(folder / f"{i}.npz")) for i in range(processes)]


def logs(folder):
    return {path.name: path.read_text()[-2000:] for path in sorted(folder.glob("*.log"))}


@pytest.mark.parametrize("processes", [2, 4])
def test_a_step_over_processes_is_that_of_one(processes, tmp_path):
    plan, want = alone()
    saved = run_together(processes, tmp_path)
    assert plan.count('"decision": "rewrite"') >= 4
    seen = set()
    for results in saved:
        assert str(results.pop("plan")) == plan
        for name, got in results.items():
            assert got.dtype == want[name].dtype
            np.testing.assert_array_equal(got, want[name])
            seen.add(name)
    assert seen == set(want)
