"""Read optimized HLO text into a Module.

The text is only indexed at first: where each computation begins and ends. A computation is parsed
when it is asked for, and only the latest few are kept, so memory stays near the size of the text
(or below it: a file is mapped, not read) however large the module is.
"""

from __future__ import annotations

import gzip
import mmap
import os
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from collmm.errors import HloError
from collmm.hlo.inline import spelled_out
from collmm.hlo.instruction import Computation, Instruction, parse_instruction
from collmm.hlo.metadata import SourceLine, StackTables
from collmm.hlo.shapes import split_top

_HEADER = re.compile(r"(ENTRY )?%?([^\s(%]+) (?:\(|\{)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# Text of parsed computations kept at a time, in characters. Objects take about ten times that.
_KEPT = 4_000_000
# Files from this many bytes on are mapped; smaller ones are read, and may change afterwards.
_MAPPED = 64_000_000


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a computation's instructions are: byte offsets, and the line of its header."""

    start: int
    end: int
    line: int
    is_entry: bool


class Module:
    """An HLO module: header attributes, computations by name, and the tables of source lines.

    Attributes: ``name``; ``attrs``, the header's attributes as text; ``entry_name``; ``tables``.
    Computations are parsed when asked for, so ``module[name]`` may raise HloError for a line that
    cannot be read.
    """

    def __init__(self, name: str, attrs: dict[str, str], buffer, spans: dict[str, _Span], tables):
        self.name = name
        self.attrs = attrs
        self.tables: StackTables = tables
        self._buffer = buffer
        self._spans = spans
        self.entry_name = next(n for n, s in spans.items() if s.is_entry)
        self._kept: OrderedDict[str, Computation] = OrderedDict()
        self._kept_size = 0

    def __repr__(self) -> str:
        return f"<HLO module {self.name}: {len(self._spans)} computations>"

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __contains__(self, name: object) -> bool:
        return name in self._spans

    def __getitem__(self, name: str) -> Computation:
        """The computation called ``name``. Raises HloError when the module has none such."""
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
            return kept
        span = self._spans.get(name)
        if span is None:
            raise HloError(
                f"line {self._first_line_with(name)}: the text has no computation {name!r}; "
                "is it complete?"
            )
        computation = self._parse(name, span)
        self._kept[name] = computation
        self._kept_size += span.end - span.start
        while self._kept_size > _KEPT and len(self._kept) > 1:
            gone, _ = self._kept.popitem(last=False)
            self._kept_size -= self._spans[gone].end - self._spans[gone].start
        return computation

    @property
    def entry(self) -> Computation:
        """The entry computation."""
        return self[self.entry_name]

    @property
    def is_scheduled(self) -> bool:
        """Whether the order of instructions is the order of execution."""
        return self.attrs.get("is_scheduled") == "true"

    @property
    def num_partitions(self) -> int:
        """Partitions the program runs on; 1 when the header names none."""
        return int(self.attrs.get("num_partitions", "1"))

    @property
    def replica_count(self) -> int:
        """Replicas the program runs on; 1 when the header names none."""
        return int(self.attrs.get("replica_count", "1"))

    @property
    def compiler(self) -> str | None:
        """``"tpu"`` or ``"gpu"`` where the header shows whose text it is, else None.

        The TPU compiler tiles every array of the entry's layout; the GPU compiler leaves the
        fingerprint of the module before its scheduler.
        """
        if ":T(" in self.attrs.get("entry_computation_layout", ""):
            return "tpu"
        if "fingerprint_before_lhs=" in self.attrs.get("frontend_attributes", ""):
            return "gpu"
        return None

    def require_schedule(self) -> None:
        """Raise HloError unless the text is scheduled."""
        if not self.is_scheduled:
            raise HloError(
                "line 1: expected is_scheduled=true in the HloModule line; this text is not "
                "scheduled, so it does not say what runs when: give the optimized module "
                "(compiled.as_text(), or of an XLA dump the *after_codegen.txt for a TPU, else the "
                "*after_optimizations.txt)"
            )

    def text(self, name: str) -> str:
        """The lines of the computation ``name`` between its braces."""
        span = self._spans[name]
        return self._buffer[span.start : span.end].decode("utf-8", "replace")

    def matching(self, name: str, pattern: re.Pattern[bytes]) -> list[Instruction]:
        """The instructions of computation ``name`` whose line matches, without parsing the rest.

        ``pattern`` must match within a line. A match may stand inside a string, so check the
        parsed instruction too.
        """
        span = self._spans[name]
        raw = self._buffer[span.start : span.end]
        out, line, counted, done = [], span.line + 1, 0, -1
        for found in pattern.finditer(raw):
            start = raw.rfind(b"\n", 0, found.start()) + 1
            if start <= done:  # the line was taken at an earlier match
                continue
            end = raw.find(b"\n", start)
            end = len(raw) if end < 0 else end
            line += raw.count(b"\n", counted, start)
            counted, done = start, end
            out.append(parse_instruction(raw[start:end].decode("utf-8", "replace"), line))
        return out

    def line_of(self, name: str) -> int:
        """The line of the header of the computation ``name``."""
        return self._spans[name].line

    def source(self, instruction: Instruction) -> SourceLine | None:
        """The user's line that ``instruction`` comes from; None when the text does not say."""
        return self.tables.source(instruction.attrs.get("metadata", ""))

    def _first_line_with(self, name: str) -> int:
        """The first line that names ``name``; 1 if none does."""
        at = max(0, self._buffer.find(name.encode()))
        return 1 + self._buffer[:at].count(b"\n")

    def _parse(self, name: str, span: _Span) -> Computation:
        instructions = [
            parse_instruction(text, span.line + 1 + k)
            for k, text in enumerate(self.text(name).split("\n"))
            if text and not text.isspace()
        ]
        _check_operands(name, spelled := spelled_out(instructions))
        return Computation(name, span.line, span.is_entry, spelled)


def _check_operands(name: str, instructions: Sequence[Instruction]) -> None:
    """Raise HloError where an operand is not defined before it is used, as it is in all HLO."""
    known: set[str] = set()
    for i in instructions:
        for operand in i.operands:
            if operand not in known:
                raise HloError(
                    f"line {i.line}: {i.name!r} uses {operand!r}, which computation {name} does "
                    "not define before it"
                )
        known.add(i.name)


def parse(text_or_path: str | os.PathLike) -> Module:
    """Read HLO text, given as the text itself or as the path of a file (gzip allowed).

    A string is taken as text when it has a line break or begins with ``HloModule``, else as a
    path. Raises HloError, naming the line and what was expected there, when it is not HLO text,
    is cut off, or cannot be read.
    """
    if isinstance(text_or_path, str) and (
        "\n" in text_or_path or text_or_path.lstrip().startswith("HloModule")
    ):
        return _index(text_or_path.encode())
    if not str(text_or_path).strip():
        raise HloError("line 1: expected 'HloModule <name>', found an empty text")
    path = Path(text_or_path)
    try:
        with path.open("rb") as f:
            if f.read(2) == b"\x1f\x8b":
                with gzip.open(path) as z:
                    return _index(z.read())
            if path.stat().st_size == 0:
                raise HloError(f"{path}: line 1: expected 'HloModule <name>', found an empty file")
            if path.stat().st_size < _MAPPED:
                return _index(path.read_bytes())
            return _index(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, EOFError, zlib.error) as e:
        raise HloError(f"cannot read {path}: {e}; expected a file of HLO text") from None


def _index(buffer: bytes | mmap.mmap) -> Module:
    """Find the header, the tables and every computation's place."""
    lines = _Lines(buffer)
    name, attrs = _read_header(lines)
    spans: dict[str, _Span] = {}
    tables: dict[str, list[str]] = {}
    while (text := lines.next()) is not None:
        if not text or text.startswith(("//", "#")):
            continue
        if text in _TABLES:
            tables[text] = []
            while row := lines.next():
                tables[text].append(row)
        elif text.endswith("{") and (header := _HEADER.match(text)):
            if header[2] in spans:
                raise HloError(f"line {lines.number}: computation {header[2]} is defined twice")
            spans[header[2]] = lines.body(header[2], header[1] is not None)
        else:
            raise HloError(
                f"line {lines.number}: expected a computation ('%name (...) -> ... {{') or a table "
                f"of source lines, found {text[:60]!r}"
            )
    if not any(s.is_entry for s in spans.values()):
        raise HloError(f"line {lines.number}: the text ends without an ENTRY computation; cut off?")
    return Module(name, attrs, buffer, spans, StackTables.read(tables))


def _read_header(lines: _Lines) -> tuple[str, dict[str, str]]:
    text: str | None = ""
    while text is not None and (not text or text.startswith(("//", "#"))):
        text = lines.next()
    if text is None or not text.startswith("HloModule"):
        found = "an empty text" if text is None else repr(text[:60])
        raise HloError(f"line {max(lines.number, 1)}: expected 'HloModule <name>', found {found}")
    try:
        parts = split_top(text)
    except HloError as e:
        raise HloError(f"line {lines.number}: {e}") from None
    pairs = (p.partition("=") for p in parts[1:])
    return parts[0].removeprefix("HloModule").strip(), {k.strip(): v.strip() for k, _, v in pairs}


class _Lines:
    """Walks the lines of a buffer, skipping computation bodies without splitting them."""

    def __init__(self, buffer: bytes | mmap.mmap):
        self.buffer = buffer
        self.at = 0
        self.number = 0

    def next(self) -> str | None:
        """The next line without its break and trailing blanks; None at the end."""
        if self.at >= len(self.buffer):
            return None
        end = self.buffer.find(b"\n", self.at)
        end = len(self.buffer) if end < 0 else end
        text = self.buffer[self.at : end].decode("utf-8", "replace").rstrip()
        self.at = end + 1
        self.number += 1
        return text

    def body(self, name: str, is_entry: bool) -> _Span:
        """Skip to after the '}' that closes the computation whose header was just read."""
        start, line = self.at, self.number
        end = self.buffer.find(b"\n}", start - 1)
        if end < 0:
            rest = self.buffer[start:]
            last = line + rest.count(b"\n") + (not rest.endswith(b"\n") and rest != b"")
            raise HloError(
                f"line {last}: the text ends inside computation {name} (line {line}); expected a "
                "line '}'; cut off?"
            )
        stop = self.buffer.find(b"\n", end + 1)
        self.at = len(self.buffer) if stop < 0 else stop + 1
        end = max(end, start)
        self.number = line + self.buffer[start:end].count(b"\n") + (2 if end > start else 1)
        return _Span(start, end, line, is_entry)
