"""Explicit axis types: an MLP with its gradients, whose cotangents are resharded after the sum."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "explicit_axes_train"
WHAT = (
    "The transpose of an einsum is typed as summed and whole, and the transpose of the reshard "
    "shards it again; an einsum that is rewritten to its scattered result changes the type "
    "between the two, and one that cannot be rewritten must not cost the others their loops."
)
MESH = {"a": 2, "b": 4}
AXIS_TYPES = "explicit"
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(54)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((4, 16, 12), np.float32), "a", "b", None)
    up = put(rng.standard_normal((12, 24), np.float32) / 4, None, "b")
    down = put(rng.standard_normal((24, 12), np.float32) / 5, "b", None)

    def loss(x, up, down):
        whole = jax.sharding.reshard(x, P("a", None, None))
        h = jnp.tanh(jnp.einsum("bsd,df->bsf", whole, up))
        y = jnp.einsum("bsf,fd->bsd", h, down, out_sharding=P("a", "b", None))
        return jnp.mean(jnp.square(y))

    return jax.value_and_grad(loss, argnums=(0, 1, 2)), (x, up, down)
