"""The linear layer is written as a batched matmul with the weight broadcast over batch."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "bmm_with_broadcast_weight"
SOURCE = "NVIDIA-NeMo/Automodel#2987"
WHAT = (
    "Async TP only matched reshape-mm-reshape and silently skipped layers that use bmm; "
    "dot_general with batch dims (sharded on data) and a gathered free dim must be handled as "
    "well."
)
MESH = {"data": 2, "tp": 4}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(20)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((4, 16, 24), np.float32), "data", "tp", None)
    w = put(rng.standard_normal((24, 32), np.float32) / 5, None, "tp")

    def fn(x, w):
        wb = jnp.broadcast_to(w, (x.shape[0], *w.shape))
        y = jax.lax.batch_matmul(x, wb)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data", None, "tp")))

    return fn, (x, w)


def reference(x, w):
    return x @ w
