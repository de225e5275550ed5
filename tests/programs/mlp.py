"""The MLP that the program files beside this one build in their sizes."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def mlp(mesh, *, rows, width, hidden):
    """gelu(x @ w) @ v in bf16: x is gathered for the first einsum, the second's sum scattered."""

    def on(*axes):
        return NamedSharding(mesh, P(*axes))

    def array(*shape, sharding):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def forward(x, w, v):
        return jax.lax.with_sharding_constraint(jax.nn.gelu(x @ w) @ v, on("model"))

    return jax.jit(forward), (
        array(rows, width, sharding=on("model")),
        array(width, hidden, sharding=on(None, "model")),
        array(hidden, width, sharding=on("model")),
    )
