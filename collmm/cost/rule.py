"""The published cost rule: decompose unless the ring is slower than einsum plus collective.

Source: Wang et al., ASPLOS 2023. With comp the undecomposed einsum, comm the original collective,
m how much slower the ring of permutes is because it uses fewer links, and extra the first and last
permute that nothing hides::

    decompose unless  max(comp, comm * m) + extra >= comp + comm,    extra = 2 * comm * m / N

It has no term for what a smaller einsum loses, for launching each step, or for other work that
already hides the collective. Everything that decides goes through :func:`estimate`.
"""

from __future__ import annotations

import dataclasses

from collmm.cost import collectives
from collmm.cost.figures import Chip
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Collective, EinsumSite


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one site, before and after; ``pays`` is the rule's verdict.

    Attributes:
      einsum_s: the undecomposed einsum on one device, at the chip's peak; of all einsums that
        share the ring.
      collective_s: the original collective.
      ring_s: the part of it that the ring takes over: all of it, or for an all-reduce the
        reduce-scatter.
      slowdown: m, time of the ring of permutes over that of the collective.
      extra_s: prologue and epilogue of the ring.
      rest_s: what stays a plain collective after the ring: the gather of an all-reduce.
      einsums: how many einsums share the ring.
      note: what had to be assumed, or empty.
    """

    einsum_s: float
    collective_s: float
    ring_s: float
    slowdown: float
    extra_s: float
    rest_s: float = 0.0
    einsums: int = 1
    note: str = ""

    @property
    def before_s(self) -> float:
        """Einsum and collective, one after the other."""
        return self.einsum_s + self.collective_s

    @property
    def after_s(self) -> float:
        """The overlapped loop."""
        return max(self.einsum_s, self.ring_s * self.slowdown) + self.extra_s + self.rest_s

    @property
    def pays(self) -> bool:
        """Whether the loop is expected to be faster."""
        return self.after_s < self.before_s


def estimate(site: EinsumSite, collective: Collective, schedule: Schedule, chip: Chip) -> Estimate:
    """Apply the published rule to one collective of one site on ``chip``."""
    notes = []
    rate = chip.peak(site.dtypes[0])
    if rate is None:
        rate = chip.bf16
        notes.append(f"no peak known for {site.dtypes[0]} on {chip.name}; bf16 taken")
    einsum_s = site.device_flops() / rate.value("achievable")
    ring = _ring(chip, schedule.ring_size)
    if ring.note:
        notes.append(ring.note)
    size = collective.bytes
    if collective.kind == ALL_TO_ALL:
        # Blocks go straight to their peers over the links that the all-to-all itself would use.
        whole_s = collectives.all_to_all_s(ring, size * schedule.ring_size)
        extra_s = 2 * whole_s / schedule.ring_size
        return Estimate(einsum_s, whole_s, whole_s, 1.0, extra_s, note="; ".join(notes))
    ring_s = (
        collectives.all_gather_s(ring, size)
        if collective.kind == ALL_GATHER
        else collectives.reduce_scatter_s(ring, size)
    )
    rest_s = collectives.all_gather_s(ring, size) if collective.kind == ALL_REDUCE else 0.0
    slowdown = collectives.slowdown(ring, two_way=schedule.two_way)
    extra_s = 2 * ring_s * slowdown / schedule.ring_size
    return Estimate(
        einsum_s, ring_s + rest_s, ring_s, slowdown, extra_s, rest_s, note="; ".join(notes)
    )


def _ring(chip: Chip, size: int) -> collectives.Ring:
    """Return the ring on ``chip``: one torus axis, or as few NVLink domains as hold it."""
    if chip.kind == "tpu":
        return collectives.torus_ring(chip, (size,))
    nodes = -(-size // chip.domain)
    while size % nodes:
        nodes += 1
    return collectives.gpu_ring(chip, size // nodes, nodes)
