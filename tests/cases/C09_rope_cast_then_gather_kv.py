"""Context-parallel attention: k and v are rotated in f32, cast to bf16, then gathered."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "rope_cast_then_gather_kv"
SOURCE = "jax-ml/jax#23543"
WHAT = (
    "The compiler gathered k/v in f32 although the program casts to bf16 first, doubling the "
    "traffic; the loops for bshd,bthd->bhst and bhst,bthd->bshd should permute bf16 shards."
)
MESH = {"cp": 8}
EXPECT = "rewrite"
TOL = 2e-2


def build(mesh):
    rng = np.random.default_rng(9)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    B, S, H, D = 1, 32, 2, 8
    q, k, v = (
        put(jnp.asarray(rng.standard_normal((B, S, H, D)), jnp.bfloat16), None, "cp", None, None)
        for _ in range(3)
    )

    def rope(t):
        t = t.astype(jnp.float32)
        ang = jnp.arange(S)[:, None] / (100.0 ** (jnp.arange(D // 2) / (D // 2)))
        c, s = jnp.cos(ang)[None, :, None], jnp.sin(ang)[None, :, None]
        a, b = t[..., : D // 2], t[..., D // 2 :]
        return jnp.concatenate([a * c - b * s, a * s + b * c], -1).astype(jnp.bfloat16)

    def fn(q, k, v):
        q, k = rope(q), rope(k)
        k, v = wsc(k, None, None, None, None), wsc(v, None, None, None, None)
        s = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) / np.sqrt(D)
        mask = jnp.arange(S)[:, None] >= jnp.arange(S)[None, :]
        p = jax.nn.softmax(jnp.where(mask, s, -1e30), -1).astype(jnp.bfloat16)
        o = jnp.einsum("bhst,bthd->bshd", p, v)
        return wsc(o, None, "cp", None, None)

    return fn, (q, k, v)
