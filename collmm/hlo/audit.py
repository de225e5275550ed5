"""Which collectives of a scheduled module are hidden behind compute, and which are exposed.

Every computation is walked in schedule order with a clock: work advances it, a start puts a
transfer on its links, a done waits for the transfer. What the done waits is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from collmm.errors import OptionError
from collmm.hlo import cost
from collmm.hlo.calls import executions
from collmm.hlo.collectives import Collective
from collmm.hlo.events import Event, Events, Role
from collmm.hlo.findings import Finding, Verdict, Work, same_links
from collmm.hlo.groups import (
    axes_of_groups,
    axes_of_pairs,
    device_groups,
    device_pairs,
    shift_of_pairs,
)
from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.loops import trip_count
from collmm.hlo.metadata import SourceLine, op_name
from collmm.hlo.parse import Module

# Below this share of its transfer time a collective counts as hidden, above one minus it as
# exposed: the figures are models, a percent is within what they can tell.
_TOLERANCE = 0.01


TransferTime = Callable[[Finding], float]
OpTime = Callable[[Instruction], "float | None"]
SharesLink = Callable[[Finding, Finding], bool]


def audit(
    module: Module,
    *,
    mesh_axes: Mapping[str, int] | None = None,
    transfer_time: TransferTime | None = None,
    clock_hz: float | None = None,
    op_time: OpTime | None = None,
    shares_link: SharesLink | None = None,
) -> list[Finding]:
    """Judge every collective that the entry of ``module`` reaches, in the order they run.

    Args:
      module: a scheduled module.
      mesh_axes: the mesh's axes with their sizes, in order, to name the axes of each collective.
      transfer_time: predicted seconds of a collective alone on its links. Without it only the
        structure is judged: work between start and done makes the verdict unknown.
      clock_hz: TensorCore clock that turns the ``estimated_cycles`` of TPU text into seconds.
      op_time: seconds of an instruction, asked where the text has no figure.
      shares_link: whether two collectives queue for the same link or stream. By default two
        permutes do when they use the same directed edge, any other two when they have a pair of
        devices in common.

    Raises HloError when the text is not scheduled or cannot be read, OptionError when
    ``mesh_axes`` cannot hold the module's devices.
    """
    module.require_schedule()
    if mesh_axes is not None:
        devices = module.num_partitions * module.replica_count
        total = 1
        for size in mesh_axes.values():
            total *= size
        if total != devices:
            raise OptionError(
                f"mesh axes {dict(mesh_axes)} make {total} devices and the module runs on "
                f"{devices}; give the mesh it was compiled for"
            )
    walker = _Walker(module, mesh_axes, transfer_time, clock_hz, op_time, shares_link or same_links)
    walker.walk(module.entry_name)
    return walker.findings


@dataclass(slots=True)
class _Flight:
    """A transfer on its way: its finding's place, start, end, and what runs meanwhile."""

    place: int
    started: float
    finish: float | None
    queued: float
    queued_behind: tuple[str, ...]
    work: list[Work]
    held_up: float = 0.0  # seconds that a synchronous collective waited for this one's link


@dataclass(frozen=True, slots=True)
class _Span:
    """Predicted seconds of a computation: a lower bound unless ``complete``."""

    seconds: float
    complete: bool


class _Walker:
    """The state of one audit: the findings so far, in the order the collectives run."""

    def __init__(
        self,
        module: Module,
        mesh_axes: Mapping[str, int] | None,
        transfer_time: TransferTime | None,
        clock_hz: float | None,
        op_time: OpTime | None,
        shares_link: SharesLink,
    ):
        self.module = module
        self.mesh_axes = mesh_axes
        self.transfer_time = transfer_time
        self.clock_hz = clock_hz
        self.op_time = op_time
        self.shares_link = shares_link
        self.events = Events(module)
        self.executions = executions(module)
        self.findings: list[Finding] = []
        self._spans: dict[str, _Span] = {}

    def walk(self, name: str) -> _Span:
        """Judge the collectives of a computation; its predicted length."""
        if name in self._spans:
            return self._spans[name]
        computation = self.module[name]
        now, complete = 0.0, True
        flights: dict[str, _Flight] = {}
        for event in self.events.of(computation):
            if event.role in (Role.WORK, Role.CALL):
                work = self._work(computation, event)
                for flight in flights.values():
                    flight.work.append(work)
                now += work.seconds or 0.0
                complete &= work.complete
            elif event.role in (Role.START, Role.SYNC):
                flight = self._launch(computation, event, now, flights)
                complete &= flight.finish is not None
                if event.role is Role.START:
                    flights[event.key] = flight
                else:
                    now = self._land(computation, event, flight, now + flight.queued)
            elif event.role is Role.DONE and event.key in flights:
                now = self._land(computation, event, flights.pop(event.key), now)
        for flight in flights.values():
            self._judge(flight, None, "its done is not in the same computation", ())
        self._spans[name] = _Span(now, complete)
        return self._spans[name]

    def _work(self, computation: Computation, event: Event) -> Work:
        i = event.instruction
        if event.role is Role.CALL:
            span = self._call(computation, i)
            return Work(i.name, i.opcode, span.seconds or None, complete=span.complete)
        seconds = cost.seconds(i, self.clock_hz)
        if seconds is None and self.op_time is not None:
            seconds = self.op_time(i)
        return Work(i.name, i.opcode, seconds, cost.estimated_cycles(i), seconds is not None)

    def _call(self, computation: Computation, i: Instruction) -> _Span:
        """Predicted length of all that a while, conditional or call runs."""
        spans = {key: [self.walk(c) for c in names] for key, names in i.called().items()}
        every = [s for group in spans.values() for s in group]
        complete = all(s.complete for s in every)
        if i.opcode == "while":
            turns = trip_count(self.module, computation, i)
            if turns is None:
                return _Span(0.0, False)
            body, test = spans["body"][0].seconds, spans["condition"][0].seconds
            return _Span(turns * body + (turns + 1) * test, complete)
        if i.opcode == "conditional":  # one branch runs, we do not know which
            shortest = min((s.seconds for s in every), default=0.0)
            return _Span(shortest, complete and all(s.seconds == shortest for s in every))
        return _Span(sum(s.seconds for s in every), complete)

    def _launch(self, computation, event, now: float, flights: dict[str, _Flight]) -> _Flight:
        finding = self._describe(computation, event)
        if self.transfer_time is not None:
            finding = replace(finding, transfer=self.transfer_time(finding))
        busy = [
            (f.finish, f)
            for f in flights.values()
            if f.finish is not None
            and f.finish > now
            and self.shares_link(self.findings[f.place], finding)
        ]
        begin, last = max(busy, key=lambda b: b[0], default=(now, None))
        if last is not None and event.role is Role.SYNC:
            last.held_up += begin - now  # nothing else runs: this wait is the other's exposure
        finish = None if finding.transfer is None else begin + finding.transfer
        self.findings.append(finding)
        behind = tuple(self.findings[f.place].name for _, f in busy)
        return _Flight(len(self.findings) - 1, now, finish, begin - now, behind, [])

    def _describe(self, computation: Computation, event: Event) -> Finding:
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
        )
        return replace(finding, **self._peers(c))

    def _source(self, computation: Computation, c: Collective, i: Instruction) -> SourceLine | None:
        """The line of ``i``; where it has none, that of the work it is for or comes from."""
        for own in (i, c.instruction):
            if (source := self.module.source(own)) is not None:
                return source
        after, before = self._user_source(computation, i), self._maker_source(computation, i)
        makes_sum = c.kind in ("reduce-scatter", "all-reduce")
        return before or after if makes_sum else after or before

    def _user_source(self, computation: Computation, i: Instruction) -> SourceLine | None:
        users = (later for later, depends in _later_work(computation, i) if depends)
        first = next(users, None)
        return self.module.source(first) if first else None

    def _maker_source(self, computation: Computation, i: Instruction) -> SourceLine | None:
        """The line of the nearest instruction before, along the last operands, that has one."""
        while i.operands:
            i = computation[i.operands[-1]]
            if (source := self.module.source(i)) is not None:
                return source
        return None

    def _peers(self, c: Collective) -> dict:
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

    def _land(self, computation, event: Event, flight: _Flight, now: float) -> float:
        """Wait for a transfer, judge it, and return the clock after it."""
        finding = self.findings[flight.place]
        exposed = None
        if flight.finish is not None:
            exposed = max(0.0, flight.finish - now) + flight.held_up
        if finding.asynchronous:
            finding = replace(finding, done=event.instruction.name)
            self.findings[flight.place] = finding
        verdict, because, behind = self._verdict(computation, event, flight, exposed)
        self._judge(flight, exposed, because, behind, verdict)
        return now if flight.finish is None else max(now, flight.finish)

    def _judge(self, flight, exposed, because, behind, verdict=Verdict.UNKNOWN) -> None:
        self.findings[flight.place] = replace(
            self.findings[flight.place],
            work=tuple(flight.work),
            exposed=exposed,
            verdict=verdict,
            because=because,
            behind=behind,
        )

    def _verdict(
        self, computation: Computation, event: Event, flight: _Flight, exposed: float | None
    ) -> tuple[Verdict, str, tuple[str, ...]]:
        finding, work = self.findings[flight.place], flight.work
        if not finding.asynchronous:
            return Verdict.EXPOSED, "it is synchronous", ()
        transfer = finding.transfer
        if exposed is not None and transfer is not None:
            if exposed <= _TOLERANCE * transfer:
                return Verdict.HIDDEN, "what runs meanwhile takes longer", ()
            if (
                flight.queued_behind
                and not flight.held_up
                and exposed <= flight.queued + _TOLERANCE * transfer
            ):
                names = flight.queued_behind
                return Verdict.SERIALISED, "its link is taken by another collective", names
        if not work:
            after = _next_work(computation, event.instruction)
            if after is not None and after[1]:
                return Verdict.SERIALISED, "the next work needs its result", (after[0].name,)
            return Verdict.EXPOSED, "nothing runs between its start and its done", ()
        if exposed is None or transfer is None:
            return Verdict.UNKNOWN, "no link time was given", ()
        if all(w.seconds is None for w in work):
            return Verdict.UNKNOWN, "what runs meanwhile has no known time", ()
        untimed = sum(not w.complete for w in work)
        but = f"; the time of {untimed} of {len(work)} is not fully known" if untimed else ""
        if exposed >= (1 - _TOLERANCE) * transfer:
            return Verdict.EXPOSED, "what runs meanwhile is too short to matter" + but, ()
        return Verdict.PARTLY_EXPOSED, "what runs meanwhile is too short" + but, ()


def _next_work(computation: Computation, i: Instruction) -> tuple[Instruction, bool] | None:
    """The first instruction after ``i`` that takes time, and whether it needs ``i``'s result."""
    for work, depends in _later_work(computation, i):
        return work, depends
    return None


def _later_work(computation: Computation, i: Instruction) -> Iterator[tuple[Instruction, bool]]:
    """What takes time after ``i``, in order, each with whether it needs ``i``'s result."""
    tainted = {i.name}
    for later in computation.after(i):
        depends = not tainted.isdisjoint(later.operands)
        if depends:
            tainted.add(later.name)
        if not cost.is_free(later):
            yield later, depends
