"""The clock that walks a schedule: what runs when, and what is waited for.

Every computation is walked in schedule order with a clock of its own that begins at 0. Work
advances it; a start puts a transfer on its links, behind those that hold one of them; a done waits
for the transfer. Asynchronous copies run on an engine of their own, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from collmm.hlo.cost import estimated_cycles
from collmm.hlo.describe import Describer
from collmm.hlo.durations import Duration, Durations
from collmm.hlo.events import Event, Events, Role
from collmm.hlo.findings import Finding, Verdict, Work
from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.loops import trip_count
from collmm.hlo.parse import Module
from collmm.hlo.verdict import judge

COMPUTE, COPIES, WAIT = "compute", "copies", "waiting"

TransferTime = Callable[[Finding], "float | None"]
SharesLink = Callable[[Finding, Finding], bool]
Lanes = Callable[[Finding], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Segment:
    """Something on a lane of one computation, in predicted seconds from the computation's start.

    ``lane`` is COMPUTE, COPIES, WAIT (nothing computes; ``name`` is what is waited for) or a
    direction of links. ``finding`` is the place of a collective among the findings. A call has the
    computations it runs as ``bodies`` and how often as ``turns``.
    """

    lane: str
    name: str
    start: float
    seconds: float
    kind: str = ""
    origin: str = ""
    finding: int | None = None
    bodies: tuple[str, ...] = ()
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Span:
    """Predicted seconds of a computation: what they go to. Lower bounds unless ``complete``."""

    compute: float = 0.0
    exposed: float = 0.0
    copying: float = 0.0
    complete: bool = True

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.exposed + self.copying

    def __add__(self, other: Span) -> Span:
        return Span(
            self.compute + other.compute,
            self.exposed + other.exposed,
            self.copying + other.copying,
            self.complete and other.complete,
        )

    def times(self, count: int) -> Span:
        """This, ``count`` times over."""
        return Span(count * self.compute, count * self.exposed, count * self.copying, self.complete)


@dataclass(slots=True)
class _Flight:
    """A transfer on its way: its finding's place, when it began and ends, and what runs meanwhile.

    ``held_up`` is how long a synchronous collective waited for this one's link.
    """

    place: int
    finish: float | None
    queued: float
    queued_behind: tuple[str, ...]
    work: list[Work] = field(default_factory=list)
    held_up: float = 0.0


@dataclass(slots=True)
class _Clock:
    """Where the walk of one computation stands."""

    computation: Computation
    now: float = 0.0
    spent: Span = field(default_factory=Span)
    flights: dict[str, _Flight] = field(default_factory=dict)
    copies: dict[str, float] = field(default_factory=dict)
    copying_until: float = 0.0


class Walker:
    """One walk over a module.

    ``findings`` are the collectives in the order they run. ``segments`` are what runs when, per
    computation; ``spans`` how long each takes. ``untimed`` names what takes time that is not
    known, with the reason; ``durations_of`` are the times of each computation's own work.
    """

    def __init__(
        self,
        module: Module,
        *,
        mesh_axes: Mapping[str, int] | None,
        transfer_time: TransferTime | None,
        durations: Durations,
        shares_link: SharesLink,
        lanes: Lanes | None = None,
    ):
        self.module = module
        self.transfer_time = transfer_time
        self.durations = durations
        self.shares_link = shares_link
        self.lanes = lanes or (lambda finding: (", ".join(finding.axes or ("links",)),))
        self.describer = Describer(module, mesh_axes)
        self.events = Events(module)
        self.findings: list[Finding] = []
        self.segments: dict[str, list[Segment]] = {}
        self.spans: dict[str, Span] = {}
        self.untimed: dict[str, str] = {}
        self.durations_of: dict[str, list[Duration]] = {}

    def walk(self, name: str) -> Span:
        """Walk a computation and all it calls; its predicted length."""
        if name in self.spans:
            return self.spans[name]
        clock = _Clock(self.module[name])
        self.segments[name] = []
        self.durations_of[name] = []
        for event in self.events.of(clock.computation):
            if event.role in (Role.WORK, Role.CALL):
                self._run(clock, event)
            elif event.role in (Role.START, Role.SYNC):
                self._launch(clock, event)
            elif event.role is Role.DONE and event.key in clock.flights:
                self._land(clock, event, clock.flights.pop(event.key))
            elif event.role is Role.FREE:
                self._copy(clock, event.instruction)
        for flight in clock.flights.values():
            elsewhere = (Verdict.UNKNOWN, "its done is not in the same computation", ())
            self._record(flight, None, elsewhere)
        self.spans[name] = clock.spent
        return clock.spent

    def _run(self, clock: _Clock, event: Event) -> None:
        i = event.instruction
        if event.role is Role.CALL:
            span, bodies, turns = self._call(clock.computation, i)
            work = Work(i.name, i.opcode, span.seconds or None, complete=span.complete)
            segment = Segment(
                COMPUTE, i.name, clock.now, span.seconds, i.opcode, bodies=bodies, turns=turns
            )
        else:
            work, duration = self._time(clock.computation, i)
            seconds = duration.seconds if duration else 0.0
            span = Span(compute=seconds, complete=duration is not None)
            origin = duration.origin if duration else ""
            segment = Segment(COMPUTE, i.name, clock.now, seconds, i.opcode, origin)
        for flight in clock.flights.values():
            flight.work.append(work)
        if span.seconds:
            self.segments[clock.computation.name].append(segment)
        clock.now += span.seconds
        clock.spent += span

    def _time(self, computation: Computation, i: Instruction) -> tuple[Work, Duration | None]:
        duration = self.durations.of(self.module, computation, i)
        if duration is None:
            self.untimed[i.name] = i.opcode
            return Work(i.name, i.opcode, None, complete=False), None
        self.durations_of[computation.name].append(duration)
        work = Work(i.name, i.opcode, duration.seconds, estimated_cycles(i), True, duration.origin)
        return work, duration

    def _call(self, computation: Computation, i: Instruction) -> tuple[Span, tuple[str, ...], int]:
        """Predicted length of all that a while, conditional or call runs; what, and how often."""
        called = i.called()
        spans = {key: [self.walk(c) for c in names] for key, names in called.items()}
        if i.opcode == "while":
            turns = trip_count(self.module, computation, i)
            body, test = spans["body"][0], spans["condition"][0]
            if turns is None:
                self.untimed[i.name] = "a loop of unknown length"
                return Span(complete=False), (), 0
            bodies = (*called["condition"], *called["body"])
            return body.times(turns) + test.times(turns + 1), bodies, turns
        if i.opcode == "conditional":  # one branch runs, we do not know which
            every = [(s, c) for key in spans for s, c in zip(spans[key], called[key], strict=True)]
            shortest, name = min(every, key=lambda e: e[0].seconds)
            alike = all(s.complete and s.seconds == shortest.seconds for s, _ in every)
            if not alike:
                self.untimed[i.name] = "branches of different length"
            return replace(shortest, complete=alike), (name,), 1
        total = sum((s for group in spans.values() for s in group), Span())
        return total, tuple(c for names in called.values() for c in names), 1

    def _launch(self, clock: _Clock, event: Event) -> None:
        finding = self.describer.finding(clock.computation, event)
        if self.transfer_time is not None:
            finding = replace(finding, transfer=self.transfer_time(finding))
            if finding.transfer is None:
                self.untimed[finding.name] = f"{finding.kind} without a link model"
        busy = [
            (f.finish, f)
            for f in clock.flights.values()
            if f.finish is not None
            and f.finish > clock.now
            and self.shares_link(self.findings[f.place], finding)
        ]
        begin, last = max(busy, key=lambda b: b[0], default=(clock.now, None))
        if last is not None and event.role is Role.SYNC:
            last.held_up += begin - clock.now  # nothing else runs: it is the other's exposure
        finish = None if finding.transfer is None else begin + finding.transfer
        behind = tuple(self.findings[f.place].name for _, f in busy)
        place = len(self.findings)
        self.findings.append(finding)
        if finding.transfer is not None:
            self.segments[clock.computation.name] += [
                Segment(lane, finding.name, begin, finding.transfer, finding.kind, finding=place)
                for lane in self.lanes(finding)
            ]
        clock.spent += Span(complete=finish is not None)
        flight = _Flight(place, finish, begin - clock.now, behind)
        if event.role is Role.START:
            clock.flights[event.key] = flight
        else:
            self._wait(clock, finding.name, begin, place)
            self._land(clock, event, flight)

    def _land(self, clock: _Clock, event: Event, flight: _Flight) -> None:
        """Wait for a transfer and judge it."""
        finding = self.findings[flight.place]
        exposed = None
        if flight.finish is not None:
            exposed = max(0.0, flight.finish - clock.now) + flight.held_up
            self._wait(clock, finding.name, flight.finish, flight.place)
        if finding.asynchronous:
            finding = replace(finding, done=event.instruction.name)
            self.findings[flight.place] = finding
        judgement = judge(
            clock.computation,
            event.instruction,
            finding,
            work=flight.work,
            exposed=exposed,
            queued=flight.queued,
            queued_behind=() if flight.held_up else flight.queued_behind,
        )
        self._record(flight, exposed, judgement)

    def _wait(self, clock: _Clock, name: str, until: float, place: int | None) -> None:
        """Let the clock stand until a transfer, or without a place a copy, has ended."""
        seconds = until - clock.now
        if seconds <= 0:
            return
        kind = "copy" if place is None else self.findings[place].kind
        self.segments[clock.computation.name].append(
            Segment(WAIT, name, clock.now, seconds, kind, finding=place)
        )
        clock.spent += Span(copying=seconds) if place is None else Span(exposed=seconds)
        clock.now = until

    def _copy(self, clock: _Clock, i: Instruction) -> None:
        if i.opcode.endswith("-done") and i.operands and i.operands[0] in clock.copies:
            self._wait(clock, i.name, clock.copies.pop(i.operands[0]), None)
        elif i.opcode.endswith("-start"):
            duration = self.durations.copy(self.module, clock.computation, i)
            if duration is None:
                return
            begin = max(clock.now, clock.copying_until)
            clock.copying_until = clock.copies[i.name] = begin + duration.seconds
            self.segments[clock.computation.name].append(
                Segment(COPIES, i.name, begin, duration.seconds, "copy", duration.origin)
            )

    def _record(self, flight: _Flight, exposed: float | None, judgement) -> None:
        verdict, because, behind = judgement
        self.findings[flight.place] = replace(
            self.findings[flight.place],
            work=tuple(flight.work),
            exposed=exposed,
            verdict=verdict,
            because=because,
            behind=behind,
        )
