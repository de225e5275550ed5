"""``collmm audit`` and ``collmm targets``: what they print, write, and refuse in one line."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from collmm.cli.main import run
from collmm.cost.hardware import CHIPS

sys.path.insert(0, str(Path(__file__).parent / "hlo"))
from hlotools import FIXTURES, stored

PROGRAM = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = {"data": 2, "model": 4}

def step(x, w, v):
    h = jnp.tanh(x @ w)
    return jax.lax.with_sharding_constraint(h @ v, x_sharding)

def build(mesh):
    global x_sharding
    print("a program may print")
    def array(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))
    x_sharding = NamedSharding(mesh, P("data", "model"))
    return step, (
        array((64, 32), "data", "model"),
        array((32, 128), None, "model"),
        array((128, 32), "model", None),
    )
"""
TITLES = ["original", "overlapped"]


@pytest.fixture(autouse=True)
def _columns(monkeypatch, kept_environment):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def audited(capsys, *argv):
    status = run(["audit", *map(str, argv)])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


def refused(capsys, *argv, command="audit"):
    """The one line of a command that was refused."""
    status = run([command, *map(str, argv)])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err.strip()


# --- programs ---


def test_a_program_is_audited_before_and_after(capsys, program, tmp_path):
    out = audited(capsys, program, "--policy=always", "--out", tmp_path / "o")
    assert "for cpu:8: 2 of 2 einsums rewritten" in out
    assert "note: CPU code runs every collective synchronously" in out
    before, _, after = out.partition("overlapped:\n")
    assert "all-gather" in before
    assert "collective-permute" in after
    assert "model -1" in after
    assert "program.py:9" in out
    names = ["audit.json", "audit.txt", "original.hlo.txt", "overlapped.hlo.txt"]
    names += ["plan.json", "plan.txt"]
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == names
    assert (tmp_path / "o" / "audit.txt").read_text() in out
    assert "memory of each device, as compiled: " in (tmp_path / "o" / "plan.txt").read_text()
    # What was written is read again like anybody's text.
    again = audited(capsys, tmp_path / "o" / "original.hlo.txt", "--target=cpu:8")
    assert "all-gather" in again


def test_the_json_document_holds_every_collective(capsys, program):
    run(["audit", str(program), "--policy=always", "--json"])
    out, err = capsys.readouterr()
    assert err == "a program may print\n"
    document = json.loads(out)
    assert [p["title"] for p in document["programs"]] == TITLES
    before, after = document["programs"]
    gathers = [c for c in before["collectives"] if c["kind"] == "all-gather"]
    assert [(g["axes"], g["bytes"], g["source_line"]) for g in gathers] == [(["model"], 4096, 9)]
    assert {c["axes"][0] for c in after["collectives"] if c["kind"] == "collective-permute"} == {
        "model"
    }
    assert before["predicted"] is None
    assert before["memory"]["gathered"] == 4096
    assert document["plan"]["memory"]["before"] == before["memory"]
    assert document["plan"]["memory"]["after"] == after["memory"]
    assert before["fits"] is True
    assert all(c["exposed_s"] is None for c in after["collectives"])


def test_the_original_alone(capsys, program):
    out = audited(capsys, program, "--original")
    assert "\noverlapped" not in out
    assert "original" in out


def test_a_plan_that_rewrites_nothing_compiles_nothing_more(capsys, program):
    out = audited(capsys, program, "--policy=never")
    assert "0 of 2 einsums rewritten" in out
    assert "\noverlapped" not in out


# --- texts ---


def test_a_text_is_audited_with_its_links(capsys, tmp_path):
    gpu = FIXTURES / "gpu-jax012-mlp.hlo"
    out = audited(capsys, gpu, "--target=gpu:h100:8", "--mesh=model=8", "--out", tmp_path / "o")
    assert "gpu-jax012-mlp.hlo: module jit_mlp, gpu:h100:8" in out
    totals = next(line for line in out.splitlines() if line.startswith("gpu-jax012-mlp.hlo  "))
    assert totals.endswith("2 exposed")
    assert "exposed beside an einsum, could be overlapped; by the published rule" in out
    assert "would save, predicted" in out
    assert "model x8" in out
    assert "the compiler's exec_time_us" in out
    assert "links: 360 GB/s (derived: nvidia" in out
    document = json.loads((tmp_path / "o" / "audit.json").read_text())
    (audit,) = document["programs"]
    predicted = audit["predicted"]
    assert predicted["complete"]
    assert predicted["step_s"] == pytest.approx(predicted["compute_s"] + predicted["exposed_s"])
    trace = json.loads((tmp_path / "o" / "trace.json").read_text())
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X"}


def test_without_a_target_only_the_structure_is_judged(capsys):
    out = audited(capsys, FIXTURES / "v5e-jax012-mlp.hlo")
    assert "without a target there are no link times: name one, such as tpu:v5e:2x4" in out
    assert "unknown" in out
    assert "exposed: it is synchronous" in out
    assert " ms predicted" not in out


@pytest.mark.parametrize(
    ("name", "target", "wrote"),
    [
        ("v5e-jax012-mlp", "gpu:h100:8", "TPU"),
        ("v5e-jax012-mlp", "cpu:8", "TPU"),
        ("gpu-jax012-mlp", "tpu:v5e:2x4", "GPU"),
        ("gpu-jax012-mlp", "cpu:8", "GPU"),
    ],
)
def test_a_text_of_another_compiler_than_the_targets_is_refused(capsys, name, target, wrote):
    message = refused(capsys, FIXTURES / f"{name}.hlo", f"--target={target}")
    assert f"was compiled for a {wrote} and {target} is another kind of target" in message


def test_a_text_that_does_not_say_who_wrote_it_is_read_with_a_warning(capsys):
    out = audited(capsys, FIXTURES / "cpu-jax012-mlp.hlo", "--target=gpu:h100:8")
    assert "nothing in the text says that it was compiled for a GPU" in out


def test_where_the_devices_of_a_tpu_lie_is_asked_for(capsys, tmp_path):
    path = tmp_path / "ring.hlo"
    path.write_bytes(gzip.decompress((FIXTURES / "v5e-jax012-unrolled.hlo.gz").read_bytes()))
    note = "the text does not spell its mesh: its devices are taken in the order of the target"
    assert note in audited(capsys, path, "--target=tpu:v5e:2x4")
    assert note not in audited(capsys, path, "--target=tpu:v5e:2x4", "--mesh=model=8")


def test_a_tpu_text_without_all_figures_names_the_one_that_has_them(capsys, tmp_path):
    note = "take the *after_codegen.txt beside it"
    assert note not in audited(capsys, FIXTURES / "v5e-jax012-mlp.hlo", "--target=tpu:v5e:2x4")
    path = tmp_path / "m.after_optimizations.txt"
    text = stored("v5e-jax012-mlp")
    # As a dump has it: of a fusion no figure yet.
    path.write_text(re.sub(r'"estimated_cycles":"\d+"', '"estimated_cycles":""', text))
    assert note in audited(capsys, path, "--target=tpu:v5e:2x4")


def test_the_mesh_that_the_text_spells_names_the_axes(capsys):
    out = audited(capsys, FIXTURES / "v5e-jax012-mlp.hlo")
    assert "the mesh is taken to be axis_0=8, as the text spells it" in out
    assert "axis_0 x8" in out


def test_where_a_loop_does_not_say_how_often_it_runs_one_run_is_told(capsys, tmp_path):
    text = stored("v5e-jax012-windowed")
    assert "direction=LT" in text
    path = tmp_path / "loop.txt"
    path.write_text(text.replace("direction=LT", "direction=EQ"))
    out = audited(capsys, path, "--target=tpu:v5e:2x4")
    assert "no time is known for a loop of unknown length" in out
    rows = [line for line in out.splitlines() if line.startswith("collective-permute ")]
    inside = [row for row in rows if re.match(r"collective-permute +\? ", row)]
    assert inside
    assert all(re.search(r"[um]s a run ", row) for row in inside)


def test_a_compressed_text_is_read(capsys, tmp_path):
    path = tmp_path / "dump.gz"
    path.write_bytes(gzip.compress(stored("gpu-jax012-mlp").encode()))
    assert "2 exposed" in audited(capsys, path, "--target=gpu:h100:8")


def broken(name):
    good = stored("gpu-jax012-mlp")
    return {
        # These two are Python by its grammar, and are not to be run.
        "options": "xla_cpu_enable_fast_min_max: false\nxla_backend_optimization_level: 3\n",
        "pbtxt": "version: 3\n",
        "nested": good.replace("dot(", f"dot{'(' * 9999}", 1).replace(
            "custom-call(", "(" * 9999, 1
        ),
        "long": f"HloModule {'m' * 10**6}",
        "missing": good.replace("\n}\n", "\n", 1),
        "truncated": good[: len(good) // 2],
        "unscheduled": good.replace("is_scheduled=true, ", ""),
        "stablehlo": "module @jit_f attributes {mhlo.num_partitions = 8 : i32} {\n  func.func @m\n",
        "empty": "",
        "prose": "an audit of the\nfarm, 1923\n",
        "instruction": good.replace("\n  %", "\n  = %"),
    }[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("options", "line 1: expected 'HloModule <name>', found 'xla_cpu_enable_fast_min_max"),
        ("pbtxt", "line 1: expected 'HloModule <name>', found 'version: 3'"),
        ("nested", "line 34: expected an opcode and '(' in '(((("),
        ("long", "without an ENTRY computation; cut off?"),
        ("missing", "line "),
        ("truncated", "cut off?"),
        ("unscheduled", "line 1: expected is_scheduled=true"),
        ("stablehlo", "line 1: expected 'HloModule <name>', found 'module @jit_f"),
        ("empty", "found an empty file"),
        ("prose", "line 1: expected 'HloModule <name>', found 'an audit of the'"),
        ("instruction", "expected '%name = shape opcode(...)'"),
    ],
)
def test_a_text_that_is_no_schedule_is_one_line(capsys, tmp_path, name, message):
    path = tmp_path / f"{name}.txt"
    path.write_text(broken(name))
    assert message in refused(capsys, path, "--target=gpu:h100:8")


def test_what_is_no_text_is_one_line(capsys, tmp_path):
    binary = tmp_path / "module.pb"
    binary.write_bytes(bytes(range(256)) * 9)
    assert "expected 'HloModule <name>'" in refused(capsys, binary)
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(b"HloModule m, is_scheduled=true\n" * 99)[:40])
    assert f"cannot read {torn}" in refused(capsys, torn)
    spoilt = bytearray(gzip.compress(stored("gpu-jax012-mlp").encode()))
    spoilt[200:220] = bytes(20)
    torn.write_bytes(spoilt)
    assert f"cannot read {torn}" in refused(capsys, torn)
    assert "No such file" in refused(capsys, tmp_path / "absent.hlo")
    assert "No such file" in refused(capsys, tmp_path / "absent.py")
    (tmp_path / "m.gpu_after_optimizations.txt").write_text("x")
    folder = refused(capsys, tmp_path)
    assert folder.endswith(
        "is a folder; name a program file or a text in it, such as m.gpu_after_optimizations.txt"
    )
    (tmp_path / "n.after_codegen.txt").write_text("x")
    assert refused(capsys, tmp_path).endswith("such as n.after_codegen.txt")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target=tpu:v5e:4x4"], "tpu:v5e:4x4 has 16 devices and"),
        (["--target=tpu:v5x:2x4"], "no compiler for 'v5x' is known"),
        (["--mesh=model"], "'model' is no axis; write data=16,model=4"),
        (["--mesh=model=0"], "'model=0' is no axis"),
        (["--mesh=a=2,b=2"], "make 4 devices and the module runs on 8"),
        (["--policy=always"], "--policy is for a program file"),
        (["--original"], "--original is for a program file"),
        (["--plot=x.png"], "--plot: there is no schedule with times"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_flags_that_do_not_fit_a_text_are_one_line(capsys, flags, message):
    assert message in refused_after_output(capsys, FIXTURES / "v5e-jax012-mlp.hlo", *flags)


def refused_after_output(capsys, *argv):
    """The error of a command; a picture is refused only when the audit is printed."""
    status = run(["audit", *map(str, argv)])
    _, err = capsys.readouterr()
    assert status == 2
    assert err.count("\n") == 1
    return err


def test_arguments_that_do_not_fit_a_program_are_one_line(capsys, program):
    assert "--mesh is for a compiled text" in refused(capsys, program, "--mesh=a=8")
    assert "0 files; give one PROGRAM or FILE" in refused(capsys)
    assert "2 files" in refused(capsys, program, program)


def test_a_program_file_may_have_any_name(capsys, tmp_path):
    path = tmp_path / "step.txt"
    path.write_text(PROGRAM)
    assert "einsums rewritten" in audited(capsys, path, "--policy=never")


# --- targets ---


def test_targets_lists_every_chip_with_what_is_missing(capsys):
    assert run(["targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[2 : lines.index("")]}
    assert {"cpu:N", "tpu:v5e:AxB", "tpu:v4:AxBxC", "gpu:h100:HOSTSxN"} <= set(rows)
    assert rows["tpu:v5e:AxB"].split()[2] == "197"
    for line in rows.values():
        assert "installed" in line


def test_targets_shows_the_sources_of_its_figures(capsys):
    assert run(["targets", "--sources"]) == 0
    out = capsys.readouterr().out
    assert "v5e:\n" in out
    assert f"link: {CHIPS['v5e'].link.nominal}; achievable {CHIPS['v5e'].link.achievable}" in out
    assert "wraparound: book: only a full axis of 16 wraps" in out


def test_targets_as_json(capsys):
    assert run(["targets", "--json"]) == 0
    rows = {row["pattern"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["cpu:N"]["figures"] == {}
    figures = rows["gpu:h100:HOSTSxN"]["figures"]
    assert figures["bf16"]["nominal"]["value"] == 989e12
    assert all("source" in f or "source" in f["nominal"] for f in figures.values())


def test_targets_takes_no_arguments(capsys):
    assert "targets takes no arguments, and got 'v5e'" in refused(capsys, "v5e", command="targets")
