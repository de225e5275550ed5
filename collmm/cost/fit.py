"""Fit the figures of a hardware row to measured times, and say how well they predict.

    samples (what ran, how many bytes or what shape, seconds)  ->  Chip, errors on held-out samples

Every second size is held out: the figures are fitted to the others and judged by these. What is
fitted are the parameters of the very formulas that the cost model predicts with, so that a held-out
error is that of the model on this hardware and not of a curve. Pure: nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collmm.cost import collectives
from collmm.cost.collectives import Ring
from collmm.cost.einsum import Place, Product, time_of
from collmm.cost.figures import Chip, Figure, Rate

PERMUTE, GATHER, SCATTER = "permute", "all-gather", "reduce-scatter"
MEMORY, EINSUM = "memory", "einsum"
COMPILED, OF_A_SUM = "compiled einsum", "compiled einsum of a sum"
# The rate of a chip that is the matrix peak for an element type.
_PEAKS = {"bfloat16": "bf16", "float32": "f32"}
Residuals = Callable[[Mapping[str, float]], tuple[np.ndarray, np.ndarray]]
_FACTORS = (1.0, 0.6, 0.3)
_ROUNDS = 100
OUTLIER = 0.2
_NUDGE = 1e-3
_DIGITS = 4
_DRAWN = 1e-4


@dataclasses.dataclass(frozen=True)
class Sample:
    """One time.

    Attributes:
      kind: ``"permute"``, ``"all-gather"``, ``"reduce-scatter"``, ``"memory"``; ``"einsum"``, one
        step of a loop with its launch; ``"compiled einsum"``, a compiler's estimate of a single
        one, or ``"compiled einsum of a sum"``, of the first or last of several that are added.
      seconds: how long one took.
      bytes: of a permute what one device sends, of the other collectives the whole value; of
        memory what is read and written; of an einsum its floating-point operations.
      product: the einsum.
      moved: bytes that it reads from and writes to the device memory; None is all of them.
      onchip: bytes of its operands that it finds on the chip.
      result: where its result goes.
    """

    kind: str
    seconds: float
    bytes: float
    product: Product | None = None
    moved: float | None = None
    onchip: float = 0.0
    result: Place = "memory"

    @property
    def curve(self) -> str:
        """The curve it lies on: its kind, and of einsums the element type too."""
        return self.kind if self.product is None else f"{self.kind} {self.product.dtype}"


@dataclasses.dataclass(frozen=True)
class CurveError:
    """How far predictions of one curve are off on held-out samples, as parts of the measured time.

    Attributes:
      curve: which.
      fitted, held_out: numbers of samples.
      median, worst: of ``|predicted / measured - 1|`` on the held-out ones.
      base_median, base_worst: the same of the row that the fit started from.
    """

    curve: str
    fitted: int
    held_out: int
    median: float
    worst: float
    base_median: float = math.nan
    base_worst: float = math.nan


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fitted row, what was fitted in it, and how well it predicts."""

    chip: Chip
    fields: tuple[str, ...]
    errors: tuple[CurveError, ...]


def fit(samples: Sequence[Sample], base: Chip, ring: Ring | None, source: str, name: str) -> Fit:
    """Fit ``base``'s figures to ``samples``.

    Args:
      samples: of any kinds; what they do not tell stays as in ``base``.
      base: the row to start from, per device.
      ring: the links of the devices that the collectives ran over, made from ``base``.
      source: where the times are from, for every fitted figure.
      name: of the fitted row.
    """
    used, held_out = split(samples)
    start = _parameters(used, base, ring)
    values: dict[str, float] = {}
    if start:
        values = solved(
            start, lambda v: _residuals(used, _row(base, v, source, name), ring, v, start)
        )
    chip = _row(base, rounded(values), source, name)
    errors = errors_of(used, held_out, chip, base, ring)
    fields = tuple(
        f.name
        for f in dataclasses.fields(Chip)
        if f.name != "name" and getattr(chip, f.name) is not getattr(base, f.name)
    )
    return Fit(chip, fields, errors)


def split(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return (those to fit, those held out): by curve and size every second one but the ends."""
    used: list[Sample] = []
    held_out: list[Sample] = []
    for curve in dict.fromkeys(s.curve for s in samples):
        ordered = sorted((s for s in samples if s.curve == curve), key=lambda s: s.bytes)
        for i, sample in enumerate(ordered):
            inside = 0 < i < len(ordered) - 1
            (held_out if inside and i % 2 else used).append(sample)
    return used, held_out


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """``values`` as they are told and written: what is judged is what is read again."""
    return {name: float(f"{value:.{_DIGITS}g}") for name, value in values.items()}


def predicted(sample: Sample, chip: Chip, ring: Ring | None) -> float:
    """The seconds that the cost model gives one sample on ``chip``, over ``ring``."""
    if sample.product is not None:
        launch_s = chip.step_launch.value if sample.kind == EINSUM else 0.0
        moved, onchip = sample.moved, sample.onchip
        found = time_of(sample.product, chip, moved=moved, onchip=onchip, result=sample.result)
        return launch_s + found.seconds
    if sample.kind == MEMORY:
        return sample.bytes / chip.hbm_bytes_per_s()
    assert ring is not None
    formula: Callable[[Ring, float], float] = {
        PERMUTE: collectives.permute_step_s,
        GATHER: collectives.all_gather_s,
        SCATTER: collectives.reduce_scatter_s,
    }[sample.kind]
    return ring.launch_s + formula(ring, sample.bytes)


def with_figures(ring: Ring | None, chip: Chip) -> Ring | None:
    """``ring`` with the link figures of ``chip``."""
    if ring is None:
        return None
    link = chip.link_bytes_per_s()
    return dataclasses.replace(
        ring,
        link=link,
        peer=chip.peer_bytes_per_s(),
        network=chip.dcn_bytes_per_s() or 0.0,
        hop_s=chip.hop_latency.value,
        launch_s=chip.launch.value,
        step_s=chip.step_launch.value,
        permute_share=chip.share("permute_share"),
        scatter_share=chip.share("scatter_share"),
    )


# --- parts ---


def _parameters(used: Sequence[Sample], base: Chip, ring: Ring | None) -> dict[str, float]:
    """The figures that the samples tell, with values to start from."""
    kinds = {s.kind for s in used}
    values: dict[str, float] = {}
    if MEMORY in kinds:
        values["hbm"] = max(s.bytes / s.seconds for s in used if s.kind == MEMORY)
    for dtype, field in _PEAKS.items():
        products = [s for s in used if s.product is not None and s.product.dtype == dtype]
        if products:
            values[field] = max(s.product.flops / s.seconds for s in products if s.product)
    if EINSUM in kinds:
        values["step_launch"] = min(s.seconds for s in used if s.kind == EINSUM) / 2
    if ring is None:
        return values
    collective = [s for s in used if s.kind in (PERMUTE, GATHER, SCATTER)]
    if collective:
        values["launch"] = min(s.seconds for s in collective) / 2
        values["hop_latency"] = values["launch"] / 4
        # Beyond a node the network decides.
        field = "dcn" if ring.kind == "nodes" else "link"
        values[field] = getattr(base, field).value()
    for kind, field in ((PERMUTE, "permute_share"), (SCATTER, "scatter_share")):
        if kind in kinds and GATHER in kinds:
            values[field] = 1.0
    return values


def _row(base: Chip, values: Mapping[str, float], source: str, name: str) -> Chip:
    changes: dict[str, Any] = {}
    for field, value in values.items():
        figure = Figure(value, _unit(base, field), source)
        rate = isinstance(getattr(base, field), Rate)
        changes[field] = Rate(figure, figure) if rate else figure
    if base.peer is not None and "link" in values:
        why = f"scaled as the links, {source}"
        changes["peer"] = base.peer.scaled(values["link"] / base.link_bytes_per_s(), why)
    return dataclasses.replace(base, name=name, **changes)


def _unit(base: Chip, field: str) -> str:
    known = getattr(base, field)
    return known.unit if known is not None else "1"


def _residuals(
    used: Sequence[Sample],
    chip: Chip,
    ring: Ring | None,
    values: Mapping[str, float],
    start: Mapping[str, float],
) -> tuple[np.ndarray, np.ndarray]:
    """``log(predicted / measured)`` of every sample, and weights that make curves count alike.

    A figure is drawn to where it starts, so little that it only counts where no sample tells it: a
    launch that is not seen is then small, and not nothing at all.
    """
    ring = with_figures(ring, chip)
    sizes = Counter(s.curve for s in used)
    off = [math.log(predicted(s, chip, ring) / s.seconds) for s in used]
    away = [math.log(value / start[name]) for name, value in values.items()]
    weights = [1 / sizes[s.curve] for s in used] + [_DRAWN] * len(away)
    return np.array(off + away), np.array(weights)


def solved(
    start: Mapping[str, float], residuals: Residuals, factors: Sequence[float] = _FACTORS
) -> dict[str, float]:
    """The best of a few starts: the formulas have corners, at which one alone may stay."""
    starts = [{name: value * factor for name, value in start.items()} for factor in factors]
    return min((_solved_from(s, residuals) for s in starts), key=lambda found: found[1])[0]


def _solved_from(
    start: Mapping[str, float], residuals: Residuals
) -> tuple[dict[str, float], float]:
    """Least squares of the residuals by Levenberg-Marquardt, in the logarithms of the figures.

    A sample that is off by more than ``OUTLIER`` counts by its distance, not by the square of it
    (Huber): a run that something else disturbed does not move the figures far.
    """
    names = list(start)
    at = np.log([start[name] for name in names])

    def evaluate(point: np.ndarray) -> tuple[np.ndarray, float]:
        values = dict(zip(names, map(float, np.exp(point)), strict=True))
        off, weights = residuals(values)
        far = np.abs(off)
        # The square root of Huber's loss: least squares of it is the minimum of the loss.
        loss = np.where(far <= OUTLIER, off**2, 2 * OUTLIER * far - OUTLIER**2)
        scaled = np.sign(off) * np.sqrt(weights * loss)
        return scaled, float(np.sum(scaled**2))

    found, best = evaluate(at)
    damping = 1e-2
    for _ in range(_ROUNDS):
        columns = [
            (evaluate(at + _NUDGE * unit)[0] - evaluate(at - _NUDGE * unit)[0]) / (2 * _NUDGE)
            for unit in np.eye(len(names))
        ]
        slope = np.stack(columns, axis=1)
        normal = slope.T @ slope
        while damping < 1e8:
            matrix = normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(names)))
            step = np.clip(np.linalg.solve(matrix, -slope.T @ found), -1, 1)
            there, less = evaluate(at + step)
            if less < best:
                break
            damping *= 4
        else:
            break
        done = best - less < 1e-10 * best
        at, found, best, damping = at + step, there, less, max(damping / 8, 1e-9)
        if done:
            break
    return dict(zip(names, map(float, np.exp(at)), strict=True)), best


def errors_of(
    used: Sequence[Sample],
    held_out: Sequence[Sample],
    chip: Chip,
    base: Chip,
    ring: Ring | None = None,
) -> tuple[CurveError, ...]:
    """How far the predictions on ``chip`` are off on what was held out, and those on ``base``."""
    curves = dict.fromkeys(s.curve for s in (*used, *held_out))
    return tuple(_error(c, used, held_out, chip, base, ring) for c in curves)


def _error(
    curve: str,
    used: Sequence[Sample],
    held_out: Sequence[Sample],
    chip: Chip,
    base: Chip,
    ring: Ring | None,
) -> CurveError:
    mine = [s for s in held_out if s.curve == curve]
    fitted = sum(s.curve == curve for s in used)
    if not mine:
        return CurveError(curve, fitted, 0, math.nan, math.nan)

    def off(row: Chip) -> list[float]:
        over = with_figures(ring, row)
        return [abs(predicted(s, row, over) / s.seconds - 1) for s in mine]

    now, before = off(chip), off(base)
    median, worst = statistics.median(now), max(now)
    return CurveError(
        curve, fitted, len(mine), median, worst, statistics.median(before), max(before)
    )
