"""What a site takes as it is, and what it would take as a loop under a schedule.

As it is, an einsum and its collective run one after the other, less what other work hides::

    before = einsum + collective + others - hidden

As a loop, one shard is on its way while another is multiplied, step by step::

    after = sum over steps of max(partial einsums, permute)  +  first and last step  +  others

which is the same as what this module gives term by term::

    after = einsum + loss + traffic + launch + exposed + rest + displaced + others - inner

``loss`` is what smaller einsums lose: tiles, shape, and the local operand read again each step.
Everything is a pure function of shapes and rates; nothing is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from collmm.cost import collectives
from collmm.cost.collectives import Ring
from collmm.cost.compiled import beside_s, plain_s
from collmm.cost.einsum import product_of, time_of
from collmm.cost.figures import Chip
from collmm.cost.hiding import Behind
from collmm.cost.kernels import fetch_s
from collmm.cost.nested import NOWHERE, Inside, with_inner
from collmm.cost.steps import Shared, loop_of
from collmm.nesting import inner_collective
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective, EinsumSite

_MUCH_EXPOSED = 0.2
# What estimates of a loop on a TPU are uncertain by, of its einsums: the median error held out.
_DOUBT = 0.03


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one site on one device, before and after, and its memory and traffic.

    Attributes:
      einsum_s: the undecomposed einsum; of all einsums that share the ring.
      collective_s: the collective that is looped, as the compiler runs it, its launch included.
      others_s: the site's other collectives, which stay as they are, less what is hidden of them.
      hidden_s: the part of ``collective_s`` that other work of the program hides already.
      steps: partial einsums of one site.
      step_einsum_s: one step's partial einsums of all that share the ring, in the middle of it.
      step_permute_s: one step's transfer on the busiest link, its launch included.
      loss_s: what all partial einsums take beyond ``einsum_s``.
      traffic_s: slices, updates of results and accumulators that are passes of their own.
      launch_s: starting the steps.
      prologue_s: exposed before the first einsum can start.
      epilogue_s: exposed after the last einsum.
      exposed_s: transfer that nothing hides, prologue and epilogue included.
      rest_s: the part of the collective that stays one: the gather of an all-reduce.
      displaced_s: other collectives that run behind this einsum as it is, and would have to wait
        for the ring.
      doubt_s: what the model cannot tell: by how much the loop may well take longer.
      inner_s: of ``others_s``, what an inner ring takes over and nothing hides as it is.
      memory_bytes: buffers of the loop on one device, less those it makes unnecessary; may be
        negative.
      link_bytes: bytes one device sends.
      permutes: instructions that send.
      einsums: how many einsums share the ring.
      note: what had to be assumed, or empty.
    """

    einsum_s: float
    collective_s: float
    others_s: float = 0.0
    hidden_s: float = 0.0
    steps: int = 1
    step_einsum_s: float = 0.0
    step_permute_s: float = 0.0
    loss_s: float = 0.0
    traffic_s: float = 0.0
    launch_s: float = 0.0
    prologue_s: float = 0.0
    epilogue_s: float = 0.0
    exposed_s: float = 0.0
    rest_s: float = 0.0
    displaced_s: float = 0.0
    doubt_s: float = 0.0
    inner_s: float = 0.0
    memory_bytes: int = 0
    link_bytes: int = 0
    permutes: int = 0
    einsums: int = 1
    note: str = ""

    @property
    def before_s(self) -> float:
        """Einsum and collectives, one after the other, less what is hidden."""
        return self.einsum_s + self.collective_s - self.hidden_s + self.others_s

    @property
    def after_s(self) -> float:
        """The overlapped loop and what stays beside it."""
        own = self.einsum_s + self.loss_s + self.traffic_s + self.launch_s + self.exposed_s
        return own + self.rest_s + self.displaced_s + self.others_s - self.inner_s

    @property
    def gain(self) -> float:
        """The share of ``before_s`` that the loop saves; negative where it loses."""
        return 1 - self.after_s / self.before_s if self.before_s else 0.0

    @property
    def sure_gain(self) -> float:
        """``gain`` if the loop takes ``doubt_s`` longer."""
        return self.gain - (self.doubt_s / self.before_s if self.before_s else 0.0)

    @property
    def bound_by_links(self) -> bool:
        """Whether the loop waits for its transfers for much of its time."""
        return self.exposed_s > _MUCH_EXPOSED * self.einsum_s

    def pays(self, min_gain: float = 0.0) -> bool:
        """Whether the loop surely saves more than ``min_gain`` of what the site takes now."""
        return self.sure_gain > min_gain

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the totals."""
        totals = {"before_s": self.before_s, "after_s": self.after_s, "gain": self.gain}
        return {**dataclasses.asdict(self), **totals}


def estimate(
    site: EinsumSite,
    collective: Collective,
    schedule: Schedule,
    chip: Chip,
    ring: Ring | None = None,
    *,
    sharing: Sequence[Shared] = (),
    hidden_s: float = 0.0,
    displaced_s: float = 0.0,
    inside: Inside = NOWHERE,
) -> Estimate:
    """The times of one site and of its loop on one device of ``chip``.

    Args:
      site: the einsum.
      collective: the one of its collectives that is looped.
      schedule: how.
      chip: the hardware row, per device.
      ring: the members' links in the order in which the loop visits them; without one, that of
        ``assumed_ring``.
      sharing: further einsums on the same ring.
      hidden_s: seconds of other work behind which the compiler can hide the collective as it is.
      displaced_s: seconds of other collectives that use the links while this einsum runs.
      inside: where the rings of the site's other collectives lie, an inner one's among them.
    """
    ring = ring or assumed_ring(chip, schedule.ring_size)
    members = (Shared(site, collective), *sharing)
    whole = [time_of(product_of(m.site), chip) for m in members]
    einsum_s = sum(t.seconds for t in whole)
    if collective.kind in (REDUCE_SCATTER, ALL_REDUCE):
        einsum_s += sum(fetch_s(m.site, chip) for m in members)
    collective_s = plain_s(collective, ring) + beside_s(site, collective, chip, ring)
    others = [c for m in members for c in m.site.loopable if c is not m.collective]
    notes = dict.fromkeys(filter(None, (ring.note, *(t.note for t in whole))))
    loop = loop_of(members, schedule, chip, ring)

    def ring_of(c: Collective) -> Ring:
        return inside.ring(c.axes) or assumed_ring(chip, site.ring_size(c))

    displaced = min(displaced_s, sum(p.count * p.transfer for p in loop.phases))
    inner_s = 0.0
    if schedule.inner is not None:
        inners = [inner_collective(m.site, m.collective, schedule) for m in members]
        inner_ring = inside.ring(schedule.inner.axes)
        inner_ring = inner_ring or assumed_ring(chip, schedule.inner.ring_size)
        loop = with_inner(loop, members, inners, schedule, chip, ring, inner_ring)
        plain = {k: plain_s(c, inner_ring) for k, c in enumerate(inners) if c}
        inner_s = sum(_inner_s(seconds, inside.of(k)) for k, seconds in plain.items())
        displaced += sum(_pushed_s(s, einsum_s, inside.of(k)) for k, s in plain.items())
    rest = dataclasses.replace(collective, kind=ALL_GATHER)
    return Estimate(
        einsum_s=einsum_s,
        collective_s=collective_s,
        others_s=max(0.0, sum(plain_s(c, ring_of(c)) for c in others) - inside.hidden_s),
        hidden_s=min(hidden_s, collective_s),
        steps=loop.steps,
        step_einsum_s=loop.einsum_s,
        step_permute_s=loop.permute_s,
        loss_s=sum(p.count * p.compute for p in loop.phases) - einsum_s,
        traffic_s=loop.passes_s,
        launch_s=sum(p.count * p.launched for p in loop.phases),
        prologue_s=loop.prologue_s,
        epilogue_s=loop.epilogue_s,
        exposed_s=sum(p.count * p.exposed for p in loop.phases),
        rest_s=plain_s(rest, ring) if collective.kind == ALL_REDUCE else 0.0,
        displaced_s=displaced,
        doubt_s=loop.doubt_s + _doubt(chip) * sum(p.count * p.compute for p in loop.phases),
        inner_s=inner_s,
        memory_bytes=loop.memory_bytes,
        link_bytes=loop.link_bytes,
        permutes=loop.permutes,
        einsums=len(members),
        note="; ".join(notes),
    )


def _doubt(chip: Chip) -> float:
    return 0.0 if chip.shape is None else _DOUBT


def _inner_s(seconds: float, behind: Behind) -> float:
    """Of a plain collective of ``seconds``, what an inner ring does away with.

    Nothing where another einsum needs the gathered value anyhow, and what other work hides is free.
    """
    return 0.0 if behind.common else max(0.0, seconds - behind.hidden_s)


def _pushed_s(seconds: float, einsum_s: float, behind: Behind) -> float:
    """What collectives that run behind the einsum come too late, once an inner ring goes first.

    It is done in the first step; they have the rest of the einsums.
    """
    late = seconds + behind.displaced_s - einsum_s
    return min(behind.displaced_s, max(0.0, late))


def assumed_ring(chip: Chip, size: int) -> Ring:
    """The ring of ``size`` devices where nothing is known of them.

    One torus axis, or as few NVLink domains as hold it. The torus axis closes where a ring of that
    size can: an even one goes round any two axes, and a mesh that has a choice is laid out so.
    """
    if chip.kind == "tpu":
        closes = size > 2 and size % 2 == 0
        return collectives.torus_ring(chip, (size,), wraps=(closes or bool(chip.wraps(size)),))
    nodes = -(-size // chip.domain)
    while size % nodes:
        nodes += 1
    return collectives.gpu_ring(chip, size // nodes, nodes)
