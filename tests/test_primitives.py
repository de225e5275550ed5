"""The two primitives under every transform of jax, against the plain einsums: exact."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from primtools import GATHERS, PROBLEMS, SCATTERS, gather, scatter, sharding

from collmm.primitives import all_gather_einsum_p, einsum_reduce_scatter_p
from collmm.schedule import Schedule

ALL = pytest.mark.parametrize("name", PROBLEMS)
# One ring of each kind is enough where a transform does not look at shardings.
FEW = pytest.mark.parametrize(
    "name", ["gather-free", "gather-contracting", "scatter-free-lhs", "scatter-many-terms"]
)


def same(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def with_grads(fn):
    """Values, tangents, and cotangents for given cotangents of the results."""

    def run(primals, tangents, cts):
        outs, dots = jax.jvp(fn, primals, tangents)
        outs_again, pull = jax.vjp(fn, *primals)
        return outs, dots, outs_again, pull(cts)

    return run


def cotangents(problem, primals):
    rng = np.random.default_rng(7)
    outs = jax.eval_shape(problem.plain, *primals)
    return [rng.integers(-3, 4, out.shape).astype(out.dtype) for out in outs]


@ALL
def test_value_is_that_of_the_plain_einsum_and_sharded_as_asked(name):
    problem = PROBLEMS[name]()
    operands = problem.operands()
    outs = jax.jit(problem.fn)(*operands)
    same(outs, problem.plain(*map(np.asarray, operands)))
    for out, spec in zip(outs, problem.out_specs, strict=True):
        assert out.sharding.is_equivalent_to(sharding(problem.mesh, spec), out.ndim)


@ALL
def test_jvp_and_vjp_are_those_of_the_plain_einsum(name):
    problem = PROBLEMS[name]()
    primals, tangents = problem.operands(0), problem.operands(1)
    cts = cotangents(problem, primals)
    got = jax.jit(with_grads(problem.fn))(tuple(primals), tuple(tangents), cts)
    host = jax.tree.map(np.asarray, (tuple(primals), tuple(tangents), cts))
    same(got, with_grads(problem.plain)(*host))


@ALL
def test_compiled_cotangents_are_sharded_as_the_operands_and_nothing_is_gathered_whole(name):
    problem = PROBLEMS[name]()
    primals = problem.operands()
    cts = [
        jax.device_put(ct, sharding(problem.mesh, spec))
        for ct, spec in zip(cotangents(problem, primals), problem.out_specs, strict=True)
    ]
    run = jax.jit(lambda xs, cts: jax.vjp(problem.fn, *xs)[1](cts))
    compiled = run.lower(primals, cts).compile()
    if name == "gather-local-is-whole":
        # Nothing is summed round the ring: each device has the whole cotangent without it.
        assert rings(run.trace(primals, cts).jaxpr) == "gg"
        return
    for grad, primal in zip(compiled(primals, cts), primals, strict=True):
        assert grad.sharding.is_equivalent_to(primal.sharding, primal.ndim)
    text = compiled.as_text()
    assert "collective-permute" in text
    # A plain collective stays for the other axis of the sums that are scattered over it as well.
    if "scattered-over-another" not in name:
        assert "all-gather" not in text


@FEW
def test_hessian_vector_product_is_that_of_the_plain_einsum(name):
    problem = PROBLEMS[name]()
    primals, tangents = problem.operands(0), problem.operands(1)

    def hvp(fn):
        def loss(*xs):
            # The cube makes the second derivative depend on the point; whole numbers throughout.
            return sum(jnp.sum(out * out * out) for out in fn(*xs))

        every = tuple(range(len(primals)))
        return lambda xs, ts: jax.jvp(jax.grad(loss, argnums=every), xs, ts)

    small = [jnp.sign(x) for x in (*primals, *tangents)]
    xs, ts = tuple(small[: len(primals)]), tuple(small[len(primals) :])
    got = jax.jit(hvp(problem.fn))(xs, ts)
    same(got, hvp(problem.plain)(*jax.tree.map(np.asarray, (xs, ts))))


def batched_operands(problem, axes, size=3):
    rng = np.random.default_rng(5)
    made = []
    for shape, axis in zip(problem.shapes, axes, strict=True):
        if axis is not None:
            at = axis % (len(shape) + 1)
            shape = (*shape[:at], size, *shape[at:])
        made.append(rng.integers(-4, 5, shape).astype(problem.dtype))
    return problem.everywhere(*made)


def batchings(problem):
    n = len(problem.shapes)
    one = [tuple(0 if i == k else None for i in range(n)) for k in range(n)]
    return [(0,) * n, (-1,) * n, (1, *(0,) * (n - 1)), *one]


@ALL
def test_vmap_with_each_operand_batched_or_not(name):
    problem = PROBLEMS[name]()
    every = batchings(problem)
    thorough = name in ("gather-free", "scatter-free-lhs")
    for axes in every if thorough else (every[0], every[-1]):
        operands = batched_operands(problem, axes)
        got = jax.jit(jax.vmap(problem.fn, in_axes=axes))(*operands)
        same(got, jax.vmap(problem.plain, in_axes=axes)(*operands))


def test_vmap_leaves_a_use_of_unbatched_operands_unbatched():
    problem = GATHERS["many-uses"]()
    axes = (None, 0, None, None, None)
    operands = batched_operands(problem, axes)
    mapped = jax.vmap(problem.fn, in_axes=axes, out_axes=[0, None, None, None])
    jaxpr = jax.make_jaxpr(mapped)(*operands)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive is all_gather_einsum_p]
    assert [v.aval.ndim for v in eqn.outvars] == [4, 3, 2, 3]


@pytest.mark.parametrize("name", ["gather-batch", "scatter-free-rhs"])
def test_vmap_shards_the_batch_over_spmd_axis_name(name):
    # Axis d is not in these problems, so that the batch can have it.
    if name == "gather-batch":
        problem = gather([("bsk,bkf->bsf", 0, "- - -", "- - -")], ("bsk", "m - -"), 0)
    else:
        problem = scatter([("sk,kf->sf", "- m", "m -")], "- m", 1)
    axes = (0,) * len(problem.shapes)
    operands = batched_operands(problem, axes, size=4)
    got = jax.jit(jax.vmap(problem.fn, in_axes=axes, spmd_axis_name="d"))(*operands)
    same(got, jax.vmap(problem.plain, in_axes=axes)(*operands))
    (out,) = got
    (spec,) = problem.out_specs
    assert out.sharding.is_equivalent_to(sharding(problem.mesh, (("d",), *spec)), out.ndim)


@FEW
def test_vmap_of_grad_and_grad_of_vmap(name):
    problem = PROBLEMS[name]()
    axes = (0,) * len(problem.shapes)
    operands = batched_operands(problem, axes)
    every = tuple(range(len(operands)))

    def both(fn):
        def loss(*xs):
            return sum(jnp.sum(out * out) for out in fn(*xs))

        inside = jax.vmap(jax.grad(loss, argnums=every), in_axes=axes)
        outside = jax.grad(lambda *xs: jnp.sum(jax.vmap(loss, in_axes=axes)(*xs)), argnums=every)
        return lambda *xs: (inside(*xs), outside(*xs))

    same(jax.jit(both(problem.fn))(*operands), both(problem.plain)(*operands))


@pytest.mark.parametrize("wrap", ["scan", "checkpoint", "checkpoint-dots", "while", "cond"])
@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_values_and_gradients_inside(kind, wrap):
    if kind == "gather":
        problem = gather([("sk,kf->sf", 0, "- -", "- -")], ("sk", "m -"), 0)
    else:
        problem = scatter([("sk,kf->sf", "- m", "m -")], "m -", 0)
    x, w = problem.operands()
    ws = np.stack([np.asarray(w), np.sign(w)])

    def wrapped(fn, x, ws):
        def step(x, w):
            return jnp.sign(fn(x, w)[0]) + fn(x, w)[0]

        if wrap == "scan":
            return jax.lax.scan(lambda c, w: (step(c, w), None), x, ws)[0]
        if wrap == "checkpoint":
            return jax.checkpoint(step)(x, ws[0])
        if wrap == "checkpoint-dots":
            return jax.checkpoint(step, policy=jax.checkpoint_policies.dots_saveable)(x, ws[0])
        if wrap == "cond":
            return jax.lax.cond(ws[0, 0, 0] > -9, step, lambda x, w: x, x, ws[0])
        return jax.lax.fori_loop(0, 2, lambda i, c: step(c, ws[i]), x)

    def grads(fn):
        # A fori_loop of known length is a scan to reverse-mode differentiation.
        loss = lambda x, ws: jnp.sum(wrapped(fn, x, ws) * jnp.arange(8.0))  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))

    same(jax.jit(grads(problem.fn))(x, ws), grads(problem.plain)(np.asarray(x), ws))


@pytest.mark.parametrize("name", ["gather-free", "scatter-free-lhs"])
def test_eager_calls_need_no_jit(name):
    problem = PROBLEMS[name]()
    operands = problem.operands()
    same(problem.fn(*operands), problem.plain(*map(np.asarray, operands)))
    grads = jax.grad(lambda *xs: jnp.sum(problem.fn(*xs)[0] ** 2), argnums=(0, 1))(*operands)
    want = jax.grad(lambda *xs: jnp.sum(problem.plain(*xs)[0] ** 2), argnums=(0, 1))
    same(grads, want(*map(np.asarray, operands)))


# --- what is bound, and what is saved ---


def rings(jaxpr):
    """The rings of a jaxpr, in order, by the first letter of the primitive: g or s."""
    found = re.findall(r"(all_gather_einsum|einsum_reduce_scatter)\[", str(jaxpr))
    return "".join("g" if name == "all_gather_einsum" else "s" for name in found)


def pulled(problem, which):
    """The jaxpr of a vjp by some operands."""
    operands = problem.operands()

    def run(cts, *moving):
        def fn(*moving):
            xs = list(operands)
            for i, x in zip(which, moving, strict=True):
                xs[i] = x
            return problem.fn(*xs)

        return jax.vjp(fn, *moving)[1](cts)

    cts = cotangents(problem, operands)
    return jax.make_jaxpr(run)(cts, *[operands[i] for i in which])


@pytest.mark.parametrize(
    ("name", "which", "bound"),
    [
        ("gather-free", (0,), "gs"),  # d(gathered): einsum + reduce-scatter
        ("gather-free", (1,), "gg"),  # d(local): the operand is gathered again
        ("gather-free", (0, 1), "ggs"),
        ("gather-batch", (0, 1), "ggs"),
        ("gather-many-uses", (0,), "gs"),  # sums over one set of axes share a ring
        ("gather-different-sums", (0,), "gss"),
        ("gather-many-uses", (1, 2, 3, 4), "gg"),  # one ring gives every local's cotangent
        ("scatter-free-lhs", (0,), "sg"),
        ("scatter-free-lhs", (0, 1), "sg"),  # the cotangent goes round once for both
        ("scatter-many-terms", (0, 1, 2, 3, 4, 5), "sg"),
    ],
)
def test_each_is_the_transpose_of_the_other(name, which, bound):
    jaxpr = pulled(PROBLEMS[name](), which)
    assert sorted(rings(jaxpr)) == sorted(bound)
    assert not re.search(r"\ball_gather\b|\bdot_general\b", str(jaxpr))


@pytest.mark.parametrize("name", ["gather-free", "gather-batch", "gather-many-uses"])
def test_what_is_saved_is_the_shard(name):
    problem = PROBLEMS[name]()
    operands = problem.operands()
    _, pull = jax.vjp(jax.jit(problem.fn), *operands)
    saved = [x for x in jax.tree.leaves(pull) if isinstance(x, jax.Array)]
    for x in saved:
        (same_as,) = [o for o in operands if o.shape == x.shape and bool((o == x).all())]
        assert x.sharding.is_equivalent_to(same_as.sharding, x.ndim)
    assert len(saved) == len(operands)


# --- numbers ---


def test_bf16_sums_are_float32_and_rounded_once():
    # One share is 256 and the others are 1: a sum rounded at each hop would stay 256 or reach 260.
    x = np.full((16, 8), 1 / 2, np.float32)
    x[:, :2] = 128.0
    w = np.ones((8, 8), np.float32)
    want = (x @ w).astype(jnp.bfloat16)
    assert want[0, 0] == 260.0
    problem = scatter([("sk,kf->sf", "- m", "m -")], "m -", 0, dtype=jnp.bfloat16)
    x, w = problem.everywhere(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    (got,) = jax.jit(problem.fn)(x, w)
    same(got, want)
    problem = gather([("sk,kf->sf", 1, "- -", "- -")], ("kf", "m -"), 0, dtype=jnp.bfloat16)
    (got,) = jax.jit(problem.fn)(w, x)
    same(got, want)


@pytest.mark.parametrize("out", ["- -", "- d"])
def test_bf16_sum_over_another_axis_is_rounded_once_too(out):
    # The shares of the two rows of the mesh are 256 and 1.5, and 1 would round to 256.
    x = np.zeros((16, 8), np.float32)
    x[:, :4], x[:, 4:] = 64.0, 3 / 8
    w = np.ones((8, 8), np.float32)
    want = (x @ w).astype(jnp.bfloat16)
    problem = gather([("sk,kf->sf", 0, "d -", out)], ("sk", "m d"), 0, dtype=jnp.bfloat16)
    half = problem.everywhere(*(a.astype(jnp.bfloat16) for a in (x, w)))
    same(jax.jit(problem.fn)(*half), [want])


@pytest.mark.parametrize("make", [GATHERS["contracting"], SCATTERS["free-lhs"]])
def test_bf16_cotangents_are_exact(make):
    problem = make(dtype=jnp.bfloat16)
    primals, tangents = problem.operands(0), problem.operands(1)
    cts = cotangents(problem, primals)
    got = jax.jit(with_grads(problem.fn))(tuple(primals), tuple(tangents), cts)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float32), (tuple(primals), tuple(tangents), cts))
    want = with_grads(make().plain)(*wide)
    same(got, jax.tree.map(lambda a: np.asarray(a).astype(jnp.bfloat16), want))


@pytest.mark.parametrize(
    "name",
    [
        "gather-many-uses",
        "gather-contracting",
        "gather-sum-scattered-over-another-axis",
        "scatter-many-terms",
        "scatter-batch",
        "scatter-sum-over-another-axis",
    ],
)
def test_int8_with_int32_results_is_exact(name):
    problem = PROBLEMS[name](dtype=jnp.int8, out_dtype=jnp.int32, preferred=jnp.int32)
    rng = np.random.default_rng(3)
    operands = [rng.integers(-128, 128, s).astype(np.int8) for s in problem.shapes]
    got = jax.jit(problem.fn)(*problem.everywhere(*operands))
    same(got, problem.plain(*operands))
    assert max(int(np.abs(x).max()) for x in got) > 127


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.int64, jnp.complex128])
@pytest.mark.parametrize("name", ["gather-many-uses", "scatter-many-terms"])
def test_wide_types_under_x64(name, dtype):
    with jax.enable_x64(True):
        problem = PROBLEMS[name](dtype=dtype)
        # Beyond what 32 bits hold exactly.
        operands = [np.asarray(x) * 2**20 + 1 for x in problem.operands(place=False)]
        operands = [x.astype(dtype) for x in operands]
        got = jax.jit(problem.fn)(*problem.everywhere(*operands))
        want = problem.plain(*operands)
        same(got, want)
        assert got[0].dtype == dtype


@pytest.mark.parametrize("name", ["gather-free", "gather-contracting", "scatter-many-terms"])
def test_complex_values_and_gradients(name):
    problem = PROBLEMS[name](dtype=jnp.complex64)
    primals, tangents = problem.operands(0), problem.operands(1)
    cts = [ct * (1 + 2j) for ct in cotangents(problem, primals)]
    cts = [ct.astype(np.complex64) for ct in cts]
    got = jax.jit(with_grads(problem.fn))(tuple(primals), tuple(tangents), cts)
    same(got, with_grads(problem.plain)(tuple(primals), tuple(tangents), cts))


SCHEDULES = [
    Schedule(("m",), 4, two_way, unroll, chains=chains)
    for two_way in (False, True)
    for unroll in (False, True)
    for chains in (None, 2, 3)
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.describe().replace(" ", "-"))
@pytest.mark.parametrize("name", ["gather-many-uses", "scatter-many-terms"])
def test_every_schedule_gives_the_same_values_and_gradients(name, schedule):
    problem = PROBLEMS[name](schedule=schedule)
    primals, tangents = problem.operands(0), problem.operands(1)
    cts = cotangents(problem, primals)
    got = jax.jit(with_grads(problem.fn))(tuple(primals), tuple(tangents), cts)
    host = jax.tree.map(np.asarray, (tuple(primals), tuple(tangents), cts))
    same(got, with_grads(problem.plain)(*host))


# --- types ---


def test_symbolic_zero_tangents_bind_nothing():
    problem = GATHERS["many-uses"]()
    operands = problem.operands()

    def one_local(x):
        return problem.fn(operands[0], operands[1], x, *operands[3:])

    jaxpr = jax.make_jaxpr(lambda x: jax.jvp(one_local, (x,), (x,)))(operands[2])
    uses = [len(e.params["uses"]) for e in jaxpr.eqns if e.primitive is all_gather_einsum_p]
    assert uses == [4, 1]


def test_explicit_axes_type_the_results():
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    problem = GATHERS["free"]()
    with jax.set_mesh(mesh):
        x, w = (
            jax.device_put(np.asarray(a), NamedSharding(mesh, P(*(axes or None for axes in spec))))
            for a, spec in zip(problem.operands(), problem.specs, strict=True)
        )
        jaxpr = jax.make_jaxpr(problem.fn)(x, w)
        (out,) = jaxpr.out_avals
        assert out.sharding.spec == P("d", None, "m")
        same(jax.jit(problem.fn)(x, w), problem.plain(np.asarray(x), np.asarray(w)))


def test_a_scatter_of_batched_terms_pads_no_operand_twice():
    problem = SCATTERS["many-terms"]()
    axes = (0, None, None, 0, None, 0)
    operands = batched_operands(problem, axes)
    jaxpr = jax.make_jaxpr(jax.vmap(problem.fn, in_axes=axes))(*operands)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive is einsum_reduce_scatter_p]
    assert [v.aval.ndim for v in eqn.invars] == [4, 2, 3, 3, 2, 4]
