"""Calibrate: a row of the hardware table from measurements, or from a compiler's own estimates.

    devices attached         loops of permutes, gathers, reduce-scatters, einsums, timed
    simulated CPU devices    the same; what comes out are figures of this machine, of no link
    a compile-only target    einsums compiled for it; the compiler's estimated cycles or times

Either way the figures are fitted to every other size and judged by the rest (``cost.fit``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import report
from collmm.cost.einsum import Product
from collmm.cost.estimate import assumed_ring
from collmm.cost.figures import Figure, Rate
from collmm.cost.fit import COMPILED, Fit, Sample, fit
from collmm.cost.hardware import chip
from collmm.devices import SIMULATED as CPU
from collmm.devices import attached, describe, row_of
from collmm.errors import OptionError, TargetError
from collmm.hlo.parse import parse
from collmm.measuring import ACCELERATOR, SIMULATED, Sizes, measure
from collmm.prediction import predict
from collmm.targets import Target, apply_environment, parse_target
from collmm.topology import RingPlaces

# Shapes of the einsums that are compiled: rows of one step, and the width of both operands.
_ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
_WIDTHS = (1024, 2048, 4096, 8192)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured and fitted.

    Attributes:
      name: of the row.
      base: the row that what was not measured is from.
      measured: what ran, in words.
      fit: the row, and how well it predicts what it was not fitted to.
      samples: every time.
      notes: what to know before using it, one line each.
    """

    name: str
    base: str
    measured: str
    fit: Fit
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        figures = [
            (name, _shown(getattr(self.fit.chip, name)), _shown(getattr(chip(self.base), name)))
            for name in self.fit.fields
        ]
        errors = [
            (e.curve, str(e.fitted), str(e.held_out), _percent(e.median), _percent(e.worst))
            for e in self.fit.errors
        ]
        return "\n".join(
            [
                f"{self.name}: {self.measured}",
                *(f"note: {note}" for note in self.notes),
                "",
                report.table(("figure", "fitted", f"{self.base} of the table"), figures),
                "",
                "error of the predictions on sizes that were held out of the fit:",
                report.table(("curve", "fitted", "held out", "median", "worst"), errors),
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the row, the errors and the samples."""
        return {
            "name": self.name,
            "measured": self.measured,
            "notes": list(self.notes),
            "row": self.row(),
            "errors": [dataclasses.asdict(e) for e in self.fit.errors],
            "samples": [
                {
                    "curve": s.curve,
                    "bytes": s.bytes,
                    "product": None if s.product is None else dataclasses.asdict(s.product),
                    "seconds": s.seconds,
                }
                for s in self.samples
            ],
        }

    def row(self) -> dict[str, Any]:
        """Return the row as ``cost.hardware.load_profile`` reads it."""
        fields = {}
        for name in self.fit.fields:
            figure = getattr(self.fit.chip, name)
            figure = figure.achievable if isinstance(figure, Rate) else figure
            fields[name] = {"value": float(f"{figure.value:.4g}"), "source": figure.source}
        return {"base": self.base, **fields, "devices_per_chip": 1}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the row to a profile; other rows that the file has are kept.

        Raises OptionError when the file is no profile or cannot be written.
        """
        file = pathlib.Path(path)
        try:
            rows = json.loads(file.read_text()) if file.exists() else {}
            if not isinstance(rows, dict):
                raise OptionError(f"{file} is no profile; name another file")
            rows[self.name] = self.row()
            file.write_text(json.dumps(rows, indent=1) + "\n")
        except ValueError:
            raise OptionError(f"{file} is no profile; name another file") from None
        except OSError as e:
            raise OptionError(f"cannot write the profile {file}: {e.strerror}") from None


def calibrate(
    target: str | None = None, *, name: str | None = None, quick: bool = False
) -> Calibration:
    """Calibrate for what is at hand, or for ``target``.

    Args:
      target: ``"cpu:8"`` measures simulated devices, a tpu or gpu target asks its compiler. Without
        one: the attached devices, or eight simulated ones where none are.
      name: of the row; that of the hardware without.
      quick: a quarter of the sizes or fewer.

    Raises TargetError for a target that is unknown, or that has nothing to calibrate with.
    """
    if target is None and attached() == CPU:
        target = f"{CPU}:8"
    if target is None:
        return calibrate_devices(jax.devices(), name, ACCELERATOR.quick() if quick else None)
    found = parse_target(target)
    apply_environment(found.name)
    if found.kind == "cpu":
        return calibrate_devices(found.devices(), name, SIMULATED.quick() if quick else None)
    step = 2 if quick else 1
    return calibrate_target(found, name, _ROWS[::step], _WIDTHS[::step])


def calibrate_devices(
    devices: Sequence[Any], name: str | None = None, sizes: Sizes | None = None
) -> Calibration:
    """Measure on ``devices``, which this process can run on.

    Args:
      devices: jax devices; of one only memory and einsums are measured.
      name: of the row; that of the hardware table, or ``"cpu"``, without.
      sizes: what to measure; by the kind of device without.
    """
    simulated = devices[0].platform == CPU
    base_name, note = row_of(devices[0])
    base = chip(base_name).per_device()
    mesh = Mesh(_placed(devices), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    place = RingPlaces({}, base).ask(mesh, ("ring",))
    ring = place.ring or assumed_ring(base, mesh.size)
    sizes = sizes or (SIMULATED if simulated else ACCELERATOR)
    samples = tuple(measure(mesh, place.order, sizes))
    where = describe(devices)
    source = f"measured on {where}, jax {jax.__version__}"
    notes = []
    if simulated:
        notes.append("simulated devices share memory and cores: these are no figures of any link")
    elif note:
        notes.append(note)
    if mesh.size == 1:
        notes.append("one device: no collective was measured")
    name = name or (CPU if simulated else base_name)
    fitted = fit(samples, base, ring if mesh.size > 1 else None, source, name)
    return Calibration(name, base_name, source, fitted, samples, tuple(notes))


def calibrate_target(
    target: Target,
    name: str | None = None,
    rows: Sequence[int] = _ROWS,
    widths: Sequence[int] = _WIDTHS,
) -> Calibration:
    """Fit einsums to the estimates of ``target``'s own compiler; nothing is run.

    Args:
      target: a tpu, or a gpu whose compiler writes its estimates.
      name: of the row; that of the target's chip without.
      rows, widths: of the einsums ``[rows, width] @ [width, width]`` in bf16, every pair.

    Raises TargetError for a target without estimates.
    """
    if target.hardware is None or not target.timed:
        raise TargetError(
            f"{target.name}: its compiler states no times; calibrate for tpu:v5e:2x4 or gpu:h100:8,"
            " say, or on devices"
        )
    base = target.hardware.per_device()
    samples = tuple(_compiled(target, rows, widths))
    source = f"fitted to the estimates of the compiler for {target.name}, jax {jax.__version__}"
    name = name or target.hardware.name
    fitted = fit(samples, base, None, source, name)
    notes = ("links are not in a compiler's estimates: those of the table are kept",)
    return Calibration(name, target.hardware.name, source, fitted, samples, notes)


def _placed(devices: Sequence[Any]) -> np.ndarray:
    """The devices as one axis, on a TPU in the order of its torus."""
    if devices[0].platform != "tpu":
        return np.array(devices)
    from jax.experimental import mesh_utils

    return mesh_utils.create_device_mesh((len(devices),), list(devices))


def _compiled(target: Target, rows: Sequence[int], widths: Sequence[int]) -> Iterator[Sample]:
    mesh = Mesh(np.array(target.devices()[:1]), ("one",))
    whole = NamedSharding(mesh, P())

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)

    for width in widths:
        for count in rows:
            product = Product(1, count, width, width)
            lowered = jax.jit(jnp.matmul).lower(array(count, width), array(width, width))
            text = target.compile(lowered, target.baseline_options()).as_text()
            found = predict(parse(text or ""), target, devices=list(mesh.devices.flat)).timeline
            assert found is not None
            logging.info("[%d, %d]: %.3g us", count, width, found.compute * 1e6)
            yield Sample(COMPILED, found.compute, product.flops, product)


def _shown(value: Rate | Figure | None) -> str:
    if value is None:
        return "-"
    figure = value.achievable if isinstance(value, Rate) else value
    for unit, factor, shown in (
        ("flop/s", 1e12, "TFLOP/s"),
        ("bytes/s", 1e9, "GB/s"),
        ("s", 1e-6, "us"),
    ):
        if figure.unit == unit:
            return f"{figure.value / factor:.4g} {shown}"
    return f"{figure.value:.4g}"


def _percent(part: float) -> str:
    return "-" if math.isnan(part) else f"{100 * part:.1f} %"
