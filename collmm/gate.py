"""Gate: from what Shardy decided for a dot to an einsum site, with its collectives or a refusal.

Refuses, each with a reason, when: the einsum is not a value of the whole program (inside a
``shard_map`` or a kernel), nothing is communicated, only collectives stand next to it that no
ring replaces, a dimension is empty or sharded in an order that XLA cannot reshard, a sharding
splits a mesh axis into parts that overlap, or the element types have no loop.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

from collmm.capture import CapturedDot
from collmm.einsum import Einsum
from collmm.errors import Reason
from collmm.manual import Match
from collmm.partition import DotSharding
from collmm.prologue import travelling_bytes
from collmm.schedule import MAX_PEERS
from collmm.sites import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    EinsumSite,
    Spec,
    shard_shape,
    trimmed,
)

_MISFIT = "the shards before and after the collective do not nest"
# Two elements share a byte: shards of these cannot be sliced at every index.
_SUB_BYTE = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


def make_site(dot: CapturedDot, sharding: DotSharding | None) -> EinsumSite:
    """Return the site of ``dot``; ``sharding`` is None when it never reached the compiler."""
    site = _bare_site(dot)
    if dot.refusal is Reason.INSIDE_SHARD_MAP and dot.matches:
        return _judge_manual(_manual_site(site, dot), dot)
    if dot.refusal is not None:
        return _refuse(site, dot.refusal)
    if sharding is None:
        return _refuse(site, Reason.UNREACHED)
    if sharding.refusal is not None:
        return _refuse(site, sharding.refusal, sharding.detail)
    sharding = _reachable(sharding, dot)
    site = dataclasses.replace(
        site,
        lhs_spec=sharding.lhs,
        rhs_spec=sharding.rhs,
        out_spec=sharding.out,
        once=(dot.once[0] == trimmed(sharding.lhs), dot.once[1] == trimmed(sharding.rhs)),
        axis_sizes=sharding.axis_sizes,
    )
    problem = _inconsistent(site, sharding)
    if problem:
        return _refuse(site, Reason.ANALYSIS_FAILED, problem)
    unfit = _unfit(site, sharding)
    if unfit:
        return _refuse(site, Reason.UNEVEN_SHARDS, unfit)
    site = dataclasses.replace(site, collectives=_collectives(site, sharding, dot.narrow))
    return _judge(site, sharding)


def _reachable(sharding: DotSharding, dot: CapturedDot) -> DotSharding:
    """Return ``sharding`` without gathers before elementwise work that a ring cannot take over."""
    kept = [
        ((),) * len(spec) if behind and not early else spec
        for spec, behind, early in zip(sharding.gathered, sharding.early, dot.early, strict=True)
    ]
    return dataclasses.replace(sharding, gathered=(kept[0], kept[1]))


def _bare_site(dot: CapturedDot) -> EinsumSite:
    lhs, rhs = (v.aval for v in dot.eqn.invars)
    out = dot.eqn.outvars[0].aval
    einsum = Einsum.from_dot_general(dot.eqn.params["dimension_numbers"], lhs.ndim, rhs.ndim)
    return EinsumSite(
        index=dot.index,
        einsum=einsum,
        shapes=(lhs.shape, rhs.shape, out.shape),
        dtypes=(lhs.dtype.name, rhs.dtype.name, out.dtype.name),
        itemsizes=(lhs.dtype.itemsize, rhs.dtype.itemsize, out.dtype.itemsize),
        location=dot.location,
        scope=dot.scope,
        typed=dot.typed,
        sources=dot.sources,
        follows=dot.follows,
        worked=dot.worked,
        together=dot.together,
        one_ring=dot.one_ring,
        precision=_precision(dot.eqn.params["precision"]),
        body=dot.dependence.body if dot.dependence else 0,
        ready=dot.dependence.ready if dot.dependence else None,
        needed=dot.dependence.needed if dot.dependence else None,
    )


def _precision(given: Any) -> str:
    """Return ``"highest"`` where the user asks for it of both operands, else ``"default"``."""
    both = given if isinstance(given, tuple) else (given, given)
    return "highest" if all(str(p).rpartition(".")[2] == "HIGHEST" for p in both) else "default"


def _manual_site(site: EinsumSite, dot: CapturedDot) -> EinsumSite:
    """Return the site of a dot inside a ``shard_map`` from the collectives the user wrote."""
    collectives = []
    for m in dot.matches:
        which = 2 if m.operand is None else m.operand
        nbytes = math.prod(site.shapes[which]) * site.itemsizes[which]
        looped = m.kind != ALL_TO_ALL or m.size <= MAX_PEERS
        dim = m.dim if looped else -1
        c = Collective(m.kind, m.operand, dim, m.axes, nbytes, m.split_dim)
        if m.kind == ALL_GATHER and m.refusal is None:
            c = _gathered_by_hand(c, m)
        collectives.append(c)
    return dataclasses.replace(
        site,
        lhs_spec=((),) * len(site.shapes[0]),
        rhs_spec=((),) * len(site.shapes[1]),
        out_spec=((),) * len(site.shapes[2]),
        collectives=tuple(collectives),
        axis_sizes=dot.manual_axes,
        manual=True,
    )


def _gathered_by_hand(c: Collective, m: Match) -> Collective:
    """Return the gather with the bytes that the user gathers, and those that a ring would send."""
    whole = m.eqn.outvars[0].aval
    gathered = sent = math.prod(whole.shape) * whole.dtype.itemsize
    if m.prologue is not None:
        # Scales that run along the gathered dimension are gathered by the user, too.
        gathered = sent = m.size * travelling_bytes(m.prologue.leaves, m.dim)
    elif m.between:
        sent = min(gathered, c.bytes)
    other = sent if sent != gathered else 0
    return dataclasses.replace(c, bytes=gathered, narrow_bytes=other)


def _judge_manual(site: EinsumSite, dot: CapturedDot) -> EinsumSite:
    refused = [m for m in dot.matches if m.refusal is not None]
    if site.loopable or not refused:
        return _judge_kinds(site)
    reason = refused[0].refusal
    assert reason is not None
    return _refuse(site, reason, refused[0].detail)


def _refuse(site: EinsumSite, reason: Reason, detail: str = "") -> EinsumSite:
    return dataclasses.replace(site, refusal=reason, detail=detail)


def _inconsistent(site: EinsumSite, sharding: DotSharding) -> str:
    """Return what is wrong when the shardings do not make one local einsum, else ''."""
    einsum = site.einsum
    axes: dict[int, tuple[str, ...]] = {}
    operands = ((einsum.lhs, site.lhs_spec), (einsum.rhs, site.rhs_spec))
    for labels, spec in (*operands, (einsum.out, site.out_spec)):
        for label, here in zip(labels, spec, strict=True):
            if axes.setdefault(label, here) != here:
                return f"one dimension is sharded over {axes[label]} and over {here}"
    summed = [a for label in einsum.contracting for a in axes[label]]
    if sorted(summed) != sorted(sharding.reduced):
        return f"contracted over {summed} but reduced over {list(sharding.reduced)}"
    return ""


def _unfit(site: EinsumSite, sharding: DotSharding) -> str:
    """Return which dimension no ring can shard, else ''. Uneven ones are padded."""
    if any(size == 0 for shape in site.shapes for size in shape):
        return "a dimension is empty"
    sizes = dict(site.axis_sizes)
    gathered_lhs, gathered_rhs = sharding.gathered
    for which, (name, spec, more) in enumerate(
        (
            ("lhs", site.lhs_spec, gathered_lhs),
            ("rhs", site.rhs_spec, gathered_rhs),
            ("result", site.out_spec, sharding.scattered),
        )
    ):
        for dim, axes in enumerate(_joined(spec, more)):
            if _out_of_order(axes, sizes):
                return f"{name} is sharded over {'+'.join(axes)}, against the order of the mesh"
            if not _nest(site.shapes[which][dim], spec[dim], axes, sizes):
                return f"{name}[{dim}] of {site.shapes[which][dim]}: {_MISFIT}"
    for e in sharding.exchanged:
        which = 2 if e.operand is None else e.operand
        spec = (site.lhs_spec, site.rhs_spec, site.out_spec)[which]
        for dim in (e.source, e.target):
            axes = spec[dim][: -len(e.axes)] if spec[dim][-len(e.axes) :] == e.axes else spec[dim]
            if not _nest(site.shapes[which][dim], axes, (*axes, *e.axes), sizes):
                return f"dimension {dim} of {site.shapes[which]}: {_MISFIT}"
    return ""


def _nest(size: int, axes: tuple[str, ...], more: tuple[str, ...], sizes: dict[str, int]) -> bool:
    """Whether the shards of a dimension over ``axes`` are made of those over ``more`` axes."""
    few, many = (math.prod(sizes[a] for a in names) for names in (axes, more))
    return few == 1 or -(-size // few) == -(-size // many) * (many // few)


def _out_of_order(axes: tuple[str, ...], sizes: dict[str, int]) -> bool:
    """Whether axes stand against the mesh's order and their sizes do not divide each other.

    XLA's partitioner aborts the process on some reshards between such tilings.
    """
    order = list(sizes)
    ordered = sorted(axes, key=order.index) == list(axes)
    extents = sorted(sizes[a] for a in axes)
    divide = all(b % a == 0 for a, b in pairwise(extents))
    return not ordered and not divide


def _collectives(
    site: EinsumSite, sharding: DotSharding, narrow: tuple[tuple[float, ...], tuple[float, ...]]
) -> tuple[Collective, ...]:
    sizes = dict(site.axis_sizes)
    found = []
    for operand, (spec, moved) in enumerate(
        zip((site.lhs_spec, site.rhs_spec), sharding.gathered, strict=True)
    ):
        nbytes = _bytes(site, operand, spec, sizes)
        early = sharding.early[operand]
        gathered = nbytes // site.itemsizes[operand] * early if early else nbytes
        for dim, axes in enumerate(moved):
            if axes and math.prod(sizes[a] for a in axes) > 1:
                share = narrow[operand][dim] if narrow[operand] else 1.0
                sent = int(nbytes * share)
                other = sent if sent != gathered else 0
                c = Collective(ALL_GATHER, operand, dim, axes, gathered, narrow_bytes=other)
                found.append(dataclasses.replace(c, early=bool(early)))
    nbytes = _bytes(site, 2, site.out_spec, sizes)
    left = list(sharding.reduced)
    for dim, axes in enumerate(sharding.scattered):
        # What is sliced over axes that were not reduced follows the ring as a plain slice.
        prefix = _reduced_prefix(axes, sharding.reduced)
        if prefix and math.prod(sizes[a] for a in prefix) > 1:
            found.append(Collective(REDUCE_SCATTER, None, dim, prefix, nbytes))
            left = [a for a in left if a not in prefix]
    if math.prod(sizes[a] for a in left) > 1:
        dim = -1 if found else _scatter_dim(site, tuple(left), sizes)
        found.append(Collective(ALL_REDUCE, None, dim, tuple(left), nbytes))
    for e in sharding.exchanged:
        which = 2 if e.operand is None else e.operand
        spec = (site.lhs_spec, site.rhs_spec, site.out_spec)[which]
        nbytes = _bytes(site, which, spec, sizes)
        # Peers are written out one by one; and an explicit result keeps the type it has.
        peers = math.prod(sizes[a] for a in e.axes)
        looped = peers <= MAX_PEERS and not (site.typed and e.operand is None)
        dim = e.source if looped else -1
        found.append(Collective(ALL_TO_ALL, e.operand, dim, e.axes, nbytes, e.target))
    for where, kind in sharding.others:
        found.append(Collective(kind, where, -1, (), 0))
    return tuple(found)


def _scatter_dim(site: EinsumSite, axes: tuple[str, ...], sizes: dict[str, int]) -> int:
    """Return the dimension by which a sum that is wanted whole can travel in blocks, or -1.

    Leading dimensions first: those are batch and sequence in an activation, so that what follows
    (norms, biases, residuals) works on whole rows. A dimension that is sharded already comes last.
    """
    if site.typed:
        return -1  # an explicit sharding is part of the type that later equations expect
    ring = math.prod(sizes[a] for a in axes)
    for taken in (False, True):
        for dim, (size, spec) in enumerate(zip(site.shapes[2], site.out_spec, strict=True)):
            shards = math.prod(sizes[a] for a in spec)
            if bool(spec) == taken and size % (shards * ring) == 0:
                return dim
    return -1


def _judge(site: EinsumSite, sharding: DotSharding) -> EinsumSite:
    if not site.loopable and any(_mixed(axes, sharding.reduced) for axes in sharding.scattered):
        return _refuse(site, Reason.MIXED_SLICE)
    if not site.loopable and sharding.shared:
        return _refuse(site, Reason.SHARED_RESULT)
    if not site.loopable and sharding.misfit:
        return _refuse(site, Reason.UNEVEN_SHARDS, _MISFIT)
    return _judge_kinds(site)


def _judge_kinds(site: EinsumSite) -> EinsumSite:
    if site.loopable:
        for name, dtype in zip(("lhs", "rhs", "result"), site.dtypes, strict=True):
            if dtype in _SUB_BYTE:
                return _refuse(site, Reason.UNSUPPORTED_DTYPE, f"{name} is {dtype}")
        return site
    kinds = [c.kind for c in site.collectives]
    for kind, reason in (
        (ALL_REDUCE, Reason.ALL_REDUCE),
        (ALL_TO_ALL, Reason.ALL_TO_ALL),
        ("collective-permute", Reason.PERMUTE),
    ):
        if kind in kinds:
            return _refuse(site, reason)
    return _refuse(site, Reason.NO_COLLECTIVE)


def _reduced_prefix(axes: tuple[str, ...], reduced: tuple[str, ...]) -> tuple[str, ...]:
    n = 0
    while n < len(axes) and axes[n] in reduced:
        n += 1
    # A reduced axis after one that is not reduced would have to be scattered in the wrong order.
    return () if any(a in reduced for a in axes[n:]) else axes[:n]


def _mixed(axes: tuple[str, ...], reduced: tuple[str, ...]) -> bool:
    return any(a in reduced for a in axes) and not _reduced_prefix(axes, reduced)


def _joined(spec: Spec, more: Spec) -> Spec:
    return tuple((*a, *b) for a, b in zip(spec, more, strict=True))


def _bytes(site: EinsumSite, which: int, spec: Spec, sizes: dict[str, int]) -> int:
    return math.prod(shard_shape(site.shapes[which], spec, sizes)) * site.itemsizes[which]
