"""Operands that name an element of a tuple, as dumps of newer compilers write them.

before:  %a = f32[2]{0} negate(%t#1)
after:   %t#1 = f32[2]{0} get-tuple-element(%t), index=1
         %a = f32[2]{0} negate(%t#1)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collmm.errors import HloError
from collmm.hlo.instruction import Instruction


def spelled_out(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The instructions with a get-tuple-element before the first use of each such operand.

    Raises HloError, naming the line, for an element that the tuple does not have.
    """
    if not any("#" in i.literal for i in instructions):
        return tuple(instructions)
    known: dict[str, Instruction] = {}
    out: list[Instruction] = []
    for i in instructions:
        if "#" in i.literal:
            for operand in i.operands:
                out += _elements(operand, known, i.line)
        out.append(i)
        known[i.name] = i
    return tuple(out)


def _elements(operand: str, known: dict[str, Instruction], line: int) -> Iterator[Instruction]:
    """The get-tuple-elements that ``operand`` needs and that are not there yet, outermost first."""
    if operand in known:
        return
    of, mark, index = operand.rpartition("#")
    if not mark or not index.isdigit():
        return  # a plain name; whoever reads it tells if it is not defined
    yield from _elements(of, known, line)
    holder = known.get(of)
    if holder is None:
        return
    elements = holder.shape.elements
    if int(index) >= len(elements):
        raise HloError(f"line {line}: {of!r} has {len(elements)} elements and no {operand!r}")
    element = Instruction(
        operand,
        "get-tuple-element",
        shape=str(elements[int(index)]),
        literal=f"%{of}",
        attrs=f"index={index}",
        line=line,
        is_root=False,
    )
    known[operand] = element
    yield element
