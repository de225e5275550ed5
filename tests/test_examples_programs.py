"""The program files of ``examples/``: what their plans say and what the compiler makes of them."""

import pathlib
import re

import jax
import numpy as np
import pytest

from collmm.hlo.collectives import collectives, summarize
from collmm.hlo.parse import parse
from collmm.programs import open_program

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
MLP = EXAMPLES / "tensor_parallel_mlp.py"
LAYER = EXAMPLES / "gpt_layer_2d.py"


pytestmark = pytest.mark.usefixtures("kept_environment")


def compiled(fn, args):
    return parse(fn.lower(*args).compile().as_text())


def test_every_einsum_of_the_mlp_becomes_a_loop_under_the_default_policy():
    program = open_program(MLP)
    plan = program.overlapped().plan(*program.args)
    assert (plan.policy, plan.chip) == ("auto", "v5e")
    looped = [(d.site.location.line, d.collective.kind, d.collective.axes) for d in plan.rewritten]
    first, second = sorted({line for line, _, _ in looped})
    over = ("model",)
    assert looped == [
        (first, "all-gather", over),  # x @ w_in
        (second, "reduce-scatter", over),  # hidden @ w_out
        (second, "all-gather", over),  # gradient of w_out, from that of the result
        (second, "all-gather", over),  # gradient of hidden, from that of the result
        (first, "all-gather", over),  # gradient of w_in, from x
        (first, "reduce-scatter", over),  # gradient of x
    ]
    assert len(plan.decisions) == len(plan.rewritten)


def test_only_permutes_are_left_of_the_collectives_of_the_mlp():
    program = open_program(MLP)
    before = summarize(compiled(program.fn, program.args))
    # x and the gradient of the result are gathered; the compiler for CPU scatters by an
    # all-reduce and a slice, in float32.
    batch, sequence, features = program.args[1].shape
    whole = batch * sequence * features
    assert before["all-gather"].count == 2
    assert before["all-reduce"].bytes == 2 * 4 * whole + 4
    assert set(before) == {"all-gather", "all-reduce"}

    after = list(collectives(compiled(program.overlapped(), program.args)))
    kinds = [c.kind for c in after]
    assert kinds.count("collective-permute") > 4 * 7
    # What else is left is the sum of the loss over the devices' parts of the sequence, one float32.
    assert [(c.kind, c.bytes) for c in after if c.kind != "collective-permute"] == [
        ("all-reduce", 4)
    ]
    # No permute carries more than one device's shard, in float32 at most.
    assert max(c.bytes for c in after) <= 4 * whole // 8


def test_each_projection_of_the_layer_loops_over_the_model_axis():
    program = open_program(LAYER)
    plan = program.overlapped().plan(*program.args)
    assert plan.policy == "auto"
    # Six projections, each with an einsum for its result and two for its gradients.
    assert len(plan.rewritten) == 6 * 3
    assert {d.collective.axes for d in plan.rewritten} == {("model",)}
    assert all(len(d.site.collectives) == 2 for d in plan.rewritten)
    attention = [d for d in plan.decisions if not d.rewritten]
    # Scores and mixing, with two einsums each for their gradients.
    assert [d.reason.code for d in attention] == ["no-collective"] * 2 * 3


def test_only_weights_are_gathered_and_scattered_in_the_rewritten_layer():
    program = open_program(LAYER)
    weights, x = program.args
    after = list(collectives(compiled(program.overlapped(), program.args)))
    # Over the data axis each weight is gathered, and its gradient scattered. On one device of the
    # model axis a weight has a quarter of its elements, which CPU reduces in float32 (4 bytes).
    quarter = sorted(w.size // 4 for w in weights.values())
    gathered = sorted(c.bytes for c in after if c.kind == "all-gather")
    scattered = sorted(c.bytes for c in after if c.kind == "reduce-scatter")
    # The compiler for CPU may also move bfloat16 as float32.
    assert gathered in ([2 * n for n in quarter], [4 * n for n in quarter])
    assert scattered in ([2 * n for n in quarter], [4 * n for n in quarter])
    # Sums over the features for the two layer norms, forward and backward, and the loss, which
    # the compiler joins to one of them: a float32 per token, and one.
    batch, sequence, _ = x.shape
    summed = [c.bytes for c in after if c.kind == "all-reduce"]
    assert max(summed) <= 4 * batch // 2 * sequence + 4
    assert {c.kind for c in after} == {
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "collective-permute",
    }


SIZES = re.compile(r"^BATCH, .* = .*$", re.M)
SMALL = {
    MLP: "BATCH, SEQUENCE, MODEL, HIDDEN = 2, 16, 32, 64",
    LAYER: "BATCH, SEQUENCE, MODEL, HIDDEN, HEADS, HEAD = 4, 8, 32, 64, 4, 8",
}


def filled(args):
    """Arrays of random numbers for ``jax.ShapeDtypeStruct``s."""
    random = np.random.default_rng(0)

    def one(a):
        values = random.standard_normal(a.shape, np.float32) / np.sqrt(a.shape[0])
        return jax.device_put(values.astype(a.dtype), a.sharding)

    return jax.tree.map(one, args)


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_the_rewritten_program_returns_what_the_original_does(path, tmp_path):
    text, count = SIZES.subn(SMALL[path], path.read_text())
    assert count == 1
    small = tmp_path / path.name
    small.write_text(text)
    program = open_program(small)
    args = filled(program.args)
    expected = program.fn(*args)
    overlapped = program.overlapped(policy="always")
    plan = overlapped.plan(*args)
    assert len(plan.rewritten) == {MLP: 6, LAYER: 18}[path]
    found = overlapped(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        # bfloat16 rounds by up to 2**-9, and a value goes through several roundings.
        assert np.max(np.abs(ours - theirs)) <= 2**-6 * np.max(np.abs(theirs))
