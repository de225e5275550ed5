"""Audits for GPU targets, compiled without a GPU; they need the CUDA plugin's wheels."""

import dataclasses
from pathlib import Path

import pytest

from collmm.auditing import ORIGINAL, OVERLAPPED, audit_program
from collmm.hlo.findings import Verdict
from collmm.memory import table
from collmm.programs import open_program
from collmm.targets.installed import missing

pytestmark = pytest.mark.skipif(missing("gpu") is not None, reason=str(missing("gpu")))
PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.fixture(scope="module")
def mlp():
    program = open_program(PROGRAMS / "mlp_gpu.py", "gpu:h100:1x8")
    with program.context():
        done = audit_program(program)
    return {p.title: p for p in done.programs}


def test_the_compiler_alone_exposes_the_gather_and_the_scatter(mlp):
    original = mlp[ORIGINAL].prediction
    assert [(f.kind, f.verdict) for f in original.findings] == [
        ("all-gather", Verdict.EXPOSED),
        ("reduce-scatter", Verdict.EXPOSED),
    ]
    line = original.timeline
    assert line.complete
    # 8 H100, x[8192, 8192], hidden 28672: 1.92 ms, of which 0.66 exposed.
    assert line.step == pytest.approx(1.92e-3, rel=0.03)
    assert line.exposed == pytest.approx(0.66e-3, rel=0.03)
    assert [len(c.einsums) for c in original.candidates] == [1, 1]
    assert all(c.saving > 0.1e-3 for c in original.candidates)


def test_ours_runs_its_permutes_beside_products(mlp):
    overlapped = mlp[OVERLAPPED].prediction
    assert {f.kind for f in overlapped.findings} == {"collective-permute"}
    hidden = [f for f in overlapped.findings if f.verdict is Verdict.HIDDEN]
    assert any("matmul" in w.name or w.opcode == "custom-call" for f in hidden for w in f.work)
    assert all(f.asynchronous for f in hidden)
    assert overlapped.timeline.complete


def test_ours_exposes_less_than_a_third_of_what_the_compiler_does(mlp):
    before, after = (mlp[title].prediction.timeline for title in (ORIGINAL, OVERLAPPED))
    assert after.exposed < before.exposed / 3
    assert after.step < before.step


def test_the_options_that_keep_loops_whole_are_applied_and_reported(mlp):
    options = dict(mlp[OVERLAPPED].options)
    assert "dot merger" in options["xla_gpu_dot_merger_threshold_mb=0"]
    assert "xla_gpu_dot_merger_threshold_mb=0" not in dict(mlp[ORIGINAL].options)


def test_memory_is_told_against_the_device(mlp):
    for audited in mlp.values():
        memory = audited.memory
        assert (memory.capacity, memory.excess) == (80_000_000_000, 0)
        assert memory.peak >= memory.arguments + memory.outputs
    assert mlp[ORIGINAL].memory.gathered == 8192 * 8192 * 2
    assert mlp[OVERLAPPED].memory.gathered == 0
    assert mlp[OVERLAPPED].memory.peak < mlp[ORIGINAL].memory.peak


def test_a_program_that_is_too_large_says_by_how_much():
    program = open_program(PROGRAMS / "mlp_gpu.py", "gpu:h100:1x8")
    x, *weights = program.args
    large = dataclasses.replace(program, args=(x.update(shape=(2**23, 8192)), *weights))
    with large.context():
        (original,) = audit_program(large, original_only=True).programs
    memory = original.memory
    assert memory.compiled
    assert memory.excess == memory.peak - memory.capacity > 10_000_000_000
    assert "original does not fit: " in table({"original": memory})
