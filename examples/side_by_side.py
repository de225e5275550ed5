"""Train one state with the plain step and one with the overlapped step, and compare the losses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags


def require_multiple(name: str, of: int) -> None:
    """Refuse values of the integer flag ``name`` that the mesh axis of size ``of`` cannot split."""
    flags.register_validator(name, lambda n: n % of == 0, f"must be a multiple of {of}")


def device_mesh(**axes: int) -> jax.sharding.Mesh:
    """Return a mesh of the first devices; the program ends with status 2 if there are too few."""
    wanted, found = math.prod(axes.values()), jax.device_count()
    if found < wanted:
        print(
            f"{found} {jax.default_backend()} devices, {wanted} are needed; for simulated ones set "
            f"JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count={wanted}",
            file=sys.stderr,
        )
        sys.exit(2)
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )


def train(
    plain: Callable, overlapped: Callable, make_state: Callable[[], Any], batches: Sequence
) -> tuple[list[float], list[float]]:
    """Return the losses of both steps, from equal states and on the same batches.

    Args:
      plain, overlapped: ``step(state, batch) -> (state, loss)``; both may donate the state.
      make_state: makes the initial state; called once for each step.
      batches: one per step.
    """
    losses: tuple[list[float], list[float]] = ([], [])
    for step, made in zip((plain, overlapped), losses, strict=True):
        state = make_state()
        for batch in batches:
            state, loss = step(state, batch)
            made.append(float(loss))
    return losses


def compare(plain: Sequence[float], overlapped: Sequence[float], bound: float) -> tuple[str, bool]:
    """Return a report and whether the losses agree within ``bound`` and fall.

    The report has one line per step, and says how far apart the losses are at most and from what
    to what they fall. A loss that is not a number agrees with nothing. The loss counts as fallen
    when its mean over the last quarter of the steps is less than nine tenths of that over the
    first quarter: batches alone make it go up and down by a few hundredths.
    """
    difference = np.abs(np.subtract(overlapped, plain))
    lines = [f"{'step':>4}  {'plain':>9}  {'overlapped':>10}  {'difference':>10}"]
    lines += [
        f"{i:>4}  {a:>9.6f}  {b:>10.6f}  {d:>10.1e}"
        for i, (a, b, d) in enumerate(zip(plain, overlapped, difference, strict=True))
    ]
    equal = bool(np.all(difference <= bound))
    lines.append(
        f"losses are {'equal' if equal else 'NOT EQUAL'}: they differ by at most "
        f"{np.max(difference):.1e}, allowed is {bound:.1e}"
    )
    n = max(1, len(plain) // 4)
    first, last = np.mean(overlapped[:n]), np.mean(overlapped[-n:])
    falls = bool(last < 0.9 * first)
    lines.append(
        f"the loss {'falls' if falls else 'DOES NOT FALL'} from {first:.3f} to {last:.3f} "
        f"(means of the first and the last {n})"
    )
    return "\n".join(lines), equal and falls
