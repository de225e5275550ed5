"""Hybrid-sharded data parallelism with gradient accumulation by scan over microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "hsdp_grad_accumulation"
SOURCE = "jax-ml/jax#24208"
WHAT = (
    "Weights are sharded on 'shard' only, optimizer state on both axes, and peak memory did "
    "not scale with the accumulation factor as computed. In the scan, weight gathers and grad "
    "scatters over 'shard' are eligible; the 'replica' reduction may wait until after the "
    "loop, and no unsharded gradient may be carried."
)
MESH = {"replica": 2, "shard": 4}
EXPECT = "rewrite"
TOL = 1e-4


def build(mesh):
    rng = np.random.default_rng(48)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    A, B, D, F, K = 4, 16, 16, 32, 8
    shapes = {"w1": (D, F), "w2": (F, D), "head": (D, K)}
    params = {
        k: put(rng.standard_normal(s, np.float32) / 4, "shard", None) for k, s in shapes.items()
    }
    mom = {k: put(np.zeros(s, np.float32), "shard", "replica") for k, s in shapes.items()}
    x = put(rng.standard_normal((A, B, D), np.float32), None, ("replica", "shard"), None)
    y = put(rng.integers(0, K, (A, B)).astype(np.int32), None, ("replica", "shard"))
    bat = (("replica", "shard"), None)

    def loss(p, x, y):
        h = wsc(jax.nn.gelu(x @ p["w1"]), *bat)
        x = x + wsc(h @ p["w2"], *bat)
        logits = wsc(x @ p["head"], *bat)
        return jnp.mean(
            jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], -1)[:, 0]
        )

    def fn(params, mom, x, y):
        def micro(acc, xy):
            val, g = jax.value_and_grad(loss)(params, *xy)
            g = jax.tree.map(lambda a: wsc(a, "shard", None), g)
            return (acc[0] + val, jax.tree.map(jnp.add, acc[1], g)), None

        zero = jax.tree.map(lambda p: wsc(jnp.zeros_like(p), "shard", None), params)
        (val, g), _ = jax.lax.scan(micro, (jnp.float32(0), zero), (x, y))
        mom = jax.tree.map(lambda m, a: wsc(0.9 * m + a / A, "shard", "replica"), mom, g)
        new = jax.tree.map(
            lambda p, m: wsc(p - 0.1 * wsc(m, "shard", None), "shard", None), params, mom
        )
        return val / A, new, mom

    return fn, (params, mom, x, y)
