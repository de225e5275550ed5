"""What the decorator itself costs: planning against jax's tracing and lowering, and dispatch.

    python benchmarks/planning.py [--json] [--layers=12,24,48] [--leaves=500] [--repetitions=5]

Both parts print ratios of two times taken side by side in this run, on simulated CPU devices.

Planning: an unrolled stack of transformer layers with its gradients is traced and lowered by jax
from empty caches; then it is planned and rewritten. Planning contains one more lowering, of the
numbered program that Shardy partitions, so a ratio of 1 means that it is no more than that.

Dispatch: a step that does next to nothing, with a parameter tree of many leaves, is called through
the wrapped jit and through the decorator in turns.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import Options, overlap_collectives

DEVICES = 8
CALLS = 50  # per batch that is timed: a batch takes milliseconds, well above the clock's grain

_JSON = flags.DEFINE_bool("json", False, "print one JSON object instead of tables")
_LAYERS = flags.DEFINE_list("layers", ["12", "24", "48"], "depths of the stack to plan")
_LEAVES = flags.DEFINE_integer("leaves", 500, "leaves of the parameter tree", lower_bound=1)
_REPETITIONS = flags.DEFINE_integer("repetitions", 5, "medians are over this many", lower_bound=1)


# --- planning ---


def transformer(mesh: Mesh, layers: int) -> tuple[Callable, tuple]:
    """Return an unrolled stack with gradients, and its arguments as shapes: nothing is allocated.

    Four einsums per layer (attention's inner two are left out: nothing is communicated for them),
    and eight more for their gradients; tensor and sequence parallel over ``model``.
    """
    batch, seq, width = 8, 1024, 1024
    shapes = {
        "qkv": ((width, 3 * width), P(None, "model")),
        "out": ((width, width), P("model", None)),
        "up": ((width, 4 * width), P(None, "model")),
        "down": ((4 * width, width), P("model", None)),
        "norm": ((2, width), P()),
    }
    sequence, heads = P("data", "model", None), P("data", None, "model")

    def constrain(x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def layer(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        qkv = jnp.einsum("bsd,df->bsf", norm(x, p["norm"][0]), p["qkv"])
        q, k, v = jnp.split(constrain(qkv, heads), 3, axis=-1)
        mixed = q * jax.nn.sigmoid(k) * v
        x = x + constrain(jnp.einsum("bsf,fd->bsd", mixed, p["out"]), sequence)
        h = jnp.einsum("bsd,df->bsf", norm(x, p["norm"][1]), p["up"])
        h = constrain(jax.nn.gelu(h), heads)
        return x + constrain(jnp.einsum("bsf,fd->bsd", h, p["down"]), sequence)

    def loss(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for p in params:
            x = layer(p, x)
        return jnp.mean(x * x)

    def step(params: list[dict[str, jax.Array]], x: jax.Array) -> tuple[jax.Array, Any]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, [{k: constrain(g[k], shapes[k][1]) for k in g} for g in grads]

    def shaped(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    params = [{k: shaped(*v) for k, v in shapes.items()} for _ in range(layers)]
    return step, (params, shaped((batch, seq, width), sequence))


def time_planning(mesh: Mesh, layers: int, repetitions: int) -> dict[str, Any]:
    """Return medians of jax's trace and lowering, and of planning and rewriting, in seconds."""
    step, args = transformer(mesh, layers)
    jax_s, plan_s = [], []
    for _ in range(repetitions):
        jax.clear_caches()
        gc.collect()
        jitted = jax.jit(step)
        overlapped = overlap_collectives(jitted, Options(policy="always"))
        start = time.perf_counter()
        jitted.trace(*args).lower()
        lowered = time.perf_counter()
        plan = overlapped.plan(*args)  # the trace is in jax's cache by now
        plan_s.append(time.perf_counter() - lowered)
        jax_s.append(lowered - start)
    return {
        "layers": layers,
        "einsums": len(plan.decisions),
        "rewritten": len(plan.rewritten),
        "jax_s": statistics.median(jax_s),
        "plan_s": statistics.median(plan_s),
        "ratio": statistics.median(p / j for p, j in zip(plan_s, jax_s, strict=True)),
        "plan_ms_per_einsum": 1e3 * statistics.median(plan_s) / len(plan.decisions),
    }


# --- dispatch ---


def time_dispatch(devices: int, leaves: int, repetitions: int) -> dict[str, Any]:
    """Return medians of one call of the jit and of the decorated jit, in seconds."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("model",))
    sharding = NamedSharding(mesh, P("model"))
    # Sharing one buffer: 500 arguments to check and pass, next to nothing to hold or to compute.
    leaf = jax.device_put(np.zeros(8, np.float32), sharding)
    params = {f"layer{i}": {"w": leaf} for i in range(leaves)}
    x = jax.device_put(np.zeros(8, np.float32), sharding)

    def step(params: Any, x: jax.Array) -> jax.Array:
        return x + 1

    jitted = jax.jit(step, keep_unused=True)  # the leaves reach the executable, as in a real step
    overlapped = overlap_collectives(jitted)

    def batch(call: Callable) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            out = call(params, x)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / CALLS

    batch(jitted), batch(overlapped)
    gc.collect()
    gc.disable()
    try:
        # In turns, each time the other one first, so that a drift of the machine hits both.
        pairs = []
        for i in range(8 * repetitions):
            order = (jitted, overlapped) if i % 2 else (overlapped, jitted)
            times = {call: batch(call) for call in order}
            pairs.append((times[jitted], times[overlapped]))
    finally:
        gc.enable()
    return {
        "devices": devices,
        "leaves": leaves,
        "jit_s": statistics.median(j for j, _ in pairs),
        "overlapped_s": statistics.median(o for _, o in pairs),
        "ratio": statistics.median(o / j for j, o in pairs),
    }


# --- printing ---


def show(result: dict[str, Any]) -> None:
    """Print the result as two tables."""
    print(f"jax {result['jax']}, simulated CPU devices\n")
    print("planning and rewriting against jax's own trace and lowering")
    print("layers  einsums  rewritten   jax s  plan s  ratio  plan ms/einsum")
    for r in result["planning"]:
        print(
            f"{r['layers']:6d}  {r['einsums']:7d}  {r['rewritten']:9d}  {r['jax_s']:6.2f}"
            f"  {r['plan_s']:6.2f}  {r['ratio']:5.2f}  {r['plan_ms_per_einsum']:14.2f}"
        )
    print("\none call through the decorator against one through the jit it wraps")
    print("devices  leaves  jit us  overlapped us  ratio")
    for r in result["dispatch"]:
        print(
            f"{r['devices']:7d}  {r['leaves']:6d}  {1e6 * r['jit_s']:6.1f}"
            f"  {1e6 * r['overlapped_s']:13.1f}  {r['ratio']:5.3f}"
        )


def main(argv: list[str]) -> None:
    """Measure and print."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    time_planning(mesh, 1, 1)  # imports and first-use costs fall here
    result = {
        "jax": jax.__version__,
        "planning": [time_planning(mesh, int(n), _REPETITIONS.value) for n in _LAYERS.value],
        "dispatch": [
            time_dispatch(devices, _LEAVES.value, _REPETITIONS.value) for devices in (1, DEVICES)
        ],
    }
    if _JSON.value:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    app.run(main)
