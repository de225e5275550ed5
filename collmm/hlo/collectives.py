"""The collectives of a module: which they are, what they move, how often they run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from collmm.hlo.calls import executions
from collmm.hlo.groups import spelled_mesh
from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.parse import Module

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# Finds lines that may be collectives, for Module.matching.
PATTERN = re.compile(rb" (?:" + "|".join(KINDS).encode() + rb")(?:-start)?\(")
_CHAIN = re.compile(r'chain_id="([^"]*)"')
_REDUCE_SCATTER_FUSION = re.compile(r"all-reduce-scatter\b")
_START_TARGET = '"AsyncCollectiveStart"'


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective where it stands in the text.

    ``operand_bytes`` is what each device puts in, ``result_bytes`` what it gets out.
    """

    kind: str
    computation: str
    instruction: Instruction
    operand_bytes: int
    result_bytes: int

    @property
    def bytes(self) -> int:
        """The larger of operand and result, in bytes per device.

        That is the whole gathered array of an all-gather, the whole array that goes into a
        reduce-scatter, all-reduce or all-to-all, and the message of a permute: the volume V of
        the usual time formulas.
        """
        return max(self.operand_bytes, self.result_bytes)


@dataclass(frozen=True, slots=True)
class CollectiveCount:
    """All collectives of one kind.

    ``count`` and ``bytes`` are those in the text, each once (a start and its done are one).
    ``executed`` and ``executed_bytes`` multiply by how often the computation around it runs; both
    are None when that is unknown for any, and ``unknown`` is for how many of ``count``.
    """

    kind: str
    count: int = 0
    bytes: int = 0
    executed: int | None = 0
    executed_bytes: int | None = 0
    unknown: int = 0

    def plus(self, size: int, times: int | None) -> CollectiveCount:
        """This with one more collective of ``size`` bytes that runs ``times`` times."""
        if times is None or self.executed is None or self.executed_bytes is None:
            executed, executed_bytes = None, None
        else:
            executed = self.executed + times
            executed_bytes = self.executed_bytes + times * size
        return CollectiveCount(
            self.kind,
            self.count + 1,
            self.bytes + size,
            executed,
            executed_bytes,
            self.unknown + (times is None),
        )


def kind_of(opcode: str) -> str | None:
    """The kind of collective that ``opcode`` is or starts; None for anything else."""
    base = opcode.removesuffix("-start")
    return base if base in KINDS else None


def chain_id(i: Instruction) -> str | None:
    """The chain of a TPU async collective fusion that ``i`` belongs to; None for others."""
    found = _CHAIN.search(i.attrs.get("frontend_attributes", ""))
    return found[1] if found else None


def collectives(module: Module) -> Iterator[Collective]:
    """Every collective of the text, in its order, each once.

    A TPU async collective fusion repeats its collective in the starting fusion, in the compute
    fusions that advance it and in the closing one: the start alone counts. A TPU fusion
    ``all-reduce-scatter`` (an all-reduce of which each device keeps a slice) is a reduce-scatter.
    """
    for name in module:
        found = [i for i in module.matching(name, PATTERN) if kind_of(i.opcode)]
        if found:
            computation = module[name]
            for i in found:
                if chain_id(i) is None or _starts(computation):
                    yield measured(computation, computation[i.name])


def measured(computation: Computation, i: Instruction) -> Collective:
    """The collective instruction ``i`` of ``computation`` with its bytes."""
    kind = kind_of(i.opcode)
    assert kind is not None, i
    root = computation.root
    if (
        kind == "all-reduce"
        and _REDUCE_SCATTER_FUSION.match(computation.name)
        and root.opcode in ("dynamic-slice", "bitcast", "reshape")
        and (whole := computation.parameter(0)) is not None
    ):
        # Inside, the array is padded to the emitter's liking; the parameter is what comes in.
        return Collective(
            "reduce-scatter", computation.name, i, whole.shape.bytes, root.shape.bytes
        )
    operands = sum(o.shape.bytes for o in computation.operands(i))
    if kind == "ragged-all-to-all":  # operands: input, output buffer, four index arrays
        operands = computation.operands(i)[0].shape.bytes
    return Collective(kind, computation.name, i, operands, _result_bytes(computation, i))


def summarize(module: Module) -> dict[str, CollectiveCount]:
    """Count a module's collectives by kind; kinds that do not occur are left out."""
    times = executions(module)
    out: dict[str, CollectiveCount] = {}
    for c in collectives(module):
        had = out.get(c.kind, CollectiveCount(c.kind))
        out[c.kind] = had.plus(c.bytes, times[c.computation])
    return {k: out[k] for k in KINDS if k in out}


def written_mesh(module: Module, devices: int) -> dict[str, int] | None:
    """The mesh of ``devices`` that the text itself spells in its collectives, axes to sizes.

    None where it spells none, several, or one of other devices.
    """
    meshes = []
    for c in collectives(module):
        mesh = spelled_mesh(c.instruction.attrs.get("replica_groups", ""))
        if mesh is not None and mesh not in meshes:
            meshes.append(mesh)
    if len(meshes) != 1 or math.prod(meshes[0].values()) != devices:
        return None
    return meshes[0]


def _starts(computation: Computation) -> bool:
    """Whether this is the starting fusion of an async collective fusion."""
    return computation.root.attrs.get("custom_call_target") == _START_TARGET


def _result_bytes(computation: Computation, i: Instruction) -> int:
    if not i.opcode.endswith("-start"):
        return i.shape.bytes
    if (done := computation.done_of(i)) is not None:
        return done.shape.bytes
    # all-reduce-start has the result's own shape, the others (operands, result, ...).
    shape = i.shape
    if i.opcode == "all-reduce-start" or not shape.is_tuple or len(shape.elements) < 2:
        return shape.bytes
    return shape.elements[1].bytes
