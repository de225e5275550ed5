"""Explicit axis types: the gather is a reshard, the scatter an einsum's out_sharding."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "explicit_axes"
WHAT = (
    "With explicit axes the sharding is part of every type; the rewritten program must have the "
    "types of the original, and the ring must start where the reshard did."
)
MESH = {"a": 2, "b": 4}
AXIS_TYPES = "explicit"
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(51)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((4, 16, 12), np.float32), "a", "b", None)
    up = put(rng.standard_normal((12, 24), np.float32) / 4, None, "b")
    down = put(rng.standard_normal((24, 12), np.float32) / 5, "b", None)

    def fn(x, up, down):
        whole = jax.sharding.reshard(x, P("a", None, None))
        h = jnp.maximum(jnp.einsum("bsd,df->bsf", whole, up), 0)
        return jnp.einsum("bsf,fd->bsd", h, down, out_sharding=P("a", "b", None))

    return fn, (x, up, down)


def reference(x, up, down):
    return np.maximum(x @ up, 0) @ down
