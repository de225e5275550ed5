"""Plan files: a plan as JSON that can be reviewed, compared, edited and pinned.

Before::

    print(step.plan(params, batch))                   # decided anew, by the cost model
    step.plan(params, batch).save("plan.json")        # or: collmm explain PROGRAM --save plan.json

after::

    overlap_collectives(step, Options(plan="plan.json"))   # decided as the file says

A file holds what the plan was made for (program, jax version, mesh, hardware row) and, for each
einsum in program order, what it is and what happens to it. ``"decision": "leave"`` and the fields
of ``"schedule"`` may be edited. Sites are told apart by what they are, not by their line: a file
still fits a program whose lines have moved. Predicted times are for the reader only.

Pure: nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from collmm import nesting
from collmm.errors import OptionError, PlanFileError, Reason
from collmm.schedule import Schedule
from collmm.sites import Collective, EinsumSite

if TYPE_CHECKING:
    from collmm.plan import Decision, Plan

FORMAT = 1
REWRITE, LEAVE = "rewrite", "leave"
# What makes two sites the same einsum, in the order in which differences are told.
_SAME_SOURCE = ("einsum", "shapes", "dtypes", "scope", "name_stack")
_SAME_SHARDING = ("lhs_spec", "rhs_spec", "out_spec", "collectives")
_HEADER = ("program", "jax", "mesh", "chip")
_SHOWN = 3
_WIDTH = 100
_CODES = {reason.code: reason for reason in Reason}


@dataclasses.dataclass(frozen=True)
class Pin:
    """What a plan file says of one site.

    Attributes:
      identity: the fields that tell the site apart, as they stand in the file.
      where: file name and line, for messages.
      looped: the collective that is looped, as ``Collective.describe`` names it; None where the
        site is left alone.
      schedule: how; None where the site is left alone.
      reason: why it is left alone, where the file gives a reason there is.
    """

    identity: dict[str, Any]
    where: str
    looped: str | None = None
    schedule: Schedule | None = None
    reason: Reason | None = None

    def collective(self, site: EinsumSite) -> Collective | None:
        """The collective of ``site`` that the file loops; None where it has none such."""
        found = (c for c in site.loopable if c.describe() == self.looped)
        return next(found, None)


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """A plan file that was read.

    Attributes:
      path: of the file.
      header: program, jax, mesh and chip it was made for.
      pins: one per site, in program order.
    """

    path: str
    header: dict[str, Any]
    pins: tuple[Pin, ...]

    def pin_of(self, site: EinsumSite) -> Pin | None:
        """The pin of ``site``; None where the file has another einsum at its place, or none."""
        if site.index >= len(self.pins):
            return None
        pin = self.pins[site.index]
        return pin if _key(pin.identity) == _key(identity(site)) else None


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to ``path``; OptionError, in one line, where that cannot be done."""
    try:
        pathlib.Path(path).write_text(text(plan), encoding="utf-8")
    except OSError as e:
        raise OptionError(f"cannot write the plan to {os.fspath(path)}: {e.strerror}") from None


def text(plan: Plan) -> str:
    """The text of a plan file; the same for the same plan."""
    return f"{_pretty(plan.to_json(), 0)}\n"


def header(plan: Plan) -> dict[str, Any]:
    """What a plan was made for: ``{program, jax, mesh, chip}``; one mesh, or a list of them."""
    meshes = dict.fromkeys(d.site.axis_sizes for d in plan.decisions if d.site.axis_sizes)
    listed = [dict(axes) for axes in meshes]
    return {
        "program": plan.program,
        "jax": plan.jax,
        "mesh": listed[0] if len(listed) == 1 else listed,
        "chip": plan.chip,
    }


def identity(site: EinsumSite) -> dict[str, Any]:
    """The fields that tell a site apart, as JSON values."""
    return {
        "einsum": site.einsum.equation(),
        "shapes": [list(s) for s in site.shapes],
        "dtypes": list(site.dtypes),
        "scope": list(site.scope),
        "name_stack": site.location.name_stack,
        "lhs_spec": [list(a) for a in site.lhs_spec],
        "rhs_spec": [list(a) for a in site.rhs_spec],
        "out_spec": [list(a) for a in site.out_spec],
        "collectives": [
            {
                "kind": c.kind,
                "operand": c.operand,
                "dim": c.dim,
                "axes": list(c.axes),
                "bytes": c.bytes,
            }
            for c in site.collectives
        ],
    }


def follows(site: EinsumSite, collective: Collective, schedule: Schedule) -> bool:
    """Whether ``schedule`` is one of the ring that ``collective`` of ``site`` runs over.

    And, where it has an inner one, of a collective that can be nested there.
    """
    return nesting.runs(site, collective, schedule)


def schedule_json(schedule: Schedule) -> dict[str, Any]:
    """The fields of a schedule as JSON values; those with their default value are left out."""
    return {
        f.name: _as_json(value)
        for f in dataclasses.fields(schedule)
        if (value := getattr(schedule, f.name)) != f.default
    }


def _as_json(value: Any) -> Any:
    if isinstance(value, Schedule):
        return schedule_json(value)
    return list(value) if isinstance(value, tuple) else value


def shown_path(file: str) -> str:
    """A path as plan files give it: from the working folder or ``site-packages`` on, else whole."""
    path = pathlib.PurePath(file)
    folder = pathlib.Path.cwd()
    if path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    for name in ("site-packages", "dist-packages"):
        if name in path.parts:
            at = len(path.parts) - path.parts[::-1].index(name)
            return pathlib.PurePath(*path.parts[at:]).as_posix()
    return file


# --- reading ---


def read(path: str | os.PathLike[str]) -> PlanFile:
    """Read a plan file; PlanFileError, in one line, for a file that is none."""
    name = os.fspath(path)
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise PlanFileError(
            f"cannot read the plan {name}: {e.strerror}; make one with plan.save(...)"
        ) from None
    except ValueError as e:
        raise PlanFileError(f"the plan {name} is not JSON: {e}") from None
    if not isinstance(content, dict) or "format" not in content or "sites" not in content:
        raise PlanFileError(f"{name} is no plan file; make one with plan.save(...)")
    if content["format"] != FORMAT:
        raise PlanFileError(
            f"the plan {name} has format {content['format']!r} and this collmm reads {FORMAT}; "
            "make it anew"
        )
    sites = content["sites"]
    if not isinstance(sites, list) or not all(isinstance(s, dict) for s in sites):
        raise PlanFileError(f'the plan {name}: "sites" must be a list of objects')
    pins = tuple(_pin(f"the plan {name}, site {i}", s) for i, s in enumerate(sites))
    return PlanFile(name, {key: content.get(key) for key in _HEADER}, pins)


def _pin(where: str, fields: dict[str, Any]) -> Pin:
    if missing := [k for k in (*_SAME_SOURCE, *_SAME_SHARDING, "decision") if k not in fields]:
        raise PlanFileError(f"{where} has no {missing[0]!r}")
    decision = fields["decision"]
    at = f"{os.path.basename(str(fields.get('file', '?')))}:{fields.get('line', '?')}"
    pin = Pin({k: fields[k] for k in (*_SAME_SOURCE, *_SAME_SHARDING)}, at)
    if decision == LEAVE:
        return dataclasses.replace(pin, reason=_CODES.get(str(fields.get("reason"))))
    if decision != REWRITE:
        raise PlanFileError(f"{where}: decision is {decision!r}; use {REWRITE!r} or {LEAVE!r}")
    looped = fields.get("looped")
    known = [_described(c) for c in fields["collectives"]]
    if looped not in known:
        raise PlanFileError(f'{where}: "looped" is {looped!r}; use one of {", ".join(known)}')
    return dataclasses.replace(pin, looped=looped, schedule=_schedule(where, fields))


def _described(fields: Any) -> str:
    try:
        return Collective(
            fields["kind"], fields["operand"], fields["dim"], tuple(fields["axes"]), 0
        ).describe()
    except (TypeError, KeyError, IndexError):
        return repr(fields)


def _schedule(where: str, fields: dict[str, Any]) -> Schedule:
    given = fields.get("schedule")
    if not isinstance(given, dict):
        raise PlanFileError(f'{where}: a rewritten site needs a "schedule" object, not {given!r}')
    return _schedule_of(where, given)


def _schedule_of(where: str, given: dict[str, Any]) -> Schedule:
    known = [f.name for f in dataclasses.fields(Schedule)]
    if unknown := [k for k in given if k not in known]:
        raise PlanFileError(f"{where}: a schedule has no {unknown[0]!r}; it has {', '.join(known)}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    if isinstance(values.get("inner"), dict):
        values["inner"] = _schedule_of(f"{where}, inner", values["inner"])
    try:
        return Schedule(**values)
    except (OptionError, TypeError) as e:
        raise PlanFileError(f"{where}: {e}") from None


# --- comparing ---


def differences(pinned: PlanFile, plan: Plan) -> tuple[str, ...]:
    """One line for each way in which ``plan``, made under the pins, is not what the file says."""
    now = header(plan)
    lines = [
        f"{key}: the plan file has {_short(pinned.header[key])}, here it is {_short(now[key])}"
        for key in _HEADER
        if json.dumps(pinned.header[key]) != json.dumps(now[key])
    ]
    old, new = list(pinned.pins), list(plan.decisions)
    keys = [[_key(p.identity) for p in old], [_key(identity(d.site)) for d in new]]
    if keys[0] == keys[1]:
        pairs: Iterable[tuple[int | None, int | None]] = zip(
            range(len(old)), range(len(new)), strict=True
        )
    else:
        pairs = _aligned(*keys)
    for i, j in pairs:
        if j is None:
            assert i is not None
            lines.append(f"{_name(i, old[i].where, old[i].identity)} is gone")
        elif i is None:
            site = new[j].site
            lines.append(f"{_name(j, _place(site), identity(site))} is new")
        else:
            lines += _site_differences(old[i], new[j], moved=i != j)
    return tuple(lines)


def message(pinned: PlanFile, found: Sequence[str], advice: str) -> str:
    """One line that says how a plan file differs."""
    shown = "; ".join(found[:_SHOWN])
    more = len(found) - _SHOWN
    rest = f"; and {more} more" if more > 0 else ""
    return f"the plan {pinned.path} does not fit: {shown}{rest}; {advice}"


def _site_differences(old: Pin, d: Decision, *, moved: bool) -> list[str]:
    # Pins are followed by number: one that moved was not, and what stands before it says why.
    here, name = identity(d.site), f"site {d.site.index} ({_place(d.site)})"
    lines = [
        f"{name}: {key} was {_told(key, old.identity[key])}, is {_told(key, here[key])}"
        for key in (*_SAME_SOURCE, *_SAME_SHARDING)
        if old.identity[key] != here[key]
    ]
    if lines or moved:
        return lines
    looped = d.collective.describe() if d.rewritten and d.collective else None
    if (old.looped, old.schedule) == (looped, d.schedule):
        return []
    planned = f"{old.looped}, {old.schedule.describe()}" if old.schedule else "left alone"
    cause = f": {d.reason.code}" if d.reason else ""
    made = f"{looped}, {d.schedule.describe()}" if d.schedule else f"left alone{cause}"
    return [f"{name}: the plan file has {planned}, and it can only be {made}"]


def _aligned(old: list[str], new: list[str]) -> Iterable[tuple[int | None, int | None]]:
    """Pair what stands at the same place of two programs; None where one has nothing there."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for _, i0, i1, j0, j1 in matcher.get_opcodes():
        both = min(i1 - i0, j1 - j0)
        yield from zip(range(i0, i0 + both), range(j0, j0 + both), strict=True)
        yield from ((i, None) for i in range(i0 + both, i1))
        yield from ((None, j) for j in range(j0 + both, j1))


def _key(fields: dict[str, Any]) -> str:
    return json.dumps([fields[k] for k in _SAME_SOURCE])


def _name(index: int, where: str, fields: dict[str, Any]) -> str:
    return f"site {index} ({where}, {fields['einsum']})"


def _place(site: EinsumSite) -> str:
    return f"{os.path.basename(site.location.file)}:{site.location.line}"


def _told(key: str, value: Any) -> str:
    if key == "collectives" and isinstance(value, list) and all(isinstance(c, dict) for c in value):
        parts = [f"{_described(c)} of {c.get('bytes')} bytes" for c in value]
        return " and ".join(parts) or "none"
    return _short(value)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return value if isinstance(value, str) and value else json.dumps(value).replace('"', "'")


# --- writing ---


def _pretty(value: Any, depth: int) -> str:
    """JSON with one line for what fits on one and holds no objects but small ones."""
    flat = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value:
        return flat
    deep = any(isinstance(v, dict) for v in _children(value))
    if not deep and len(flat) + depth <= _WIDTH and depth > 0 and "site" not in value:
        return flat
    inner = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {_pretty(v, depth + 1)}" for k, v in value.items()]
        return "{" + inner + f",{inner}".join(parts) + "\n" + " " * depth + "}"
    parts = [_pretty(v, depth + 1) for v in value]
    return "[" + inner + f",{inner}".join(parts) + "\n" + " " * depth + "]"


def _children(value: dict | list) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
