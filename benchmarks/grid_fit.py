"""Fits what an einsum's shape costs to stored results of the grid.

results (a JSON file of ``cost_grid.py``)  ->  the figures of ``collmm/cost/einsum_fits.py``

TPU (``EinsumShape``): least squares of ``log(predicted / timeline)`` over every program of the
sites that the fit may use, whole and in loops; programs that are far off count by their distance
(``collmm.cost.fit``). GPU (``EinsumTable``): the share of the matrix peak that single einsums
reach, the mean of both ways round.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from grid_report import Entry, Row
from grid_report import entries as found_in

from collmm.cost.figures import Chip
from collmm.cost.fit import OUTLIER, solved
from collmm.cost.hardware import chip
from collmm.cost.shape_fit import usual

FIELDS = (
    *("matrix_share", "result", "kept", "summed", "start", "arrived_start"),
    *("memory_share", "onchip", "pass_start", "pass_share"),
)
_DIGITS = 3
_DRAWN = 0.1
_FACTORS = (1.0, 0.6)


def chips_of(entries: Sequence[Entry]) -> list[str]:
    """The chips whose figures can be fitted: those that have an ``EinsumShape``."""
    return sorted({e.chip_name for e in entries if chip(e.chip_name).shape is not None})


def figures_of(row: Chip) -> dict[str, float]:
    """The fitted figures of a row."""
    return {name: getattr(row.shape, name).value for name in FIELDS}


def with_figures(row: Chip, values: Mapping[str, float]) -> Chip:
    """``row`` with other fitted figures."""
    assert row.shape is not None
    changes = {
        name: dataclasses.replace(getattr(row.shape, name), value=value)
        for name, value in values.items()
    }
    return dataclasses.replace(row, shape=dataclasses.replace(row.shape, **changes))


def residuals_of(
    entries: Sequence[Entry], row: Chip
) -> Callable[[Mapping[str, float]], tuple[np.ndarray, np.ndarray]]:
    """Of figures to ``log(predicted / timeline)`` of every program, and their weights.

    What few programs depend on is drawn to ``usual``, with the weight of ``_DRAWN`` programs.
    """
    drawn = usual(row)

    def residuals(values: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
        there = with_figures(row, values)
        off = [
            math.log(seconds / r.timeline[variant])
            for r in (e.row(there) for e in entries)
            for variant, seconds in r.predicted.items()
            if variant in r.timeline
        ]
        away = [math.log(value / drawn[name]) for name, value in values.items()]
        weights = [1.0] * len(off) + [_DRAWN] * len(away)
        return np.array(off + away), np.array(weights) / len(off)

    return residuals


def loss(entries: Sequence[Entry], row: Chip) -> float:
    """What the fit makes least, for the figures of ``row`` and the sites of that chip."""
    own = [e for e in entries if e.chip_name == row.name]
    off, weights = residuals_of(own, row)(figures_of(row))
    far = np.abs(off)
    return float(np.sum(weights * np.where(far <= OUTLIER, far**2, OUTLIER * (2 * far - OUTLIER))))


def fitted(entries: Sequence[Entry], name: str, start: Mapping[str, float] | None = None) -> Chip:
    """The row ``name`` with its figures fitted to ``entries`` of that chip.

    ``start``: figures to start from; else the usual ones, and less.
    """
    row = chip(name).per_device()
    own = [e for e in entries if e.chip_name == name]
    first, factors = (usual(row), _FACTORS) if start is None else (start, (1.0,))
    values = solved(first, residuals_of(own, row), factors)
    return with_figures(row, {k: float(f"{v:.{_DIGITS}g}") for k, v in values.items()})


def predicted_by(
    entries: Sequence[Entry], rows: Mapping[str, Chip] = MappingProxyType({})
) -> list[Row]:
    """``entries`` as the model sees them with the rows given, else with the hardware table."""
    return [e.row(rows.get(e.chip_name) or chip(e.chip_name).per_device()) for e in entries]


def crossed(entries: Sequence[Entry]) -> list[Row]:
    """Each half of the sites as the model sees them when it is fitted to the other half."""
    found: list[Row] = []
    for half in (True, False):
        others = [e for e in entries if e.fitted != half]
        rows = {name: fitted(others, name) for name in chips_of(others)}
        found += predicted_by([e for e in entries if e.fitted == half], rows)
    return found


def shares(results: Mapping[str, Any], name: str) -> list[list[list[float]]]:
    """The shares of ``EinsumTable`` from the times of single einsums."""
    row = chip(name)
    assert row.table is not None
    times = {tuple(shape): seconds for *shape, seconds in results["products"][name]}

    def share(short: int, depth: int, long: int) -> float:
        ways = {(short, depth, long), (long, depth, short)}
        flops = 2 * short * depth * long
        mean = statistics.fmean(flops / row.bf16.value() / times[way] for way in ways)
        return float(f"{mean:.{_DIGITS}g}")

    return [
        [[share(a, k, b) for b in row.table.long] for k in row.table.depth] for a in row.table.short
    ]


def text_of_all(results: Mapping[str, Any]) -> str:
    """Every figure, fitted to the half of the sites that the fit may use."""
    used = [e for e in found_in(results) if e.fitted]
    lines = [text(fitted(used, name)) for name in chips_of(used)]
    for name in results.get("products", {}):
        lines += [f"{name}:", *(f"{row}," for row in shares(results, name))]
    return "\n".join(lines)


def text(row: Chip) -> str:
    """The line of ``einsum_fits.SHAPES`` for a fitted row."""
    v = figures_of(row)
    shown = (
        v["matrix_share"],
        *(1e12 * v[name] for name in ("result", "kept", "summed")),
        *(1e6 * v[name] for name in ("start", "arrived_start")),
        v["memory_share"],
        v["onchip"] / 1e12,
        1e6 * v["pass_start"],
        v["pass_share"],
    )
    return f'"{row.name}": ({", ".join(f"{x:.{_DIGITS}g}" for x in shown)}),'
