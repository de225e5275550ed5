"""(heads, head_dim) is flattened before the output projection; heads are sharded."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "merge_heads_then_out_proj"
SOURCE = "marin-community/marin#7247"
WHAT = (
    "Splitting or merging a sharded dim by reshape loses the layout (a type error in explicit "
    "mode); the pass has to follow heads@tp through the reshape to see that the 2D matmul "
    "ends in a reduce-scatter."
)
MESH = {"tp": 8}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(18)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    o = put(rng.standard_normal((2, 16, 8, 4), np.float32), None, None, "tp", None)
    wo = put(rng.standard_normal((32, 24), np.float32) / 6, "tp", None)

    def fn(o, wo):
        b, s, h, e = o.shape
        y = o.reshape(b, s, h * e) @ wo
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(None, "tp", None)))

    return fn, (o, wo)


def reference(o, wo):
    return o.reshape(2, 16, 32) @ wo
