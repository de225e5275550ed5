"""Every dot_general of a program is in its plan: rewritten, or with a reason of the closed list."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_manual import MESH, ints

from collmm import Options, Reason, overlap_collectives


def jaxprs_of(value):
    """Every jaxpr in a parameter of an equation, however deep it is held."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
        yield value.jaxpr
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from jaxprs_of(item)
    elif type(value).__name__ == "CustomRoot":  # a primitive that holds its own jaxpr
        yield from jaxprs_of(value.params)
    elif isinstance(value, dict):
        for item in value.values():
            yield from jaxprs_of(item)


def dots_of(jaxpr):
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "dot_general"
        for value in eqn.params.values():
            count += sum(map(dots_of, jaxprs_of(value)))
    return count


X, W = ints(0, 8, 8), ints(1, 8, 8)


def nested_scans(x, w):
    def inner(c, _):
        return c @ w % 5, None

    def outer(c, _):
        return lax.scan(inner, c @ w, None, length=2)[0] % 5, None

    return lax.scan(outer, x, None, length=2)[0]


def while_loop(x, w):
    def condition(carry):
        return (carry[1] @ w).sum() + carry[0] < 3

    return lax.while_loop(condition, lambda c: (c[0] + 1, c[1] @ w % 3), (0.0, x))[1]


def branches(x, w):
    return lax.switch(x[0, 0].astype(int) % 3, [lambda x: x @ w, lambda x: w @ x, lambda x: x], x)


def kernel(x, w):
    def body(x, w, o):
        o[...] = jnp.dot(x[...], w[...])

    out = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return pl.pallas_call(body, out_shape=out, interpret=True)(x, w) @ w


@custom_partitioning
def partitioned(x, w):
    return x @ w


partitioned.def_partition(
    partition=lambda mesh, args, out: (
        mesh,
        lambda x, w: x @ w,
        NamedSharding(mesh, P()),
        (NamedSharding(mesh, P()),) * 2,
    ),
    infer_sharding_from_operands=lambda mesh, args, out: NamedSharding(mesh, P()),
    sharding_rule="i j, j k -> i k",
)


def root(x, w):
    def solve(g, y):
        return y / g(jnp.ones_like(y))

    return lax.custom_root(
        lambda v: (w @ v) * 0 + v * v - 2, x[0], lambda f, v: v - f(v) / 9, solve
    )


def linear_solve(x, w):
    m = w @ w.T + 100 * jnp.eye(8)
    return lax.custom_linear_solve(
        lambda v: m @ v, x[0], lambda mv, b: jnp.linalg.solve(m, b), symmetric=True
    )


@jax.custom_vjp
def with_rules(x, w):
    return x @ w


with_rules.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda res, ct: (ct @ res[1].T, res[0].T @ ct + 0 * res[1])
)


@jax.custom_jvp
def with_tangents(x, w):
    return x @ w


with_tangents.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))


def mapped(x, w):
    def body(x, w):
        inner = jax.shard_map(
            lambda x, w: lax.psum(x @ w, "m"),
            in_specs=(P(None, "m"), P("m", None)),
            out_specs=P(),
            axis_names={"m"},
        )
        return inner(x, w) @ w

    return jax.shard_map(
        body, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"}
    )(x, w)


def reducer(x, w):
    return lax.reduce(x, 0.0, lambda a, b: a + b, (0,)) @ w


def convolution(x, w):
    return lax.conv_general_dilated(x[None, None], w[None, None], (1, 1), "SAME")[0, 0] @ w


def ragged(x, w):
    return lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([3, 5], jnp.int32)) @ w


def nested_jits(x, w):
    @jax.jit
    def product(x, w):
        return x @ w

    kept = jax.jit(product, out_shardings=NamedSharding(MESH, P()))  # not inlined: it has options
    return product(product(x, w), w) + kept(x, w) + kept(w, x)


def gradient(f):
    return jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))


PROGRAMS = {
    "plain": lambda x, w: x @ w,
    "dead": lambda x, w: (x @ w, x)[1],
    "nested scans": nested_scans,
    "while": while_loop,
    "branches": branches,
    "kernel": kernel,
    "custom_partitioning": partitioned,
    "custom_root": root,
    "custom_linear_solve": linear_solve,
    "custom_vjp": with_rules,
    "custom_vjp, differentiated": gradient(with_rules),
    "custom_jvp": with_tangents,
    "custom_jvp, differentiated": gradient(with_tangents),
    "checkpoint": gradient(jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)),
    "scan, differentiated": gradient(nested_scans),
    "nested shard_maps": mapped,
    "reduce": reducer,
    "convolution": convolution,
    "ragged_dot": ragged,
    "nested jits": nested_jits,
    "vmap": jax.vmap(lambda x, w: w @ x, in_axes=(0, None)),
    "batched vectors": lambda x, w: jnp.einsum("ab,cb,db->acd", x, w, w),
    "linear algebra": lambda x, w: jnp.linalg.solve(w @ w.T + 99 * jnp.eye(8), x) @ w,
}


@pytest.mark.parametrize("policy", ["auto", "never"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_plan_has_a_line_for_every_dot(name, sharded, policy):
    fn = jax.jit(PROGRAMS[name])
    spec = P("d", "m") if sharded else P()
    args = [jax.device_put(a, NamedSharding(MESH, spec)) for a in (X, W)]
    o = overlap_collectives(fn, Options(policy, strict=True))
    plan = o.plan(*args)
    count = dots_of(fn.trace(*args).jaxpr.jaxpr)
    assert len(plan.decisions) == count > 0
    assert [d.site.index for d in plan.decisions] == list(range(len(plan.decisions)))
    for d in plan.decisions:
        assert d.rewritten or isinstance(d.reason, Reason)
    assert str(plan).count("\n") >= len(plan.decisions)


def test_bodies_that_are_not_entered_say_so():
    plan = overlap_collectives(jax.jit(kernel), Options(strict=True)).plan(X, W)
    assert len(plan.decisions) == 2
    args = [jax.device_put(a, NamedSharding(MESH, P("d", "m"))) for a in (X, W)]
    plan = overlap_collectives(jax.jit(kernel), Options("always", strict=True)).plan(*args)
    assert plan.decisions[0].reason is Reason.OPAQUE
    assert plan.decisions[0].site.scope == ("pallas_call",)
    assert plan.decisions[1].reason is not Reason.OPAQUE


def test_what_is_no_dot_general_is_not_in_the_plan():
    for fn in (convolution, ragged):
        plan = overlap_collectives(jax.jit(fn), Options(strict=True)).plan(X, W)
        assert len(plan.decisions) == 1
        assert np.shape(plan.decisions[0].site.shapes[2]) == (2,)
