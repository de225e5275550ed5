"""The user already wrote a collective matmul by hand inside shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "handwritten_ring_left_alone"
SOURCE = "jax-ml/jax#31398"
WHAT = (
    "Somebody's hand-written ring matmul (shard_map + ppermute in a loop) crashed the GPU "
    "runtime; such code is common, its inner dots see per-device shapes and must not be "
    "touched nor trip the analysis."
)
MESH = {"i": 8}
EXPECT = "leave"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(23)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    n = mesh.shape["i"]
    x = put(rng.standard_normal((32, 16), np.float32), "i", None)
    w = put(rng.standard_normal((16, 24), np.float32) / 4, None, "i")

    def ring(x, w):
        me, rows = jax.lax.axis_index("i"), x.shape[0]
        out = jnp.zeros((rows * n, w.shape[1]), x.dtype)

        def step(t, carry):
            blk, out = carry
            out = jax.lax.dynamic_update_slice(out, blk @ w, (((me - t) % n) * rows, 0))
            return jax.lax.ppermute(blk, "i", [(j, (j + 1) % n) for j in range(n)]), out

        return jax.lax.fori_loop(0, n, step, (x, out))[1]

    def fn(x, w):
        return jax.shard_map(
            ring,
            mesh=mesh,
            in_specs=(P("i", None), P(None, "i")),
            out_specs=P(None, "i"),
            check_vma=False,
        )(x, w)

    return fn, (x, w)


def reference(x, w):
    return x @ w
