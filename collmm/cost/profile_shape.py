"""What an einsum's shape costs, as a profile has it: ``EinsumShape`` and ``EinsumTable`` in JSON.

    "shape": {"matrix_share": 0.968, "start": {"value": 1.4e-06, "source": "lab"}, ...}
    "table": {"short": [256, 512], "depth": [256, 1024], "long": [256, 1024],
              "shares": [[[0.1, 0.2], [0.2, 0.4]], [[0.2, 0.3], [0.4, 0.6]]], "source": "lab"}

Figures that a shape leaves out are those of the row it starts from. ``null`` takes either away.
Numbers are written as they are, so that what is read again is equal to what was written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from collmm.cost.figures import EinsumShape, EinsumTable, Figure
from collmm.errors import OptionError

UNITS: Mapping[str, str] = {
    "matrix_share": "1",
    "result": "s",
    "kept": "s",
    "summed": "s",
    "start": "s",
    "arrived_start": "s",
    "memory_share": "1",
    "onchip": "bytes/s",
    "onchip_fits": "bytes",
    "result_fits": "bytes",
    "pass_start": "s",
    "pass_share": "1",
    "late": "1",
    "span_fits": "bytes",
}
"""The figures of a shape, in the order of ``EinsumShape``, and their units."""
_AXES = ("short", "depth", "long")
# None of a tile, of the memory on the chip, or of a permute started late may be true of a chip.
_MAY_BE_ZERO = ("onchip_fits", "result_fits", "late")


def shape_json(shape: EinsumShape) -> dict[str, Any]:
    """``shape`` as ``read_shape`` reads it."""
    figures = {name: getattr(shape, name) for name in UNITS}
    return {name: {"value": f.value, "source": f.source} for name, f in figures.items()}


def table_json(table: EinsumTable) -> dict[str, Any]:
    """``table`` as ``read_table`` reads it."""
    return {**dataclasses.asdict(table)}


def read_shape(where: str, value: Any, base: EinsumShape | None) -> EinsumShape | None:
    """The shape that a profile gives; ``base`` has what it leaves out.

    Raises OptionError, in one line that begins with ``where``, for anything else.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise OptionError(f"{where} must be an object of figures or null, not {value!r}")
    if unknown := value.keys() - UNITS.keys():
        raise OptionError(f"{where}: {min(unknown)!r} is not one of {', '.join(UNITS)}")
    figures = {k: _figure(f"{where}, {k!r}", k, v) for k, v in value.items()}
    if base is not None:
        return dataclasses.replace(base, **figures)
    if missing := [name for name in UNITS if name not in figures]:
        raise OptionError(f"{where} has no {missing[0]!r}, and the base row has no shape")
    return EinsumShape(**figures)


def read_table(where: str, value: Any) -> EinsumTable | None:
    """The table that a profile gives; raises as ``read_shape``."""
    if value is None:
        return None
    keys = {*_AXES, "shares", "source"}
    if not isinstance(value, dict) or not {*_AXES, "shares"} <= value.keys() <= keys:
        raise OptionError(
            f"{where} must be null, or have {', '.join((*_AXES, 'shares', 'source'))}"
        )
    axes = {name: _sizes(f"{where}, {name!r}", value[name]) for name in _AXES}
    wanted = tuple(len(axes[name]) for name in _AXES)
    shares = _shares(f"{where}, 'shares'", value["shares"], wanted)
    return EinsumTable(**axes, shares=shares, source=str(value.get("source", "profile")))


def _figure(where: str, name: str, value: Any) -> Figure:
    parts = value if isinstance(value, dict) else {"value": value}
    if unknown := parts.keys() - {"value", "source"}:
        raise OptionError(f"{where}: {min(unknown)!r} is not one of source, value")
    if "value" not in parts:
        raise OptionError(f'{where} has no "value"')
    least = 0.0 if name in _MAY_BE_ZERO else math.ulp(0.0)
    number = _number(parts["value"])
    if number is None or number < least:
        raise OptionError(f"{where} must be a positive number, not {parts['value']!r}")
    if name == "late" and number not in (0, 1):
        raise OptionError(f"{where} must be 0 or 1, not {parts['value']!r}")
    return Figure(number, UNITS[name], str(parts.get("source", "profile")))


def _sizes(where: str, value: Any) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(v) is int and v > 0 for v in value)
    if not whole or not value or sorted(set(value)) != value:
        raise OptionError(f"{where} must be sizes that grow, such as [256, 1024], not {value!r}")
    return tuple(value)


def _shares(where: str, value: Any, wanted: tuple[int, ...]) -> Any:
    """Lists of lists of lists of that many positive numbers, as tuples."""
    if not wanted:
        number = _number(value)
        if number is None or number <= 0:
            raise OptionError(f"{where} must be positive numbers, not {value!r}")
        return number
    if not isinstance(value, list) or len(value) != wanted[0]:
        given = f"{len(value)}" if isinstance(value, list) else repr(value)
        raise OptionError(
            f"{where} must be lists as long as short, depth and long; one has {given} where "
            f"{wanted[0]} are wanted"
        )
    return tuple(_shares(where, v, wanted[1:]) for v in value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
