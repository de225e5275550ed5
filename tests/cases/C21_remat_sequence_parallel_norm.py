"""Sequence-parallel norm, gather, MLP under jax.checkpoint; the gathered value is not saved."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "remat_sequence_parallel_norm"
SOURCE = "jax-ml/jax#25010"
WHAT = (
    "The user could not get the compiler-inserted all-gather rematerialised; with a "
    "save-only-these-names policy the rewrite has to work inside the checkpoint and keep only "
    "the small sharded norm output as residual."
)
MESH = {"data": 2, "tensor": 4}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(21)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((16, 4, 24), np.float32), "tensor", "data", None)  # [seq, batch, d]
    w1 = put(rng.standard_normal((24, 48), np.float32) / 5, None, "tensor")
    w2 = put(rng.standard_normal((48, 24), np.float32) / 7, "tensor", None)

    def block(x, w1, w2):
        n = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        n = checkpoint_name(wsc(n, "tensor", "data", None), "normed")
        g = wsc(n, None, "data", None)  # the all-gather
        h = jax.nn.gelu(wsc(g @ w1, None, "data", "tensor"))
        return x + wsc(h @ w2, "tensor", "data", None)

    block = jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names("normed"))

    def fn(x, w1, w2):
        val, grads = jax.value_and_grad(lambda *a: jnp.mean(block(*a) ** 2), argnums=(0, 1, 2))(
            x, w1, w2
        )
        return val, (
            wsc(grads[0], "tensor", "data", None),
            wsc(grads[1], None, "tensor"),
            wsc(grads[2], "tensor", None),
        )

    return fn, (x, w1, w2)
