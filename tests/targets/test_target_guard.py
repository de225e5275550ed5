"""A guarded call survives what would end this process; a missing compiler is one line."""

import os
import stat
import time

import pytest

from collmm.errors import OptionError, TargetError
from collmm.targets import guarded, installed, parse_name, parse_target


def test_the_result_comes_back():
    assert guarded(parse_name, "gpu:h100:2x8") == parse_name("gpu:h100:2x8")
    assert guarded(os.getpid) != os.getpid()


def test_variables_reach_the_new_process():
    name = "COLLMM_TEST_VARIABLE"
    assert guarded(os.getenv, name, environment={name: "here"}) == "here"
    assert name not in os.environ


def test_an_exception_is_raised_here():
    with pytest.raises(TargetError, match="'tpu:v9:2x2': no compiler"):
        guarded(parse_name, "tpu:v9:2x2")
    with pytest.raises(OptionError, match="basis is 'x'"):
        guarded(
            parse_target("cpu:8").fallback.hbm_bytes_per_s.__func__,
            parse_target("cpu:8").fallback,
            "x",
        )


def test_a_crash_is_one_line_that_names_the_signal():
    with pytest.raises(TargetError, match=r"^posix.abort died by SIGABRT") as caught:
        guarded(os.abort)
    assert "\n" not in str(caught.value)


def test_an_exit_is_one_line():
    with pytest.raises(TargetError, match=r"_exit exited with status 7 and no result"):
        guarded(os._exit, 7)


def test_what_hangs_is_ended():
    with pytest.raises(TargetError, match=r"sleep ran past 0.5 s and was ended"):
        guarded(time.sleep, 60, timeout_s=0.5)


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
