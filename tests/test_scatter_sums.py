"""Plain tensor parallelism becomes its sequence-parallel form; nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives
from test_manual import ints
from test_share import MESH, put, wsc

from collmm import Options, overlap_collectives
from collmm.sites import ALL_GATHER, ALL_REDUCE


def looped(plan):
    return [d.collective.kind for d in plan.rewritten]


def test_an_all_reduce_is_scattered_on_a_ring_and_gathered_back():
    @jax.jit
    def fn(h, w):
        return wsc(h @ w, "data", None, None)

    args = put(ints(0, 4, 16, 8), "data", None, "tp"), put(ints(1, 8, 12), "tp", None)
    o = always(fn)
    assert looped(o.plan(*args)) == [ALL_REDUCE]
    after = collectives(o, *args)
    assert after["all-reduce"] == 0
    assert after["all-gather"] == 1
    assert_equal_trees(o(*args), fn(*args))
    assert o(*args).sharding.is_equivalent_to(fn(*args).sharding, 3)


def layer(x, p):
    n = jnp.round(x / (1 + jnp.max(jnp.abs(x), -1, keepdims=True)) * 3)
    n = wsc(n, "data", None, None)
    h = wsc(n @ p["w1"], "data", None, "tp")
    y = wsc(jnp.maximum(h, 0) @ p["w2"], "data", None, None)
    return wsc(x + y, "data", None, None), None


def parameters():
    w1, w2 = ints(1, 3, 8, 16), ints(2, 3, 16, 8)
    return {"w1": put(w1, None, None, "tp"), "w2": put(w2, None, "tp", None)}


def test_megatron_layers_in_a_scan_become_sequence_parallel():
    fn = jax.jit(lambda x, ps: jax.lax.scan(layer, x, ps)[0])
    args = put(ints(0, 4, 16, 8), "data", None, None), parameters()
    o = always(fn)
    assert looped(o.plan(*args)) == [ALL_GATHER, ALL_REDUCE]
    before, after = collectives(fn, *args), collectives(o, *args)
    assert before["all-reduce"] == 1
    # Norm and residual work on the shard; the only gather left is that of the result.
    assert after["all-reduce"] == 0
    assert after["all-gather"] <= 1
    assert_equal_trees(o(*args), fn(*args))


def test_their_gradients_too():
    def loss(x, ps):
        return (jax.lax.scan(jax.checkpoint(layer), x, ps)[0] * 2).sum()

    fn = jax.jit(jax.grad(loss, argnums=(0, 1)))
    args = put(ints(0, 4, 16, 8), "data", None, None), parameters()
    o = always(fn)
    kinds = looped(o.plan(*args))
    assert kinds.count(ALL_REDUCE) >= 1
    assert kinds.count(ALL_GATHER) >= 3
    got, want = jax.tree.leaves(o(*args)), jax.tree.leaves(fn(*args))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-4)
        assert g.sharding.is_equivalent_to(w.sharding, g.ndim)


def test_a_sum_that_no_dimension_can_scatter_is_left_with_its_reason():
    @jax.jit
    def fn(h, w):
        return wsc(h @ w, None, None)

    args = put(ints(0, 3, 8), None, "tp"), put(ints(1, 8, 5), "tp", None)
    o = always(fn)
    (decision,) = o.plan(*args).decisions
    assert decision.reason.code == "all-reduce"
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_shardings_of_results_stay_what_they_were(policy):
    @jax.jit
    def fn(h, w, b):
        y = h @ w + b
        return y, jnp.maximum(y, 0), y.sum()

    h = put(ints(0, 4, 16, 8), "data", None, "tp")
    args = h, put(ints(1, 8, 12), "tp", None), put(ints(2, 12), None)
    o = overlap_collectives(fn, Options(policy, strict=True))
    got, want = o(*args), fn(*args)
    assert_equal_trees(got, want)
    for g, w in zip(got, want, strict=True):
        assert g.sharding.is_equivalent_to(w.sharding, g.ndim)


@pytest.mark.parametrize("backward", [False, True])
def test_results_on_another_mesh_stay_where_they_were(backward):
    flat = jax.sharding.Mesh(MESH.devices.reshape(-1), ("all",))

    def on(mesh, *spec):
        return NamedSharding(mesh, P(*spec))

    def step(x, w, v):
        h = jax.lax.with_sharding_constraint(x @ w, on(MESH, "data", "tp"))
        h = jax.lax.with_sharding_constraint(h, on(flat, "all", None))
        return jax.lax.with_sharding_constraint(h @ v, on(flat, None, "all")), h

    def loss(*args):
        return sum((y * y).sum() for y in step(*args))

    fn = jax.jit(jax.grad(loss, argnums=(0, 1, 2)) if backward else step)
    args = (
        put(ints(0, 16, 32), ("data", "tp"), None),
        put(ints(1, 32, 64), None, "tp"),
        jax.device_put(ints(2, 64, 64), on(flat, None, "all")),
    )
    o = always(fn)
    assert {axis for d in o.plan(*args).rewritten for axis in d.collective.axes} >= {"tp", "all"}
    got, want = o(*args), fn(*args)
    assert_equal_trees(got, want)
    for g, w in zip(got, want, strict=True):
        assert g.sharding.is_equivalent_to(w.sharding, g.ndim)


def test_a_mesh_in_the_type_is_left_alone():
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.sharding.Mesh(MESH.devices, MESH.axis_names, axis_types=kinds)
    with jax.set_mesh(mesh):
        h = jax.device_put(ints(0, 4, 16, 8), NamedSharding(mesh, P("data", None, "tp")))
        w = jax.device_put(ints(1, 8, 12), NamedSharding(mesh, P("tp", None)))
        fn = jax.jit(
            lambda h, w: jnp.einsum("bsk,kn->bsn", h, w, out_sharding=P("data", None, None))
        )
        o = always(fn)
        assert [d.reason.code for d in o.plan(h, w).decisions] == ["all-reduce"]
        assert_equal_trees(o(h, w), fn(h, w))
