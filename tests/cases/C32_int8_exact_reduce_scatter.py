"""int8 x int8 -> int32: with integers there is no excuse for a last-bit difference."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "int8_exact_reduce_scatter"
SOURCE = "jax-ml/jax#5213"
WHAT = (
    "preferred_element_type was added so that quantised matmuls accumulate in int32; dropping "
    "it on the partial dots overflows int8, and the scattered sum must be exact."
)
MESH = {"dp": 2, "tp": 4}
EXPECT = "rewrite"
TOL = 0.0


def build(mesh):
    rng = np.random.default_rng(32)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.integers(-128, 128, (4, 8, 64)).astype(np.int8), "dp", None, "tp")
    w = put(rng.integers(-128, 128, (64, 24)).astype(np.int8), "tp", None)

    def fn(x, w):
        y = jax.lax.dot_general(x, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("dp", "tp", None)))

    return fn, (x, w)


def reference(x, w):
    return x.astype(np.int32) @ w.astype(np.int32)
