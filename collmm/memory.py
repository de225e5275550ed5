"""The memory a compiled program takes on each device, and whether that fits the chip.

The compiler's own figures (``memory_analysis``) give arguments, outputs, temporaries and the peak;
how much of the temporaries collectives hold is counted from the schedule (``hlo.live``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from collmm import report
from collmm.cost.figures import Chip
from collmm.hlo.live import live_results
from collmm.hlo.parse import Module
from collmm.plan import Plan

_OVERFLOW = (
    re.compile(
        r"required for HLO temporaries \((?P<need>[\d.]+[KMGT]?)\).*HBM \((?P<have>[\d.]+[KMGT]?)\)"
    ),
    re.compile(r"Used (?P<need>[\d.]+[KMGT]?)i?B? of (?P<have>[\d.]+[KMGT]?)i?B? hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      peak: what the program needs; where the compiler gave up, the least that it says it would be.
      arguments, outputs, temporaries, code: what it is the sum of: outputs that reuse an argument's
        buffer count with the argument, the gaps between temporaries with these. None where the
        compiler gave up.
      gathered: the most that results of all-gathers hold at one time in main memory.
      collectives: the same of permutes, reductions and all-to-alls. Both are part of the
        temporaries or outputs; None where there is no schedule.
      capacity: of the device; None where it is not known.
      compiled: False where the compiler refused the program because it does not fit.
    """

    peak: int
    arguments: int | None = None
    outputs: int | None = None
    temporaries: int | None = None
    code: int | None = None
    gathered: int | None = None
    collectives: int | None = None
    capacity: int | None = None
    compiled: bool = True

    @property
    def excess(self) -> int:
        """Bytes by which the program does not fit; 0 when it does, or when that is not known."""
        if self.capacity is None:
            return 0 if self.compiled else self.peak
        return max(0, self.peak - self.capacity)

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the excess."""
        return {**dataclasses.asdict(self), "excess": self.excess}


def memory_of(
    compiled: Any, module: Module | None = None, chip: Chip | None = None
) -> Memory | None:
    """Return the memory of a ``jax.stages.Compiled``; None where its backend tells nothing.

    Args:
      compiled: the program.
      module: its schedule, to count what collectives hold.
      chip: the row of one device, for its capacity.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arguments = stats.argument_size_in_bytes
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporaries = stats.temp_size_in_bytes
    if total := getattr(stats, "total_allocation_bytes", 0):  # unknown to older versions of jax
        # What the TPU compiler holds against the chip's memory; by its temp_size_in_bytes it would
        # be up to a tenth more. Nor is peak_memory_in_bytes that: it counts what is live, without
        # the gaps, but on-chip memory too, and of a cpu program no temporaries.
        temporaries = max(0, total - arguments - outputs)
    code = stats.generated_code_size_in_bytes
    live = live_results(module) if module is not None and module.is_scheduled else None
    return Memory(
        peak=arguments + outputs + temporaries + code,
        arguments=arguments,
        outputs=outputs,
        temporaries=temporaries,
        code=code,
        gathered=live.gathered if live else None,
        collectives=live.others if live else None,
        capacity=chip.hbm_bytes() if chip else None,
    )


def compiled_or_overflow(compile_: Callable[[], Any]) -> tuple[Any, Memory | None]:
    """Return (the compiled program, None), or (None, its memory) where that does not fit the chip.

    What else the compiler says against the program is raised as it is.
    """
    try:
        return compile_(), None
    except Exception as e:
        overflow = overflow_of(e)
        if overflow is None:
            raise
        return None, overflow


def overflow_of(error: Exception) -> Memory | None:
    """Return what a compiler's error says of the memory that lacked; None for any other error."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    for pattern in _OVERFLOW:
        if found := pattern.search(text):
            return Memory(
                peak=_bytes(found["need"]), capacity=_bytes(found["have"]), compiled=False
            )
    return None


def table(rows: Mapping[str, Memory]) -> str:
    """Return the memory of programs as a table, and a line for each that does not fit.

    >>> print(table({"before": Memory(3 * 2**30, 2**30, 2**30, 2**30, 0, 2**29, 0)}))
    memory  peak     arguments  outputs  code  temporaries  of them gathered  other collectives
    ------  -------  ---------  -------  ----  -----------  ----------------  -----------------
    before  3.0 GiB  1.0 GiB    1.0 GiB  0 B   1.0 GiB      512.0 MiB         0 B
    """
    headers = (
        *("memory", "peak", "arguments", "outputs", "code", "temporaries"),
        *("of them gathered", "other collectives"),
    )
    cells = []
    for title, m in rows.items():
        parts = (m.arguments, m.outputs, m.code, m.temporaries, m.gathered, m.collectives)
        peak = ("" if m.compiled else ">= ") + report.human_bytes(m.peak)
        if m.capacity is not None:
            peak += f" of {report.human_bytes(m.capacity)}"
        cells.append((title, peak, *("-" if p is None else report.human_bytes(p) for p in parts)))
    lines = [report.table(headers, cells)]
    for title, m in rows.items():
        if m.excess:
            most = "" if m.capacity is None else f" than the {report.human_bytes(m.capacity)}"
            least = "" if m.compiled else "at least "
            size = report.human_bytes(m.excess)
            lines.append(f"{title} does not fit: {least}{size} more{most} of the device")
    return "\n".join(lines)


def with_memory(plan: Plan, memories: Mapping[str, Memory]) -> Plan:
    """Return the plan with the memory of its program, ``"before"`` and ``"after"``."""
    return dataclasses.replace(plan, memory=tuple(memories.items()))


def _bytes(text: str) -> int:
    unit = text[-1] if text[-1] in _UNITS else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])
