"""Fit what an einsum's shape costs: a TPU's ``EinsumShape``, a GPU's ``EinsumTable``.

    samples (a product, where its operands lie, seconds)  ->  Chip, errors on held-out samples

Of a TPU's figures single einsums tell ``FITTED``; the others are about loops, and stay those of
the row that the fit starts from, or where it has none those that are usual. Rates stay as they are:
what is fitted are shares of them. Of a GPU the share at every point of the table is that of the
samples there, and what is held out lies between the points. Pure: nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from collmm.cost.figures import Chip, EinsumShape, EinsumTable, Figure
from collmm.cost.fit import Fit, Sample, errors_of, predicted, rounded, solved, split
from collmm.cost.profile_shape import UNITS
from collmm.cost.rows import CHIPS

_At = tuple[int, int, int]
FITTED = ("matrix_share", "result", "start", "memory_share")
_FACTORS = (1.0, 0.6)
_DRAWN = 0.1
"""What few samples depend on is drawn to where the fit starts, with the weight of that many."""


def usual(row: Chip) -> dict[str, float]:
    """Figures of a TPU as they are on most chips, by its rates; ``row`` is per device."""
    element = 1.75e3 / row.bf16.value()
    return {
        "matrix_share": 0.9,
        "result": element,
        "kept": element / 2,
        "summed": element * 0.8,
        "start": 2e-6,
        "arrived_start": 1e-6,
        "memory_share": 0.7,
        "onchip": 4 * row.hbm_bytes_per_s(),
        "pass_start": 1.2e-6,
        "pass_share": 0.6,
    }


def usual_shape(row: Chip) -> EinsumShape:
    """The shape of a TPU of which nothing is known; ``row`` is per device.

    What fits on the chip, and whether permutes are started late, is as on the chip of the table
    whose peak is nearest.
    """
    known = [c for c in CHIPS.values() if c.shape is not None]
    near = min(known, key=lambda c: abs(math.log(c.bf16.value() / row.bf16.value())))
    assert near.shape is not None
    figures = {
        name: dataclasses.replace(
            getattr(near.shape, name), source=f"assumed: as {near.name}, not known of {row.name}"
        )
        for name in UNITS
    }
    source = f"assumed: usual for the rates of {row.name}"
    figures |= {name: Figure(v, UNITS[name], source) for name, v in usual(row).items()}
    return EinsumShape(**figures)


def with_shape(row: Chip, values: Mapping[str, float], source: str) -> Chip:
    """``row`` with other figures of its shape."""
    assert row.shape is not None
    changes = {name: Figure(value, UNITS[name], source) for name, value in values.items()}
    return dataclasses.replace(row, shape=dataclasses.replace(row.shape, **changes))


def fit_shape(samples: Sequence[Sample], base: Chip, source: str, name: str) -> Fit:
    """Fit ``base``'s shape to ``samples``, every second of which is held out.

    Args:
      samples: einsums, with where their operands lie.
      base: a TPU row, per device.
      source: where the times are from, for every fitted figure.
      name: of the fitted row.
    """
    used, held_out = split(samples)
    start = dataclasses.replace(base, name=name, shape=base.shape or usual_shape(base))
    near = {field: getattr(start.shape, field).value for field in FITTED}
    sizes = Counter(s.curve for s in used)
    each = [1 / sizes[s.curve] for s in used]
    weights = np.array(each + [_DRAWN * len(sizes) / max(1, len(used))] * len(near))

    def residuals(values: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
        row = with_shape(start, values, source)
        off = [math.log(predicted(s, row, None) / s.seconds) for s in used]
        away = [math.log(value / near[field]) for field, value in values.items()]
        return np.array(off + away), weights

    row = with_shape(start, rounded(solved(near, residuals, _FACTORS)), source)
    return Fit(row, ("shape",), errors_of(used, held_out, row, base))


def fit_table(
    points: Sequence[Sample], between: Sequence[Sample], base: Chip, source: str, name: str
) -> Fit:
    """The table of shares that ``points`` give, judged by the samples ``between`` them.

    Args:
      points: the products of every short and long side and depth, one way round or both; the sides
        and depths are read off them.
      between: what is held out.
      base: the row whose peak the shares are of.
      source: where the times are from.
      name: of the row.
    """
    shares: dict[_At, list[float]] = {}
    peak = base.bf16.value()
    for sample in points:
        p = sample.product
        assert p is not None
        a, b = sorted((p.rows, p.columns))
        shares.setdefault((a, p.depth, b), []).append(p.flops / peak / sample.seconds)
    means = _means(shares)
    short, depth, long = _axis(means, 0), _axis(means, 1), _axis(means, 2)

    def share(a: int, k: int, b: int) -> float:
        return means[min(a, b), k, max(a, b)]

    found = tuple(tuple(tuple(share(a, k, b) for b in long) for k in depth) for a in short)
    table = EinsumTable(short, depth, long, found, source)
    row = dataclasses.replace(base, name=name, table=table)
    return Fit(row, ("table",), errors_of(points, between, row, base))


def _means(
    shares: Mapping[tuple[int, int, int], Sequence[float]],
) -> dict[tuple[int, int, int], float]:
    """The mean of both ways round, as it is written."""
    means = rounded({str(at): statistics.fmean(found) for at, found in shares.items()})
    return dict(zip(shares, means.values(), strict=True))


def _axis(found: Mapping[_At, float], which: int) -> tuple[int, ...]:
    return tuple(sorted({at[which] for at in found}))
