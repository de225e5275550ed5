"""What each instruction of a scheduled computation is to an audit: work, a collective, a call.

A collective may be an instruction of its own (synchronous, or a start and a done), be wrapped by
``async-start``, or sit inside a fusion: then the fusion is what the schedule shows.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from collmm.hlo.collectives import PATTERN, Collective, chain_id, kind_of, measured
from collmm.hlo.cost import is_free, is_synchronous
from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.parse import Module

_CALLING = ("while", "conditional", "call")
_CALLS = re.compile(rb"[ ,](?:calls|to_apply)=")
_MARKERS = {'"AsyncCollectiveStart"': "start", '"AsyncCollectiveDone"': "done"}


class Role(enum.Enum):
    """What an instruction does to the clock."""

    FREE = "free"
    WORK = "work"
    CALL = "call"
    SYNC = "sync"
    START = "start"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Event:
    """An instruction and its role; the collective it runs, starts, or (by ``key``) ends."""

    instruction: Instruction
    role: Role
    collective: Collective | None = None
    key: str = ""


class Events:
    """Tells the events of a module's computations."""

    def __init__(self, module: Module):
        self._module = module
        self._holders = _holders(module)

    def of(self, computation: Computation) -> Iterator[Event]:
        """The events of ``computation`` in schedule order.

        A START and its DONE have the same key, unique while the collective is in flight.
        """
        started: dict[str, Event] = {}  # name of a start or update -> the start
        for i in computation:
            event = self._event(computation, i)
            before = started.get(i.operands[0]) if i.operands else None
            if event.role is Role.START:
                started[i.name] = event
                if not i.operands:  # made ready now, sent off by the update that brings operands
                    event = Event(i, Role.FREE)
            elif before and i.opcode.endswith("-update"):
                started[i.name] = before
                if len(i.operands) > 1:
                    event = Event(i, Role.START, before.collective, before.key)
            elif before and i.opcode.endswith("-done"):
                event = Event(i, Role.DONE, key=before.key)
            yield event

    def _event(self, computation: Computation, i: Instruction) -> Event:
        if kind_of(i.opcode):
            started = i.opcode.endswith("-start") and not is_synchronous(i)
            role = Role.START if started else Role.SYNC
            return Event(i, role, measured(computation, i), i.name)
        if i.opcode in _CALLING:
            return Event(i, Role.CALL)
        if i.opcode in ("fusion", "async-start", "call-start", "fusion-start"):
            for callee in i.called().get("calls", ()) + i.called().get("to_apply", ()):
                if callee in self._holders:
                    return self._wrapped(i, callee)
        return Event(i, Role.FREE if is_free(i) else Role.WORK)

    def _wrapped(self, i: Instruction, callee: str) -> Event:
        """The event of ``i``, whose callee holds a collective at some depth."""
        inner = self._collective(callee)
        if inner is None:
            return Event(i, Role.WORK)
        root = self._module[inner.computation].root
        chain = chain_id(inner.instruction)
        marker = _MARKERS.get(root.attrs.get("custom_call_target", ""))
        if chain is not None:
            # TPU async collective fusion: started by one fusion, advanced by compute fusions,
            # closed by another.
            if marker == "start":
                return Event(i, Role.START, inner, f"chain {chain}")
            return Event(i, Role.DONE if marker == "done" else Role.WORK, key=f"chain {chain}")
        synchronous = is_synchronous(i) or is_synchronous(inner.instruction)
        if i.opcode.endswith("-start") and not synchronous:
            return Event(i, Role.START, inner, i.name)
        return Event(i, Role.SYNC, inner, i.name)

    def _collective(self, name: str) -> Collective | None:
        """The first collective in the computation or in what its fusions call."""
        computation = self._module[name]
        for i in computation:
            if kind_of(i.opcode):
                return measured(computation, i)
        for i in computation:
            for callees in i.called().values() if i.opcode in ("fusion", "call") else ():
                for callee in callees:
                    if callee in self._holders:
                        return self._collective(callee)
        return None


def _holders(module: Module) -> set[str]:
    """Computations that hold a collective, or call one that does."""
    holders: set[str] = set()
    for name in module:  # callees stand before their callers
        if any(kind_of(i.opcode) for i in module.matching(name, PATTERN)):
            holders.add(name)
            continue
        for i in module.matching(name, _CALLS):
            if any(c in holders for names in i.called().values() for c in names):
                holders.add(name)
                break
    return holders
