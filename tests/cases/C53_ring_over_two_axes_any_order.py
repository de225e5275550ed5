"""One ring over two mesh axes, minor axis named first, on a mesh of shuffled devices."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "ring_over_two_axes_any_order"
WHAT = (
    "A dimension sharded over ('y', 'x') on a mesh whose axes are x, y has its shards in another "
    "order than the mesh; a ring that counts positions in mesh order joins them wrongly."
)
MESH = {"x": 2, "y": 4}
DEVICE_ORDER = [3, 0, 6, 1, 7, 2, 5, 4]
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(53)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((24, 16), np.float32), ("y", "x"), None)
    up = put(rng.standard_normal((16, 32), np.float32) / 4, None, ("y", "x"))
    down = put(rng.standard_normal((32, 16), np.float32) / 6, ("y", "x"), None)

    def fn(x, up, down):
        return wsc(wsc(x @ up, None, ("y", "x")) @ down, ("y", "x"), None)

    return fn, (x, up, down)


def reference(x, up, down):
    return x @ up @ down
