"""One instruction of HLO text and the computation it stands in.

The name, opcode, shape text and operands are read at once; shapes, attributes and the backend
configuration only when asked for, since most instructions of a large module are never looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from collmm.errors import HloError
from collmm.hlo.shapes import Shape, parse_shape, split_top

_HEAD = re.compile(r"\s*(ROOT )?%?([^\s=%(]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_PAREN = re.compile(r'"(?:[^"\\]|\\.)*"|[()]', re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/")
_ATTRIBUTE = re.compile(r"([\w\-]+)\s*=(?!=)")
# Attributes whose value names computations, by the way control reaches them.
CALL_ATTRIBUTES = (
    "calls",
    "body",
    "condition",
    "to_apply",
    "true_computation",
    "false_computation",
    "branch_computations",
    "called_computations",
)


class Instruction:
    """One line of a computation.

    Attributes: ``name`` without the ``%``; ``opcode`` as written, for instance
    ``all-gather-start``; ``line``, the 1-based line in the text; ``is_root``; ``operands``, the
    names of the operands in order (none for ``parameter`` and ``constant``); ``literal``, what
    stands between the parentheses as text.
    """

    __slots__ = ("__dict__", "_attrs", "_shape", "is_root", "line", "literal", "name", "opcode")

    def __init__(
        self,
        name: str,
        opcode: str,
        *,
        shape: str,
        literal: str,
        attrs: str,
        line: int,
        is_root: bool,
    ):
        self.name = name
        self.opcode = opcode
        self.literal = literal
        self.line = line
        self.is_root = is_root
        self._shape = shape
        self._attrs = attrs

    def __repr__(self) -> str:
        return f"<{self.name} = {self.opcode}({self.literal}) at line {self.line}>"

    @cached_property
    def shape(self) -> Shape:
        """The result's shape. Raises HloError with the line when it cannot be read."""
        return self._reading(parse_shape, self._shape)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        if self.opcode in ("parameter", "constant", "iota") or not self.literal.strip():
            return ()
        parts = self._reading(split_top, _COMMENT.sub("", self.literal))
        # With operand shapes printed, the name is the last word: "f32[2]{0} %add.1".
        return tuple(p.rpartition(" ")[2].lstrip("%") for p in parts)

    @cached_property
    def attrs(self) -> dict[str, str]:
        """The attributes, name to text, in the order they are written."""
        out: dict[str, str] = {}
        last = ""
        for part in self._reading(split_top, self._attrs) if self._attrs.strip() else ():
            found = _ATTRIBUTE.match(part)
            if found and found[1] != "device_ids":
                last = found[1]
                out[last] = part[found.end() :].strip()
            elif last and part:  # mesh[...], device_ids=(...) {...} is one value with a comma in it
                out[last] += ", " + part
            elif part:
                raise HloError(f"line {self.line}: expected an attribute 'name=', found {part!r}")
        return out

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """The ``backend_config`` as a dict; empty when there is none or it is not JSON."""
        text = self.attrs.get("backend_config", "")
        try:
            config = json.loads(text) if text else {}
            if isinstance(config, str):  # the older spelling: JSON inside a string
                config = json.loads(config)
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}

    def called(self) -> dict[str, tuple[str, ...]]:
        """The computations it names: attribute (``calls``, ``body``, ...) to their names."""
        return {
            key: tuple(n.strip().lstrip("%") for n in self.attrs[key].strip("{}").split(","))
            for key in CALL_ATTRIBUTES
            if key in self.attrs
        }

    def _reading(self, read, text):
        try:
            return read(text)
        except HloError as e:
            raise HloError(f"line {self.line}: {e}") from None


class Computation:
    """A computation: its name, whether it is the entry, and its instructions in schedule order."""

    def __init__(self, name: str, line: int, is_entry: bool, instructions: tuple[Instruction, ...]):
        self.name = name
        self.line = line
        self.is_entry = is_entry
        self.instructions = instructions

    def __repr__(self) -> str:
        return f"<computation {self.name} at line {self.line}: {len(self)} instructions>"

    def __len__(self) -> int:
        return len(self.instructions)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    @cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    def __getitem__(self, name: str) -> Instruction:
        found = self._by_name.get(name)
        if found is None:
            raise HloError(
                f"line {self.line}: computation {self.name} uses {name!r} and does not define it"
            )
        return found

    def get(self, name: str) -> Instruction | None:
        """The instruction of that name, or None."""
        return self._by_name.get(name)

    def after(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions that stand after ``instruction``, in schedule order."""
        for k in range(self._position[instruction.name] + 1, len(self.instructions)):
            yield self.instructions[k]

    def done_of(self, start: Instruction) -> Instruction | None:
        """The ``-done`` that reads ``start`` directly; None when there is none here."""
        return self._dones.get(start.name)

    @cached_property
    def _dones(self) -> dict[str, Instruction]:
        return {i.operands[0]: i for i in self if i.opcode.endswith("-done") and i.operands}

    @cached_property
    def _position(self) -> dict[str, int]:
        return {i.name: k for k, i in enumerate(self.instructions)}

    @cached_property
    def root(self) -> Instruction:
        """The instruction marked ROOT. Raises HloError when there is none."""
        for i in reversed(self.instructions):
            if i.is_root:
                return i
        raise HloError(f"line {self.line}: computation {self.name} has no ROOT instruction")

    def parameter(self, index: int) -> Instruction | None:
        """The instruction ``parameter(index)``, or None."""
        text = str(index)
        for i in self.instructions:
            if i.opcode == "parameter" and i.literal == text:
                return i
        return None

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that ``instruction`` reads, in order."""
        return [self[name] for name in instruction.operands]


def parse_instruction(text: str, line: int) -> Instruction:
    """Read one line, ``[ROOT ]%name = shape opcode(operands)[, attributes]``.

    Raises HloError naming ``line`` when it is not one.
    """
    head = _HEAD.match(text)
    if not head:
        raise HloError(f"line {line}: expected '%name = shape opcode(...)', found {_short(text)}")
    start = head.end()
    if text.startswith("(", start):
        end = _closing(text, start, line)
    else:
        end = text.find(" ", start)
        if end < 0:
            raise HloError(f"line {line}: expected an opcode after the shape in {_short(text)}")
    opcode = _OPCODE.match(text, end)
    if not opcode:
        raise HloError(f"line {line}: expected an opcode and '(' in {_short(text[end:])}")
    close = _closing(text, opcode.end() - 1, line)
    attrs = text[close:].lstrip().removeprefix(",")
    return Instruction(
        head[2],
        opcode[1],
        shape=text[start:end],
        literal=text[opcode.end() : close - 1],
        attrs=attrs,
        line=line,
        is_root=head[1] is not None,
    )


def _closing(text: str, start: int, line: int) -> int:
    """Position after the ')' that closes the '(' at ``start``."""
    end = text.find(")", start)
    if end >= 0 and text.find("(", start + 1, end) < 0 and text.find('"', start, end) < 0:
        return end + 1
    depth = 0
    for token in _PAREN.finditer(text, start):
        if token[0] == "(":
            depth += 1
        elif token[0] == ")":
            depth -= 1
            if depth == 0:
                return token.end()
    raise HloError(f"line {line}: expected a ')' that closes {_short(text[start:])}; truncated?")


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
