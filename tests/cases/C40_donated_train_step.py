"""SGD-with-momentum step whose state is donated; layouts of state in and out must agree."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "donated_train_step"
SOURCE = "jax-ml/jax#25346"
WHAT = (
    "Donation failed with an alias size mismatch when the output layout was left to the "
    "compiler; after the rewrite new params must still have the layout of the old ones, so "
    "their buffers can be reused."
)
MESH = {"fsdp": 8}
JIT_KWARGS = {"donate_argnums": (0,)}
EXPECT = "rewrite"
TOL = 1e-5


def build(mesh):
    rng = np.random.default_rng(40)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    def init(*s):
        return put(rng.standard_normal(s, np.float32) / 5, "fsdp", None)

    params = {"w1": init(16, 32), "w2": init(32, 8)}
    state = {
        "params": params,
        "mom": jax.tree.map(lambda a: put(np.zeros(a.shape, np.float32), "fsdp", None), params),
    }
    x = put(rng.standard_normal((32, 16), np.float32), "fsdp", None)
    y = put(rng.standard_normal((32, 8), np.float32), "fsdp", None)

    def loss(p, x, y):
        h = wsc(jax.nn.relu(x @ p["w1"]), "fsdp", None)
        return jnp.mean((wsc(h @ p["w2"], "fsdp", None) - y) ** 2)

    def fn(state, x, y):
        val, g = jax.value_and_grad(loss)(state["params"], x, y)
        g = jax.tree.map(lambda a: wsc(a, "fsdp", None), g)
        mom = jax.tree.map(lambda m, a: 0.9 * m + a, state["mom"], g)
        return {
            "params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mom),
            "mom": mom,
        }, val

    return fn, (state, x, y)
