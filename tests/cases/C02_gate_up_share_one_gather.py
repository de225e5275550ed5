"""Two matmuls eat the same gathered activation, and the backward pass wants it a third time."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "gate_up_share_one_gather"
SOURCE = "openxla/xla#11563"
WHAT = (
    "An all-gather with several dot users was turned into one ring per user, so the same "
    "bytes went round two or three times; ideally one ring feeds gate and up."
)
MESH = {"tp": 8}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(2)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((32, 16), np.float32), "tp", None)
    wg = put(rng.standard_normal((16, 48), np.float32) / 4, None, "tp")
    wu = put(rng.standard_normal((16, 48), np.float32) / 4, None, "tp")

    def loss(x, wg, wu):
        h = jax.nn.silu(x @ wg) * (x @ wu)
        h = wsc(h, None, "tp")
        return jnp.mean(h * h)

    def fn(x, wg, wu):
        val, (dx, dg, du) = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, wg, wu)
        return val, wsc(dx, "tp", None), wsc(dg, None, "tp"), wsc(du, None, "tp")

    return fn, (x, wg, wu)
