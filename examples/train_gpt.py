"""Train a small GPT with and without collmm, side by side, on text that Python brings along.

    python examples/train_gpt.py --steps=40

The model is written the way large ones are: one ``scan`` over stacked layer weights, ``checkpoint``
inside it, a mesh of data x model with every weight sharded over both axes (FSDP over ``data``,
tensor parallel over ``model``), activations sharded over their sequence between the layers, Adam,
and a donated state. The only difference between the two runs is the decorator. It runs on eight
simulated CPU devices unless XLA_FLAGS or JAX_PLATFORMS say otherwise, and exits with status 1 when
the losses differ or do not fall.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import side_by_side
import text_data
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import collmm

MESH = {"data": 2, "model": 4}

_STEPS = flags.DEFINE_integer("steps", 40, "Optimizer steps.", lower_bound=2)
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers of the model.", lower_bound=1)
_D_MODEL = flags.DEFINE_integer("d_model", 128, "Width of the residual stream.", lower_bound=8)
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 8, "Sequences in a batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 32, "Bytes in a sequence.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Of Adam.", lower_bound=0)
_POLICY = flags.DEFINE_enum(
    "policy",
    "always",
    ["auto", "always", "never"],
    "Which einsums collmm rewrites. These are too small for 'auto' to expect a gain.",
)
_SHOW_PLAN = flags.DEFINE_bool("show_plan", False, "Print the plan, one line per einsum.")
side_by_side.require_multiple("batch", of=MESH["data"])
side_by_side.require_multiple("length", of=MESH["model"])
side_by_side.require_multiple("heads", of=MESH["model"])


@flags.multi_flags_validator(["d_model", "heads"], "--d_model must be a multiple of --heads")
def _heads_divide(values: dict[str, int]) -> bool:
    return values["d_model"] % values["heads"] == 0


# Float32 losses near 5 carry 5e-7, and sums across devices are added in another order. Plain JAX
# on one device and on eight differ by 3e-6 in this model. (At three times the learning rate the
# training itself is unstable: there they are 1e-5 apart after 40 steps and 1e-2 after 200.)
BOUND = 1e-5

# Sharding of every weight; the first dimension of a layer's weights is the layer.
SPECS = {
    "embed": P("model", "data"),  # [vocabulary, d]
    "position": P(None, "data"),  # [length, d]
    "layers": {
        "norm1": P(),  # [layers, d]
        "qkv": P(None, "data", None, "model", None),  # [layers, d, 3, heads, d / heads]
        "out": P(None, "model", None, "data"),  # [layers, heads, d / heads, d]
        "norm2": P(),  # [layers, d]
        "up": P(None, "data", "model"),  # [layers, d, 4 d]
        "down": P(None, "model", "data"),  # [layers, 4 d, d]
    },
    "norm": P(),  # [d]
}
RESIDUAL = P("data", "model", None)  # [batch, length, d]
HIDDEN = P("data", None, "model")  # [batch, length, 4 d]
HEADS = P("data", None, "model", None)  # [batch, length, heads, d / heads]


def init(key: jax.Array) -> dict[str, Any]:
    """Return the weights in float32."""
    layers, d, heads = _LAYERS.value, _D_MODEL.value, _HEADS.value
    keys = iter(jax.random.split(key, 6))

    def weights(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    return {
        "embed": weights(text_data.VOCABULARY, d, fan_in=d),
        "position": weights(_LENGTH.value, d, fan_in=d),
        "layers": {
            "norm1": jnp.ones((layers, d)),
            "qkv": weights(layers, d, 3, heads, d // heads, fan_in=d),
            "out": weights(layers, heads, d // heads, d, fan_in=d),
            "norm2": jnp.ones((layers, d)),
            "up": weights(layers, d, 4 * d, fan_in=d),
            "down": weights(layers, 4 * d, d, fan_in=4 * d),
        },
        "norm": jnp.ones(d),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention on [batch, length, heads, size] each."""
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tri(q.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqs,bshk->bqhk", weights, v)


def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """One transformer layer on the residual stream [batch, length, d]."""
    wsc = jax.lax.with_sharding_constraint
    n = rms_norm(x, w["norm1"])
    q, k, v = (wsc(jnp.einsum("bsd,dhk->bshk", n, w["qkv"][:, i]), HEADS) for i in range(3))
    a = wsc(attention(q, k, v), HEADS)
    x = wsc(x + jnp.einsum("bshk,hkd->bsd", a, w["out"]), RESIDUAL)
    n = rms_norm(x, w["norm2"])
    h = wsc(jax.nn.gelu(jnp.einsum("bsd,df->bsf", n, w["up"])), HIDDEN)
    return wsc(x + jnp.einsum("bsf,fd->bsd", h, w["down"]), RESIDUAL), None


def loss_of(weights: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Mean cross entropy, in nats, of each next byte of ``tokens`` [batch, length + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = weights["embed"][inputs] + weights["position"]
    x = jax.lax.with_sharding_constraint(x, RESIDUAL)
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights["layers"])
    logits = jnp.einsum("bsd,vd->bsv", rms_norm(x, weights["norm"]), weights["embed"])
    logits = jax.lax.with_sharding_constraint(logits, HIDDEN)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def training(
    optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> tuple[Callable, Callable]:
    """Return (train_step, make_state); the state is the weights and Adam's moments of them."""

    def init_state(key):
        weights = init(key)
        return weights, optimizer.init(weights)

    # The moments are sharded as their weights are; Adam's step count is not.
    specs = (
        SPECS,
        optax.tree_map_params(
            optimizer,
            lambda _, spec: spec,
            jax.eval_shape(init_state, jax.random.key(0))[1],
            SPECS,
            transform_non_params=lambda _: P(),
        ),
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    @functools.partial(jax.jit, out_shardings=(shardings, None), donate_argnums=0)
    def train_step(state, tokens):
        weights, moments = state
        loss, grads = jax.value_and_grad(loss_of)(weights, tokens)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(weights, updates), moments), loss

    return train_step, lambda: jax.jit(init_state, out_shardings=shardings)(jax.random.key(0))


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    mesh = side_by_side.device_mesh(**MESH)
    jax.set_mesh(mesh)
    train_step, make_state = training(optax.adam(_LEARNING_RATE.value), mesh)
    windows = text_data.windows(text_data.topics(), _BATCH.value, _LENGTH.value + 1, seed=1)
    batches = [
        jax.device_put(tokens, NamedSharding(mesh, P("data")))
        for tokens in itertools.islice(windows, _STEPS.value)
    ]
    overlapped = collmm.overlap_collectives(train_step, collmm.Options(policy=_POLICY.value))
    plan = overlapped.plan(make_state(), batches[0])
    if _SHOW_PLAN.value:
        print(plan)
    print(f"{len(plan.rewritten)} of {len(plan.decisions)} einsums rewritten")
    losses = side_by_side.train(train_step, overlapped, make_state, batches)
    report, ok = side_by_side.compare(*losses, BOUND)
    print(report)
    return 0 if ok else 1


if __name__ == "__main__":
    app.run(main)
