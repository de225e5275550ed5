"""Everything divides by the axis size but the local shards have 3 and 5 rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "odd_local_shards"
SOURCE = "tenstorrent/tt-mlir#3649"
WHAT = (
    "A sharded jnp.dot failed unless dims were multiples of a hardware tile; here a "
    "bidirectional ring that halves each shard meets an odd local size and must fall back to "
    "one direction (or uneven halves)."
)
MESH = {"tp": 8}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(15)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((24, 20), np.float32), "tp", None)
    w = put(rng.standard_normal((20, 40), np.float32) / 4, None, "tp")

    def fn(x, w):
        return jax.lax.with_sharding_constraint(jnp.dot(x, w), NamedSharding(mesh, P(None, "tp")))

    return fn, (x, w)


def reference(x, w):
    return x @ w
