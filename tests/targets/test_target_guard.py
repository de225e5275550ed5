"""A guarded call survives what would end this process; a missing compiler is one line."""

import contextlib
import ctypes
import os
import stat
import subprocess
import sys
import time

import pytest

from collmm.errors import CrashError, OptionError, TargetError
from collmm.targets import guard, guarded, installed, parse_name, parse_target
from collmm.targets.guard import Worker

VARIABLE = "COLLMM_TEST_VARIABLE"


@pytest.fixture(scope="module")
def worker():
    with contextlib.closing(Worker({VARIABLE: "here"})) as worker:
        yield worker


def test_the_result_comes_back_from_another_process(worker):
    assert worker.call(parse_name, "gpu:h100:2x8") == parse_name("gpu:h100:2x8")
    there = worker.call(os.getpid)
    assert there != os.getpid()
    assert worker.call(os.getpid) == there


def test_variables_reach_the_new_process(worker):
    assert worker.call(os.getenv, VARIABLE) == "here"
    assert VARIABLE not in os.environ


def test_what_it_prints_is_kept_to_itself(worker, capfd):
    worker.call(print, "chatter")
    assert capfd.readouterr() == ("", "")


def test_an_exception_is_raised_here(worker):
    with pytest.raises(TargetError, match="'tpu:v9:2x2': no compiler"):
        worker.call(parse_name, "tpu:v9:2x2")
    rate = parse_target("cpu:8").fallback.hbm_bytes_per_s
    with pytest.raises(OptionError, match="basis is 'x'"):
        worker.call(rate.__func__, rate.__self__, "x")


def test_an_interrupted_question_is_not_answered_to_the_next(worker, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(guard.select, "select", interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.call(os.getpid)
    monkeypatch.undo()
    assert worker.call(os.getenv, VARIABLE) == "here"


@pytest.mark.parametrize(
    ("function", "args", "end"),
    [
        (os.abort, (), r"^posix.abort died by SIGABRT"),
        (ctypes.string_at, (0,), r"^ctypes.string_at died by SIGSEGV"),
        (os._exit, (7,), r"^posix._exit exited with status 7 and no result"),
    ],
)
def test_a_crash_is_one_line_and_the_next_call_works(worker, function, args, end):
    with pytest.raises(CrashError, match=end) as caught:
        worker.call(function, *args)
    assert "\n" not in str(caught.value)
    assert worker.call(os.getenv, VARIABLE) == "here"


def test_a_crash_says_what_was_tried(worker):
    with pytest.raises(CrashError, match=r"^the step died by SIGABRT$"):
        worker.call(os.abort, what="the step")


def test_what_hangs_is_ended():
    with pytest.raises(CrashError, match=r"sleep ran past 0.5 s and was ended"):
        guarded(time.sleep, 60, timeout_s=0.5)


def test_a_worker_ends_with_the_process_that_asked():
    script = (
        "import os; from collmm.targets.guard import Worker; w = Worker(); print(w.call(os.getpid))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Traceback" not in run.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(run.stdout), 0)


def test_a_worker_ends_with_a_process_that_is_killed():
    script = """
import os, threading, time
from collmm.targets.guard import Worker
w = Worker()
print(w.call(os.getpid), flush=True)
threading.Timer(0.1, os.kill, (os.getpid(), 9)).start()
w.call(time.sleep, 600)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == -9
    assert ends(int(run.stdout))


def ends(process, within_s=60):
    """Whether a process is gone after some time: a second, or more where there is much to do."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_what_cannot_be_imported_there_is_refused():
    def local():
        return 1

    with pytest.raises(TargetError, match="must be importable"):
        guarded(local)


def find_only(monkeypatch, *present):
    monkeypatch.setattr(
        installed.importlib.util, "find_spec", lambda name: object() if name in present else None
    )
    monkeypatch.setattr(installed, "_ptxas_paths", lambda: iter(()))


def test_missing_compilers_name_the_extra(monkeypatch):
    find_only(monkeypatch)
    assert installed.missing("cpu") is None
    assert installed.missing("tpu").endswith('(libtpu) is not installed: pip install "collmm[tpu]"')
    assert installed.missing("gpu").endswith('is not installed: pip install "collmm[gpu]"')
    find_only(monkeypatch, "libtpu", "jax_plugins.xla_cuda12")
    assert installed.missing("tpu") is None
    assert installed.missing("gpu").startswith("ptxas is not installed")


def script(folder, text):
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_ptxas_that_lacks_the_architecture_or_does_not_run_is_named(monkeypatch, tmp_path):
    find_only(monkeypatch, "jax_plugins.xla_cuda12")
    old = script(tmp_path, "echo \"Allowed: 'sm_80','sm_90a'.\"")
    monkeypatch.setattr(installed, "_ptxas_paths", lambda: iter([old]))
    assert installed.missing("gpu", "sm_90a") is None
    assert installed.missing("gpu", "sm_100a").startswith(f"{old} does not run or does not know")
    (tmp_path / "b").mkdir()
    broken = script(tmp_path / "b", "kill -ABRT $$")
    monkeypatch.setattr(installed, "_ptxas_paths", lambda: iter([broken]))
    assert "does not know sm_90a" in installed.missing("gpu", "sm_90a")


def test_ptxas_is_looked_for_on_the_path(monkeypatch, tmp_path):
    path = script(tmp_path, "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    assert next(installed._ptxas_paths()) == path


def test_a_target_without_its_compiler_raises_before_anything_is_loaded(monkeypatch):
    find_only(monkeypatch)
    for text in ("tpu:v5e:2x4", "gpu:h100:8"):
        target = parse_target(text)
        for use in (target.require_compiler, target.devices, lambda t=target: t.compile(None)):
            with pytest.raises(TargetError, match=r'pip install "collmm\[(t|g)pu\]"'):
                use()
