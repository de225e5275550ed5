"""The decoder layer, forward and backward, that the program files beside this one build."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SEQUENCE, HEAD = 1024, 128
ACTIVATIONS, BY_HEAD = P("data", None, "model"), P("data", None, "model", None)


def layer_step(mesh, *, batch, width):
    """Sharded as the large dense models of Wang et al., ASPLOS 2023; hidden size 4 x width."""
    hidden, heads = 4 * width, width // HEAD
    weights = {
        "q": ((width, heads, HEAD), P("data", "model", None)),
        "k": ((width, heads, HEAD), P("data", "model", None)),
        "v": ((width, heads, HEAD), P("data", "model", None)),
        "o": ((heads, HEAD, width), P("model", None, "data")),
        "w_in": ((width, hidden), P("data", "model")),
        "w_out": ((hidden, width), P("model", "data")),
    }

    def sharded(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def normalize(x):
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + 1e-6)
        return sharded((x32 * scale).astype(x.dtype), ACTIVATIONS)

    def attention(params, x):
        q, k, v = (
            sharded(jnp.einsum("bsm,mhd->bshd", x, params[name]), BY_HEAD)
            for name in ("q", "k", "v")
        )
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / HEAD**0.5
        causal = jnp.tril(jnp.ones((SEQUENCE, SEQUENCE), bool))
        shares = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1).astype(x.dtype)
        mixed = sharded(jnp.einsum("bhst,bthd->bshd", shares, v), BY_HEAD)
        return sharded(jnp.einsum("bshd,hdm->bsm", mixed, params["o"]), ACTIVATIONS)

    def feed_forward(params, x):
        up = jax.nn.gelu(jnp.einsum("bsm,mf->bsf", x, params["w_in"]))
        return sharded(jnp.einsum("bsf,fm->bsm", up, params["w_out"]), ACTIVATIONS)

    def loss(params, x):
        # A constraint holds for the gradient too: that of a weight is scattered like the weight.
        params = {name: sharded(w, weights[name][1]) for name, w in params.items()}
        x = sharded(x, ACTIVATIONS)
        x = x + attention(params, normalize(x))
        x = x + feed_forward(params, normalize(x))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def layer_step(params, x):
        return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    def array(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    params = {name: array(*weight) for name, weight in weights.items()}
    return jax.jit(layer_step), (params, array((batch, SEQUENCE, width), ACTIVATIONS))
