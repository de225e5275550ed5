"""One ring for several einsums: the permutes are those of one ring, the values are exact."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives, rings
from test_manual import ints, mesh_of

MESH = mesh_of((2, 4), ("data", "tp"))


def put(a, *spec):
    return jax.device_put(a, NamedSharding(MESH, P(*spec)))


def wsc(a, *spec):
    return jax.lax.with_sharding_constraint(a, NamedSharding(MESH, P(*spec)))


def projections():
    x = put(ints(0, 4, 16, 8), "data", "tp", None)
    return x, *(put(ints(i, 8, 16), None, "tp") for i in (1, 2, 3))


def test_q_k_and_v_share_one_ring():
    @jax.jit
    def fn(x, wq, wk, wv):
        return tuple(wsc(x @ w, "data", None, "tp") for w in (wq, wk, wv))

    o = always(fn)
    args = projections()
    assert rings(o, *args) == [("gather", 3)]
    assert collectives(o, *args)["collective-permute"] == 3  # a ring of four, once
    assert_equal_trees(o(*args), fn(*args))


def test_weights_that_are_cast_between_the_einsums_still_share():
    @jax.jit
    def fn(x, wq, wk, wv):
        return tuple(
            wsc(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), "data", None, "tp")
            for w in (wq, wk, wv)
        )

    o = always(fn)
    args = projections()
    assert rings(o, *args) == [("gather", 3)]
    assert_equal_trees(o(*args), fn(*args))


def test_an_einsum_that_depends_on_another_does_not_join_it():
    @jax.jit
    def fn(x, wq, wk, wv):
        a = wsc(x @ wq, "data", None, "tp")
        b = wsc(x @ (wk + jnp.tanh(a).sum()).astype(jnp.float32), "data", None, "tp")
        return a, b

    o = always(fn)
    args = projections()
    assert rings(o, *args) == [("gather", 1), ("gather", 1)]
    for got, want in zip(o(*args), fn(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_gate_and_up_forward_and_backward():
    def loss(x, wg, wu, wd):
        h = wsc(x @ wg, "data", None, "tp") * wsc(x @ wu, "data", None, "tp")
        return (wsc(h @ wd, "data", "tp", None) * 2).sum()

    fn = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    args = (*projections()[:3], put(ints(5, 16, 8), "tp", None))
    o = always(fn)
    found = rings(o, *args)
    # gate and up; dY for dH and dWd; x for dWg and dWu; and both parts of dX summed on one ring.
    assert sorted(found) == [("gather", 2), ("gather", 2), ("gather", 2), ("scatter", 2)]
    assert collectives(o, *args)["collective-permute"] < 2 * sum(n for _, n in found) * 3
    assert_equal_trees(o(*args), fn(*args))


def test_a_sum_whose_part_is_read_elsewhere_is_not_joined():
    @jax.jit
    def fn(h, wa, wb):
        a = wsc(h @ wa, "data", "tp", None)
        b = wsc(h @ wb, "data", "tp", None)
        return a + b, a

    # Contracted dimensions larger than the result: the sum is the smaller thing to send.
    h = put(ints(0, 4, 16, 64), "data", None, "tp")
    args = h, put(ints(1, 64, 8), "tp", None), put(ints(2, 64, 8), "tp", None)
    o = always(fn)
    assert rings(o, *args) == [("scatter", 1), ("scatter", 1)]
    assert_equal_trees(o(*args), fn(*args))


def test_sharing_happens_inside_a_scan_body():
    @jax.jit
    def fn(x, wq, wk, wv):
        def step(c, _):
            q, k = (wsc(c @ w, "data", None, "tp") for w in (wq, wk))
            y = wsc((q - k) @ wv.T, "data", "tp", None)
            return jnp.round(y) % 5, None

        return jax.lax.scan(step, x, None, length=3)[0]

    o = always(fn)
    args = projections()
    assert sorted(rings(o, *args)) == [("gather", 2), ("scatter", 1)]
    assert_equal_trees(o(*args), fn(*args))
