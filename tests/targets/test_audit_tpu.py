"""Audits for TPU targets, compiled without a TPU; they need libtpu."""

from pathlib import Path

import pytest

from collmm import audit_report, memory
from collmm.auditing import ORIGINAL, OVERLAPPED, UNDECOMPOSED, audit_program
from collmm.cli.main import run
from collmm.hlo.findings import Verdict
from collmm.programs import open_program
from collmm.targets.installed import missing

pytestmark = pytest.mark.skipif(missing("tpu") is not None, reason=str(missing("tpu")))
PROGRAMS = Path(__file__).parents[1] / "programs"


def audited(name, target, **kwargs):
    program = open_program(PROGRAMS / name, target)
    with program.context():
        done = audit_program(program, **kwargs)
    return {p.title: p for p in done.programs}


@pytest.fixture(scope="module")
def mlp():
    return audited("mlp_tpu.py", "tpu:v5e:2x4")


def test_the_baselines_of_the_published_kind_of_layer_are_reproduced(mlp):
    """x[16384, 8192] bf16, hidden 32768, 8-way; libtpu 0.0.42, 0.0.50 and 0.0.52 agree on these."""
    assert mlp[UNDECOMPOSED].prediction.timeline.step == pytest.approx(19.9e-3, rel=0.03)
    assert mlp[ORIGINAL].prediction.timeline.step == pytest.approx(19.7e-3, rel=0.03)
    for title in (UNDECOMPOSED, ORIGINAL):
        assert mlp[title].prediction.timeline.complete


def test_what_the_compiler_decomposes_itself_is_hidden_but_for_its_ends(mlp):
    findings = mlp[ORIGINAL].prediction.findings
    assert {f.kind for f in findings} == {"collective-permute"}
    exposed = [f for f in findings if f.verdict is not Verdict.HIDDEN]
    assert len(exposed) == 2
    assert all(f.executed == 1 and f.work == () for f in exposed)
    assert {f.shift for f in findings} == {1, -1}
    off = mlp[UNDECOMPOSED].prediction
    assert [(f.kind, f.verdict) for f in off.findings] == [
        ("all-gather", Verdict.EXPOSED),
        ("reduce-scatter", Verdict.EXPOSED),
    ]


def test_our_row_stands_beside_them(mlp):
    line = mlp[OVERLAPPED].prediction.timeline
    assert line.complete
    assert line.compute < mlp[ORIGINAL].prediction.timeline.compute
    assert line.step < mlp[ORIGINAL].prediction.timeline.step


def test_memory_is_told_against_the_chip(mlp):
    for audit in mlp.values():
        assert audit.memory.capacity == 16_000_000_000
        assert audit.memory.excess == 0
    assert mlp[UNDECOMPOSED].memory.gathered == 16384 * 8192 * 2


TOO_LARGE = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = {"model": 8}

def build(mesh):
    def array(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))
    def step(x, w):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())) @ w
    return step, (array((2**21, 8192), "model"), array((8192, 8192), None, "model"))
"""


def test_a_program_that_does_not_fit_says_by_how_much(tmp_path, capsys):
    path = tmp_path / "large.py"
    path.write_text(TOO_LARGE)
    for command in (["audit", "--original"], ["dump", "--policy=never"]):
        assert run([command[0], str(path), *command[1:], "--target=tpu:v5e:2x4"]) == 0
        out = capsys.readouterr().out
        assert "does not fit: at least " in out
        assert "more than the 15.8 GiB of the device" in out
        refused = "not counted before: the compiler refused that program for its memory"
        assert (refused in out) == (command[0] == "dump")


LARGE_SUM = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = {"data": 2, "model": 4}

def build(mesh):
    def on(*axes):
        return NamedSharding(mesh, P(*axes))
    def array(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=on(*axes))
    def step(x, w):
        x = jax.lax.with_sharding_constraint(x, on("data", None, None))
        return jnp.einsum("bsm,mf->bsf", x, w)
    x = array((16, 1024, 8192), "data", None, "model")
    return step, (x, array((8192, 32768), None, "model"))
"""


def test_a_sum_over_shards_that_fits_no_chip_costs_no_more_than_the_whole_einsum(tmp_path):
    """8192 x 8192 float32 on each device, read and written by each of four steps."""
    path = tmp_path / "large_sum.py"
    path.write_text(LARGE_SUM)
    done = audited(path, "tpu:v5e:2x4")
    whole, loop = (done[title].prediction.timeline for title in (UNDECOMPOSED, OVERLAPPED))
    assert loop.exposed == 0
    assert loop.compute < 1.02 * whole.compute
    assert loop.step < 0.9 * whole.step


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "target"), [("gpt_64b.py", "tpu:v4:4x4x8"), ("gpt_512b.py", "tpu:v4:8x8x16")]
)
def test_a_decoder_layer_compiles_and_audits_on_its_pod(name, target):
    """128 and 1024 chips, forward and backward; minutes each, nearly all of it the compiler's."""
    done = audited(name, target)
    print(f"{name} on {target}\n{audit_report.totals(done.values())}")  # pytest -s shows it
    print(memory.table({title: a.memory for title, a in done.items()}))
    assert [a.failure for a in done.values()] == [""] * 3
    for audit in done.values():
        line = audit.prediction.timeline
        assert line.complete
        assert line.step == pytest.approx(line.compute + line.exposed + line.copying)
        assert all(f.axes for f in line.findings)
        assert audit.memory.excess == 0
    overlapped = done[OVERLAPPED].prediction
    # The activations; whether a weight's gather over data is looped is the cost model's choice.
    assert ("model",) in {f.axes for f in overlapped.findings if f.pairs}
    assert overlapped.timeline.step < done[ORIGINAL].prediction.timeline.step


DECLINED = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from collmm import Options, overlap_collectives

MESH = {"m": 8}

def build(mesh):
    def on(*axes):
        return NamedSharding(mesh, P(*axes))
    def array(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=on(*axes))
    @overlap_collectives(options=Options(keep_whole=KEEP_WHOLE))
    @jax.jit
    def step(x, w):
        return jax.lax.with_sharding_constraint(jax.nn.gelu(x @ w), on("m", None))
    return step, (array((65536, 4096), "m", None), array((4096, 4096), None, "m"))
"""


@pytest.mark.parametrize("keep_whole", [True, False])
def test_what_the_model_declines_is_left_whole_by_the_compiler_too(tmp_path, keep_whole):
    """libtpu would decompose this einsum; with ``keep_whole`` it is told not to.

    The einsum alone is looped: its gelu, on the way out of the whole one, is a pass after a loop.
    """
    path = tmp_path / "declined.py"
    path.write_text(DECLINED.replace("KEEP_WHOLE", str(keep_whole)))
    program = open_program(path, "tpu:v6e:2x4")
    with program.context():
        (decision,) = program.overlapped().plan(*program.args).decisions
        assert decision.judged
        text = program.overlapped().lower(*program.args).compile().as_text()
    assert ("collective-permute-start" in text) != keep_whole
    assert (" all-gather(" in text) == keep_whole
