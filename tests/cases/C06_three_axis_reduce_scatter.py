"""replica x fsdp x tp: weight gather over one axis and reduce-scatter over another in one dot."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "three_axis_reduce_scatter"
SOURCE = "openxla/xla#37081"
WHAT = (
    "On 3D meshes all-reduce + slice was not recognised as reduce-scatter (no-op clamps in "
    "the index maths), costing half as much TP and DP traffic again; here the same dot needs "
    "RS over 'tp' and AG of w over 'fsdp'."
)
MESH = {"replica": 2, "fsdp": 2, "tp": 2}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(6)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    h = put(rng.standard_normal((8, 6, 32), np.float32), ("replica", "fsdp"), None, "tp")
    w = put(rng.standard_normal((32, 20), np.float32) / 6, "tp", "fsdp")

    def fn(h, w):
        y = jnp.einsum("bsk,kn->bsn", h, w)
        return jax.lax.with_sharding_constraint(
            y, NamedSharding(mesh, P(("replica", "fsdp"), "tp", None))
        )

    return fn, (h, w)


def reference(h, w):
    return np.einsum("bsk,kn->bsn", h, w)
