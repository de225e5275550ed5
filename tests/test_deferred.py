"""An overlapped function inside every transform of jax: planned late, equal to the plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steptools import (
    ALWAYS,
    DOWN,
    UP,
    X,
    answer,
    arguments,
    make_mesh,
    make_step,
    permutes,
    put,
    same,
    whole_numbers,
)

import collmm
from collmm import AnalysisError, AnalysisWarning, Options, no_overlap, overlap_collectives


@pytest.fixture
def mesh():
    return make_mesh()


@pytest.fixture
def plain(mesh):
    return jax.jit(make_step(mesh))


@pytest.fixture
def overlapped(plain):
    return overlap_collectives(plain, ALWAYS)


def loss_of(fn, power=2):
    """A scalar of the step whose derivatives depend on the point."""

    def loss(x, up, down):
        return jnp.sum(fn(x, up, down) ** power)

    return loss


def small(mesh):
    """Signs only: second derivatives stay exact."""
    return [jnp.sign(a) for a in arguments(mesh)]


EVERY = (0, 1, 2)

# Each takes the function and gives one that is called with the step's arguments.
TRANSFORMS = {
    "call": lambda f: f,
    "grad": lambda f: jax.grad(loss_of(f), argnums=EVERY),
    "grad-of-one": lambda f: jax.grad(loss_of(f), argnums=1),
    "value-and-grad": lambda f: jax.value_and_grad(loss_of(f), argnums=EVERY),
    "jvp": lambda f: lambda *xs: jax.jvp(f, xs, tuple(2 * x for x in xs)),
    "jvp-of-one": lambda f: lambda x, up, down: jax.jvp(lambda u: f(x, u, down), (up,), (up,)),
    "vjp": lambda f: lambda *xs: jax.vjp(f, *xs)[1](xs[0]),
    "linearize": lambda f: lambda *xs: jax.linearize(f, *xs)[1](*xs),
    "hvp": lambda f: lambda *xs: jax.jvp(jax.grad(loss_of(f), argnums=EVERY), xs, xs),
    "jacfwd": lambda f: lambda x, up, down: jax.jacfwd(lambda u: f(x, u, down))(up),
    "jacrev": lambda f: lambda x, up, down: jax.jacrev(lambda d: jnp.sum(f(x, up, d), (0, 1)))(
        down
    ),
    "vmap": lambda f: lambda x, up, down: jax.vmap(f, in_axes=(0, None, None))(
        jnp.stack([x, 2 * x]), up, down
    ),
    "vmap-of-all": lambda f: lambda *xs: jax.vmap(f, in_axes=-1, out_axes=1)(
        *(jnp.stack([x, 2 * x], -1) for x in xs)
    ),
    "grad-of-vmap": lambda f: jax.grad(
        lambda x, up, down: jnp.sum(
            jax.vmap(loss_of(f), in_axes=(0, None, None))(jnp.stack([x, 2 * x]), up, down)
        ),
        argnums=EVERY,
    ),
    "vmap-of-grad": lambda f: lambda x, up, down: jax.vmap(
        jax.grad(loss_of(f), argnums=EVERY), in_axes=(0, None, None)
    )(jnp.stack([x, 2 * x]), up, down),
    "checkpoint": lambda f: jax.grad(loss_of(jax.checkpoint(f)), argnums=EVERY),
    "checkpoint-dots": lambda f: jax.grad(
        loss_of(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)), argnums=EVERY
    ),
    "checkpoint-everything": lambda f: jax.grad(
        loss_of(jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)),
        argnums=EVERY,
    ),
    "scan": lambda f: lambda x, up, down: jax.lax.scan(
        lambda c, i: (jnp.sign(f(c, up, down)) + i, f(c, up, down)), x, jnp.arange(2.0)
    ),
    "grad-of-scan": lambda f: jax.grad(
        lambda x, up, down: jnp.sum(
            jax.lax.scan(lambda c, i: (jnp.sign(c) + f(c, up, down) * i, None), x, jnp.arange(2.0))[
                0
            ]
        ),
        argnums=EVERY,
    ),
    "while": lambda f: lambda x, up, down: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sign(f(c[1], up, down))), (0, x)
    ),
    "cond": lambda f: lambda x, up, down: jax.lax.cond(
        jnp.sum(x) > 1e6, lambda *xs: xs[0], f, x, up, down
    ),
    "grad-of-cond": lambda f: jax.grad(
        loss_of(
            lambda x, up, down: jax.lax.cond(
                jnp.sum(x) > 1e6, lambda *xs: xs[0], f, x, up, down
            )
        ),
        argnums=EVERY,
    ),
    "custom-vjp": lambda f: jax.grad(loss_of(with_custom_vjp(f)), argnums=EVERY),
    "custom-jvp": lambda f: jax.grad(loss_of(with_custom_jvp(f)), argnums=EVERY),
    "twice": lambda f: lambda x, up, down: f(f(x, up, down), up, down),
    "nested-jit": lambda f: jax.jit(lambda *xs: f(*xs) + 1),
    "grad-of-nested-jit": lambda f: jax.grad(loss_of(jax.jit(lambda *xs: f(*xs) + 1)), EVERY),
}  # fmt: skip


def with_custom_vjp(f):
    g = jax.custom_vjp(f)

    def forward(*xs):
        return f(*xs), xs

    def backward(xs, ct):
        # Twice the true cotangents, to show that the rule is used; and f once more inside it.
        return tuple(2 * c for c in jax.vjp(f, *xs)[1](ct))

    g.defvjp(forward, backward)
    return g


def with_custom_jvp(f):
    g = jax.custom_jvp(f)

    @g.defjvp
    def rule(primals, tangents):
        out, dot = jax.jvp(f, primals, tangents)
        return out, 3 * dot

    return g


@pytest.mark.parametrize("name", TRANSFORMS)
def test_inside_a_transform_it_equals_the_plain_function(mesh, plain, overlapped, name):
    transform = TRANSFORMS[name]
    args = small(mesh)
    want = transform(plain)(*args)
    same(jax.jit(transform(overlapped))(*args), want)


EAGER = [
    "grad", "value-and-grad", "jvp", "vjp", "linearize", "hvp", "jacfwd", "vmap", "vmap-of-grad",
    "checkpoint", "scan", "while", "cond", "custom-vjp",
]  # fmt: skip


@pytest.mark.parametrize("name", EAGER)
def test_outside_any_jit_too(mesh, plain, overlapped, name):
    args = small(mesh)
    same(TRANSFORMS[name](overlapped)(*args), TRANSFORMS[name](plain)(*args))


# --- that it is overlapped there ---

# Transforms whose call, or one part of it, stands at the top level of the outer jit.
AT_TOP = ["call", "grad", "value-and-grad", "jvp", "vjp", "hvp", "custom-vjp", "twice", "vmap"]


@pytest.mark.parametrize("name", AT_TOP)
def test_permutes_appear_at_the_top_level_of_an_outer_jit(mesh, overlapped, name):
    outer = jax.jit(TRANSFORMS[name](overlapped))
    assert permutes(outer.lower(*arguments(mesh)).compile())


@pytest.mark.parametrize("name", ["grad", "value-and-grad", "jvp", "vmap"])
def test_permutes_appear_outside_a_jit(mesh, overlapped, name, monkeypatch):
    rewritten = []
    plan_program = collmm.deferred.plan_program

    def spy(*args, **kwargs):
        planned = plan_program(*args, **kwargs)
        rewritten.append(len(planned.plan.rewritten))
        return planned

    monkeypatch.setattr(collmm.deferred, "plan_program", spy)
    TRANSFORMS[name](overlapped)(*arguments(mesh))
    assert sum(rewritten) >= 2


def test_gradients_are_overlapped_as_much_as_inside_the_decorator(mesh, plain, overlapped):
    args = arguments(mesh)
    specs = tuple(NamedSharding(mesh, s) for s in (X, UP, DOWN))
    outer = jax.jit(jax.grad(loss_of(overlapped), argnums=EVERY), out_shardings=specs)
    inner = overlap_collectives(
        jax.jit(jax.grad(loss_of(plain), argnums=EVERY), out_shardings=specs), ALWAYS
    )
    same(outer(*args), inner(*args))
    assert permutes(outer.lower(*args).compile()) >= permutes(inner.lower(*args).compile()) / 2


def test_shardings_around_the_call_are_found_through_other_operations(mesh, overlapped):
    def outer(x, up, down):
        return overlapped(jnp.tanh(x) + 1, 2 * up, down.astype(jnp.bfloat16).astype(jnp.float32))

    args = arguments(mesh)
    assert permutes(jax.jit(outer).lower(*args).compile())


def test_the_same_call_on_other_shardings_is_planned_again(mesh):
    fn = overlap_collectives(jax.jit(lambda x, w: x @ w), ALWAYS)
    out = NamedSharding(mesh, P(None, "m"))

    def outer(x, v, w):
        return fn(x, w), fn(v, w)

    x = put(mesh, whole_numbers(8, 8), P("m"))
    v = put(mesh, whole_numbers(8, 8, seed=4), P())
    w = put(mesh, whole_numbers(8, 8, seed=5), UP)
    compiled = jax.jit(outer, out_shardings=(out, out)).lower(x, v, w).compile()
    # Only the first call has a gather; had it been planned for both, the other would have a ring.
    assert permutes(compiled) == 3
    same(compiled(x, v, w), (np.asarray(x) @ np.asarray(w), np.asarray(v) @ np.asarray(w)))


def test_a_nested_jit_that_constrains_its_arguments_is_overlapped(mesh, overlapped):
    @jax.jit
    def inner(x, up, down):
        x, up, down = (
            jax.lax.with_sharding_constraint(a, NamedSharding(mesh, s))
            for a, s in zip((x, up, down), (X, UP, DOWN), strict=True)
        )
        return overlapped(x, up, down)

    args = arguments(mesh)
    outer = jax.jit(lambda *xs: inner(*xs) * 2)
    same(outer(*args), 2 * answer(*args))
    assert permutes(outer.lower(*args).compile())


def test_scan_over_layers_inside_the_decorator_and_around_it(mesh, plain, overlapped):
    x, up, down = small(mesh)
    ups, downs = jnp.stack([up, 2 * up]), jnp.stack([down, down])

    def layers(f):
        return lambda x, ups, downs: jax.lax.scan(
            lambda c, w: (jnp.sign(f(c, *w)), jnp.sum(f(c, *w))), x, (ups, downs)
        )

    want = layers(plain)(x, ups, downs)
    inside = overlap_collectives(jax.jit(layers(plain)), ALWAYS)
    assert len(inside.plan(x, ups, downs).rewritten) >= 2
    same(inside(x, ups, downs), want)
    same(jax.jit(layers(overlapped))(x, ups, downs), want)


def test_inside_another_overlapped_function_it_is_planned_with_it(mesh, plain, overlapped):
    def outer(x, up, down):
        return overlapped(x, up, down) + overlapped(2 * x, up, down)

    args = arguments(mesh)
    both = overlap_collectives(jax.jit(outer), ALWAYS)
    same(both(*args), 3 * answer(*args))
    assert len(both.plan(*args).rewritten) == 4
    grad = overlap_collectives(jax.jit(jax.grad(loss_of(outer), argnums=EVERY)), ALWAYS)
    same(grad(*args), jax.grad(lambda *xs: 9 * loss_of(plain)(*xs), argnums=EVERY)(*args))


def test_jit_of_an_overlapped_plain_function(mesh):
    step = make_step(mesh)
    outer = jax.jit(overlap_collectives(step, ALWAYS), donate_argnums=0)
    args = arguments(mesh)
    want = answer(*args)
    same(outer(*args), want)
    assert args[0].is_deleted()


def test_explicit_axes():
    mesh = make_mesh(kind=AxisType.Explicit)

    def fn(x, up, down):
        whole = jax.sharding.reshard(x, P("d", None, None))
        h = jnp.maximum(whole @ up, 0)
        return jnp.einsum("bsf,fk->bsk", h, down, out_sharding=X)

    with jax.set_mesh(mesh):
        args = small(mesh)
        plain, overlapped = jax.jit(fn), overlap_collectives(jax.jit(fn), ALWAYS)
        outer = jax.jit(lambda *xs: overlapped(*xs) * 2)
        same(outer(*args), 2 * plain(*args))
        assert permutes(outer.lower(*args).compile())
        grads = jax.jit(jax.grad(loss_of(overlapped), argnums=EVERY))
        same(grads(*args), jax.grad(loss_of(plain), argnums=EVERY)(*args))
        assert permutes(grads.lower(*args).compile())


# --- what a call carries through ---


def test_static_donated_and_keyword_arguments_under_a_trace(mesh):
    @functools.partial(overlap_collectives, options=ALWAYS)
    @functools.partial(jax.jit, static_argnums=1, static_argnames="name", donate_argnums=0)
    def fn(x, n, up, *, scale=1, name="y"):
        return {name: n * scale * (x @ up)}

    x, up, _ = arguments(mesh)
    want = {"z": 6 * (np.asarray(x) @ np.asarray(up))}
    same(jax.jit(lambda x, up: fn(x, 3, up, scale=2, name="z"))(x, up), want)
    with jax.checking_leaks():
        same(jax.jit(lambda x, up: fn(x, 3, name="z", up=up, scale=2))(x, up), want)


def test_in_and_out_shardings_of_the_jit_hold_under_a_trace(mesh):
    named = functools.partial(NamedSharding, mesh)
    out = named(P("d", None, "m"))
    inner = jax.jit(lambda x, up: x @ up, in_shardings=(named(X), named(UP)), out_shardings=out)
    overlapped = overlap_collectives(inner, ALWAYS)
    x, up, _ = arguments(mesh)
    outer = jax.jit(lambda x, up: overlapped(x, up))
    got = outer(np.asarray(x), np.asarray(up))
    same(got, np.asarray(x) @ np.asarray(up))
    assert got.sharding.is_equivalent_to(out, 3)
    assert permutes(outer.lower(np.asarray(x), np.asarray(up)).compile())


def test_integers_and_nothing_to_differentiate(mesh):
    def fn(x, up, ids):
        y = jnp.take(x @ up, ids, axis=0)
        return y, ids + 1, jnp.argmax(y)

    x, up, _ = arguments(mesh)
    ids = put(mesh, np.array([0, 2]), P())
    plain, overlapped = jax.jit(fn), overlap_collectives(jax.jit(fn), ALWAYS)

    def grads(f):
        loss = lambda x, up: jnp.sum(f(x, up, ids)[0] ** 2) + f(x, up, ids)[1][0]  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=EVERY[:2]))

    same(grads(overlapped)(x, up), grads(plain)(x, up))
    tangents = (x, up, np.zeros(ids.shape, jax.dtypes.float0))
    got = jax.jvp(overlapped, (x, up, ids), tangents)
    want = jax.jvp(plain, (x, up, ids), tangents)
    same(got[0], want[0])
    same(got[1][0], want[1][0])
    assert got[1][1].dtype == jax.dtypes.float0


def test_a_closed_over_tracer_is_differentiated(mesh, plain):
    def loss_with(wrap):
        def loss(up, x, down):
            def inner(x):
                return plain(x, up, down)

            return jnp.sum(wrap(jax.jit(inner))(x) ** 2)

        return loss

    x, up, down = small(mesh)
    wrap = functools.partial(overlap_collectives, options=ALWAYS)
    got = jax.jit(jax.grad(loss_with(wrap)))(up, x, down)
    same(got, jax.grad(loss_with(lambda f: f))(up, x, down))


def test_named_axes_of_a_vmap_are_seen_inside(mesh):
    def fn(x, up):
        return (x @ up) - jax.lax.psum(x @ up, "i")

    x, up, _ = arguments(mesh)
    xs = jnp.stack([x, 2 * x])
    # The name is bound by the vmap around: only there can the function be traced.
    overlapped = overlap_collectives(jax.jit(fn), ALWAYS)
    got = jax.jit(jax.vmap(overlapped, in_axes=(0, None), axis_name="i"))(xs, up)
    same(got, jax.vmap(jax.jit(fn), in_axes=(0, None), axis_name="i")(xs, up))


def test_vmap_with_spmd_axis_name_shards_the_batch(mesh):
    fn = overlap_collectives(jax.jit(lambda x, w: x @ w), ALWAYS)
    xs = put(mesh, whole_numbers(4, 8, 8), P("d", "m"))
    w = put(mesh, whole_numbers(8, 8, seed=1), UP)
    out = NamedSharding(mesh, P("d", None, "m"))
    mapped = jax.vmap(fn, in_axes=(0, None), spmd_axis_name="d")
    compiled = jax.jit(mapped, out_shardings=out).lower(xs, w).compile()
    assert permutes(compiled)
    same(compiled(xs, w), np.asarray(xs) @ np.asarray(w))


def test_no_overlap_around_the_call_leaves_it_alone(mesh, plain, overlapped):
    def outer(*xs):
        with no_overlap():
            return overlapped(*xs)

    args = arguments(mesh)
    same(jax.jit(outer)(*args), answer(*args))
    assert permutes(jax.jit(outer).lower(*args).compile()) == permutes(plain.lower(*args).compile())


def test_effects_of_a_call_under_a_trace_happen(mesh, plain):
    seen = []

    def fn(*xs):
        y = plain(*xs)
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(y))
        return y

    args = arguments(mesh)
    found = []
    for f in (jax.jit(fn), overlap_collectives(jax.jit(fn), ALWAYS)):
        seen.clear()
        same(jax.jit(lambda *xs, f=f: f(*xs) * 1)(*args), answer(*args))
        jax.effects_barrier()
        found.append(list(seen))
    assert found[0] == found[1]
    assert found[0]


# --- when it goes wrong ---


def test_broken_analysis_warns_and_the_outer_program_is_right(mesh, plain, monkeypatch):
    def partition(*args, **kwargs):
        raise RuntimeError("Shardy is out today")

    monkeypatch.setattr(collmm.program, "partition", partition)
    overlapped = overlap_collectives(plain, ALWAYS)
    args = arguments(mesh)
    with pytest.warns(AnalysisWarning, match=r"step.*RuntimeError: Shardy is out today"):
        same(jax.jit(lambda *xs: overlapped(*xs) + 1)(*args), answer(*args) + 1)


def test_strict_raises_under_a_trace_too(mesh, plain, monkeypatch):
    def partition(*args, **kwargs):
        raise AnalysisError("what is this")

    monkeypatch.setattr(collmm.program, "partition", partition)
    overlapped = overlap_collectives(plain, Options(policy="always", strict=True))
    with pytest.raises(AnalysisError, match="what is this"):
        jax.jit(lambda *xs: overlapped(*xs) + 1)(*arguments(mesh))


def test_errors_of_the_user_pass_through_an_outer_trace(mesh):
    def fn(x):
        raise KeyError("no such layer")

    overlapped = overlap_collectives(jax.jit(fn))
    with pytest.raises(KeyError) as e:
        jax.jit(lambda x: overlapped(x))(arguments(mesh)[0])
    assert e.value.args == ("no such layer",)


def test_no_tracer_leaks_under_transforms(mesh, overlapped):
    args = arguments(mesh)
    with jax.checking_leaks():
        jax.jit(jax.grad(loss_of(overlapped), argnums=EVERY))(*args)
        jax.jit(TRANSFORMS["hvp"](overlapped))(*args)
        jax.jit(TRANSFORMS["vmap"](overlapped))(*args)


def test_a_trace_is_not_repeated_for_the_same_signature(mesh):
    traces = []

    def fn(x, up):
        traces.append(1)
        return x @ up

    overlapped = overlap_collectives(jax.jit(fn), ALWAYS)
    x, up, _ = arguments(mesh)
    outer = jax.jit(lambda x, up: overlapped(x, up) + overlapped(x + 1, up))
    outer(x, up)
    assert len(traces) == 1
