"""The FSDP linear: batch and the weight's input dim are sharded over the same axis."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "fsdp_weight_gather"
SOURCE = "pytorch/xla#6778"
WHAT = (
    "A minimal FSDP matmul gathered the activation instead of the weight and nothing "
    "overlapped; the weight shards must travel along the contracted dim while the big "
    "batch-sharded activation stays put."
)
MESH = {"fsdp": 8}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(27)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((64, 32), np.float32), "fsdp", None)
    w = put(rng.standard_normal((32, 24), np.float32) / 6, "fsdp", None)

    def fn(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("fsdp", None)))

    return fn, (x, w)


def reference(x, w):
    return x @ w
