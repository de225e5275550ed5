"""Row-parallel matmul: the contracted dim is sharded, the result is wanted sharded on rows."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "contracting_dim_reduce_scatter"
SOURCE = "openxla/xla#17173"
WHAT = (
    "With the contracted dim sharded, every ring step adds into an accumulator and those adds "
    "blocked the overlap; matmul + reduce-scatter must become partial dots plus a travelling "
    "sum."
)
MESH = {"tp": 8}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(4)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((32, 64), np.float32), None, "tp")
    w = put(rng.standard_normal((64, 24), np.float32) / 8, "tp", None)

    def fn(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("tp", None)))

    return fn, (x, w)


def reference(x, w):
    return x @ w
