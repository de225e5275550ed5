"""A decode-step projection: the gather is tiny, splitting it in eight only adds latency."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "tiny_decode_gemm"
SOURCE = "openxla/xla#18271"
WHAT = (
    "The size of the sharded operand alone does not tell whether splitting a matmul pays, its "
    "total work does; with the cost model on this must stay one all-gather + one dot (forced "
    "on, it must still be right)."
)
MESH = {"tp": 8}
EXPECT = "leave"
DECIDED_BY = "cost"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(5)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    x = put(rng.standard_normal((8, 16), np.float32), "tp", None)  # one token per device
    w = put(rng.standard_normal((16, 16), np.float32) / 4, None, "tp")

    def fn(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, "tp")))

    return fn, (x, w)


def reference(x, w):
    return x @ w
