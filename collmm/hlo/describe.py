"""What a collective is: the facts of a finding that do not depend on when it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from collmm.hlo import cost
from collmm.hlo.calls import executions
from collmm.hlo.collectives import Collective
from collmm.hlo.events import Event, Role
from collmm.hlo.findings import Finding
from collmm.hlo.groups import (
    axes_of_groups,
    axes_of_pairs,
    device_groups,
    device_pairs,
    shift_of_pairs,
)
from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.metadata import SourceLine, op_name
from collmm.hlo.parse import Module

_COLOURS = re.compile(r"StrategyRing\{colors:(\d+)")


class Describer:
    """Describes the collectives of one module."""

    def __init__(self, module: Module, mesh_axes: Mapping[str, int] | None):
        self.module = module
        self.mesh_axes = mesh_axes
        self.executions = executions(module)

    def finding(self, computation: Computation, event: Event) -> Finding:
        """The finding of the collective that ``event`` starts or runs, not yet judged."""
        c = event.collective
        assert c is not None
        i = event.instruction
        metadata = i.attrs.get("metadata", "") or c.instruction.attrs.get("metadata", "")
        finding = Finding(
            kind=c.kind,
            name=i.name,
            computation=computation.name,
            line=i.line,
            source=self._source(computation, c, i),
            op_name=op_name(metadata),
            operand_bytes=c.operand_bytes,
            result_bytes=c.result_bytes,
            asynchronous=event.role is Role.START,
            executed=self.executions[computation.name],
            rings=_rings(i) or _rings(c.instruction),
        )
        return replace(finding, **self._peers(c))

    def _source(self, computation: Computation, c: Collective, i: Instruction) -> SourceLine | None:
        """The line of ``i``; where it has none, that of the work it is for or comes from."""
        for own in (i, c.instruction):
            if (source := self.module.source(own)) is not None:
                return source
        if i.opcode == "fusion" and (source := source_of(self.module, i)) is not None:
            return source
        after, before = self._user_source(computation, i), self._maker_source(computation, i)
        makes_sum = c.kind in ("reduce-scatter", "all-reduce")
        return before or after if makes_sum else after or before

    def _user_source(self, computation: Computation, i: Instruction) -> SourceLine | None:
        for later, depends in later_work(computation, i):
            if depends and (source := source_of(self.module, later)) is not None:
                return source
        return None

    def _maker_source(self, computation: Computation, i: Instruction) -> SourceLine | None:
        """The line of the nearest instruction before, along the last operands, that has one."""
        while i.operands:
            i = computation[i.operands[-1]]
            if (source := source_of(self.module, i)) is not None:
                return source
        return None

    def _peers(self, c: Collective) -> dict[str, Any]:
        size = {"replicas": self.module.replica_count, "partitions": self.module.num_partitions}
        axes = self.mesh_axes
        if c.kind == "collective-permute":
            pairs = device_pairs(c.instruction, **size)
            if axes is None:
                return {"pairs": pairs}
            shift = shift_of_pairs(pairs, axes)
            return {"pairs": pairs, "axes": axes_of_pairs(pairs, axes), "shift": shift}
        groups = device_groups(c.instruction, **size)
        return {"groups": groups, "axes": axes_of_groups(groups, axes) if axes else None}


def source_of(module: Module, i: Instruction) -> SourceLine | None:
    """The user's line of ``i``; of a fusion without one, that of the last inside that has one."""
    if (source := module.source(i)) is not None or i.opcode != "fusion":
        return source
    for name in i.called().get("calls", ()):
        for inner in reversed(module[name].instructions) if name in module else ():
            if (source := source_of(module, inner)) is not None:
                return source
    return None


def later_work(computation: Computation, i: Instruction) -> Iterator[tuple[Instruction, bool]]:
    """What takes time after ``i``, in order, each with whether it needs ``i``'s result."""
    tainted = {i.name}
    for later in computation.after(i):
        depends = not tainted.isdisjoint(later.operands)
        if depends:
            tainted.add(later.name)
        if not cost.is_free(later):
            yield later, depends


def _rings(i: Instruction) -> int | None:
    """How many rings a TPU collective of the ring strategy runs at once, as its text says."""
    config = i.backend_config.get("collective_algorithm_config")
    if not isinstance(config, dict) or config.get("strategy") != "StrategyRing":
        return None
    found = _COLOURS.search(str(config.get("debug", "")))
    return int(found[1]) if found else None
