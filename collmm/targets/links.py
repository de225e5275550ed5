"""What a transfer of a schedule takes on a target's links, and which links that are. No jax.

Torus: every hop of every member is routed on the slice, one torus axis after the other, the
shorter way round where the axis wraps; the busiest directed link decides. NVLink switch: a device
sends at its whole egress, whatever the direction. Between hosts: through each device's own network
interface. Devices are anything with ``coords`` (TPU) or ``process_index`` (GPU).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from collmm.cost import collectives
from collmm.cost.collectives import Ring, torus_ring
from collmm.cost.figures import Basis
from collmm.errors import TargetError
from collmm.hlo.findings import Finding
from collmm.targets import rings
from collmm.targets.target import Target

_ONE_RING = (
    "reduce-scatters that the compiler writes as one ring (StrategyRing, 1 colour) are taken to "
    "use one direction of its links; if they use both they take half as long"
)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective on its links.

    Attributes:
        seconds: predicted, launch included; None where a figure is missing.
        links: what it occupies while it runs; transfers with a link in common queue.
        lanes: the directions of links it runs over, named for people: ``"model +"``, ``"model -"``.
        note: what had to be assumed, or empty.
    """

    seconds: float | None
    links: frozenset[Hashable]
    lanes: tuple[str, ...]
    note: str = ""


class Links:
    """The links between the devices of a program on a target.

    Args:
        target: a TPU or GPU target; a cpu's links are those of its planning hardware.
        devices: the devices in the order of the program's device assignment, under jax
            ``mesh.devices.flat``. Without them every group is one torus axis of its own, or one
            host's switch, and permutes are taken to go to neighbours.
        basis: ``"achievable"`` or ``"nominal"`` link rates.
    """

    def __init__(
        self,
        target: Target,
        devices: Sequence[Any] | None = None,
        basis: Basis = "achievable",
    ):
        self.target = target
        self.chip = target.hardware or target.fallback
        self.basis = basis
        self.devices = None if devices is None or target.kind == "cpu" else list(devices)
        self._seen: dict[Hashable, Transfer] = {}
        self._rings: dict[Hashable, Ring] = {}
        self._used: dict[Hashable, frozenset[Hashable]] = {}

    def transfer(self, finding: Finding) -> Transfer:
        """Price a collective of a schedule.

        An all-gather, reduce-scatter or all-reduce takes what ``collmm.cost.collectives`` gives for
        the links its groups span. Where the TPU compiler writes that a reduce-scatter runs a single
        ring, that ring is taken to use one direction of its links.
        """
        key = (
            finding.kind,
            finding.operand_bytes,
            finding.result_bytes,
            finding.groups,
            finding.pairs,
            finding.rings,
        )
        if key not in self._seen:
            if finding.pairs or not finding.groups:
                self._seen[key] = self._permute(finding)
            else:
                self._seen[key] = self._collective(finding)
        return self._seen[key]

    def ring(self, finding: Finding) -> Ring:
        """The ring of the groups of a collective other than a permute, for the cost model."""
        if finding.groups not in self._rings:
            self._rings[finding.groups] = self._ring(finding)
        return self._rings[finding.groups]

    def shares(self, one: Finding, other: Finding) -> bool:
        """Whether two collectives queue for a link."""
        return not self.transfer(one).links.isdisjoint(self.transfer(other).links)

    # --- collectives of groups ---

    def _collective(self, finding: Finding) -> Transfer:
        ring = self.ring(finding)
        full, note = finding.bytes, ring.note
        one_way = finding.kind == "reduce-scatter" and finding.rings == 1
        if one_way and ring.kind == "torus" and ring.size > 2:
            note = "; ".join(filter(None, (note, _ONE_RING)))
            # One ring through all members, not one per torus axis.
            ring_s = full * (ring.size - 1) / ring.size / ring.link
            seconds = max(ring_s, (ring.size - 1) * ring.hop_s)
        else:
            seconds = self._seconds(ring, finding, full)
        lanes = self._lanes(finding, (" +",) if one_way else (" +", " -"))
        return Transfer(seconds + self._launch(ring), self._links_of(finding), lanes, note)

    def _seconds(self, ring: Ring, finding: Finding, full: int) -> float:
        if finding.kind == "all-reduce":
            return collectives.all_reduce_s(ring, full)
        if finding.kind in ("all-to-all", "ragged-all-to-all"):
            return collectives.all_to_all_s(ring, finding.operand_bytes * ring.size)
        # A broadcast is taken to take what an all-gather of its bytes does.
        return collectives.all_gather_s(ring, full)

    def _launch(self, ring: Ring) -> float:
        return ring.launch_s if ring.size > 1 else 0.0

    def _ring(self, finding: Finding) -> Ring:
        groups = finding.groups
        if self.devices is None or len({len(g) for g in groups}) > 1:
            return self._assumed_ring(max(len(g) for g in groups))
        members = self._members(groups)
        if self.target.kind == "gpu":
            return rings.gpu_ring_of(self.chip, members, self.basis)
        return rings.tpu_ring_of(
            self.chip, self.target.shape, self.target.wrap, members, self.basis
        )

    def _assumed_ring(self, size: int) -> Ring:
        if self.chip.kind == "tpu":
            return torus_ring(self.chip, (size,), basis=self.basis)
        per_node = min(size, self.target.shape[-1])
        nodes = -(-size // per_node)
        return collectives.gpu_ring(self.chip, per_node, nodes, self.basis)

    def _members(self, groups: Sequence[Sequence[int]]) -> np.ndarray:
        assert self.devices is not None
        most = max(max(g) for g in groups)
        if most >= len(self.devices):
            raise TargetError(
                f"{self.target.name} has {len(self.devices)} devices and the program names "
                f"device {most}; give the target it was compiled for"
            )
        members = np.empty((len(groups), len(groups[0])), object)
        for row, group in enumerate(groups):
            members[row] = [self.devices[d] for d in group]
        return members

    def _links_of(self, finding: Finding) -> frozenset[Hashable]:
        """Every directed link the groups can use: between neighbours inside the span of each."""
        if finding.groups not in self._used:
            self._used[finding.groups] = frozenset(
                link for group in finding.groups for link in self._inside(group)
            )
        return self._used[finding.groups]

    def _inside(self, group: Sequence[int]) -> list[Hashable]:
        if self.devices is None:
            ring = zip(group, (*group[1:], group[0]), strict=True)
            return [edge for s, t in ring for edge in ((s, t), (t, s)) if s != t]
        if self.target.kind == "gpu":
            hosts = {self.devices[d].process_index for d in group}
            kinds = ("out", "network") if len(hosts) > 1 else ("out",)
            return [(kind, d) for d in group for kind in kinds]
        return list(self._torus_links([self._place(d) for d in group]))

    def _torus_links(self, places: list[tuple[int, ...]]) -> set[Hashable]:
        here = set(places)
        found: set[Hashable] = set()
        for axis, size in enumerate(self.target.shape):
            if len({p[axis] for p in places}) < 2:
                continue
            for place, step in itertools.product(here, (1, -1)):
                there = list(place)
                there[axis] += step
                if self.target.wrap[axis]:
                    there[axis] %= size
                if tuple(there) in here:
                    found.add((place, axis, step))
        return found

    # --- permutes ---

    def _permute(self, finding: Finding) -> Transfer:
        lanes = self._lanes(finding, (_direction(finding),))
        pairs = [(s, t) for s, t in finding.pairs if s != t]
        if not pairs:
            return Transfer(0.0, frozenset(), lanes)
        if self.devices is None:
            chip_link = self.chip.peer_bytes_per_s(self.basis)
            seconds = max(finding.bytes / chip_link, self.chip.hop_latency.value)
            return Transfer(seconds + self.chip.launch.value, frozenset(pairs), lanes)
        self._members(pairs)  # checks the devices
        if self.target.kind == "gpu":
            return self._switched_permute(finding, pairs, lanes)
        load: Counter[Hashable] = Counter()
        longest = 0
        for s, t in pairs:
            route = list(
                rings.route(self._place(s), self._place(t), self.target.shape, self.target.wrap)
            )
            longest = max(longest, len(route))
            load.update(route)
        busiest = max(load.values(), default=0)
        link = self.chip.link_bytes_per_s(self.basis)
        seconds = max(finding.bytes * busiest / link, longest * self.chip.hop_latency.value)
        return Transfer(seconds + self.chip.launch.value, frozenset(load), lanes)

    def _switched_permute(self, finding: Finding, pairs, lanes) -> Transfer:
        assert self.devices is not None
        host = [d.process_index for d in self.devices]
        out = [(s, host[s] != host[t]) for s, t in pairs]
        links = frozenset(("network" if leaves else "out", s) for s, leaves in out)
        rate: float | None = self.chip.peer_bytes_per_s(self.basis)
        if any(leaves for _, leaves in out):
            rate = self.chip.dcn_bytes_per_s(self.basis)
        if rate is None:
            note = f"no network bandwidth is known for {self.chip.name}"
            return Transfer(None, links, lanes, note)
        seconds = max(finding.bytes / rate, self.chip.hop_latency.value)
        return Transfer(seconds + self.chip.launch.value, links, lanes)

    # --- names ---

    def _lanes(self, finding: Finding, ways: Sequence[str]) -> tuple[str, ...]:
        over = ",".join(finding.axes) if finding.axes else "links"
        if self.target.kind == "gpu":  # a switch has one way out of a device
            return (over,)
        return tuple(over + way for way in ways)

    def _place(self, device: int) -> tuple[int, ...]:
        assert self.devices is not None
        return tuple(self.devices[device].coords[: len(self.target.shape)])


def _direction(finding: Finding) -> str:
    """Which way round a permute goes: by its shift along a mesh axis, else as most of its pairs."""
    if finding.shift is not None:
        return " +" if finding.shift > 0 else " -"
    upward = sum((t > s) - (t < s) for s, t in finding.pairs)
    return " +" if upward > 0 else " -" if upward < 0 else " permute"
