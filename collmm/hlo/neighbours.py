"""The einsums that stand next to a collective: whose operand it gathers, whose result it scatters.

Bitcasts, copies, casts, transposes and reshapes between the two are looked through, alone or fused,
and so are the other operations of the fusion that holds the einsum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from collmm.hlo.describe import source_of
from collmm.hlo.durations import Durations
from collmm.hlo.findings import Finding
from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.metadata import SourceLine
from collmm.hlo.parse import Module
from collmm.hlo.traffic import is_gemm

_TRANSPARENT = {
    *("bitcast", "copy", "convert", "transpose", "reshape", "get-tuple-element", "copy-start"),
    *("copy-done", "opt-barrier", "reduce-precision", "bitcast-convert", "tuple"),
}
_PRODUCTS = ("dot", "convolution")
_FREE_INSIDE = {*_TRANSPARENT, "parameter", "constant"}


@dataclass(frozen=True, slots=True)
class Einsum:
    """An einsum of the schedule next to a collective.

    ``name`` is the instruction that runs it, ``seconds`` its predicted time in one run, None when
    it is not known.
    """

    name: str
    source: SourceLine | None
    seconds: float | None


def einsums_beside(module: Module, finding: Finding, durations: Durations) -> list[Einsum]:
    """The einsums that a gather brings an operand to, or whose result a reduction takes.

    An all-to-all may do either. Collectives of other kinds have none here: no loop takes them.
    """
    computation = module[finding.computation]
    start = computation[finding.name]
    found: list[Instruction] = []
    if finding.kind in ("reduce-scatter", "all-reduce", "all-to-all"):
        found += _before(module, computation, start)
    if finding.kind in ("all-gather", "all-to-all"):
        # A synchronous one may be written as a start and a done, too.
        end = computation[finding.done] if finding.done else computation.done_of(start)
        found += _after(module, computation, end or start)
    out = {}
    for i in found:
        duration = durations.of(module, computation, i)
        seconds = duration.seconds if duration else None
        out[i.name] = Einsum(i.name, source_of(module, i), seconds)
    return list(out.values())


def _after(module: Module, computation: Computation, i: Instruction) -> Iterator[Instruction]:
    """The einsums one of whose operands is the value of ``i``."""
    same = {i.name}
    for later in computation.after(i):
        uses = [n for n, operand in enumerate(later.operands) if operand in same]
        if not uses:
            continue
        if _keeps_elements(module, computation, later):
            same.add(later.name)
        elif _is_product(later):
            yield later
        elif later.opcode == "fusion":
            callee = _callee(module, later)
            if callee is not None and any(_feeds_product(callee, n) for n in uses):
                yield later


def _before(module: Module, computation: Computation, i: Instruction) -> Iterator[Instruction]:
    """The einsums whose result is what ``i`` reads."""
    todo, seen = list(i.operands), set()
    while todo:
        name = todo.pop()
        maker = computation.get(name)
        if maker is None or name in seen:
            continue
        seen.add(name)
        if _is_product(maker) or _holds_product(module, maker):
            yield maker
        elif _keeps_elements(module, computation, maker):
            todo += maker.operands


def _is_product(i: Instruction) -> bool:
    return i.opcode in _PRODUCTS or (i.opcode == "custom-call" and is_gemm(i))


def _holds_product(module: Module, i: Instruction) -> bool:
    callee = _callee(module, i) if i.opcode == "fusion" else None
    return callee is not None and any(
        _is_product(inner) or _holds_product(module, inner) for inner in callee
    )


def _keeps_elements(module: Module, computation: Computation, i: Instruction) -> bool:
    """Whether the elements of ``i`` are those of what it reads, but for their place and type."""
    if i.opcode == "reduce" and not i.shape.is_tuple:  # over dimensions of size 1, to drop them
        whole = computation.get(i.operands[0])
        return whole is not None and math.prod(whole.shape.dims) == math.prod(i.shape.dims)
    return i.opcode in _TRANSPARENT or _moves_only(module, i)


def _moves_only(module: Module, i: Instruction) -> bool:
    """Whether ``i`` is a fusion that keeps every element as it is, but for its place and type."""
    callee = _callee(module, i) if i.opcode == "fusion" else None
    return callee is not None and all(inner.opcode in _FREE_INSIDE for inner in callee)


def _feeds_product(callee: Computation, number: int) -> bool:
    """Whether parameter ``number`` of a fused computation reaches an einsum in it."""
    parameter = callee.parameter(number)
    if parameter is None:
        return False
    tainted = {parameter.name}
    for i in callee.after(parameter):
        if tainted.isdisjoint(i.operands):
            continue
        if _is_product(i) or i.opcode == "fusion":
            return True
        tainted.add(i.name)
    return False


def _callee(module: Module, i: Instruction) -> Computation | None:
    names = i.called().get("calls") or ()
    return module[names[0]] if names and names[0] in module else None
