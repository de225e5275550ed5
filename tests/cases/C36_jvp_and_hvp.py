"""Forward mode and a Hessian-vector product through a gather-matmul and a matmul-scatter."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "jvp_and_hvp"
SOURCE = "jax-ml/jax#25844"
WHAT = (
    "grad, jacfwd and jacrev treat shardings differently from jvp/vjp; a rewrite hidden "
    "behind custom_vjp breaks forward mode, so jvp, and jvp-of-grad, must work and keep "
    "parameter layouts."
)
MESH = {"tp": 8}
EXPECT = "rewrite"
TOL = 1e-4


def build(mesh):
    rng = np.random.default_rng(36)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((16, 8), np.float32), "tp", None)
    w1, v1 = (put(rng.standard_normal((8, 24), np.float32) / 3, None, "tp") for _ in range(2))
    w2, v2 = (put(rng.standard_normal((24, 8), np.float32) / 5, "tp", None) for _ in range(2))

    def loss(w1, w2, x):
        h = wsc(jnp.tanh(x @ w1), None, "tp")
        return jnp.mean(wsc(h @ w2, "tp", None) ** 2)

    def fn(w1, w2, v1, v2, x):
        def f(a, b):
            return loss(a, b, x)

        val, dval = jax.jvp(f, (w1, w2), (v1, v2))
        _, (h1, h2) = jax.jvp(jax.grad(f, argnums=(0, 1)), (w1, w2), (v1, v2))
        return val, dval, wsc(h1, None, "tp"), wsc(h2, "tp", None)

    return fn, (w1, w2, v1, v2, x)
