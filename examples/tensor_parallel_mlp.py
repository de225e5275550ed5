"""A tensor-parallel MLP with sequence parallelism, forward and backward, on 8 devices.

    collmm dump examples/tensor_parallel_mlp.py

Activations are sharded over the sequence between the layers and over the hidden features inside.
So the forward pass gathers x before the first einsum and reduce-scatters the result of the
second; the backward pass gathers the gradient of the result and x again, and reduce-scatters the
gradient of x. Look at the plan: each of those einsums names its collective and its ring over
"model". Then at the table of collectives below it: the gathers and scatters are gone, permutes
that run beside the partial einsums have taken their place.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {"model": 8}

BATCH, SEQUENCE, MODEL, HIDDEN = 4, 2048, 4096, 16384


def build(mesh):
    def on(*axes):
        return NamedSharding(mesh, P(*axes))

    def by_sequence(x):
        return jax.lax.with_sharding_constraint(x, on(None, "model"))

    def mlp(params, x):
        # A constraint holds for the gradient too, so that of x is scattered like x.
        hidden = jax.nn.gelu(jnp.einsum("bsd,df->bsf", by_sequence(x), params["w_in"]))
        return by_sequence(jnp.einsum("bsf,fd->bsd", hidden, params["w_out"]))

    def loss(params, x):
        return jnp.mean(jnp.square(mlp(params, x).astype(jnp.float32)))

    def mlp_step(params, x):
        return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    def array(*shape, sharding):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    params = {
        "w_in": array(MODEL, HIDDEN, sharding=on(None, "model")),
        "w_out": array(HIDDEN, MODEL, sharding=on("model", None)),
    }
    return jax.jit(mlp_step), (params, array(BATCH, SEQUENCE, MODEL, sharding=on(None, "model")))
