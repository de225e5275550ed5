"""What an audit says about one collective."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from collmm.hlo.groups import Groups, Pairs
from collmm.hlo.metadata import SourceLine


class Verdict(enum.Enum):
    """How a collective fares in the schedule."""

    HIDDEN = "hidden"
    PARTLY_EXPOSED = "partly-exposed"
    EXPOSED = "exposed"
    SERIALISED = "serialised"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Work:
    """Something that runs while a collective is in flight.

    ``seconds`` is the predicted time of one run, all turns of a loop together; None when neither
    the text nor the caller says. It is a lower bound unless ``complete``: something inside a loop
    or call had no time. ``cycles`` is the TPU compiler's own estimate; ``origin`` says where
    ``seconds`` come from, empty for a loop or call.
    """

    name: str
    opcode: str
    seconds: float | None
    cycles: int | None = None
    complete: bool = True
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One collective of the schedule.

    Bytes are per device and per run: ``operand_bytes`` put in, ``result_bytes`` got out, ``bytes``
    the larger. ``pairs`` are a permute's (source, target) devices, ``groups`` the devices of any
    other collective. ``axes`` are the mesh axes it runs over, None when no mesh was given or the
    groups are not whole axes; ``shift`` is how far a permute along one axis moves each shard.
    ``line`` is that of the text, ``source`` the user's; where the compiler gives none, as for a
    gathered argument, that of the work that needs it, or for a reduction of the work that made it.
    ``rings`` is how many rings at once the TPU compiler's text says it runs, None where it says
    nothing. ``executed`` is how often it runs, None when unknown. ``work`` is what runs between
    start and done.

    Times are predicted seconds per run: ``transfer`` from the caller's link model, ``exposed`` what
    of it no work covers, both None without a link model. ``exposed`` is an upper bound when some
    of ``work`` has no time. ``because`` says why the verdict, and ``behind`` names the instructions
    a serialised collective waits for or holds up.
    """

    kind: str
    name: str
    computation: str
    line: int
    source: SourceLine | None
    op_name: str
    operand_bytes: int
    result_bytes: int
    asynchronous: bool
    executed: int | None
    groups: Groups = ()
    pairs: Pairs = ()
    axes: tuple[str, ...] | None = None
    shift: int | None = None
    rings: int | None = None
    done: str | None = None
    work: tuple[Work, ...] = ()
    transfer: float | None = None
    exposed: float | None = None
    verdict: Verdict = Verdict.UNKNOWN
    because: str = ""
    behind: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The larger of what a device puts in and gets out."""
        return max(self.operand_bytes, self.result_bytes)


def same_links(one: Finding, other: Finding) -> bool:
    """Whether two collectives use a link in common, going by the devices they join."""
    if one.pairs and other.pairs:
        return not set(one.pairs).isdisjoint(other.pairs)
    first, second = (
        [set(g) for g in f.groups] or [set(p) for p in f.pairs if p[0] != p[1]]
        for f in (one, other)
    )
    return any(len(a & b) > 1 for a in first for b in second)
