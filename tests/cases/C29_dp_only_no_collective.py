"""Pure data parallelism: nothing to gather in forward, only an all-reduce in backward."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "dp_only_no_collective"
SOURCE = "NVIDIA/TransformerEngine#2023"
WHAT = (
    "A custom GEMM's wrong sharding spec brought collectives into plain data parallelism; "
    "here weights are replicated, so there is nothing to gather; the gradient's all-reduce "
    "may stay or be split, no more."
)
MESH = {"data": 8}
EXPECT = "either"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(29)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((16, 4, 12), np.float32), "data", None, None)
    w = put(rng.standard_normal((12, 20), np.float32) / 4, None, None)

    def fn(x, w):
        def loss(w):
            return jnp.mean(jnp.tanh(wsc(x @ w, "data", None, None)) ** 2)

        val, g = jax.value_and_grad(loss)(w)
        return val, wsc(g, None, None)

    return fn, (x, w)
