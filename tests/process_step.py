"""A data x model training step, alone or as one of several processes; see ``test_processes.py``.

    python process_step.py PROCESS PROCESSES COORDINATOR OUT

Whole numbers throughout, so that every order of additions gives the same bits.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import Options, overlap_collectives

DATA, MODEL = 2, 4
BATCH, SEQ, WIDTH, HIDDEN = 4, 8, 8, 16
SPECS = {
    "up": P("data", "model"),  # gathered over data before use, as fully sharded weights are
    "down": P("model", "data"),
    "x": P("data", "model", None),
    "want": P("data", "model", None),
}


def host_values():
    shapes = {
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "x": (BATCH, SEQ, WIDTH),
        "want": (BATCH, SEQ, WIDTH),
    }
    return {
        name: np.random.default_rng(i).integers(-2, 3, shape).astype(np.float32)
        for i, (name, shape) in enumerate(shapes.items())
    }


def make_step(mesh):
    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def loss(params, x, want):
        h = constrain(jnp.einsum("bsk,kf->bsf", x, params["up"]), "data", None, "model")
        y = jnp.einsum("bsf,fk->bsk", jnp.maximum(h, 0), params["down"])
        return jnp.sum(constrain(y, "data", "model", None) * want)

    def step(params, x, want):
        value, grads = jax.value_and_grad(loss)(params, x, want)
        new = {name: constrain(params[name] - grads[name], *SPECS[name]) for name in params}
        return value, new

    return step


def run(mesh):
    """Return the plan as JSON text and the shards of this process, by name and place."""
    arrays = {
        name: jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, SPECS[name]), lambda index, v=value: v[index]
        )
        for name, value in host_values().items()
    }
    params = {name: arrays[name] for name in ("up", "down")}
    step = overlap_collectives(jax.jit(make_step(mesh)), Options("always", strict=True))
    args = params, arrays["x"], arrays["want"]
    plan = json.dumps(step.plan(*args).to_json(), sort_keys=True)
    results = {}
    for _ in range(2):  # the second call goes through the dispatcher's cache
        value, new = step(*args)
        for name, array in {**new, "loss": value}.items():
            for shard in array.addressable_shards:
                place = ",".join(f"{s.start or 0}" for s in shard.index)
                results[f"{name}[{place}]"] = np.asarray(shard.data)
    return plan, results


def main(process, processes, coordinator, out):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", DATA * MODEL // processes)
    jax.distributed.initialize(coordinator, processes, process, initialization_timeout=60)
    mesh = Mesh(np.array(jax.devices()).reshape(DATA, MODEL), ("data", "model"))
    plan, results = run(mesh)
    np.savez(out, plan=np.array(plan), **results)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
