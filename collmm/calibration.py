"""Calibrate: a row of the hardware table from measurements, or from a compiler's own estimates.

    devices attached         loops of permutes, gathers, reduce-scatters, einsums, timed
    simulated CPU devices    the same; what comes out are figures of this machine, of no link
    a compile-only target    einsums compiled for it; the compiler's estimated cycles or times

Devices give rates and launches (``cost.fit``), a compiler what an einsum's shape costs
(``cost.shape_fit``); either way what is fitted is judged by sizes that it was not fitted to.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from collmm import report
from collmm.cost.estimate import assumed_ring
from collmm.cost.figures import Chip, EinsumTable, Figure, Rate
from collmm.cost.fit import CurveError, Fit, Sample, fit
from collmm.cost.hardware import chip, load_profile, profile_row
from collmm.cost.profile_shape import UNITS
from collmm.cost.shape_fit import FITTED, fit_shape, fit_table
from collmm.devices import SIMULATED as CPU
from collmm.devices import attached, describe, row_of
from collmm.errors import OptionError, TargetError
from collmm.estimating import Wanted, between_samples, table_samples, tpu_samples
from collmm.measuring import ACCELERATOR, SIMULATED, Sizes, measure
from collmm.targets import Target, apply_environment, parse_target
from collmm.topology import RingPlaces

_LIST = re.compile(r"\[[^\[\]{}]*\]")


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
        base = chip(self.base).per_device()
        errors = [
            (e.curve, str(e.fitted), str(e.held_out), *map(_percent, _four(e)))
            for e in self.fit.errors
        ]
        heads = ("curve", "fitted", "held out", "median", "worst", "of the table", "worst")
        return "\n".join(
            [
                f"{self.name}: {self.measured}",
                *(f"note: {note}" for note in self.notes),
                "",
                report.table(
                    ("figure", "fitted", f"{self.base} of the table"),
                    _figures(self.fit, base),
                ),
                "",
                "error of the predictions on sizes that were held out of the fit, and of those of",
                f"the table's {self.base} there:",
                report.table(heads, errors),
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the row, the errors and the samples."""
        return {
            "name": self.name,
            "measured": self.measured,
            "notes": list(self.notes),
            "row": self.row(),
            "errors": [
                {k: None if v != v else v for k, v in dataclasses.asdict(e).items()}
                for e in self.fit.errors
            ],
            "samples": [
                {
                    "curve": s.curve,
                    "bytes": s.bytes,
                    "product": None if s.product is None else dataclasses.asdict(s.product),
                    "moved": s.moved,
                    "onchip": s.onchip,
                    "result": s.result,
                    "seconds": s.seconds,
                }
                for s in self.samples
            ],
        }

    def row(self) -> dict[str, Any]:
        """Return the row as ``cost.hardware.load_profile`` reads it: of a chip, as the table's."""
        base = chip(self.base)
        fitted = {
            name: _per_chip(getattr(self.fit.chip, name), name, base.devices_per_chip)
            for name in self.fit.fields
        }
        return profile_row(dataclasses.replace(base, **fitted), base)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the row to a profile; other rows that the file has are kept.

        Raises OptionError when the file is no profile or cannot be written.
        """
        rows = profile_at(path)
        rows[self.name] = self.row()
        try:
            text = _LIST.sub(_one_line, json.dumps(rows, indent=1))
            pathlib.Path(path).write_text(text + "\n")
        except OSError as e:
            raise OptionError(f"cannot write the profile {path}: {e.strerror}") from None


def profile_at(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The rows of the profile that is to be written at ``path``; none where there is no file yet.

    Raises OptionError when the file is no profile or cannot be written: worth asking before
    minutes are spent on measuring.
    """
    file = pathlib.Path(path)
    asked = file if file.exists() else file.parent
    if not asked.exists():
        raise OptionError(f"cannot write the profile {file}: there is no directory {asked}")
    if file.is_dir():
        raise OptionError(f"cannot write the profile {file}: it is a directory")
    if not os.access(asked, os.W_OK):
        raise OptionError(f"cannot write the profile {file}: {os.strerror(errno.EACCES)}")
    if not file.exists():
        return {}
    try:
        load_profile(file)
    except OptionError as e:
        raise OptionError(f"{e}; name another file to write to") from None
    rows: dict[str, Any] = json.loads(file.read_text())
    return rows


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
    return calibrate_target(found, name, Wanted().quick() if quick else Wanted())


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
    target: Target, name: str | None = None, wanted: Wanted | None = None
) -> Calibration:
    """Fit what an einsum's shape costs to the estimates of ``target``'s own compiler.

    Nothing is run.

    Args:
      target: a tpu, or a gpu whose compiler writes its estimates.
      name: of the row; that of the target's chip without.
      wanted: the einsums to compile; see ``estimating.Wanted``.

    Raises TargetError for a target without estimates.
    """
    if target.hardware is None or not target.timed:
        raise TargetError(
            f"{target.name}: its compiler states no times; calibrate for tpu:v5e:2x4 or gpu:h100:8,"
            " say, or on devices"
        )
    base, wanted = target.hardware.per_device(), wanted or Wanted()
    source = f"fitted to the estimates of the compiler for {target.name}, jax {jax.__version__}"
    name = name or target.hardware.name
    notes = ["rates and links are not in a compiler's estimates: those of the table are kept"]
    if target.kind == "gpu":
        points = tuple(table_samples(target, wanted))
        between = tuple(between_samples(target, wanted))
        fitted = fit_table(points, between, base, source, name)
        return Calibration(name, base.name, source, fitted, (*points, *between), tuple(notes))
    if base.shape is None:
        notes.append(
            f"the table has no shape for {base.name}: what single einsums do not tell is assumed"
        )
    samples = tuple(tpu_samples(target, wanted))
    fitted = fit_shape(samples, base, source, name)
    return Calibration(name, base.name, source, fitted, samples, tuple(notes))


def _placed(devices: Sequence[Any]) -> np.ndarray:
    """The devices as one axis, on a TPU in the order of its torus."""
    if devices[0].platform != "tpu":
        return np.array(devices)
    from jax.experimental import mesh_utils

    return mesh_utils.create_device_mesh((len(devices),), list(devices))


def _per_chip(value: Any, name: str, count: int) -> Any:
    """A field per device as a row of a chip of ``count`` devices has it."""
    if count == 1 or not isinstance(value, Rate) or name in ("link", "peer", "dcn"):
        return value
    return value.scaled(count, f"{count} devices")


def _one_line(found: re.Match[str]) -> str:
    """A list that holds no other, written in one line."""
    return "[" + ", ".join(part.strip() for part in found[0][1:-1].split(",")) + "]"


def _figures(fitted: Fit, base: Chip) -> list[tuple[str, str, str]]:
    """A line per figure: its name, as it was fitted, and as the table has it."""
    rows = []
    for name in fitted.fields:
        new, old = getattr(fitted.chip, name), getattr(base, name)
        if name == "table":
            rows.append((name, _points(new), _points(old)))
        elif name == "shape":
            shown = FITTED if old is not None else UNITS
            rows += [(f, _shown(getattr(new, f)), _shown(getattr(old, f, None))) for f in shown]
        else:
            rows.append((name, _shown(new), _shown(old)))
    return rows


def _points(table: EinsumTable | None) -> str:
    if table is None:
        return "-"
    sides = (table.short, table.depth, table.long)
    return f"shares at {' x '.join(str(len(side)) for side in sides)} points"


def _four(e: CurveError) -> tuple[float, float, float, float]:
    return e.median, e.worst, e.base_median, e.base_worst


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
