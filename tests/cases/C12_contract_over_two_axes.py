"""The contracted dim is sharded over a tuple of mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "contract_over_two_axes"
SOURCE = "jax-ml/jax#31927"
WHAT = (
    "Reducing over ('X','Y') at once was rejected though one axis worked; here the matrix "
    "product scatters its result over both axes and the matrix-vector product is a plain "
    "all-reduce."
)
MESH = {"X": 2, "Y": 4}
EXPECT = "either"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(12)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    a = put(rng.standard_normal((64, 16), np.float32), ("X", "Y"), None)
    b = put(rng.standard_normal((64, 12), np.float32) / 8, ("X", "Y"), None)
    v = put(rng.standard_normal((64,), np.float32), ("X", "Y"))

    def fn(a, b, v):
        return (
            wsc(jnp.einsum("np,nq->pq", a, b), ("X", "Y"), None),
            wsc(jnp.einsum("np,n->p", a, v), None),
        )

    return fn, (a, b, v)


def reference(a, b, v):
    return a.T @ b, a.T @ v
