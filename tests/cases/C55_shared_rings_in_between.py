"""Two values gathered in turns, each for several einsums, one ring's result feeding another's."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "shared_rings_in_between"
WHAT = (
    "The last einsum of y needs a result of the second ring of x, so that it cannot join the "
    "first einsum of y, which stands before that ring: moved there, it reads what is not made yet."
)
MESH = {"tp": 8}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(55)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    x, y = (put(rng.standard_normal((8, 8), np.float32), "tp", None) for _ in range(2))
    w, v = (put(rng.standard_normal((8, 8), np.float32) / 3, None, "tp") for _ in range(2))

    def fn(x, y, w, v):
        first = wsc(x @ w, None, "tp")
        other = jnp.tanh(wsc(y @ v, None, "tp"))
        second = wsc(x @ (0.3 * first), None, "tp")
        third = wsc(x @ (0.2 * first), None, "tp")
        last = wsc(y @ (0.5 * third), None, "tp")
        return other, second, last

    return fn, (x, y, w, v)


def reference(x, y, w, v):
    first = x @ w
    return np.tanh(y @ v), x @ (0.3 * first), y @ (0.1 * (x @ first))
