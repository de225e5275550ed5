"""precision= on one dot, a default_matmul_precision block round another."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "precision_is_kept"
SOURCE = "jax-ml/jax#39869"
WHAT = (
    "What precision a matmul runs at is easy to lose by accident; every partial dot of the "
    "loop must carry the precision of the dot it replaces (look in the jaxpr: on CPU the "
    "numbers do not tell)."
)
MESH = {"tp": 8}
EXPECT = "rewrite"
KEEP_IN_JAXPR = "HIGHEST"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(31)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((16, 24), np.float32), "tp", None)
    w1 = put(rng.standard_normal((24, 32), np.float32) / 5, None, "tp")
    w2 = put(rng.standard_normal((32, 16), np.float32) / 6, "tp", None)

    def fn(x, w1, w2):
        h = wsc(jnp.matmul(x, w1, precision=jax.lax.Precision.HIGHEST), None, "tp")
        with jax.default_matmul_precision("highest"):
            return wsc(h @ w2, "tp", None)

    return fn, (x, w1, w2)


def reference(x, w1, w2):
    return x @ w1 @ w2
