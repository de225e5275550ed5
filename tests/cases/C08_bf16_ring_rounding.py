"""bf16 in, bf16 out, values chosen so that rounding the sum at each hop loses small terms."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "bf16_ring_rounding"
SOURCE = "NVIDIA/Megatron-LM#6199"
WHAT = (
    "A ring reduce-scatter in bf16 rounds N-1 times; one partial sum is 256 and seven are 1, "
    "so per-hop rounding gives 256 or 260 on some devices; summing in f32 and rounding once "
    "gives 264 everywhere."
)
MESH = {"tp": 8}
EXPECT = "rewrite"
TOL = 1e-2  # 260 or 256 instead of 264 is an error of 1.5e-2 or 3e-2


def build(mesh):
    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    k = 8 * 32
    x = np.full((16, k), 1 / 32, np.float32)
    x[:, :32] = 8.0  # partial sum on the first device: 256
    x = put(jnp.asarray(x, jnp.bfloat16), None, "tp")
    w = put(jnp.ones((k, 4), jnp.bfloat16), "tp", None)

    def fn(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("tp", None)))

    return fn, (x, w)


def reference(x, w):
    return (x.astype(np.float32) @ w.astype(np.float32)).astype(x.dtype)
