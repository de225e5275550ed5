"""How often a while loop runs.

The compiler says so for most loops (``known_trip_count`` in the backend configuration). For the
loops of its own decomposed einsums it does not; there the count follows from the condition
``compare(counter, bound)``, the counter's initial value and what one turn adds to it, all read
from the text. Where any of these is not a constant, the count is unknown: None, never one.
"""

from __future__ import annotations

from dataclasses import dataclass

from collmm.errors import HloError
from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.parse import Module

# Instructions whose value is their first operand's.
_TRANSPARENT = {"copy", "bitcast", "convert", "reshape", "opt-barrier", "copy-start", "copy-done"}
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, slots=True)
class _State:
    """The whole loop state, at the beginning of a turn."""


@dataclass(frozen=True, slots=True)
class _Element:
    """Element ``index`` of the loop state, plus ``offset``."""

    index: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Compare:
    direction: str
    left: object
    right: object


@dataclass(frozen=True, slots=True)
class _Tuple:
    frame: _Frame
    names: tuple[str, ...]


class _Frame:
    """Values of one computation's instructions, given those of its parameters.

    A value is an int, an _Element, _State, _Compare or _Tuple, or None where it is not known.
    """

    def __init__(self, module: Module, computation: Computation, args=None):
        self.module = module
        self.computation = computation
        self.args = args  # parameter number -> value, or None: all unknown
        self._memo: dict[str, object] = {}

    def value(self, name: str) -> object:
        if name not in self._memo:
            self._memo[name] = None  # a cycle, which HLO has not, would read as unknown
            instruction = self.computation.get(name)
            self._memo[name] = self._evaluate(instruction) if instruction else None
        return self._memo[name]

    def root(self) -> object:
        return self.value(self.computation.root.name)

    def _evaluate(self, i: Instruction) -> object:
        op = i.opcode
        if op == "parameter":
            return self.args(int(i.literal)) if self.args else None
        if op == "constant":
            return int(i.literal) if i.literal.lstrip("-").isdigit() else None
        if op == "tuple":
            return _Tuple(self, i.operands)
        if op == "get-tuple-element":
            return _element(self.value(i.operands[0]), int(i.attrs["index"]))
        if op in _TRANSPARENT:
            return self.value(i.operands[0])
        if op in ("add", "subtract"):
            left, right = (self.value(o) for o in i.operands)
            return _sum(left, right, 1 if op == "add" else -1)
        if op == "compare":
            left, right = (self.value(o) for o in i.operands)
            return _Compare(i.attrs.get("direction", ""), left, right)
        callee = i.attrs.get("calls") or (i.attrs.get("to_apply") if op == "call" else None)
        if op in ("fusion", "call") and callee and (name := callee.lstrip("%")) in self.module:
            operands = i.operands
            inner = _Frame(self.module, self.module[name], lambda n: self.value(operands[n]))
            return inner.root()
        return None


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Turns of the ``while`` instruction ``loop`` of ``computation``; None when unknown."""
    known = loop.backend_config.get("known_trip_count")
    if isinstance(known, dict) and str(known.get("n", "")).isdigit():
        return int(known["n"])
    try:
        body, condition = (module[loop.attrs[k].lstrip("%")] for k in ("body", "condition"))
    except KeyError as e:
        raise HloError(f"line {loop.line}: expected {e.args[0]}= on a while loop") from None
    turn = _Frame(module, body, lambda n: _State())
    test = _Frame(module, condition, lambda n: _State()).root()
    before = _Frame(module, computation).value(loop.operands[0])
    if not isinstance(test, _Compare):
        return None
    counter, direction, bound = test.left, test.direction, test.right
    if not isinstance(counter, _Element):
        counter, direction, bound = test.right, _FLIPPED.get(test.direction, ""), test.left
    if not isinstance(counter, _Element):
        return None
    after = turn.root()
    if isinstance(bound, _Element):  # a bound carried in the state: constant if passed through
        if _element(after, bound.index) != _Element(bound.index, 0):
            return None
        bound = _sum(_element(before, bound.index), bound.offset, 1)
    start = _sum(_element(before, counter.index), counter.offset, 1)
    step = _element(after, counter.index)
    if not (isinstance(step, _Element) and step.index == counter.index):
        return None
    if not (isinstance(start, int) and isinstance(bound, int)):
        return None
    return _turns(start, step.offset, direction, bound)


def _turns(start: int, step: int, direction: str, bound: int) -> int | None:
    """Turns of ``for (i = start; i <direction> bound; i += step)``; None when it does not end."""
    if direction == "LE":
        direction, bound = "LT", bound + 1
    elif direction == "GE":
        direction, bound = "GT", bound - 1
    distance = bound - start
    if direction == "GT":
        direction, distance, step = "LT", -distance, -step
    if direction == "LT":
        if distance <= 0:
            return 0
        return -(-distance // step) if step > 0 else None
    if direction == "NE" and step and distance % step == 0 and distance // step >= 0:
        return distance // step
    return None


def _element(value: object, index: int) -> object:
    if isinstance(value, _State):
        return _Element(index, 0)
    if isinstance(value, _Tuple) and index < len(value.names):
        return value.frame.value(value.names[index])
    return None


def _sum(left: object, right: object, sign: int) -> object:
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if isinstance(left, _Element) and isinstance(right, int):
        return _Element(left.index, left.offset + sign * right)
    if isinstance(right, _Element) and isinstance(left, int) and sign == 1:
        return _Element(right.index, right.offset + left)
    return None
