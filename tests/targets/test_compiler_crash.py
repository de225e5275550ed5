"""A compiler that crashes ends its own process: the caller gets one line and goes on."""

import contextlib

import crashes
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import Options, assert_overlapped, overlap_collectives
from collmm.auditing import ORIGINAL, OVERLAPPED, audit_program
from collmm.cli.main import run
from collmm.errors import CrashError
from collmm.programs import open_program
from collmm.targets import compilation, parse_target
from collmm.targets.environment import unattached
from collmm.targets.guard import Worker
from collmm.targets.installed import missing

tpu = pytest.mark.skipif(missing("tpu") is not None, reason=str(missing("tpu")))
gpu = pytest.mark.skipif(missing("gpu") is not None, reason=str(missing("gpu")))
TPU, GPU = "tpu:v5e:2x2", "gpu:h100:4"
EACH = [pytest.param(TPU, marks=tpu), pytest.param(GPU, marks=gpu)]

PROGRAM = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = {"model": 4}

def build(mesh):
    def array(*axes):
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=sharding)
    def step(x, w):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())) @ w
    return step, (array("model"), array(None, "model"))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "step.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def fatal(monkeypatch):
    """A process that XLA's native code ends: it checks its flags and dies of a wrong one."""
    variables = {**unattached(), "XLA_FLAGS": "--no_such_flag=1"}
    with contextlib.closing(Worker(variables)) as worker:
        monkeypatch.setattr(compilation, "_worker", worker)
        yield worker


@pytest.mark.parametrize(
    ("command", "target"),
    [pytest.param("dump", TPU, marks=tpu), pytest.param("audit", GPU, marks=gpu)],
)
def test_a_command_outlives_its_compiler(capsys, program, fatal, command, target):
    assert run([command, str(program), f"--target={target}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"collmm {command}: {target}: the compiler of jit(step) exited with")
    assert "Unknown flag in XLA_FLAGS: --no_such_flag=1" in err


@pytest.mark.parametrize("target", EACH[:1])
def test_a_segmentation_fault_is_one_line(capsys, program, monkeypatch, target):
    monkeypatch.setattr(compilation, "_compile", crashes.compile_and_crash)
    assert run(["dump", str(program), f"--target={target}"]) == 2
    _, err = capsys.readouterr()
    assert err == f"collmm dump: {target}: the compiler of jit(step) died by SIGSEGV\n"


@pytest.mark.parametrize("target", EACH[1:])
def test_an_assertion_outlives_its_compiler(fatal, target):
    mesh = parse_target(target).mesh({"model": 4})

    def array(*axes):
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=sharding)

    step = overlap_collectives(lambda x, w: x @ w, Options(policy="always"))
    with pytest.raises(CrashError, match=r"the compiler of jit.* Unknown flag in XLA_FLAGS"):
        assert_overlapped(step, array("model"), array(None, "model"), target=target)


@pytest.mark.parametrize("target", EACH[1:])
def test_a_crash_over_the_overlapped_program_alone_leaves_the_audit_of_the_other(
    program, fatal, monkeypatch, target
):
    sound, asked = compilation.Worker(unattached()), []

    class Second:
        """Crashes over the program that holds a ring, and is sound otherwise."""

        def call(self, function, topology, request, what):
            asked.append(what)
            worker = fatal if b"collective_permute" in request.module else sound
            return worker.call(function, topology, request, what=what)

        def start(self):
            sound.start()

    monkeypatch.setattr(compilation, "_worker", Second())
    opened = open_program(program, target)
    with contextlib.closing(sound), opened.context():
        done = {p.title: p for p in audit_program(opened, policy="always").programs}
    assert done[ORIGINAL].prediction.findings
    assert done[OVERLAPPED].prediction is None
    assert "Unknown flag in XLA_FLAGS" in done[OVERLAPPED].failure
    assert len(asked) == len(done)


@pytest.mark.parametrize("target", EACH)
def test_what_comes_back_is_what_the_compiler_gives_in_this_process(target):
    mesh = parse_target(target).mesh({"model": 4})
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("model")))
    step = jax.jit(lambda x: (x @ x.T) * 2, donate_argnums=0, out_shardings=x.sharding)
    options = parse_target(target).baseline_options()
    here = step.lower(x).compile(compiler_options=options)
    there = parse_target(target).compile(step.lower(x), options)
    assert there.as_text() == here.as_text()
    assert "input_output_alias" in there.as_text()
    figures, expected = there.memory_analysis(), here.memory_analysis()
    for name in ("argument", "output", "alias", "temp", "generated_code"):
        field = f"{name}_size_in_bytes"
        assert getattr(figures, field) == getattr(expected, field)
    assert figures.peak_memory_in_bytes == expected.peak_memory_in_bytes
