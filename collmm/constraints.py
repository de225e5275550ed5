"""Constraints: what a user forces or forbids at single einsums, and within which budgets.

Overrides name einsums by where they were written or by their name scope, and say what happens::

    overrides = {
        "model.py:120": "never",  # what that line makes, forward and backward
        "decoder/mlp": "always",  # what was traced under these named scopes, paying or not
        "layer_*/attention": "two-way unrolled",  # the same, as a loop of that form
    }

Where several match one einsum, the last one listed counts. Pure: nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from collmm.errors import OptionError
from collmm.schedule import Schedule, with_groups
from collmm.sites import ALL_GATHER, EinsumSite, Location

# As a user may write them, and as they are kept: hashable, in the order in which they were listed.
Overrides = tuple[tuple[str, str], ...]

NEVER, ALWAYS = "never", "always"
_FORMS: Mapping[str, tuple[str, bool]] = {
    "one-way": ("two_way", False),
    "two-way": ("two_way", True),
    "rolled": ("unroll", False),
    "unrolled": ("unroll", True),
    "nested": ("nested", True),
    "single": ("nested", False),
    "chunked": ("chunked", True),
    "whole": ("chunked", False),
    "grouped": ("grouped", True),
    "ungrouped": ("grouped", False),
}
_LINE = re.compile(r"(.+):(\d+)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"b": 1, **{f"{u}b": 1000**i for i, u in enumerate("kmgt", 1)}} | {
    f"{u}ib": 1024**i for i, u in enumerate("kmgt", 1)
}
_NEAREST = 3
# Into how many chunks an override cuts a shard where the cost model lists no schedule that does.
_CHUNKS = 2


@dataclasses.dataclass(frozen=True)
class Form:
    """What an override asks for at one einsum.

    Attributes:
      loop: False leaves the einsum alone, True makes a loop whatever it is expected to gain.
      fields: the fields of the ``Schedule`` that are given, with their values.
      text: as the user wrote it.
    """

    loop: bool
    fields: tuple[tuple[str, Any], ...]
    text: str

    def admits(self, schedule: Schedule, kind: str = ALL_GATHER) -> bool:
        """Whether the schedule of a ``kind`` of collective has the form that was asked for.

        Only gathers are chunked or not.
        """
        return all(
            getattr(schedule, name) == value
            for name, value in self.fields
            if name != "chunked" or kind == ALL_GATHER
        )

    def applied(self, schedule: Schedule, kind: str = ALL_GATHER) -> Schedule:
        """Return ``schedule`` in that form; chunks and accumulators are those of its default.

        An inner ring can be left out, but not made. Where shards are grouped there is none; a ring
        whose length or order allows no groups stays ungrouped.
        """
        if self.admits(schedule, kind):
            return schedule
        fields = dict(self.fields)
        if fields.pop("nested", None) is False:
            fields["inner"] = None
        chunked = fields.pop("chunked", False) and kind == ALL_GATHER
        grouped = fields.pop("grouped", schedule.grouped)
        made = dataclasses.replace(schedule, chains=_CHUNKS if chunked else None, **fields)
        return with_groups(made) if grouped else dataclasses.replace(made, shards_per_step=1)


def read_overrides(given: Any) -> Overrides:
    """Return overrides as they are kept, from a mapping or from pairs.

    Raises OptionError for a pattern or a value that is not allowed.
    """
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    good = isinstance(pairs, (tuple, list)) and all(
        isinstance(p, (tuple, list)) and len(p) == 2 for p in pairs
    )
    if not good:
        raise OptionError(f'overrides={given!r}; give a dict such as {{"model.py:120": "{NEVER}"}}')
    for pattern, value in pairs:
        if not isinstance(pattern, str) or not pattern.strip("/ "):
            raise OptionError(
                f"overrides: {pattern!r} names no einsum; write 'file.py:120' or a name scope"
            )
        if not isinstance(value, str):
            raise OptionError(f"overrides[{pattern!r}]={value!r}; {_allowed()}")
        _form(value, f"overrides[{pattern!r}]")
    return tuple((pattern, value) for pattern, value in pairs)


def read_size(given: Any, name: str) -> int:
    """Return a number of bytes from a whole number or a text such as ``"2GiB"``.

    Raises OptionError, naming the option ``name``, for anything else.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise OptionError(f"{name}={given!r}; give bytes as a whole number or a text like '2GiB'")
    return int(float(found[1]) * _UNITS[(found[2] or "B").lower()])


def form_for(site: EinsumSite, overrides: Overrides) -> Form | None:
    """Return what the last override that matches ``site`` asks for; None where none does."""
    for pattern, value in reversed(overrides):
        if matches(pattern, site.location):
            return _form(value, f"overrides[{pattern!r}]")
    return None


def matches(pattern: str, location: Location) -> bool:
    """Whether an override's pattern names an einsum that stands at ``location``.

    ``path.py:120`` matches a file whose last components are those of ``path.py``. Anything else is
    a name scope: its components, which may hold ``*`` and ``?``, must follow each other in the
    einsum's name stack.
    """
    line = _LINE.fullmatch(pattern)
    if line is not None:
        wanted = pathlib.PurePath(line[1]).parts
        return int(line[2]) == location.line and _ends_with(location.file, wanted)
    wanted = tuple(pattern.strip("/ ").split("/"))
    names = scopes(location.name_stack)
    starts = range(len(names) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, names[i : i + len(wanted)], wanted)) for i in starts)


def scopes(name_stack: str) -> tuple[str, ...]:
    """The names of a name stack without what transformations wrap round them.

    >>> scopes("jit(step)/transpose(jvp(decoder))/mlp")
    ('step', 'decoder', 'mlp')
    """
    bare = re.sub(r"\w+\(|\)", "", name_stack)
    return tuple(name for name in bare.split("/") if name)


def unmatched(overrides: Overrides, sites: Sequence[EinsumSite], of: str = "") -> list[str]:
    """Return one line for each override that matches no site, with the sites nearest to it.

    ``of`` stands after "no einsum", such as ``" of train_step"``.
    """
    lines = []
    for pattern, _ in overrides:
        if any(matches(pattern, site.location) for site in sites):
            continue
        close = _nearest(pattern, sites)
        hint = f"nearest: {', '.join(close)}" if close else "the program has no einsum"
        lines.append(f"overrides: {pattern!r} matches no einsum{of}; {hint}")
    return lines


# --- parts ---


@functools.cache
def _form(value: str, where: str) -> Form:
    words = value.split()
    if words == [NEVER]:
        return Form(False, (), value)
    if words == [ALWAYS]:
        return Form(True, (), value)
    if not words or (unknown := [w for w in words if w not in _FORMS]):
        named = f"{unknown[0]!r}: " if words and len(words) > 1 else ""
        raise OptionError(f"{where}={value!r}; {named}{_allowed()}")
    fields = dict(_FORMS[word] for word in words)
    if len(fields) < len(words):
        raise OptionError(f"{where}={value!r} says one thing twice; {_allowed()}")
    return Form(True, tuple(sorted(fields.items())), value)


def _allowed() -> str:
    return f"use {NEVER!r}, {ALWAYS!r}, or a form of {', '.join(_FORMS)}"


def _ends_with(file: str, wanted: tuple[str, ...]) -> bool:
    return pathlib.PurePath(file).parts[-len(wanted) :] == wanted


def _nearest(pattern: str, sites: Sequence[EinsumSite]) -> list[str]:
    line = _LINE.fullmatch(pattern)
    if line is not None:
        name = pathlib.PurePath(line[1]).name
        here = [s.location for s in sites if pathlib.PurePath(s.location.file).name == name]
        here.sort(key=lambda at: (abs(at.line - int(line[2])), at.line))
        return list(dict.fromkeys(map(_shown, here or [s.location for s in sites])))[:_NEAREST]
    names = dict.fromkeys("/".join(scopes(s.location.name_stack)) for s in sites)
    known = [name for name in names if name]
    close = difflib.get_close_matches(pattern, _tails(known), n=_NEAREST, cutoff=0.4)
    return close or known[:_NEAREST] or list(dict.fromkeys(_shown(s.location) for s in sites))[:3]


def _tails(names: Iterable[str]) -> list[str]:
    """Every run of components that ends or starts a name: what a user may have meant."""
    tails: dict[str, None] = {}
    for name in names:
        parts = name.split("/")
        for i in range(len(parts)):
            tails["/".join(parts[i:])] = None
            tails["/".join(parts[: i + 1])] = None
            tails[parts[i]] = None
    return list(tails)


def _shown(location: Location) -> str:
    return f"{pathlib.PurePath(location.file).name}:{location.line}"
