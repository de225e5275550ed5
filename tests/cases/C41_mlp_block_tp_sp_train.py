"""Llama-style MLP block with tensor and sequence parallelism, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "mlp_block_tp_sp_train"
SOURCE = "jax-ml/jax#39200"
WHAT = (
    "The reported model (gather x, column-parallel w1, row-parallel w2, scatter) stopped "
    "compiling with forced multi-stream windowed einsums on jaxlib 0.10.2; a source-level "
    "rewrite must compile on any version and in backward turn each gather into a scatter and "
    "vice versa."
)
MESH = {"data": 2, "tp": 4}
EXPECT = "rewrite"
TOL = 1e-4


def build(mesh):
    rng = np.random.default_rng(41)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    B, S, D, F = 4, 32, 32, 96
    specs = {"norm": (None,), "gate": (None, "tp"), "up": (None, "tp"), "down": ("tp", None)}
    shapes = {"norm": (D,), "gate": (D, F), "up": (D, F), "down": (F, D)}
    params = {
        k: put(rng.standard_normal(shapes[k], np.float32) / np.sqrt(shapes[k][0]), *specs[k])
        for k in specs
    }
    x = put(rng.standard_normal((B, S, D), np.float32), "data", "tp", None)
    target = put(rng.standard_normal((B, S, D), np.float32), "data", "tp", None)

    def block(p, x):
        x = wsc(x, "data", "tp", None)
        n = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p["norm"]
        n = wsc(n, "data", "tp", None)  # gathered by the two dots, never named whole
        h = jax.nn.silu(jnp.einsum("bsd,df->bsf", n, p["gate"])) * jnp.einsum(
            "bsd,df->bsf", n, p["up"]
        )
        h = wsc(h, "data", None, "tp")
        y = wsc(jnp.einsum("bsf,fd->bsd", h, p["down"]), "data", "tp", None)  # reduce-scatter
        return x + y

    def loss(p, x, target):
        return jnp.mean(jnp.square(block(p, x) - target))

    def fn(params, x, target):
        val, (gp, gx) = jax.value_and_grad(loss, argnums=(0, 1))(params, x, target)
        gp = {k: wsc(g, *specs[k]) for k, g in gp.items()}
        return val, gp, wsc(gx, "data", "tp", None)

    return fn, (params, x, target)
