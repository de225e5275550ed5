"""The hardware table: look up a chip by name, or extend the table from a JSON profile.

>>> chip("v5e").link_bytes_per_s()
45000000000.0
>>> chip("v5e").link.nominal.source
'gcp'
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from collmm.cost.figures import Basis, Chip, EinsumShape, Figure, Rate, WrapRule
from collmm.cost.profile_shape import read_shape, read_table, shape_json, table_json
from collmm.cost.rows import CHIPS as _ROWS
from collmm.errors import OptionError

__all__ = [
    "CHIPS",
    "Basis",
    "Chip",
    "Figure",
    "Rate",
    "WrapRule",
    "chip",
    "load_profile",
    "profile_row",
    "profile_rows",
]

CHIPS: Mapping[str, Chip] = MappingProxyType(_ROWS)
"""The built-in rows by name."""


def chip(name: str, table: Mapping[str, Chip] = CHIPS) -> Chip:
    """The row called ``name``; an unknown name raises OptionError with the nearest valid ones."""
    row = table.get(name)
    if row is None:
        raise OptionError(f"no chip is called {name!r}; {nearest(name, table)}")
    return row


def nearest(name: str, valid: Mapping[str, object] | tuple[str, ...]) -> str:
    """Half a sentence for an error: the valid names closest to ``name``, or all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(repr(n) for n in close)}? valid: {', '.join(names)}"
    return f"valid: {', '.join(names)}"


_UNITS = {
    "bf16": "flop/s",
    "int8": "flop/s",
    "fp8": "flop/s",
    "f32": "flop/s",
    "f32_highest": "flop/s",
    "hbm": "bytes/s",
    "link": "bytes/s",
    "peer": "bytes/s",
    "dcn": "bytes/s",
    "hbm_capacity": "bytes",
    "clock": "Hz",
    "hop_latency": "s",
    "launch": "s",
    "step_launch": "s",
    "permute_share": "1",
    "scatter_share": "1",
}
_SHARES = ("permute_share", "scatter_share")
_FIGURES = ("hbm_capacity", "clock", "hop_latency", "launch", "step_launch", *_SHARES)
_SWITCHES = ("early_gathers",)
_SHAPES = ("shape", "table")
_COUNTS = ("domain", "torus_dims", "devices_per_chip", "matrix_tile")


def load_profile(
    path: str | os.PathLike[str], table: Mapping[str, Chip] = CHIPS
) -> dict[str, Chip]:
    """``table`` with the rows of a JSON profile added or overridden; ``table`` is left as it was.

    The file holds one object: chip name -> fields. A name that exists is overridden field by
    field; a new one names the row it starts from in ``"base"``. A field is a number in SI units, or
    ``{"value": number, "source": text}``; a rate may also give ``"nominal"`` besides ``"value"``
    (flop/s or bytes/s; ``value`` is what is achieved). Counts are whole numbers,
    ``"early_gathers"`` is true or false. ``"wrap"`` is ``{"exact": n}``, ``{"multiple": n}`` or
    ``{}`` (not known). ``"shape"`` and ``"table"``, what an einsum's shape costs, are as
    ``cost.profile_shape`` says::

        {"lab": {"base": "h100", "link": {"value": 3.1e11, "source": "nccl-tests, rack 4"}}}

    Raises OptionError, in one line, for a file that cannot be read or does not follow this.
    """
    name = os.fsdecode(path)
    rows = dict(table)
    for key, fields in _read(name).items():
        rows[key] = _row(f"profile {name!r}, chip {key!r}", key, fields, rows)
    return rows


def profile_row(row: Chip, base: Chip) -> dict[str, Any]:
    """What a profile says of ``row`` if it starts from ``base``: the fields that are not the same.

    Read again it is ``row``; only kind, pod shape and wraparound are always those of the base, and
    a rate has one source.
    """
    fields: dict[str, Any] = {"base": base.name}
    for key in (*_UNITS, *_COUNTS, *_SWITCHES, *_SHAPES):
        value = getattr(row, key)
        if value == getattr(base, key):
            continue
        if isinstance(value, Rate):
            fields[key] = _written(value.achievable)
            if value.nominal.value != value.achievable.value:
                fields[key]["nominal"] = value.nominal.value
        elif isinstance(value, Figure):
            fields[key] = _written(value)
        elif key in _SHAPES and value is not None:
            fields[key] = shape_json(value) if key == "shape" else table_json(value)
        else:
            fields[key] = value
    return fields


def _written(figure: Figure) -> dict[str, Any]:
    return {"value": figure.value, "source": figure.source}


def profile_rows(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of the rows that a JSON profile adds or overrides; raises as ``load_profile``."""
    return tuple(_read(os.fsdecode(path)))


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise OptionError(f"profile {path!r}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"profile {path!r} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise OptionError(f"profile {path!r} must be an object of chips, not {_kind(content)}")
    return content


def _row(where: str, name: str, fields: Any, rows: Mapping[str, Chip]) -> Chip:
    if not isinstance(fields, dict):
        raise OptionError(f"{where} must be an object of fields, not {_kind(fields)}")
    base = fields.get("base", name)
    if base not in rows:
        hint = nearest(str(base), rows)
        if "base" in fields:
            raise OptionError(f'{where}: "base" is {base!r}; {hint}')
        raise OptionError(f'{where} is new and needs a "base" row to start from; {hint}')
    changes: dict[str, Any] = {
        key: _field(f"{where}, {key!r}", key, v, rows[base].shape)
        for key, v in fields.items()
        if key != "base"
    }
    return dataclasses.replace(rows[base], name=name, **changes)


def _field(where: str, key: str, value: Any, shape: EinsumShape | None) -> Any:
    if key in _SHAPES:
        return read_shape(where, value, shape) if key == "shape" else read_table(where, value)
    if key in _COUNTS:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise OptionError(f"{where} must be a whole number, not {value!r}")
        return value
    if key in _SWITCHES:
        if not isinstance(value, bool):
            raise OptionError(f"{where} must be true or false, not {value!r}")
        return value
    if key == "wrap":
        return _wrap(where, value)
    if key not in _UNITS:
        valid = {*_UNITS, *_COUNTS, *_SWITCHES, *_SHAPES, "wrap", "base"}
        raise OptionError(f"{where} is no field of a chip; {nearest(key, tuple(valid))}")
    parts = value if isinstance(value, dict) else {"value": value}
    known = {"value", "source"} if key in _FIGURES else {"value", "source", "nominal"}
    if unknown := set(parts) - known:
        raise OptionError(f"{where}: {min(unknown)!r} is not one of {', '.join(sorted(known))}")
    if "value" not in parts:
        raise OptionError(f'{where} has no "value"')
    source = str(parts.get("source", "profile"))
    figure = Figure(_number(where, parts["value"]), _UNITS[key], source)
    if key in _FIGURES:
        return figure
    nominal = _number(where, parts.get("nominal", figure.value))
    return Rate(figure, Figure(nominal, _UNITS[key], source))


def _wrap(where: str, value: Any) -> WrapRule:
    if not isinstance(value, dict) or len(value) > 1 or set(value) - {"exact", "multiple"}:
        raise OptionError(f'{where} must be {{"exact": n}}, {{"multiple": n}} or {{}}')
    for size in value.values():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"{where} needs a whole number of at least 1, not {size!r}")
    return WrapRule("profile", **value)


def _number(where: str, value: Any) -> float:
    bad = isinstance(value, bool) or not isinstance(value, (int, float))
    if bad or not math.isfinite(value) or value <= 0:
        raise OptionError(f"{where} must be a positive number, not {value!r}")
    return float(value)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", int: "a number", float: "a number", dict: "an object"}
    return names.get(type(value), repr(value))
