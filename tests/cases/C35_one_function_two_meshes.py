"""One module-level function, called under two meshes of equal shape but different devices order."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "one_function_two_meshes"
SOURCE = "jax-ml/jax#19638"
WHAT = (
    "shard_map and constraints bake in a concrete mesh, so an equal-shaped mesh of other "
    "devices means relowering; this function names axes only and takes its mesh from the "
    "context: a cached rewrite must not pin the first."
)
MESH = {"a": 2, "b": 4}
CONTEXT_MESH = True  # the runner calls under jax.set_mesh(mesh)
DEVICE_ORDERS = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]]
EXPECT = "rewrite"
TOL = 1e-5


def fn(x, w):
    y = jnp.einsum("bsd,df->bsf", x, w)
    return jax.lax.with_sharding_constraint(y, P("a", None, "b"))


def build(mesh):
    rng = np.random.default_rng(35)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((2, 16, 12), np.float32), "a", "b", None)
    w = put(rng.standard_normal((12, 24), np.float32) / 4, None, "b")
    return fn, (x, w)


def reference(x, w):
    return x @ w
