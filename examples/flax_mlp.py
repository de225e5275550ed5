"""Train a flax model, sharded by flax's own annotations, with and without collmm, side by side.

    python examples/flax_mlp.py --api=linen
    python examples/flax_mlp.py --api=nnx

The model predicts each byte of a text from the eight before it. Its weights carry logical axis
names, and one table of rules says which mesh axes those stand for: the way the guides of
flax.linen and flax.nnx show it. Nothing in the model knows of collmm; the training step is
decorated, that is all. It runs on eight simulated CPU devices unless XLA_FLAGS or JAX_PLATFORMS
say otherwise, and exits with status 1 when the losses differ or do not fall.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import side_by_side
import text_data
from absl import app, flags
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import collmm

MESH = {"data": 2, "model": 4}
CONTEXT = 8  # bytes that the model sees for each one it predicts

_API = flags.DEFINE_enum("api", "linen", ["linen", "nnx"], "Which API of flax to use.")
_STEPS = flags.DEFINE_integer("steps", 30, "Optimizer steps.", lower_bound=2)
_LAYERS = flags.DEFINE_integer("layers", 2, "Blocks of the model.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 64, "Width of the residual stream.", lower_bound=8)
_BATCH = flags.DEFINE_integer("batch", 16, "Sequences in a batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 16, "Bytes predicted in a sequence.", lower_bound=1)
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
side_by_side.require_multiple("width", of=MESH["data"])


# What the logical axes of the model are on the mesh.
RULES = (
    ("batch", "data"),
    ("length", "model"),  # between the blocks
    ("embed", None),
    ("weight_embed", "data"),  # FSDP
    ("mlp", "model"),
    ("vocabulary", "model"),
)
RESIDUAL = ("batch", "length", "embed")
HIDDEN = ("batch", None, "mlp")
LOGITS = ("batch", None, "vocabulary")
EMBEDDING = ("vocabulary", "weight_embed")
UP = ("weight_embed", "mlp")
DOWN = ("mlp", "weight_embed")

# Float32 losses near 5 carry 5e-7, and sums across devices are added in another order.
BOUND = 1e-5

lecun = jax.nn.initializers.lecun_normal()
normal = jax.nn.initializers.normal(0.02)
zeros = jax.nn.initializers.zeros


class LinenBlock(linen.Module):
    """Residual MLP on [batch, length, width]."""

    width: int

    @linen.compact
    def __call__(self, x):
        logical, constrain = linen.with_logical_partitioning, linen.with_logical_constraint
        h = linen.Dense(
            4 * self.width,
            kernel_init=logical(lecun, UP),
            bias_init=logical(zeros, UP[1:]),
        )(linen.RMSNorm()(x))
        h = constrain(linen.gelu(h), HIDDEN)
        y = linen.Dense(
            self.width,
            kernel_init=logical(lecun, DOWN),
            bias_init=logical(zeros, DOWN[1:]),
        )(h)
        return constrain(x + y, RESIDUAL)


class LinenMlp(linen.Module):
    """Logits [batch, length, vocabulary] of what follows each CONTEXT of a sequence of tokens."""

    width: int
    layers: int

    @linen.compact
    def __call__(self, tokens):
        logical, constrain = linen.with_logical_partitioning, linen.with_logical_constraint
        embed = linen.Embed(
            text_data.VOCABULARY, self.width, embedding_init=logical(normal, EMBEDDING)
        )
        x = constrain(concatenated(embed(contexts(tokens))), RESIDUAL)
        x = linen.Dense(
            self.width, use_bias=False, kernel_init=logical(lecun, ("embed", "weight_embed"))
        )(x)
        x = constrain(x, RESIDUAL)
        for _ in range(self.layers):
            x = LinenBlock(self.width)(x)
        logits = linen.Dense(
            text_data.VOCABULARY,
            use_bias=False,
            kernel_init=logical(lecun, ("weight_embed", "vocabulary")),
        )(linen.RMSNorm()(x))
        return constrain(logits, LOGITS)


def linen_training(optimizer, mesh) -> tuple[Callable, Callable]:
    """Return (train_step, make_state); the state is a ``TrainState`` of boxed weights."""
    model = LinenMlp(_WIDTH.value, _LAYERS.value)

    def init(key):
        tokens = jnp.zeros((_BATCH.value, _LENGTH.value + CONTEXT - 1), jnp.int32)
        params = model.init(key, tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    specs = linen.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
    shardings = linen.logical_to_mesh_sharding(specs, mesh, RULES)

    @functools.partial(
        jax.jit,
        in_shardings=(shardings, NamedSharding(mesh, P("data"))),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    def train_step(state, tokens):
        def loss_of(params):
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return cross_entropy(logits, tokens[:, CONTEXT:])

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step, lambda: jax.jit(init, out_shardings=shardings)(jax.random.key(0))


class NnxBlock(nnx.Module):
    """Residual MLP on [batch, length, width]."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        logical = nnx.with_partitioning
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(
            width,
            4 * width,
            kernel_init=logical(lecun, UP),
            bias_init=logical(zeros, UP[1:]),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            4 * width,
            width,
            kernel_init=logical(lecun, DOWN),
            bias_init=logical(zeros, DOWN[1:]),
            rngs=rngs,
        )

    def __call__(self, x):
        h = constrain_nnx(nnx.gelu(self.up(self.norm(x))), HIDDEN)
        return constrain_nnx(x + self.down(h), RESIDUAL)


class NnxMlp(nnx.Module):
    """Logits [batch, length, vocabulary] of what follows each CONTEXT of a sequence of tokens."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        logical = nnx.with_partitioning
        self.embed = nnx.Embed(
            text_data.VOCABULARY, width, embedding_init=logical(normal, EMBEDDING), rngs=rngs
        )
        self.first = nnx.Linear(
            CONTEXT * width,
            width,
            use_bias=False,
            kernel_init=logical(lecun, ("embed", "weight_embed")),
            rngs=rngs,
        )
        self.blocks = nnx.List([NnxBlock(width, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.logits = nnx.Linear(
            width,
            text_data.VOCABULARY,
            use_bias=False,
            kernel_init=logical(lecun, ("weight_embed", "vocabulary")),
            rngs=rngs,
        )

    def __call__(self, tokens):
        x = constrain_nnx(concatenated(self.embed(contexts(tokens))), RESIDUAL)
        x = constrain_nnx(self.first(x), RESIDUAL)
        for block in self.blocks:
            x = block(x)
        return constrain_nnx(self.logits(self.norm(x)), LOGITS)


def constrain_nnx(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Constrain an activation by logical names; nnx itself knows those of variables only."""
    return jax.lax.with_sharding_constraint(x, linen.logical_to_mesh_axes(names))


def nnx_training(optimizer, _) -> tuple[Callable, Callable]:
    """Return (train_step, make_state); the state is that of the model and of its optimizer."""

    def make() -> tuple[NnxMlp, nnx.Optimizer]:
        model = NnxMlp(_WIDTH.value, _LAYERS.value, nnx.Rngs(0))  # sharded as it is made
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    graph, _ = nnx.split(nnx.eval_shape(make))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, tokens):
        model, adam = nnx.merge(graph, state)

        def loss_of(model):
            return cross_entropy(model(tokens[:, :-1]), tokens[:, CONTEXT:])

        loss, grads = nnx.value_and_grad(loss_of)(model)
        adam.update(model, grads)
        return nnx.state((model, adam)), loss

    return train_step, lambda: nnx.state(make())


def contexts(tokens: jax.Array) -> jax.Array:
    """Return every stretch of CONTEXT tokens: [batch, n] to [batch, n - CONTEXT + 1, CONTEXT]."""
    n = tokens.shape[1] - CONTEXT + 1
    return jnp.stack([tokens[:, i : i + n] for i in range(CONTEXT)], axis=-1)


def concatenated(x: jax.Array) -> jax.Array:
    """Return [batch, length, CONTEXT, width] as [batch, length, CONTEXT * width]."""
    return x.reshape(*x.shape[:2], -1)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    mesh = side_by_side.device_mesh(**MESH)
    jax.set_mesh(mesh)
    windows = text_data.windows(text_data.topics(), _BATCH.value, _LENGTH.value + CONTEXT, seed=1)
    batches = [
        jax.device_put(tokens, NamedSharding(mesh, P("data")))
        for tokens in itertools.islice(windows, _STEPS.value)
    ]
    training = {"linen": linen_training, "nnx": nnx_training}[_API.value]
    with linen.logical_axis_rules(RULES):  # those of nnx, too
        train_step, make_state = training(optax.adam(_LEARNING_RATE.value), mesh)
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
