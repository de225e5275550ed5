"""The call graph of a module: how often each computation runs in one run of the program."""

from __future__ import annotations

import re
from dataclasses import dataclass

from collmm.hlo.instruction import CALL_ATTRIBUTES, Instruction
from collmm.hlo.loops import trip_count
from collmm.hlo.parse import Module

_CALLS = re.compile(rb"[ ,](?:" + "|".join(CALL_ATTRIBUTES).encode() + rb")=")
# Computations named by to_apply of these run once per call; of others (all-reduce, sort, ...)
# they say how to combine two elements.
_CALLERS = ("call", "call-start", "async-start")


@dataclass(frozen=True, slots=True)
class Call:
    """``caller`` names ``callee`` at ``instruction``; ``times`` is how often it runs it each time.

    ``times`` is None when the text does not say: a loop of unknown length, a branch.
    """

    caller: str
    callee: str
    instruction: Instruction
    times: int | None


def calls_from(module: Module, name: str) -> list[Call]:
    """Every call in the computation ``name``, in schedule order."""
    out = []
    computation = None
    for i in module.matching(name, _CALLS):
        for key, callees in i.called().items():
            if key == "to_apply" and i.opcode not in _CALLERS:
                continue
            times: int | None = 1
            if i.opcode == "while":
                computation = computation or module[name]
                times = trip_count(module, computation, i)
                if key == "condition" and times is not None:
                    times += 1
            elif i.opcode == "conditional":
                times = None
            out += [Call(name, c, i, times) for c in callees if c in module]
    return out


def executions(module: Module) -> dict[str, int | None]:
    """How often each computation runs in one run of the module; None where that is unknown.

    Computations that the entry does not reach, and those that only say how to combine two
    elements, run 0 times.
    """
    calls = {name: calls_from(module, name) for name in module}
    counts: dict[str, int | None] = dict.fromkeys(module, 0)
    counts[module.entry_name] = 1
    for name in _callers_first(module.entry_name, calls):
        mine = counts[name]
        for call in calls[name]:
            had = counts[call.callee]
            if mine is None or call.times is None or had is None:
                unknown = not (mine == 0 or call.times == 0) or had is None
                counts[call.callee] = None if unknown else had
            else:
                counts[call.callee] = had + mine * call.times
    return counts


def _callers_first(entry: str, calls: dict[str, list[Call]]) -> list[str]:
    """The computations reached from ``entry``, each after all that call it."""
    order: list[str] = []
    state: dict[str, int] = {}
    stack = [(entry, iter(calls[entry]))]
    state[entry] = 1
    while stack:
        name, rest = stack[-1]
        call = next(rest, None)
        if call is None:
            order.append(name)
            stack.pop()
        elif call.callee not in state:
            state[call.callee] = 1
            stack.append((call.callee, iter(calls[call.callee])))
    return order[::-1]
