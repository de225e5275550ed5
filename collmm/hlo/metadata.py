"""From an instruction's metadata back to the user's source line.

Two spellings exist: ``source_file``/``source_line`` in the metadata itself, and a
``stack_frame_id`` into the tables FileNames, FunctionNames, FileLocations and StackFrames that
stand after the module's header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_STRING = r'"((?:[^"\\]|\\.)*)"'
_OP_NAME = re.compile(rf"op_name={_STRING}")
_SOURCE_FILE = re.compile(rf"source_file={_STRING}")
_SOURCE_LINE = re.compile(r"source_line=(\d+)")
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_NAME_ROW = re.compile(rf"(\d+)\s+{_STRING}")
_ROW = re.compile(r"(\d+)\s+\{(.*)\}")
_FIELD = re.compile(r"(\w+)=(\d+)")
_LIBRARY = re.compile(r"[/\\](?:site-packages|dist-packages)[/\\](?:jax|jaxlib|flax|equinox)[/\\]")


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A place in the user's program. ``function`` is empty when the text does not name it."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class StackTables:
    """The module's source tables: frame id to its line and its parent's id (0: none)."""

    frames: Mapping[int, tuple[SourceLine, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, tables: Mapping[str, Sequence[str]]) -> StackTables:
        """Build from the rows of the four tables; rows that refer to nothing are left out."""
        files, functions = (_names(tables.get(t, ())) for t in ("FileNames", "FunctionNames"))
        places = {}
        for key, row in _rows(tables.get("FileLocations", ())):
            places[key] = SourceLine(
                files.get(row.get("file_name_id", 0), ""),
                row.get("line", 0),
                functions.get(row.get("function_name_id", 0), ""),
            )
        rows = list(_rows(tables.get("StackFrames", ())))
        # The first frame has no parent. Some versions write that as 0 or leave it out; others
        # write every parent one too high (the first frame then names itself).
        shift = rows[0][1].get("parent_frame_id", 0) if rows else 0
        frames = {
            key: (places[row["file_location_id"]], max(row.get("parent_frame_id", 0) - shift, 0))
            for key, row in rows
            if row.get("file_location_id") in places
        }
        return cls(frames)

    def stack(self, frame_id: int) -> Iterator[SourceLine]:
        """The lines of the stack of ``frame_id``, innermost first."""
        seen = set()
        while frame_id in self.frames and frame_id not in seen:
            seen.add(frame_id)
            line, frame_id = self.frames[frame_id]
            yield line

    def source(self, metadata: str) -> SourceLine | None:
        """The user's line for a ``metadata={...}`` text: the innermost not inside a library."""
        if found := _FRAME_ID.search(metadata):
            stack = list(self.stack(int(found[1])))
            user = (s for s in stack if not _LIBRARY.search(s.file))
            if stack:
                return next(user, stack[0])
        file, line = _SOURCE_FILE.search(metadata), _SOURCE_LINE.search(metadata)
        return SourceLine(file[1], int(line[1])) if file and line else None


def op_name(metadata: str) -> str:
    """The ``op_name`` (jax's name stack and primitive) of a metadata text; empty when absent."""
    found = _OP_NAME.search(metadata)
    return found[1] if found else ""


def _names(rows: Sequence[str]) -> dict[int, str]:
    found = (_NAME_ROW.match(r.strip()) for r in rows)
    return {int(m[1]): m[2] for m in found if m}


def _rows(rows: Sequence[str]) -> Iterator[tuple[int, dict[str, int]]]:
    for r in rows:
        if found := _ROW.match(r.strip()):
            yield int(found[1]), {k: int(v) for k, v in _FIELD.findall(found[2])}
