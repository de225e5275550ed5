"""One GPT decoder layer, sharded two ways over a data and a model axis, forward and backward.

    collmm dump examples/gpt_layer_2d.py
    collmm dump examples/gpt_layer_2d.py --target tpu:v4:2x2x2

The sharding of the large decoder models of Wang et al., ASPLOS 2023, with X = data, Y = model:
activations [B_X, S, D_Y], query, key and value weights [D_X, H_Y, d], output projection
[H_Y, d, D_X], feed-forward weights [D_X, F_Y] and [F_Y, D_X]. Every weight is sharded over both
axes, so every projection has two collectives: over "model" the activations are gathered or the
result is scattered, over "data" the weight is gathered, and in the backward pass its gradient is
scattered. One of the two becomes a loop; the plan says which, and leaves the small attention
einsums alone.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {"data": 2, "model": 4}

BATCH, SEQUENCE, MODEL, HIDDEN, HEADS, HEAD = 16, 1024, 8192, 32768, 64, 128

SPECS = {
    "query": P("data", "model", None),
    "key": P("data", "model", None),
    "value": P("data", "model", None),
    "project": P("model", None, "data"),
    "w_in": P("data", "model"),
    "w_out": P("model", "data"),
}
ACTIVATIONS = P("data", None, "model")
BY_HEAD = P("data", None, "model", None)


def build(mesh):
    return layer_step(mesh, BATCH, SEQUENCE, MODEL, HIDDEN, HEADS, HEAD)


def layer_step(mesh, batch, sequence, model, hidden, heads, head, keep=None):
    """The layer and its gradients for a batch of shapes, and those shapes.

    ``keep``: names of the values that the backward pass finds saved, of "context" and "project";
    all others are computed again. None saves everything.
    """
    shapes = {
        "query": (model, heads, head),
        "key": (model, heads, head),
        "value": (model, heads, head),
        "project": (heads, head, model),
        "w_in": (model, hidden),
        "w_out": (hidden, model),
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
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / head**0.5
        causal = jnp.tril(jnp.ones((sequence, sequence), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1).astype(x.dtype)
        mixed = sharded(jnp.einsum("bhst,bthd->bshd", weights, v), BY_HEAD)
        mixed = checkpoint_name(mixed, "context")
        out = sharded(jnp.einsum("bshd,hdm->bsm", mixed, params["project"]), ACTIVATIONS)
        return checkpoint_name(out, "project")

    def feed_forward(params, x):
        up = jax.nn.gelu(jnp.einsum("bsm,mf->bsf", x, params["w_in"]))
        return sharded(jnp.einsum("bsf,fm->bsm", up, params["w_out"]), ACTIVATIONS)

    def layer(params, x):
        x = x + attention(params, normalize(x))
        return x + feed_forward(params, normalize(x))

    if keep is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*keep)
        layer = jax.checkpoint(layer, policy=policy)

    def loss(params, x):
        # A constraint holds for the gradient too: that of a weight is scattered like the weight.
        params = {name: sharded(w, SPECS[name]) for name, w in params.items()}
        return jnp.mean(jnp.square(layer(params, sharded(x, ACTIVATIONS)).astype(jnp.float32)))

    def step(params, x):
        return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    def array(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    params = {name: array(shapes[name], SPECS[name]) for name in shapes}
    return jax.jit(step), (params, array((batch, sequence, model), ACTIVATIONS))
