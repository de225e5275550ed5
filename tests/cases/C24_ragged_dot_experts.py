"""Dropless MoE with lax.ragged_dot, hidden dim of the experts sharded."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "ragged_dot_experts"
SOURCE = "jax-ml/jax#33403"
WHAT = (
    "ragged_dot on sharded operands warned of undefined behaviour under one partitioner; it "
    "is not a plain dot_general, group boundaries are data dependent, so the pass must step "
    "around it."
)
MESH = {"tp": 8}
EXPECT = "leave"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(24)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    T, D, F, E = 20, 12, 32, 4
    x = put(rng.standard_normal((T, D), np.float32), None, None)  # sorted by expert
    w1 = put(rng.standard_normal((E, D, F), np.float32) / 4, None, None, "tp")
    w2 = put(rng.standard_normal((E, F, D), np.float32) / 6, None, "tp", None)
    sizes = put(np.array([3, 0, 9, 8], np.int32), None)

    def fn(x, w1, w2, sizes):
        h = jnp.tanh(jax.lax.ragged_dot(x, w1, sizes))
        y = jax.lax.ragged_dot(h, w2, sizes)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(None, None)))

    return fn, (x, w1, w2, sizes)


def reference(x, w1, w2, sizes):
    e = np.repeat(np.arange(len(sizes)), sizes)
    h = np.tanh(np.einsum("td,tdf->tf", x, w1[e]))
    return np.einsum("tf,tfd->td", h, w2[e])
