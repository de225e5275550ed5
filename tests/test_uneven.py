"""Dimensions that do not divide by their mesh axes: padded inside the primitive, exact outside."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from primtools import PROBLEMS
from rewritten import always, assert_equal_trees, collectives, rings
from test_manual import ints, mesh_of

from collmm import Options, Reason, overlap_collectives
from collmm.sites import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, shard_shape

# What travels, by the role of the uneven dimension: equation, then the shardings in which lhs and
# rhs are given and the result is wanted. Shardy finds the collective.
CASES = {
    "gather-free": ("sk,kf->sf", "m -", "- m", "- m", "s", ALL_GATHER),
    "gather-free-rhs": ("bd,vd->bv", "m -", "m -", "m -", "v", ALL_GATHER),
    "gather-contracting": ("sk,kf->sf", "m -", "m -", "m -", "k", ALL_GATHER),
    "gather-batch": ("bsk,bkf->bsf", "m - -", "- - m", "- - m", "b", ALL_GATHER),
    "gather-local-uneven": ("sk,kf->sf", "m -", "- m", "- m", "f", ALL_GATHER),
    "scatter-free": ("sk,kf->sf", "- m", "m -", "m -", "s", REDUCE_SCATTER),
    "scatter-free-rhs": ("sk,kf->sf", "- m", "m -", "- m", "f", REDUCE_SCATTER),
    "scatter-batch": ("bsk,bkf->bsf", "- - m", "- m -", "m - -", "b", REDUCE_SCATTER),
    "scatter-contracting": ("sk,kf->sf", "- m", "m -", "m -", "k", REDUCE_SCATTER),
    "gather-all-uneven": ("sk,kf->sf", "m -", "- m", "- m", "skf", ALL_GATHER),
    "scatter-all-uneven": ("sk,kf->sf", "- m", "m -", "m -", "skf", REDUCE_SCATTER),
}


def spec(text):
    return P(*(None if axes == "-" else tuple(axes.split(",")) for axes in text.split()))


def program(mesh, equation, lhs, rhs, out):
    """An einsum of values constrained to ``lhs`` and ``rhs``, with a result constrained to ``out``.

    No argument of a jit can be sharded unevenly, but what is between its equations can.
    """

    def at(x, text):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(text)))

    def fn(x, w):
        return at(jnp.einsum(equation, at(x, lhs), at(w, rhs)), out)

    return fn


def with_gradients(fn):
    """The result of ``fn``, and the gradients of the sum of its squares."""

    def loss(*args):
        out = fn(*args)
        return jnp.sum(out * out), out

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def operands(equation, sizes):
    lhs, rest = equation.split(",")
    rhs = rest.split("->")[0]
    return tuple(ints(i, *(sizes[x] for x in labels)) for i, labels in enumerate((lhs, rhs)))


def check(mesh, case, extra):
    """Values and gradients are exact; return the kind of collective found, and that of the case."""
    equation, lhs, rhs, out, uneven, kind = CASES[case]
    n = mesh.shape["m"]
    sizes = dict.fromkeys("bskfdv", 2 * n) | dict.fromkeys(uneven, extra)
    args = operands(equation, sizes)
    o = always(with_gradients(program(mesh, equation, lhs, rhs, out)))
    plan = o.plan(*args)
    assert plan.decisions[0].rewritten, plan
    assert_equal_trees(o(*args), with_gradients(lambda x, w: jnp.einsum(equation, x, w))(*args))
    return plan.decisions[0].collective.kind, kind


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_values_and_gradients_on_any_ring(n, case):
    found, wanted = check(mesh_of((n,), ("m",)), case, 2 * n - 1)
    assert found == wanted


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 5])
def test_fewer_rows_than_devices_leave_some_with_padding_alone(case, size):
    check(mesh_of((8,), ("m",)), case, size)


@pytest.mark.parametrize("case", ["gather-contracting", "scatter-contracting", "gather-batch"])
def test_infinities_meet_no_padding(case):
    equation, lhs, rhs, out, uneven, _ = CASES[case]
    args = operands(equation, dict.fromkeys("bskf", 8) | {uneven: 5})
    args = tuple(x.at[0].set(jnp.inf) for x in args)
    o = always(jax.jit(program(mesh_of((4,), ("m",)), equation, lhs, rhs, out)))
    assert len(o.plan(*args).rewritten) == 1
    np.testing.assert_array_equal(o(*args), jnp.einsum(equation, *args))


# Other axes shard what the ring's do not, or the same dimension before them.
TWO_AXES = {
    "gather": ("bsk,kf->bsf", "d m -", "- m", "d - m"),
    "gather-behind-another": ("sk,kf->sf", "d,m -", "- m", "d m"),
    "gather-contracting": ("sk,kf->sf", "m -", "m d", "m d"),
    "gather-over-both": ("sk,kf->sf", "d,m -", "- d,m", "- d,m"),
    "gather-two-dimensions": ("sk,kf->sf", "m d", "- m", "- m"),
    "scatter": ("bsk,kf->bsf", "d - m", "m -", "d m -"),
    "scatter-behind-another": ("sk,kf->sf", "d m", "m -", "d,m -"),
    "scatter-over-both": ("sk,kf->sf", "- d,m", "d,m -", "d,m -"),
    "scatter-two-sums": ("sk,kf->sf", "- d,m", "d,m -", "m -"),
}


@pytest.mark.parametrize("case", TWO_AXES)
def test_values_and_gradients_on_two_axes(case):
    equation, *specs = TWO_AXES[case]
    # Fifteen rows are eight for each of two devices, and two for each of eight: shards that nest.
    args = operands(equation, {"b": 3, "s": 15, "k": 11, "f": 9})
    o = always(with_gradients(program(mesh_of((2, 4), ("d", "m")), equation, *specs)))
    assert o.plan(*args).decisions[0].rewritten
    assert_equal_trees(o(*args), with_gradients(lambda x, w: jnp.einsum(equation, x, w))(*args))


@pytest.mark.parametrize("case", ["gather-behind-another", "scatter-behind-another"])
def test_shards_that_do_not_nest_are_left_with_a_reason(case):
    # Thirteen rows: seven for each of two devices, but two for each of eight.
    equation, *specs = TWO_AXES[case]
    args = operands(equation, {"s": 13, "k": 8, "f": 9})
    o = always(jax.jit(program(mesh_of((2, 4), ("d", "m")), equation, *specs)))
    assert [d.reason for d in o.plan(*args).decisions] == [Reason.UNEVEN_SHARDS]
    assert_equal_trees(o(*args), jnp.einsum(equation, *args))


def test_the_only_collectives_left_are_the_permutes_of_one_ring():
    mesh = mesh_of((4,), ("m",))
    for case in ("gather-free-rhs", "gather-contracting", "scatter-free", "gather-all-uneven"):
        equation, lhs, rhs, out, _, _ = CASES[case]
        fn = program(mesh, equation, lhs, rhs, out)
        args = operands(equation, dict.fromkeys("bskfdv", 7))
        # The largest element: a result that is whole for the caller would be gathered again.
        o = always(jax.jit(lambda x, w, fn=fn: jnp.max(fn(x, w))))
        ((schedule,), after) = [d.schedule for d in o.plan(*args).rewritten], collectives(o, *args)
        # Seven rows are blocks of two, which two accumulators can share.
        chains = min(2, schedule.accumulators) if case == "scatter-free" else 1
        permutes = 3 * chains
        assert after["collective-permute"] == permutes, case
        assert after["all-gather"] == after["reduce-scatter"] == after["all-to-all"] == 0, case
        assert after["all-reduce"] == (case != "gather-free"), case  # that of the largest element


def language_model(mesh, kind):
    """Embedding, a residual block and the loss over a vocabulary that does not divide."""

    def at(x, *axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def loss(params, tokens):
        # Where the vocabulary is sharded: over the model axis, or FSDP over the data axis.
        table = at(params["table"], "m" if kind == "vocabulary" else "d", None)
        one_hot = jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype)
        x = at(jnp.einsum("bsv,vk->bsk", one_hot, table), "d", "m", None)
        h = at(jnp.einsum("bsk,kf->bsf", x, at(params["up"], None, "m")), "d", None, "m")
        x = x + at(jnp.einsum("bsf,fk->bsk", h, at(params["down"], "m", None)), "d", "m", None)
        logits = at(jnp.einsum("bsk,vk->bsv", x, table), "d", None, "m")
        picked = jnp.sum(one_hot * logits, -1)
        return jnp.sum(picked * picked - jnp.sum(logits, -1))

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return value, jax.tree.map(lambda p, g: p - g, params, grads)

    return jax.jit(step)


@pytest.mark.parametrize("kind", ["vocabulary", "fsdp"])
@pytest.mark.parametrize("vocabulary", [13, 3])
def test_a_training_step_with_a_vocabulary_that_does_not_divide(vocabulary, kind):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, (4, 8)))
    params = {
        name: jnp.sign(ints(i, *shape))
        for i, (name, shape) in enumerate(
            {"table": (vocabulary, 6), "up": (6, 10), "down": (10, 6)}.items()
        )
    }
    fn = language_model(mesh_of((2, 4), ("d", "m")), kind)
    o = always(fn)
    plan = o.plan(params, tokens)
    assert len(plan.rewritten) >= 6, plan
    one = language_model(mesh_of((1, 1), ("d", "m")), kind)
    assert_equal_trees(*jax.tree.map(np.asarray, (o(params, tokens), one(params, tokens))))


def test_einsums_of_one_uneven_value_share_its_ring():
    mesh = mesh_of((4,), ("m",))

    def at(x, *axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    @jax.jit
    def fn(x, wq, wk):
        x = at(x, "m", None)
        return tuple(jnp.max(at(x @ w, None, "m"), 0) for w in (at(wq, None, "m"), wk))

    args = ints(0, 7, 6), ints(1, 6, 5), ints(2, 6, 9)
    o = always(fn)
    assert rings(o, *args) == [("gather", 2)]
    assert collectives(o, *args)["collective-permute"] == 3
    assert_equal_trees(o(*args), tuple(jnp.max(args[0] @ w, 0) for w in args[1:]))


@pytest.mark.parametrize("side", ["operand", "result"])
def test_an_exchange_of_uneven_blocks(side):
    mesh = mesh_of((4,), ("m",))
    specs = ("- m -", "m - -", "m - -") if side == "operand" else ("m - -", "m - -", "- m -")
    fn = program(mesh, "ecd,edf->ecf", *specs)
    args = ints(0, 7, 5, 6), ints(1, 7, 6, 3)
    o = always(jax.jit(fn))
    assert [d.collective.kind for d in o.plan(*args).rewritten] == [ALL_TO_ALL]
    assert_equal_trees(o(*args), jnp.einsum("ecd,edf->ecf", *args))


@pytest.mark.parametrize("role", ["free", "contracting"])
def test_a_quantised_value_travels_narrow_only_where_its_padding_is_not_summed(role):
    mesh = mesh_of((4,), ("m",))
    equation = {"free": "sk,kf->sf", "contracting": "ks,kf->sf"}[role]

    def at(x, text):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(text)))

    def fn(x8, scale, w):
        # Padding of scales is zero, and what is divided by it is no number.
        x = at(x8, "m -").astype(jnp.float32) / at(scale, "m -")
        return at(jnp.einsum(equation, x, at(w, "- m")), "- m")

    rows = 7
    shape = {"free": (5, 9), "contracting": (rows, 9)}[role]
    scale = jnp.asarray(2.0 ** np.random.default_rng(3).integers(-2, 3, (rows, 1)), jnp.float32)
    args = ints(0, rows, 5, dtype=jnp.int8), scale, ints(2, *shape)
    o = always(jax.jit(fn))
    assert len(o.plan(*args).rewritten) == 1
    narrow = "narrow_gather_einsum" in str(o.trace(*args).jaxpr)
    assert narrow == (role == "free")
    assert_equal_trees(o(*args), jnp.einsum(equation, args[0].astype(jnp.float32) / scale, args[2]))


def test_under_transforms_of_the_overlapped_function():
    mesh = mesh_of((4,), ("m",))
    equation, lhs, rhs, out, _, _ = CASES["gather-free-rhs"]
    fn = program(mesh, equation, lhs, rhs, out)
    o = always(jax.jit(fn))
    x, w = operands(equation, dict.fromkeys("bdv", 7))

    def plain(x, w):
        return jnp.einsum(equation, x, w)

    def several(f):
        return lambda x, w: (
            jax.jvp(f, (x, w), (w, x)),
            jax.vjp(f, x, w)[1](plain(w, x)),
            jax.vmap(f)(jnp.stack([x, w]), jnp.stack([w, x])),
            jax.lax.scan(lambda c, a: (f(c, a), f(a, c)), x, jnp.stack([w, x])),
        )

    assert_equal_trees(several(o)(x, w), several(plain)(x, w))
    jitted = jax.jit(several(o))
    assert_equal_trees(jitted(x, w), several(plain)(x, w))
    assert "collective-permute" in jitted.lower(x, w).compile().as_text()


# --- the primitives themselves ---

UNEVEN = {"b": 5, "s": 13, "k": 7, "f": 9, "h": 3}


def values_and_derivatives(fn):
    def run(primals, tangents, cts):
        outs, pull = jax.vjp(fn, *primals)
        return outs, jax.jvp(fn, primals, tangents)[1], pull(cts)

    return run


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_ring_and_its_derivatives_with_no_dimension_that_divides(name):
    problem = PROBLEMS[name](sizes=UNEVEN)
    primals, tangents = (
        tuple(problem.everywhere(*problem.operands(seed, place=False))) for seed in (0, 1)
    )
    outs = jax.eval_shape(problem.plain, *primals)
    rng = np.random.default_rng(7)
    cts = [rng.integers(-3, 4, out.shape).astype(out.dtype) for out in outs]
    got = jax.jit(values_and_derivatives(problem.fn))(primals, tangents, cts)
    assert_equal_trees(got, values_and_derivatives(problem.plain)(primals, tangents, cts))


@pytest.mark.parametrize("name", ["gather-many-uses", "scatter-many-terms"])
def test_vmap_of_rings_of_uneven_dimensions(name):
    problem = PROBLEMS[name](sizes=UNEVEN)
    rng = np.random.default_rng(5)
    args = problem.everywhere(
        *(rng.integers(-4, 5, (3, *shape)).astype(np.float32) for shape in problem.shapes)
    )
    got = jax.jit(jax.vmap(problem.fn))(*args)
    assert_equal_trees(got, jax.vmap(problem.plain)(*args))


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    name=st.sampled_from(sorted(PROBLEMS)),
    sizes=st.fixed_dictionaries({x: st.integers(1, 10) for x in "bskfh"}),
)
def test_rings_of_any_sizes(name, sizes):
    problem = PROBLEMS[name](sizes=sizes)
    args = problem.everywhere(*problem.operands(place=False))
    # Whole results: jax cannot take over a result whose dimension divides by a part of an axis.
    whole = NamedSharding(problem.mesh, P())
    assert_equal_trees(jax.jit(problem.fn, out_shardings=whole)(*args), problem.plain(*args))


@pytest.mark.parametrize("uneven", ["rows", "hidden", "width"])
def test_rings_of_padded_shards_stay_apart(uneven):
    """What is elementwise between two rings makes of the padding what is not zero."""
    mesh = mesh_of((8,), ("m",))
    sizes = {"rows": 16, "hidden": 24, "width": 8} | {uneven: 27}
    rows, hidden, width = (sizes[k] for k in ("rows", "hidden", "width"))

    def at(x, *axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def loss(x, w, v):
        h = jnp.clip(at(at(x, "m", None) @ at(w, None, "m"), None, "m"), -3, 3)
        y = at((h * h + 1) @ at(v, "m", None), "m", None)
        return jnp.sum(y), y

    fn = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    args = ints(0, rows, width), ints(1, width, hidden), ints(2, hidden, width)
    o = overlap_collectives(fn, Options("always", strict=True))
    assert_equal_trees(o(*args), fn(*args))
    # The width is not sharded: there the chains are made, and one ring is left beside them.
    assert len(rings(o, *args)) == (1 if uneven == "width" else 5)


# --- what the plan says ---


def test_bytes_and_flops_count_the_padding():
    assert shard_shape((17, 4, 3), (("m",), (), ("d", "m")), {"d": 2, "m": 4}) == (5, 4, 1)
    mesh = mesh_of((8,), ("m",))
    fn = jax.jit(program(mesh, "sk,kf->sf", "m -", "- m", "- m"))
    args = jnp.ones((17, 16)), jnp.ones((16, 20))
    (decision,) = overlap_collectives(fn, Options("always", strict=True)).plan(*args).decisions
    # 3 of 24 rows times 17 columns of x travel, and 3 of 24 columns of w are multiplied.
    assert decision.site.device_flops() == 2 * 17 * 16 * 3
    assert decision.collective.bytes == 17 * 16 * 4


def test_an_even_program_is_not_padded():
    problem = PROBLEMS["gather-many-uses"]()
    args = problem.operands(place=False)
    names = {eqn.primitive.name for eqn in jax.make_jaxpr(problem.fn)(*args).eqns}
    assert math.prod(problem.shapes[0]) > 0
    assert not names & {"pad", "slice", "sharding_constraint"}
    text = jax.jit(problem.fn).lower(*args).as_text()
    assert "stablehlo.pad" not in text
