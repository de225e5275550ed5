"""Collective matmul on a data x model mesh: x is sharded on two dims, only one must travel."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "dp_tp_partial_gather"
SOURCE = "openxla/xla#26948"
WHAT = (
    "Once batch is also sharded (DP/FSDP next to TP) the windowed einsum no longer matched "
    "and the sequence all-gather stayed exposed; the loop must run over 'model' only, one "
    "ring per data row."
)
MESH = {"data": 2, "model": 4}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(1)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((4, 16, 32), np.float32), "data", "model", None)
    w = put(rng.standard_normal((32, 64), np.float32) / 6, None, "model")

    def fn(x, w):
        y = jnp.einsum("bsd,df->bsf", x, w)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data", None, "model")))

    return fn, (x, w)


def reference(x, w):
    return np.einsum("bsd,df->bsf", x, w)
