"""One process of ``slow_network.py``: compiles the programs, runs them in turns, prints the times.

    python slow_network_rank.py '{"rank": 0, "ranks": 4, ...}'

Three programs of one einsum and its collective, f32, over ``ranks`` processes of one device:

- ``plain``: jit with shardings; the compiler puts an all-gather before, or a reduce-scatter after.
- ``overlapped``: the same function through ``overlap_collectives``.
- ``control``: the same again, but each partial einsum waits for the permutes sent before it. What
  it gains over ``plain`` is due to its messages alone; the rest is due to overlap.

and three parts, for the bound: ``einsum`` with nothing to communicate, ``collective``, what the
compiler's own moves, and ``permutes``, what the ring sends, both with nothing to multiply.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import Options, overlap_collectives
from collmm.loops import partial, ringops

AXIS = "m"
SCOPE = "measured"
UNCOUNTED = 2  # repetitions before those that count
NEVER = 12345.6875  # no value of these programs


# --- the control ---


@contextlib.contextmanager
def waiting_loops() -> Iterator[None]:
    """Loops that are lowered meanwhile multiply only what has waited for every permute so far."""
    arrived: list[jax.Array] = []

    def ppermute(x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        arrived.append(lax.ppermute(x, *args, **kwargs))
        return arrived[-1]

    def dot_general(lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if arrived and lhs.size <= rhs.size:
            lhs = after(lhs, arrived)
        elif arrived:
            rhs = after(rhs, arrived)
        return lax.dot_general(lhs, rhs, *args, **kwargs)

    def patched(module: Any, **names: Callable) -> Any:
        return mock.patch.object(module, "lax", types.SimpleNamespace(**{**vars(lax), **names}))

    with patched(ringops, ppermute=ppermute), patched(partial, dot_general=dot_general):
        yield


def after(x: jax.Array, values: list[jax.Array]) -> jax.Array:
    """Return ``x``, not before all of ``values`` are there.

    One element of ``x`` is made to depend on them: XLA's CPU compiler drops barriers.
    """
    first = (0,) * x.ndim
    hit = jnp.stack([v[(0,) * v.ndim] == NEVER for v in values]).any()
    element = jnp.where(hit, jnp.zeros((), x.dtype), x[first])
    return lax.dynamic_update_slice(x, element.reshape((1,) * x.ndim), first)


# --- the programs ---


def gather_program(mesh: Mesh, size: int) -> tuple[Callable, tuple]:
    """relu(x)[size@m, size] @ w[size, n*size@m], relu(x) gathered: an up projection."""
    rows, columns = NamedSharding(mesh, P(AXIS, None)), NamedSharding(mesh, P(None, AXIS))

    def function() -> Any:
        def up(x: jax.Array, w: jax.Array) -> jax.Array:
            with jax.named_scope(SCOPE):
                return jnp.einsum("ik,kj->ij", jax.nn.relu(x), w)

        return jax.jit(up, out_shardings=columns)

    n = mesh.size
    return function, (whole_numbers(rows, size, size), whole_numbers(columns, size, n * size))


def scatter_program(mesh: Mesh, size: int) -> tuple[Callable, tuple]:
    """h[size, n*size@m] @ w[n*size@m, size], summed and scattered: a down projection."""
    rows, columns = NamedSharding(mesh, P(AXIS, None)), NamedSharding(mesh, P(None, AXIS))

    def function() -> Any:
        def down(h: jax.Array, w: jax.Array) -> jax.Array:
            with jax.named_scope(SCOPE):
                return jnp.einsum("ik,kj->ij", h, w)

        return jax.jit(down, out_shardings=rows)

    n = mesh.size
    return function, (whole_numbers(columns, size, n * size), whole_numbers(rows, n * size, size))


PROGRAMS = {"gather": gather_program, "scatter": scatter_program}


def build(
    kind: str, mesh: Mesh, size: int, options: Options
) -> tuple[dict[str, Callable[[], Any]], Any]:
    """Return calls without arguments by name, and the plan of the overlapped one."""
    function, args = PROGRAMS[kind](mesh, size)
    plain, overlapped = function(), overlap_collectives(function(), options)
    control = overlap_collectives(function(), options)
    with waiting_loops():
        jax.block_until_ready(control(*args))
    calls = {
        "plain": lambda: plain(*args),
        "overlapped": lambda: overlapped(*args),
        "control": lambda: control(*args),
    }
    return {**calls, **parts(kind, mesh, size)}, overlapped.plan(*args)


def parts(kind: str, mesh: Mesh, size: int) -> dict[str, Callable[[], Any]]:
    """Return the einsum, the compiler's collective and the ring's permutes, each by itself."""
    gathers, n = kind == "gather", mesh.size
    around = [(i, (i - 1) % n) for i in range(n)]

    def collective(x: jax.Array) -> jax.Array:
        if gathers:
            return lax.all_gather(x, AXIS, axis=0, tiled=True)
        return lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)

    def permutes(x: jax.Array) -> jax.Array:
        for _ in range(n - 1):
            x = lax.ppermute(x, AXIS, around)
        return x

    def mapped(fn: Callable, ins: P, outs: P) -> Any:
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))

    moved = mapped(collective, P(AXIS), P() if gathers else P(AXIS))
    sent = mapped(permutes, P(AXIS), P(AXIS))
    alone = mapped(lambda x: x @ x, P(), P())
    rows = NamedSharding(mesh, P(AXIS, None))
    square = whole_numbers(NamedSharding(mesh, P()), size, size)
    shards = whole_numbers(rows, size, size)
    before = shards if gathers else whole_numbers(rows, n * size, size)
    return {
        "einsum": lambda: alone(square),
        "collective": lambda: moved(before),
        "permutes": lambda: sent(shards),
    }


def whole_numbers(sharding: NamedSharding, *shape: int) -> jax.Array:
    """Small whole numbers, each process its own part: sums of products are exact in any order."""

    def block(index: Any) -> np.ndarray:
        rows, columns = (range(n)[cut] for n, cut in zip(shape, index, strict=True))
        i, j = np.ix_(rows, columns)
        return ((i * 7 + j * 3) % 5 - 2).astype(np.float32)

    return jax.make_array_from_callback(shape, sharding, block)


# --- timing ---


def measure(
    calls: dict[str, Callable[[], Any]], repetitions: int, mesh: Mesh
) -> dict[str, list[float]]:
    """Return the seconds of every repetition of every call on this process."""
    barrier = jax.jit(
        jax.shard_map(lambda x: lax.psum(x, AXIS), mesh=mesh, in_specs=P(AXIS), out_specs=P())
    )
    token = whole_numbers(NamedSharding(mesh, P(AXIS)), mesh.size, 1)
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-UNCOUNTED, repetitions):
        turn = i % len(names)  # another one goes first every time
        for name in (*names[turn:], *names[:turn]):
            jax.block_until_ready(barrier(token))
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            if i >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def differing(calls: dict[str, Callable[[], Any]]) -> list[str]:
    """Return which programs do not give exactly what the plain one gives."""

    def shards(name: str) -> list[np.ndarray]:
        return [np.asarray(s.data) for s in calls[name]().addressable_shards]

    want = shards("plain")
    return [
        name
        for name in ("overlapped", "control")
        if not all(map(np.array_equal, shards(name), want))
    ]


def first_in_line() -> None:
    """Run before whatever else this machine is busy with."""
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    # Where the kernel groups by session, priorities only count inside a group.
    group = pathlib.Path("/proc/self/autogroup")
    if group.exists():
        group.write_text("-20")


def main(config: dict[str, Any]) -> None:
    """Join the others, measure, and print one JSON object on the last line."""
    if config["first_in_line"]:
        first_in_line()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        config["coordinator"], config["ranks"], config["rank"], initialization_timeout=60
    )
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    options = Options(policy="always", strict=True, overrides={SCOPE: config["schedule"]})
    result = {}
    for kind in config["kinds"]:
        calls, plan = build(kind, mesh, config["size"], options)
        result[kind] = {
            "plan": [d.schedule.describe() if d.schedule else None for d in plan.decisions],
            "differing": differing(calls),
            "times": measure(calls, config["repetitions"], mesh),
        }
    print(json.dumps(result))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
