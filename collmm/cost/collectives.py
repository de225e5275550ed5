"""Seconds a collective takes on a ring or torus of TPUs and on GPUs, and a permute ring beside it.

Throughout, V is the full (gathered) size in bytes, X the number of members, ``link`` the one-way
bandwidth in bytes/s, W = 2 * link the two-way bandwidth of one torus axis, n the number of torus
axes the members span. The formulas are those of the scaling book (sharding.md for TPU, gpus.md for
GPU); what is derived from them here says so. No time includes the launch of the collective, which
is ``Ring.launch_s``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from collmm.cost.figures import Basis, Chip
from collmm.errors import OptionError


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices of one collective and the links between them.

    Attributes:
        kind: ``"torus"`` (ICI), ``"switch"`` (NVLink: a device reaches every peer at ``link``),
            ``"peers"`` (xGMI: every pair has its own wire of ``peer``), ``"nodes"`` (several NVLink
            domains, or TPU slices, over the network).
        axes: torus: chips per torus axis spanned; nodes: (nodes, members per node); else (size,).
        wraps: torus: whether each axis has wraparound links.
        link: one-way bytes/s of one ICI link, or of all links of a GPU together.
        peer: one-way bytes/s to one neighbour.
        network: bytes/s of one device beyond its node; 0 where the ring does not leave it.
        permute_load: torus: shards that cross the busiest directed link in one step of a one-way
            permute ring, and half shards in one of a two-way ring.
        neighbour_hops: torus: hops of the longest step from one member to the next.
        per_chip: torus: members that are devices of one chip and share its links.
        dims: torus: axes of the pod, spanned or not.
        hop_s: seconds per hop; on GPUs the latency of one collective.
        launch_s: seconds to start one collective.
        step_s: seconds one step of a permute loop costs besides its transfer.
        permute_share: the part of the links' rate that a permute achieves.
        scatter_share: the part of an all-gather's rate that a reduce-scatter achieves.
        note: what had to be assumed, or empty.
    """

    kind: Literal["torus", "switch", "peers", "nodes"]
    axes: tuple[int, ...]
    wraps: tuple[bool, ...]
    link: float
    peer: float
    network: float
    hop_s: float
    launch_s: float
    step_s: float
    permute_load: tuple[int, int] = (1, 1)
    neighbour_hops: int = 1
    per_chip: int = 1
    dims: int = 0
    permute_share: float = 1.0
    scatter_share: float = 1.0
    note: str = ""

    @property
    def size(self) -> int:
        """Number of members."""
        return math.prod(self.axes) * self.per_chip


def torus_ring(
    chip: Chip,
    axes: Sequence[int],
    slice_shape: Sequence[int] | None = None,
    wraps: Sequence[bool] | None = None,
    basis: Basis = "achievable",
) -> Ring:
    """A ring over whole torus axes of a TPU slice.

    Args:
        chip: a TPU row.
        axes: chips along each torus axis spanned; axes of one chip are dropped.
        slice_shape: chips per torus axis of the slice, for the wraparound rule.
        wraps: overrides the rule, one entry per entry of ``axes``.
        basis: ``"achievable"`` or ``"nominal"`` link rates.

    The members are taken to be in the best order there is. One axis closes by its wraparound;
    several do when all wrap, or when their number is even, as a grid then has a cycle through all
    its members (``Target.ring`` looks at a mesh's real order). Otherwise the step from the last to
    the first goes back through the reverse links. Where no wraparound rule is known the axis is
    taken not to wrap, and ``note`` says so.
    """
    if chip.kind != "tpu":
        raise OptionError(f"{chip.name} is a {chip.kind} and has no torus; use gpu_ring")
    if wraps is not None and len(wraps) != len(axes):
        raise OptionError(f"wraps has {len(wraps)} entries for {len(axes)} torus axes")
    _check_sizes("torus axes", axes)
    shape = None if slice_shape is None else tuple(slice_shape)
    known = [chip.wraps(size, shape) for size in axes] if wraps is None else list(wraps)
    kept = [(size, bool(wrap)) for size, wrap in zip(axes, known, strict=True) if size > 1]
    unknown = any(wrap is None for wrap in known)
    size = math.prod(axes)
    closed = all(wrap for _, wrap in kept) or (len(kept) > 1 and size % 2 == 0)
    link = chip.link_bytes_per_s(basis)
    return Ring(
        kind="torus",
        axes=tuple(size for size, _ in kept) or (1,),
        wraps=tuple(wrap for _, wrap in kept) or (False,),
        link=link,
        peer=link,
        network=0.0,
        hop_s=chip.hop_latency.value,
        launch_s=chip.launch.value,
        step_s=chip.step_launch.value,
        permute_load=(1, 1) if closed else (1, 2),
        neighbour_hops=1 if closed else size - 1,
        dims=chip.torus_dims,
        permute_share=chip.share("permute_share"),
        scatter_share=chip.share("scatter_share"),
        note=f"{chip.name}: {chip.wrap.source}; taken not to wrap" if unknown else "",
    )


def gpu_ring(chip: Chip, per_node: int, nodes: int = 1, basis: Basis = "achievable") -> Ring:
    """A ring of ``nodes * per_node`` GPUs, ``per_node`` of them in each NVLink domain.

    Raises OptionError when ``per_node`` exceeds the domain.
    """
    if chip.kind != "gpu":
        raise OptionError(f"{chip.name} is a {chip.kind} and has no NVLink; use torus_ring")
    _check_sizes("GPUs per node and nodes", (per_node, nodes))
    if per_node > chip.domain:
        raise OptionError(f"{per_node} {chip.name} do not fit one NVLink domain of {chip.domain}")
    return _switched(chip, per_node, nodes, basis)


def network_ring(chip: Chip, nodes: int, per_node: int = 1, basis: Basis = "achievable") -> Ring:
    """A ring over ``nodes`` TPU slices or GPU nodes, ``per_node`` members in each."""
    _check_sizes("nodes and members per node", (nodes, per_node))
    return _switched(chip, per_node, nodes, basis)


def _switched(chip: Chip, per_node: int, nodes: int, basis: Basis) -> Ring:
    link, peer = chip.link_bytes_per_s(basis), chip.peer_bytes_per_s(basis)
    network = chip.dcn_bytes_per_s(basis)
    if nodes > 1 and network is None:
        raise OptionError(f'no network bandwidth is known for {chip.name}; set "dcn" in a profile')
    axes = (nodes, per_node) if nodes > 1 else (per_node,)
    return Ring(
        kind="nodes" if nodes > 1 else "switch" if peer == link else "peers",
        axes=axes,
        wraps=(True,) * len(axes),
        link=link,
        peer=peer,
        network=network or 0.0,
        hop_s=chip.hop_latency.value,
        launch_s=chip.launch.value,
        step_s=chip.step_launch.value,
        permute_share=chip.share("permute_share"),
        scatter_share=chip.share("scatter_share"),
    )


def all_gather_s(ring: Ring, full_bytes: float, two_way: bool = True) -> float:
    """Seconds of an all-gather whose result is ``full_bytes`` on every member.

    Torus, every axis wrapping: V/(nW); one-way or without wraparound: V(X-1)/X over the one-way
    bandwidth of the n axes (book, sharding.md). At least one hop latency per hop (book): half an
    axis when it wraps and both ways are used, else X-1. GPU in one node: V(X-1)/(X link); over
    several: the slower of the node's network V/(k network), k members per node, and of NVLink
    inside it (book, gpus.md). Peers: as in a node, over X-1 wires (derived).
    """
    if ring.size == 1:
        return 0.0
    return max(full_bytes / _gather_rate(ring, two_way), _hops(ring, two_way) * ring.hop_s)


def reduce_scatter_s(ring: Ring, full_bytes: float, two_way: bool = True) -> float:
    """Seconds of a reduce-scatter whose operand is ``full_bytes``: as an all-gather (book)."""
    return all_gather_s(ring, full_bytes / ring.scatter_share, two_way)


def all_reduce_s(ring: Ring, full_bytes: float, two_way: bool = True) -> float:
    """Seconds of an all-reduce of ``full_bytes``: reduce-scatter, then all-gather (book)."""
    scattered = reduce_scatter_s(ring, full_bytes, two_way)
    return scattered + all_gather_s(ring, full_bytes, two_way)


def all_to_all_s(ring: Ring, full_bytes: float) -> float:
    """Seconds of an all-to-all of an array of ``full_bytes`` in all, V/X of it on each member.

    Torus axis that wraps: V/(4W) (book, sharding.md). Without wraparound the middle link carries
    V/4 one way: V/(4 link) (derived). Several axes: the slowest, each with its share of V
    (derived). GPU in one node: V(X-1)/(X X link) (book, gpus.md); over M nodes each sends
    V(M-1)/(M M) through its network (derived).
    """
    size = ring.size
    if size == 1:
        return 0.0
    floor = _hops(ring, two_way=True) * ring.hop_s
    if ring.kind == "torus":
        axis_s = (
            full_bytes * axis / size / (4 * ring.link * (2 if wrap else 1))
            for axis, wrap in zip(ring.axes, ring.wraps, strict=True)
        )
        return max(*axis_s, floor)
    inner = full_bytes * (size - 1) / size**2 / _egress(ring)
    if ring.kind == "nodes":
        nodes, per_node = ring.axes
        outer = full_bytes * (nodes - 1) / nodes**2 / (per_node * ring.network)
        return max(inner, outer, floor)
    return max(inner, floor)


def permute_step_s(ring: Ring, shard_bytes: float, two_way: bool = False) -> float:
    """Seconds one step of a permute ring needs to move every member's shard on by one member.

    Two-way moves half of the shard each way. Torus: the load of the busiest link over ``link``: a
    shard, or half of one on a ring that closes; a line of chips closes through its own reverse
    links, X-1 hops away, and two-way gains nothing (derived). On an NVLink switch one direction
    already uses all of a GPU's egress: two gain nothing. Peers: one wire, or two. Nodes: the edge
    that leaves a node decides: one network interface, or two when it has two members (derived). At
    least one hop latency.
    """
    if ring.size == 1:
        return 0.0
    return max(shard_bytes / _permute_rate(ring, two_way), ring.neighbour_hops * ring.hop_s)


def grouped(ring: Ring, g: int) -> Ring:
    """The links of ``ring`` for permutes that move ``g`` positions on.

    A switch makes no difference. On a torus they pass the links of ``g`` members, so that each link
    carries as many times more; a network interface carries its own member's alone as before.
    """
    if g == 1 or ring.kind != "torus":
        return ring
    one_way, both = ring.permute_load
    hops = ring.neighbour_hops * g
    return dataclasses.replace(ring, permute_load=(g * one_way, g * both), neighbour_hops=hops)


def inside_group(ring: Ring, g: int) -> Ring:
    """The links of ``ring`` for permutes round every group of ``g`` neighbours.

    On a torus the last member's goes back past the others. A group within a node leaves it nowhere.
    """
    if g == 1 or ring.kind == "torus":
        return grouped(ring, max(1, g - 1))
    if ring.kind == "nodes" and ring.axes[1] % g == 0:
        return dataclasses.replace(ring, kind="switch", axes=(g,), wraps=(True,))
    return ring


def permute_ring_s(ring: Ring, full_bytes: float, two_way: bool = False) -> float:
    """Seconds of all X-1 steps that bring every shard of ``full_bytes`` round the ring.

    Closed by wraparound: about 2V/W one-way, V/W two-way (book; the same rounding of (X-1)/X to 1
    as ``all_gather_s``, so that their ratio is ``slowdown``). Otherwise X-1 steps of V/X.
    """
    size = ring.size
    if size == 1:
        return 0.0
    floor = (size - 1) * permute_step_s(ring, 0.0, two_way)
    return max(full_bytes * _share(ring) / _permute_rate(ring, two_way), floor)


def slowdown(ring: Ring, two_way: bool = False) -> float:
    """The factor m: how much slower the permute ring is than the collective, both at full size.

    A permute ring uses one link, or two, of those the collective could use. On n wrapping torus
    axes 2n one-way and n two-way; on an NVLink switch 1; on peers the number of wires; never below
    1, as the collective could itself run as that ring.
    """
    if ring.size == 1:
        return 1.0
    permute = _share(ring) / _permute_rate(ring, two_way)
    return max(1.0, permute * _gather_rate(ring, two_way=True))


def _share(ring: Ring) -> float:
    """The part of V that crosses a link: (X-1)/X, which the book rounds to 1 on wrapping tori."""
    if ring.kind == "nodes" or (ring.kind == "torus" and all(ring.wraps)):
        return 1.0
    return (ring.size - 1) / ring.size


def _gather_rate(ring: Ring, two_way: bool) -> float:
    """Bytes/s such that V over it is the bandwidth time of an all-gather."""
    if ring.kind == "torus":
        ways = sum(2 if wrap and two_way else 1 for wrap in ring.wraps)
        share = (ring.size - 1) / ring.size if not two_way else _share(ring)
        return ways * ring.link / share
    if ring.kind == "nodes":
        per_node = ring.axes[1]
        outer = per_node * ring.network
        inner = math.inf if per_node == 1 else ring.link * per_node / (per_node - 1)
        return min(outer, inner)
    return _egress(ring) / _share(ring)


def _permute_rate(ring: Ring, two_way: bool) -> float:
    """Bytes/s at which every member's shard moves on by one member."""
    return _links_rate(ring, two_way) * ring.permute_share


def _links_rate(ring: Ring, two_way: bool) -> float:
    if ring.kind == "torus":
        one_way, both = ring.permute_load
        return ring.link * 2 / both if two_way else ring.link / one_way
    if ring.kind == "switch":
        return ring.link
    if ring.kind == "peers":
        return ring.peer * (2 if two_way and ring.size > 2 else 1)
    ways = 2 if two_way and ring.axes[1] > 1 else 1
    return min(ring.network * ways, ring.link)


def _egress(ring: Ring) -> float:
    """Bytes/s a GPU sends to all its peers together."""
    if ring.kind == "peers":
        return min(ring.link, (ring.size - 1) * ring.peer)
    return ring.link


def _hops(ring: Ring, two_way: bool) -> int:
    """Hops to the farthest member; 1 where everything is one switch away."""
    if ring.kind != "torus":
        return 1
    pairs = zip(ring.axes, ring.wraps, strict=True)
    return sum(axis // 2 if wrap and two_way else axis - 1 for axis, wrap in pairs)


def _check_sizes(what: str, sizes: Sequence[int]) -> None:
    if not sizes or any(size < 1 for size in sizes):
        raise OptionError(f"{what} are {tuple(sizes)}; each must be at least 1")
