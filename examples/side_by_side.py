"""Train one state with the plain step and one with the overlapped step, and compare the losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np


def train(
    plain: Callable, overlapped: Callable, make_state: Callable[[], Any], batches: Iterable
) -> tuple[list[float], list[float]]:
    """Return the losses of both steps, from equal states and on the same batches.

    Args:
      plain, overlapped: ``step(state, batch) -> (state, loss)``; both may donate the state.
      make_state: makes the initial state; called once for each step.
      batches: the batches, one per step.
    """
    states = [make_state(), make_state()]
    losses: tuple[list[float], list[float]] = ([], [])
    for batch in batches:
        for i, step in enumerate((plain, overlapped)):
            states[i], loss = step(states[i], batch)
            losses[i].append(float(loss))
    return losses


def compare(plain: list[float], overlapped: list[float], bound: float) -> tuple[str, bool]:
    """Return a report and whether the losses agree within ``bound`` and fall.

    The report has one line per step, and says how far apart the losses are at most and from what
    to what they fall. A loss that is not a number agrees with nothing. The loss counts as fallen
    when the mean of the last quarter of the steps is below that of the first quarter.
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
    falls = bool(last < first)
    lines.append(
        f"the loss {'falls' if falls else 'DOES NOT FALL'} from {first:.3f} to {last:.3f} "
        f"(means of the first and last {n} steps)"
    )
    return "\n".join(lines), equal and falls


def device_mesh(**axes: int) -> jax.sharding.Mesh:
    """Return a mesh of the first devices, with axes that the compiler shards over by itself."""
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    )
