"""How much memory the results of collectives hold at once, going by the schedule.

A value is live from the instruction that makes it (a start, where there is one) to the last that
reads it or a value that shares its buffer. A result that the TPU compiler lays in on-chip memory
(``S(1)``) takes none of the chip's main memory and is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from collmm.hlo.events import Events, Role
from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.parse import Module

# Values that live in the buffer of their operand.
_ALIASES = ("bitcast", "get-tuple-element", "tuple", "opt-barrier", "while", "add-dependency")


@dataclass(frozen=True, slots=True)
class Live:
    """Most bytes per device live at one time: of gathered values, of other collectives' results."""

    gathered: int
    others: int


def live_results(module: Module) -> Live:
    """The most main memory that results of collectives hold at once in a scheduled module.

    ``gathered`` are the results of all-gathers, ``others`` those of permutes, reductions and
    all-to-alls. The two peaks may be at different times. What a loop or call holds adds to what is
    live around it. Raises HloError when the text is not scheduled.
    """
    module.require_schedule()
    counter = _Counter(module)
    return counter.peak(module.entry_name)


class _Counter:
    def __init__(self, module: Module):
        self.module = module
        self.events = Events(module)
        # The GPU compiler's S(1) is main memory, registered with the links.
        self.on_chip = module.compiler == "tpu"
        self._peaks: dict[str, Live] = {}

    def peak(self, name: str) -> Live:
        if name not in self._peaks:
            self._peaks[name] = self._peak(self.module[name])
        return self._peaks[name]

    def _peak(self, computation: Computation) -> Live:
        made = []  # (position, bytes, is a gather, name)
        inner: dict[int, Live] = {}
        for at, event in enumerate(self.events.of(computation)):
            i = event.instruction
            if event.role in (Role.START, Role.SYNC) and event.collective is not None:
                if self.on_chip and _on_chip(computation, i):
                    continue
                gather = event.collective.kind == "all-gather"
                made.append((at, event.collective.result_bytes, gather, i.name))
            elif event.role is Role.CALL:
                called = [c for names in i.called().values() for c in names]
                parts = [self.peak(c) for c in called]
                inner[at] = Live(
                    max((p.gathered for p in parts), default=0),
                    max((p.others for p in parts), default=0),
                )
        last = _last_uses(computation)
        gathered, others = [0] * len(computation), [0] * len(computation)
        for at, size, is_gather, name in made:
            row = gathered if is_gather else others
            for k in range(at, max(at, last[name]) + 1):
                row[k] += size
        for at, live in inner.items():
            gathered[at] += live.gathered
            others[at] += live.others
        return Live(max(gathered, default=0), max(others, default=0))


def _on_chip(computation: Computation, i: Instruction) -> bool:
    """Whether the result of a collective, or of the start ``i`` of one, lies in on-chip memory."""
    done = computation.done_of(i) if i.opcode.endswith("-start") else None
    spaces = {leaf.memory_space for leaf in (done or i).shape.leaves() if leaf.dtype != "token"}
    return spaces == {1}


def _last_uses(computation: Computation) -> dict[str, int]:
    """The place of the last reader of every value, through those that share its buffer."""
    last: dict[str, int] = {}
    place = {i.name: k for k, i in enumerate(computation)}
    for i in reversed(computation.instructions):
        until = last.setdefault(i.name, place[i.name])
        shares = i.opcode in _ALIASES or i.opcode.endswith(("-done", "-update"))
        for operand in i.operands:
            reach = until if shares else place[i.name]
            last[operand] = max(last.get(operand, 0), reach)
    return last
