"""Timing on the devices at hand: rounds in which every contender runs once, and medians.

What is compared is run in turns, so that a machine that gets slower or busier does so for all of
them; each round starts with another contender. A median does not care for the odd slow run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Call = Callable[[], Any]


def interleaved(calls: Sequence[Call], rounds: int) -> list[list[float]]:
    """Return the seconds of ``rounds`` runs of each call, after one that is not counted.

    A call returns jax arrays, which are waited for. Where it has a ``prepare``, that runs before
    each call and is not timed.
    """
    for call in calls:
        _seconds(call)
    taken: list[list[float]] = [[] for _ in calls]
    for r in range(rounds):
        for i in range(len(calls)):
            k = (i + r) % len(calls)
            taken[k].append(_seconds(calls[k]))
    return taken


def medians(calls: Sequence[Call], rounds: int) -> list[float]:
    """Return the median of ``interleaved`` for each call."""
    return [statistics.median(times) for times in interleaved(calls, rounds)]


def _seconds(call: Call) -> float:
    prepare = getattr(call, "prepare", None)
    if prepare is not None:
        prepare()
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start
