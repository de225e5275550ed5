"""A vocabulary of 17 rows over 8 devices: the constraint cannot be honoured evenly."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "uneven_vocab_constraint"
SOURCE = "jax-ml/jax#26946"
WHAT = (
    "A constraint on a dim that does not divide by the axis is accepted inside jit and "
    "quietly replicates (or pads); a ring that assumes equal shards would read past the end "
    "or return padding."
)
MESH = {"data": 8}
EXPECT = "either"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(14)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    h = put(rng.standard_normal((24, 12), np.float32), "data", None)
    table = put(rng.standard_normal((17, 12), np.float32), None, None)

    def fn(h, table):
        t = wsc(table * 2.0, "data", None)  # 17 rows, 8 shards
        return jnp.einsum("bd,vd->bv", h, t)

    return fn, (h, table)


def reference(h, table):
    return h @ (2.0 * table).T
