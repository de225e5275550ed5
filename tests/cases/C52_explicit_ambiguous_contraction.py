"""Explicit axis types: a contraction over a sharded dimension without an out_sharding."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "explicit_ambiguous_contraction"
WHAT = (
    "JAX refuses to choose between an all-reduce and a reduce-scatter here; its own error has to "
    "reach the user as it is."
)
MESH = {"tp": 8}
AXIS_TYPES = "explicit"
EXPECT = "leave"
RAISES = "ShardingTypeError"
TOL = 0.0


def build(mesh):
    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(np.ones((8, 16), np.float32), None, "tp")
    w = put(np.ones((16, 8), np.float32), "tp", None)

    def fn(x, w):
        return jnp.einsum("bk,kn->bn", x, w)

    return fn, (x, w)
