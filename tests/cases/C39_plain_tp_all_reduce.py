"""Tensor parallelism without sequence parallelism: the second matmul ends in an all-reduce."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "plain_tp_all_reduce"
SOURCE = "NVIDIA/TransformerEngine#746"
WHAT = (
    "Users ask why overlap needs sequence parallelism: with replicated activations there is "
    "neither gather nor scatter, only an all-reduce. Leave it with a reason, or split it into "
    "a scatter ring and a gather ring."
)
MESH = {"tp": 8}
EXPECT = "either"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(39)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((2, 10, 16), np.float32), None, None, None)
    w1 = put(rng.standard_normal((16, 32), np.float32) / 4, None, "tp")
    w2 = put(rng.standard_normal((32, 16), np.float32) / 6, "tp", None)

    def fn(x, w1, w2):
        h = wsc(jnp.maximum(x @ w1, 0), None, None, "tp")
        return wsc(h @ w2, None, None, None)

    return fn, (x, w1, w2)


def reference(x, w1, w2):
    return np.maximum(x @ w1, 0) @ w2
