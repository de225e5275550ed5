"""The benchmark over a slow network: what it computes, and that nothing of it is left behind.

Where no network can be made the same tests hold it to saying so, in one line and with status 2.
No time is asserted.
"""

import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "slow_network.py"
# Small, and each process still has matrices of 4 rows to send.
SMALL = ("--size=64", "--repetitions=2", "--rate=200mbit")


@pytest.fixture(scope="module")
def network():
    return benchmark_module("network")


def benchmark_module(name):
    """A module of the folder of benchmarks, which is no package."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPT.parent))


def command(*flags):
    return [sys.executable, str(SCRIPT), *flags]


def environment():
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def run(*flags):
    done = subprocess.run(
        command(*flags), env=environment(), capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def assert_says(network, status, err):
    """Where there can be no network: one line that says why."""
    assert status == 2, err
    assert err.strip() == network.why_not()


def test_both_kinds_are_measured_and_equal_the_plain_program(network):
    status, out, err = run("--json", *SMALL)
    if network.why_not():
        assert_says(network, status, err)
        return
    assert status == 0, err
    kinds = {found["kind"]: found for found in json.loads(out)["kinds"]}
    assert set(kinds) == {"gather", "scatter"}
    for found in kinds.values():
        assert found["schedule"] == ["one-way x4 unrolled"]
        assert found["differing"] == []
        assert all(seconds > 0 for seconds in found["median_s"].values())
        assert found["ratio"] > 0
    assert not namespaces(network)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_benchmark_leaves_nothing_behind(network, number):
    if network.why_not():
        status, _, err = run(*SMALL)
        assert_says(network, status, err)
        return
    started = subprocess.Popen(
        command("--repetitions=1000", "--size=64"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # All five namespaces, and processes in them.
        wait_for(lambda: len(namespaces(network)) == 5)
        wait_for(lambda: all(network.members(s) for s in namespaces(network) if s[-1].isdigit()))
        pids = [pid for space in namespaces(network) for pid in network.members(space)]
        started.send_signal(number)
        assert started.wait(60) != 0
        wait_for(lambda: not namespaces(network))
        wait_for(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids))
    finally:
        started.kill()
        started.wait()


def test_what_a_dead_owner_left_is_removed_by_the_next(network):
    if network.why_not():
        assert network.why_not().count("\n") == 0
        return
    gone = subprocess.Popen(["true"])
    name = network.owner_name(gone.pid)
    gone.wait()
    network.run("ip", "netns", "add", f"{name}-switch")
    with network.Network(1):
        assert f"{name}-switch" not in network.spaces()


def namespaces(network):
    """Those of benchmarks that this test started, not of others on this machine."""
    mine = {os.getpid(), *children(os.getpid())}
    known = {s for s in network.spaces() if s.startswith(f"{network.PREFIX}-")}
    return {s for s in known if int(s.split("-")[1]) in mine or not owner_runs(s)}


def owner_runs(space):
    return pathlib.Path(f"/proc/{space.split('-')[1]}").exists()


def children(pid):
    return map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


def test_without_root_it_says_so_in_one_line():
    code = f"import os, runpy, sys; os.geteuid = lambda: 1000; sys.argv = [{str(SCRIPT)!r}]; "
    code += f"sys.path.insert(0, {str(SCRIPT.parent)!r}); "
    code += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "network namespaces need root; run it as root\n"


def test_summary_takes_the_slowest_process_of_each_repetition():
    bench = benchmark_module("slow_network")
    names = bench.NAMES
    times = [{n: [1.0, 5.0, 2.0] for n in names}, {n: [3.0, 4.0, 2.5] for n in names}]
    times[0]["overlapped"] = times[1]["overlapped"] = [2.0, 2.0, 2.0]
    times[0]["control"] = times[1]["control"] = [2.5, 2.5, 2.5]
    times[0]["einsum"] = times[1]["einsum"] = [1.5, 1.5, 1.5]
    times[0]["permutes"] = times[1]["permutes"] = [1.0, 1.0, 1.0]
    ranks = [
        {"gather": {"plan": ["one-way x4 unrolled"], "differing": [], "times": t}} for t in times
    ]
    found = bench.summary(ranks, "gather")
    assert found["median_s"]["plain"] == 3.0  # of 3, 5 and 2.5
    assert found["ratio"] == 1.5
    assert found["of_control"] == 0.8
    assert found["bound"] == 2.0
    assert bench.failures([found]) == []
    slow = {**found, "ratio": 1.1, "of_control": 0.95}
    assert len(bench.failures([slow])) == 2
