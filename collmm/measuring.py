"""Measure on the devices at hand what the cost model predicts: links, memory and einsums.

Each measurement is one jitted loop whose steps depend on each other, run for few and for many
steps; the difference, per step, has no dispatch in it::

    for _ in range(steps):  x = ppermute(x)                      # one hop of a ring
    for _ in range(steps):  x = all_gather(x)[next position]     # a whole gather, one slice kept
    for _ in range(steps):  x[0] = psum_scatter(x)               # a whole reduce-scatter
    for _ in range(steps):  x = x * c                            # device memory, read and written
    for _ in range(steps):  x = x @ w                            # an einsum
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import _jax
from collmm.cost.einsum import Product
from collmm.cost.fit import EINSUM, GATHER, MEMORY, PERMUTE, SCATTER, Sample
from collmm.ring import permutation
from collmm.timing import interleaved

_MOST_STEPS = 1 << 14


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What to measure.

    Attributes:
      collectives: bytes of the whole value of a collective.
      memory: bytes of the array that is read and written.
      rows, widths: of the einsums ``[rows, width] @ [width, width]``, every pair.
      dtypes: element types of the einsums.
      least_s: how long one run is to take at least.
      rounds: how often each is run.
    """

    collectives: tuple[int, ...]
    memory: tuple[int, ...]
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    least_s: float = 0.02
    rounds: int = 7

    def quick(self) -> Sizes:
        """Every second size, and fewer runs of each."""
        return dataclasses.replace(
            self,
            collectives=self.collectives[::2],
            memory=self.memory[::2],
            rows=self.rows[::2],
            widths=self.widths[::2],
            rounds=3,
        )


ACCELERATOR = Sizes(
    collectives=tuple(1 << k for k in range(15, 29)),
    memory=tuple(1 << k for k in range(24, 30)),
    rows=(64, 128, 256, 512, 1024, 2048, 4096, 8192),
    widths=(1024, 2048, 4096, 8192),
)
SIMULATED = Sizes(
    collectives=tuple(1 << k for k in range(16, 25)),
    memory=tuple(1 << k for k in range(20, 25)),
    rows=(16, 64, 128, 256, 512),
    widths=(128, 256, 512),
    dtypes=("float32",),
    least_s=0.01,
    rounds=5,
)


def measure(mesh: Mesh, order: Sequence[int] | None, sizes: Sizes) -> Iterator[Sample]:
    """Yield the times of collectives over a mesh of one axis, and of one of its devices.

    Args:
      mesh: of one axis; with one device there are no collectives.
      order: the members in the order in which a permute ring visits them; None as they are.
      sizes: what to measure.
    """
    dtype = jnp.dtype(sizes.dtypes[0])
    if mesh.size > 1:
        for size in sizes.collectives:
            for kind in COLLECTIVES:
                loop = collective_loop(kind, mesh, order, size, dtype)
                yield _told(Sample(kind, per_step(loop, sizes), loop.bytes))
    device = mesh.devices.flat[0]
    for size in sizes.memory:
        loop = memory_loop(device, size, dtype)
        yield _told(Sample(MEMORY, per_step(loop, sizes), loop.bytes))
    for name in sizes.dtypes:
        for width in sizes.widths:
            for rows in sizes.rows:
                loop, product = einsum_loop(device, rows, width, name)
                yield _told(Sample(EINSUM, per_step(loop, sizes), loop.bytes, product))


def per_step(run: Callable[[int], Any], sizes: Sizes) -> float:
    """Return the seconds of one step of ``run(steps)``."""
    jax.block_until_ready(run(1))
    many = 4
    while True:
        start = time.perf_counter()
        jax.block_until_ready(run(many))
        taken = time.perf_counter() - start
        if taken >= sizes.least_s or many >= _MOST_STEPS:
            break
        many = min(_MOST_STEPS, many * max(2, min(16, math.ceil(sizes.least_s / taken))))
    few = max(1, many // 4)
    calls = [functools.partial(run, few), functools.partial(run, many)]
    short, long = map(statistics.median, interleaved(calls, sizes.rounds))
    # Where the machine is too busy to tell few steps from many, dispatch is counted in.
    return (long - short) / (many - few) if long > short else long / many


# --- what is run ---


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of equal steps: ``loop(steps)`` runs it.

    Attributes:
      jitted: from (steps, the operands) to what the last step made.
      operands: arrays.
      bytes: of one step; see ``Sample``.
    """

    jitted: Any
    operands: tuple[Any, ...]
    bytes: int

    def __call__(self, steps: int) -> Any:
        """Run that many steps."""
        return self.jitted(np.full((1,), steps, np.int32), *self.operands)


COLLECTIVES = (PERMUTE, GATHER, SCATTER)


def collective_loop(
    kind: str, mesh: Mesh, order: Sequence[int] | None, size: int, dtype: Any
) -> Loop:
    """Return the loop of one collective over a mesh of one axis.

    Args:
      kind: one of ``COLLECTIVES``.
      mesh: of one axis.
      order: the members as a permute ring visits them; None as they are.
      size: bytes of the whole value, about.
      dtype: of its elements.
    """
    n, (axis,) = mesh.size, mesh.axis_names
    shard = max(1, size // (n * dtype.itemsize))
    held = n * shard if kind == SCATTER else shard

    def permute(x: Any) -> Any:
        ring = range(n) if order is None else order
        return lax.ppermute(x, axis, [(ring[a], ring[b]) for a, b in permutation(n, 1)])

    def gather(x: Any) -> Any:
        # The barrier keeps the gather whole, though only one shard of it goes on.
        whole = lax.optimization_barrier(lax.all_gather(x, axis, tiled=True))
        return lax.dynamic_slice(whole, ((lax.axis_index(axis) + 1) % n * shard,), (shard,))

    def scatter(x: Any) -> Any:
        mine = lax.optimization_barrier(lax.psum_scatter(x, axis, tiled=True))
        return lax.dynamic_update_slice(x, mine / n, (0,))

    step = {PERMUTE: permute, GATHER: gather, SCATTER: scatter}[kind]

    def body(steps: Any, x: Any) -> Any:
        return lax.fori_loop(0, steps[0], lambda _, x: step(x), x)

    jitted = jax.jit(_jax.shard_map_all(body, mesh, (P(), P(axis)), P(axis)))
    x = jax.device_put(np.ones((n * held,), dtype), NamedSharding(mesh, P(axis)))
    return Loop(jitted, (x,), (1 if kind == PERMUTE else n) * shard * dtype.itemsize)


def memory_loop(device: Any, size: int, dtype: Any) -> Loop:
    """Return the loop that reads and writes an array of ``size`` bytes."""

    @jax.jit
    def loop(steps: Any, x: Any) -> Any:
        half = jnp.asarray(0.5, dtype)
        return lax.fori_loop(0, steps[0], lambda _, x: x * half + half, x)

    x = jax.device_put(np.ones((size // dtype.itemsize,), dtype), device)
    return Loop(loop, (x,), 2 * x.nbytes)


def einsum_loop(device: Any, rows: int, width: int, name: str) -> tuple[Loop, Product]:
    """Return the loop of ``[rows, width] @ [width, width]``, and that product."""
    dtype = jnp.dtype(name)
    random = np.random.default_rng(0)
    x = jax.device_put(random.standard_normal((rows, width)).astype(dtype), device)
    # Orthogonal on average: the values neither grow nor vanish.
    w = random.standard_normal((width, width)) / math.sqrt(width)
    w = jax.device_put(w.astype(dtype), device)

    @jax.jit
    def loop(steps: Any, x: Any, w: Any) -> Any:
        return lax.fori_loop(0, steps[0], lambda _, x: x @ w, x)

    product = Product(1, rows, width, width, (dtype.itemsize,) * 3, name)
    return Loop(loop, (x, w), product.flops), product


def _told(sample: Sample) -> Sample:
    shape = sample.product
    what = f"{sample.bytes} bytes" if shape is None else f"[{shape.rows}, {shape.depth}]"
    logging.info("%s %s: %.3g us", sample.curve, what, sample.seconds * 1e6)
    return sample
