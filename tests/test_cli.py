"""The command line: help, the dump command, one line for bad input; and ``COLLMM_DUMP_TO``."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import tomllib

import pytest

import collmm
from collmm.cli.main import COMMANDS, run

ROOT = pathlib.Path(__file__).parents[1]
DUMPED = {"plan.txt", "plan.json"} | {
    f"{when}.{kind}"
    for when in ("before", "after")
    for kind in ("jaxpr.txt", "stablehlo.mlir", "hlo.txt")
}

# A gather over four devices, small enough that only policy "always" rewrites it.
GATHER = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = {"model": 4}

def gather_step(x, w):
    return x @ w

def build(mesh):
    def array(*axes):
        return jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P(*axes)))
    return gather_step, (array("model", None), array(None, "model"))
"""


pytestmark = pytest.mark.usefixtures("kept_environment")


@pytest.fixture
def gather(tmp_path):
    path = tmp_path / "gather.py"
    path.write_text(GATHER)
    return path


def in_a_process(*command, **variables):
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**kept, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
    )


# --- help ---


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]], ids=str)
def test_help_lists_every_command_with_its_summary(argv, capsys):
    assert run(argv) == 0
    out = capsys.readouterr().out
    for command in COMMANDS.values():
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {command.name} ")]
        assert line.endswith(command.summary)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["x.py", "--help"]], ids=str)
def test_the_help_of_a_command_explains_each_flag(command, argv, capsys):
    assert run([command.name, *argv]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: collmm {command.name} {command.arguments} [flags]\n")
    values = command.flags()
    for name in {values[key].name for key in values}:
        lines = out.splitlines()
        (at,) = [i for i, line in enumerate(lines) if re.match(rf"  --{name}\b", line)]
        assert len(lines[at + 1].strip()) > 5
    assert max(map(len, out.splitlines())) <= 80


def test_the_version_is_printed(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"collmm {collmm.__version__}\n"


def test_the_entry_point_of_the_package_is_the_command_line():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["scripts"]["collmm"].split(":")
    assert getattr(importlib.import_module(module), name) is run


# --- dump ---


def test_dump_prints_the_plan_and_the_collectives(gather, capsys):
    assert run(["dump", str(gather), "--policy", "always"]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if "gather.py:" in line]
    assert re.match(
        r"0 +gather.py:9 +ab,bc->ac +all-gather rhs\[1\] over model +model x4 +1.0 KiB +rewrite",
        row,
    )
    assert "1 of 1 einsums of gather_step rewritten (policy always" in out
    assert "for v5e" in out.split("note: ")[1].splitlines()[0]
    assert re.search(r"^all-gather +1 +1 +1.0 KiB +- +- +-$", out, re.M)
    # Three steps of a ring of four, each with a shard of 256 bytes or two halves of it.
    assert re.search(r"^collective-permute +- +- +- +\d+ +\d+ +768 B$", out, re.M)
    assert re.search(
        r"^memory of each device, as compiled: \S+ \S+ before, \S+ \S+ after$", out, re.M
    )
    assert "wrote" not in out


def test_dump_writes_every_text(gather, tmp_path, capsys):
    out = tmp_path / "made" / "here"
    assert run(["dump", str(gather), f"--out={out}", "--policy=always"]) == 0
    assert {p.name for p in out.iterdir()} == DUMPED
    assert f"wrote 8 files to {out}: plan.txt, " in capsys.readouterr().out
    text = {name: (out / name).read_text() for name in DUMPED}
    assert "all_gather_einsum" in text["after.jaxpr.txt"]
    assert "dot_general" in text["before.jaxpr.txt"]
    assert "all_gather_einsum" not in text["before.jaxpr.txt"]
    assert "stablehlo.collective_permute" in text["after.stablehlo.mlir"]
    assert "stablehlo.collective_permute" not in text["before.stablehlo.mlir"]
    assert "is_scheduled=true" in text["before.hlo.txt"]
    assert " all-gather(" in text["before.hlo.txt"]
    assert " collective-permute(" in text["after.hlo.txt"]
    assert " all-gather(" not in text["after.hlo.txt"]
    assert json.loads(text["plan.json"])["sites"][0]["file"] == str(gather)
    assert "1 of 1 einsums" in text["plan.txt"]
    assert "memory of each device, as compiled: " in text["plan.txt"]


def test_dump_as_json_is_one_document(gather, tmp_path, capsys):
    gather.write_text(GATHER + "\nprint('a line of the program')\n")
    out = tmp_path / "out"
    assert run(["dump", str(gather), "--json", "--policy=always", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert "a line of the program" in captured.err
    assert set(document) == {"plan", "collectives", "memory", "compiler_options", "files"}
    assert set(document["memory"]) == {"before", "after"}
    assert document["plan"]["memory"] == document["memory"]
    assert document["plan"] == json.loads((out / "plan.json").read_text())
    assert {pathlib.Path(f) for f in document["files"]} == {out / name for name in DUMPED}
    before, after = document["collectives"]["before"], document["collectives"]["after"]
    assert before == {
        "all-gather": {"count": 1, "bytes": 1024, "executed": 1, "executed_bytes": 1024}
    }
    assert list(after) == ["collective-permute"]
    assert after["collective-permute"]["executed_bytes"] == 768


def test_where_nothing_is_rewritten_after_is_before(gather, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["dump", str(gather), "--out", str(out)]) == 0
    assert "0 of 1 einsums" in capsys.readouterr().out
    for kind in ("jaxpr.txt", "stablehlo.mlir", "hlo.txt"):
        assert (out / f"after.{kind}").read_text() == (out / f"before.{kind}").read_text()


def test_the_chip_and_the_target_can_be_named(gather, capsys):
    argv = ["dump", "--target", "cpu:4", str(gather), "--json", "--chip=v4", "--policy=never"]
    assert run(argv) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["chip"], plan["policy"], plan["rewritten"]) == ("v4", "never", 0)


def test_a_dumped_plan_is_a_plan_file(gather, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["dump", str(gather), "--policy=always", f"--out={out}"]) == 0
    capsys.readouterr()
    argv = ["dump", str(gather), f"--plan={out / 'plan.json'}", "--json"]
    assert run(argv) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["policy"], plan["rewritten"]) == ("auto", 1)
    assert run([*argv, "--chip=v4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(
        r"collmm dump: the plan .*plan\.json does not fit: chip: the plan file has v5e, here it is "
        r'v4; make it anew, or set Options\(on_mismatch="replan"\)\n',
        captured.err,
    )


def test_a_profile_is_planned_with(gather, tmp_path, capsys):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"lab": {"base": "h100", "link": 1e9}}))
    argv = ["dump", str(gather), f"--profile={profile}", "--json"]
    assert run(argv) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["chip"] == "lab"
    assert plan["note"] == f"planned for lab, the one row of {profile}"
    profile.write_text(json.dumps({"lab": {"base": "h100"}, "v5e": {"link": 1e9}}))
    assert run(argv) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["chip"] == "v5e"
    assert run([*argv, "--chip=lab"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["chip"] == "lab"
    assert run([*argv, "--chip=lob"]) == 2
    assert "chip='lob'; did you mean 'lab'?" in capsys.readouterr().err


def test_dump_works_from_a_shell_without_any_variable_set(gather, tmp_path):
    # Six devices, so that they can only come from MESH.
    gather.write_text(GATHER.replace('"model": 4', '"model": 6').replace("16, 16", "12, 12"))
    done = in_a_process("-m", "collmm", "dump", gather, "--policy=always", "--json")
    assert done.returncode == 0, done.stderr
    (site,) = json.loads(done.stdout)["plan"]["sites"]
    assert (site["schedule"]["ring_size"], site["schedule"]["two_way"]) == (6, True)
    assert done.stderr == ""


@pytest.mark.filterwarnings("default")
def test_an_analysis_that_fails_is_a_line_on_stderr(gather, monkeypatch, caplog):
    def fail(*_, **__):
        raise RuntimeError("the analysis broke")

    monkeypatch.setattr("collmm.api.plan_program", fail)
    assert run(["dump", str(gather)]) == 0
    (record,) = caplog.records
    assert "AnalysisWarning: collmm left gather_step as it is" in record.getMessage()
    assert "RuntimeError: the analysis broke" in record.getMessage()


def test_verbose_says_what_is_done(gather, caplog, tmp_path):
    assert run(["dump", str(gather), "--verbose", "--out", str(tmp_path)]) == 0
    lines = [r.getMessage() for r in caplog.records]
    assert [line.split(",")[0].removeprefix("made ") for line in lines[1:]][-1] == "after.hlo.txt"
    caplog.clear()
    assert run(["dump", str(gather)]) == 0
    assert not caplog.records


# --- bad input ---

BAD_INPUT = {
    "command": (["dumb"], r"collmm: no command 'dumb'; did you mean 'dump'\? valid: "),
    "flag-first": (["--taget"], r"collmm: no flag '--taget'; did you mean 'targets'\? valid: "),
    "no-program": (["dump"], r"collmm dump: 0 program files; give one, see collmm dump --help"),
    "two-programs": (["dump", "a.py", "b.py"], r"collmm dump: 2 program files; give one"),
    "missing": (["dump", "no/such.py"], r"collmm dump: cannot read no/such.py: No such file"),
    "flag": (["dump", "PROGRAM", "--polcy=auto"], r"flag 'polcy'. Did you mean: policy \?; see"),
    "no-value": (["dump", "PROGRAM", "--out"], r"Missing value for flag --out; see collmm dump"),
    "policy": (
        ["dump", "PROGRAM", "--policy=sometimes"],
        r"collmm dump: policy='sometimes'; use one of auto, always, never",
    ),
    "chip": (["dump", "PROGRAM", "--chip=v5f"], r"chip='v5f'; did you mean .*'v5e'.*valid: a100"),
    "target-kind": (
        ["dump", "PROGRAM", "--target=abacus:8"],
        r"target 'abacus:8' is not one of cpu:N, tpu:CHIP:AxB",
    ),
    "target-chip": (["dump", "PROGRAM", "--target=tpu:v9:2x4"], r"'v9' is known; .*valid: .*v5e"),
    "target-size": (
        ["dump", "PROGRAM", "--target=cpu:8"],
        r"mesh model=4 has 4 devices, cpu:8 has 8",
    ),
    "plan": (["dump", "PROGRAM", "--plan=none.json"], r"dump: cannot read the plan none.json: No"),
    "profile": (["dump", "PROGRAM", "--profile=no.json"], r"dump: profile 'no.json': No such file"),
    "out": (["dump", "PROGRAM", "--out=PROGRAM"], r"cannot write a dump to .*: it is a file; name"),
    "out-below": (["dump", "PROGRAM", "--out=PROGRAM/x"], r"cannot write a dump to .*: Not a dir"),
}


@pytest.mark.parametrize(("argv", "expected"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(argv, expected, gather, capsys):
    assert run([a.replace("PROGRAM", str(gather)) for a in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(expected, captured.err), captured.err


BAD_PROGRAMS = {
    "no-build": ("MESH = {'a': 2}\n", r"program.py defines no build; give def build\(mesh\)"),
    "no-mesh": ("def build(mesh): ...\n", r"program.py defines no MESH; give axes and sizes"),
    "not-python": ("MESH = {'a': 2\n", r"program.py is not Python: "),
    "options": (
        "import collmm\nMESH = {'a': 2}\ndef build(mesh):\n    collmm.Options(policy='maybe')\n",
        r"collmm dump: policy='maybe'; use one of auto, always, never",
    ),
}


@pytest.mark.parametrize(("text", "expected"), BAD_PROGRAMS.values(), ids=BAD_PROGRAMS)
def test_a_bad_program_is_one_line_and_status_2(text, expected, tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(text)
    assert run(["dump", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(expected, captured.err), captured.err


def test_bad_input_in_a_shell_has_no_traceback(tmp_path):
    done = in_a_process("-m", "collmm", "dump", tmp_path / "missing.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"collmm dump: cannot read {tmp_path}/missing.py: No such file or directory; "
        "name a program file\n"
    )


def test_an_error_of_the_users_own_code_passes_through(gather):
    gather.write_text(GATHER.replace("return x @ w", "return x @ w / (1 // 0)"))
    with pytest.raises(ZeroDivisionError) as e:
        run(["dump", str(gather)])
    assert str(e.traceback[-1].path) == str(gather)


def test_an_interrupt_is_one_line_and_status_130(gather, capsys):
    gather.write_text(GATHER.replace("return x @ w", "raise KeyboardInterrupt"))
    assert run(["dump", str(gather)]) == 130
    assert capsys.readouterr().err == "collmm dump: interrupted\n"


# --- COLLMM_DUMP_TO ---

SCRIPT = """
import os, warnings
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from collmm import Options, overlap_collectives

mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
rows, columns = NamedSharding(mesh, P("model", None)), NamedSharding(mesh, P(None, "model"))
always = Options(policy="always")

@overlap_collectives(options=always)
@functools.partial(jax.jit, donate_argnums=0, static_argnames="scale")
def donating_step(x, w, scale=1.0):
    y = jax.lax.with_sharding_constraint((x @ w) * scale, columns)
    return jax.lax.with_sharding_constraint(y @ w.T, rows), jnp.sum(y)

@overlap_collectives(options=always)
@jax.jit
def other_step(x, w):
    jax.debug.callback(lambda: None)  # a program with an effect takes the slow path every time
    return x @ w

def inputs(n):
    random = np.random.default_rng(n)
    put = lambda s: jax.device_put(random.standard_normal((n, n), np.float32), s)
    return put(rows), put(columns)

for n in (16, 16, 32):
    x, w = inputs(n)
    other = np.asarray(other_step(x, w))
    y, total = donating_step(x, w, scale=2.0)
    assert x.is_deleted() and not w.is_deleted()
    x, _ = inputs(n)
    expected = jax.jit(donating_step.original.__wrapped__)(x, w, scale=2.0)
    np.testing.assert_allclose(y, expected[0], rtol=1e-4, atol=1e-4)
    print(n, np.asarray(y).tobytes().hex()[:64], float(total), other.tobytes().hex()[:64])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    plain = in_a_process(path)
    assert (plain.returncode, plain.stderr) == (0, ""), plain.stderr
    return path, plain.stdout


def test_a_variable_makes_any_script_dump_every_decorated_function_it_runs(script, tmp_path):
    path, plain = script
    # A rerun keeps what an earlier one wrote.
    (tmp_path / "dumps" / "donating_step.0").mkdir(parents=True)
    done = in_a_process(path, COLLMM_DUMP_TO=str(tmp_path / "dumps"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == plain
    folders = {p.name: {f.name for f in p.iterdir()} for p in (tmp_path / "dumps").iterdir()}
    # Two sizes each; the second call with the first size is the same program.
    assert folders == {
        "donating_step.0": set(),
        **dict.fromkeys(["donating_step.1", "donating_step.2"], DUMPED),
        **dict.fromkeys(["other_step.0", "other_step.1"], DUMPED),
    }
    first = tmp_path / "dumps" / "donating_step.1"
    assert " collective-permute(" in (first / "after.hlo.txt").read_text()
    assert " collective-permute(" not in (first / "before.hlo.txt").read_text()
    for when in ("before", "after"):
        assert "may-alias" in (first / f"{when}.hlo.txt").read_text().splitlines()[0]
    assert "f32[32,32]" in (tmp_path / "dumps/other_step.1/before.jaxpr.txt").read_text()


def test_a_dump_that_cannot_be_written_is_a_warning_and_the_script_runs(script, tmp_path):
    path, plain = script
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = in_a_process(path, COLLMM_DUMP_TO=str(blocked))
    assert (done.returncode, done.stdout) == (0, plain)
    assert "DumpWarning: collmm wrote no full dump: cannot write a dump to" in done.stderr
    assert "Traceback" not in done.stderr
    assert blocked.read_text() == ""
