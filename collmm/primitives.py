"""The primitives that stand for a collective and its einsums in a jaxpr.

Both act on whole (global) values and carry the shardings they lower to:

``all_gather_einsum``: one ring-gathered operand, one or more local operands, one einsum each::

    a b = all_gather_einsum[dim=1 ...] x wq wk        # x's dimension 1 is sharded over the ring
    a g = all_gather_einsum[hand_out=True ...] x wq   # g is x, gathered: the ring's by-product

``einsum_reduce_scatter``: one or more einsums whose results are summed and scattered on a ring::

    y = einsum_reduce_scatter[dim=1 ...] h w

An einsum of either may have an operand that is itself gathered, on an inner ring during the first
step; for its derivatives that one is a plain collective.

They are bilinear, and each is the other's transpose: the cotangent of a gathered operand is an
einsum + reduce-scatter, that of a scattered sum is gathered into einsums. What autodiff saves is
the operand as it came, a shard per device. Lowering is a ``shard_map`` over all mesh axes around
the loop of ``collmm.loops``; reductions over axes other than the ring's stay plain collectives.

With ``mesh=None`` they stand inside a ``shard_map`` already: operands and results are one device's
shards, there are no shardings to carry, and lowering is the bare loop. These are made only after
autodiff, and have no derivative of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from collmm import _jax, loops
from collmm.loops import Consumer, Inner, PartialEinsum
from collmm.schedule import Schedule
from collmm.sites import Spec
from collmm.uneven import Dims, on_shards


@dataclasses.dataclass(frozen=True)
class GatherUse:
    """One einsum of a gathered operand: the loop's consumer and the shardings round it.

    ``local_spec`` is the other operand's sharding as the einsum sees it; with ``inner`` it comes
    sharded over that ring as well, and is gathered during the first step.
    """

    consumer: Consumer
    local_spec: Spec
    out_spec: Spec
    inner: Inner | None = None


@dataclasses.dataclass(frozen=True)
class ScatterTerm:
    """One einsum of a scattered sum, with its operands' shardings as the einsum sees them.

    With ``inner`` one operand comes sharded over that ring as well, and is gathered during the
    first step.
    """

    partial: PartialEinsum
    lhs_spec: Spec
    rhs_spec: Spec
    inner: Inner | None = None


def all_gather_einsum(
    gathered: jax.Array,
    locals_: Sequence[jax.Array],
    uses: Sequence[GatherUse],
    *,
    gathered_spec: Spec,
    dim: int,
    schedule: Schedule,
    mesh: Any,
    hand_out: bool = False,
) -> list[jax.Array]:
    """Einsums of one operand that is gathered on a ring; equal to plain einsums in value.

    Args:
      gathered: whole value, sharded by ``gathered_spec``; ``gathered_spec[dim]`` ends in the
        ring's axes.
      locals_: the other operand of each use.
      uses: the einsums, one per local operand.
      gathered_spec: mesh axes per dimension of ``gathered``, before the gather.
      dim: the dimension that the ring gathers.
      schedule: how the ring runs.
      mesh: a ``jax.sharding.Mesh``.
      hand_out: give the gathered operand as well, sharded as it is after the gather.

    Returns:
      One result per use, in the use's ``out_dtype``; with ``hand_out`` the gathered operand last.
    """
    return all_gather_einsum_p.bind(
        gathered,
        *locals_,
        uses=tuple(uses),
        gathered_spec=gathered_spec,
        dim=dim,
        schedule=schedule,
        mesh=mesh,
        hand_out=hand_out,
    )


def einsum_reduce_scatter(
    operands: Sequence[tuple[jax.Array, jax.Array]],
    terms: Sequence[ScatterTerm],
    *,
    out_spec: Spec,
    dim: int,
    schedule: Schedule,
    mesh: Any,
) -> jax.Array:
    """The sum of einsums, reduced and scattered on a ring; equal to plain einsums in value.

    Args:
      operands: (lhs, rhs) of each term, whole values.
      terms: the einsums; all have one result shape and ``out_dtype``.
      out_spec: mesh axes per dimension of the result; ``out_spec[dim]`` ends in the ring's axes.
      dim: the dimension of the result that the ring scatters.
      schedule: how the ring runs.
      mesh: a ``jax.sharding.Mesh``.
    """
    flat = [x for pair in operands for x in pair]
    (out,) = einsum_reduce_scatter_p.bind(
        *flat, terms=tuple(terms), out_spec=out_spec, dim=dim, schedule=schedule, mesh=mesh
    )
    return out


# --- shardings ---


def need_mesh(mesh: Any) -> None:
    """Raise where a ring inside a ``shard_map`` would have to be differentiated or batched."""
    if mesh is None:
        raise NotImplementedError(
            "a ring inside a shard_map was differentiated or batched after its program was "
            "rewritten; transform the overlapped function instead, not its jaxpr"
        )


def without_ring(spec: Spec, dim: int, schedule: Schedule) -> Spec:
    """Return ``spec`` with the ring's axes taken off the end of dimension ``dim``."""
    n = len(schedule.axes)
    assert spec[dim][-n:] == schedule.axes, (spec, dim, schedule)
    return (*spec[:dim], spec[dim][:-n], *spec[dim + 1 :])


def before_inner(spec: Spec, operand: int, inner: Inner | None) -> Spec:
    """Return the sharding with which an operand comes, ``spec`` being that after an inner ring."""
    if inner is None or inner.operand != operand:
        return spec
    dim = inner.dim
    return (*spec[:dim], (*spec[dim], *inner.schedule.axes), *spec[dim + 1 :])


def label_axes_of(*operands: tuple[Sequence[int], Spec]) -> dict[int, tuple[str, ...]]:
    """Return the mesh axes of every label, from (labels, spec) pairs."""
    axes: dict[int, tuple[str, ...]] = {}
    for labels, spec in operands:
        axes.update(zip(labels, spec, strict=True))
    return axes


def summed_axes(partial: PartialEinsum, axes: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the mesh axes over which each device holds only a share of the einsum's sum."""
    return tuple(a for label in partial.einsum.contracting for a in axes[label])


def finish(out: jax.Array, spec: Spec, base: Spec, summed: Sequence[str]) -> jax.Array:
    """Reduce a local result over the axes that no ring has reduced, in the user's own dtype.

    These are the collectives that the compiler would have used, and stay as they were. ``base`` is
    the sharding that the einsum itself gives; what ``spec`` has beyond it is scattered.
    """
    rest = list(summed)
    for d, (have, want) in enumerate(zip(base, spec, strict=True)):
        assert want[: len(have)] == have, (spec, base)
        extra = want[len(have) :]
        if extra:
            out = lax.psum_scatter(out, extra, scatter_dimension=d, tiled=True)
            rest = [a for a in rest if a not in extra]
    if rest:
        out = lax.psum(out, tuple(rest))
    return out


# --- all_gather_einsum ---


def _gather_base(use: GatherUse, gathered_spec: Spec, dim: int, schedule: Schedule):
    """Return the axes of each label once the gather is done."""
    consumer = use.consumer
    whole = without_ring(gathered_spec, dim, schedule)
    return label_axes_of(
        (consumer.gathered_labels(), whole), (consumer.local_labels(), use.local_spec)
    )


def _gather_impl(gathered, *locals_, uses, gathered_spec, dim, schedule, mesh, hand_out):
    ring = {"gathered_dim": dim, "return_gathered": hand_out}
    if mesh is None:
        consumers = [use.consumer for use in uses]
        return loops.all_gather_einsum(gathered, locals_, consumers, schedule, **ring)
    inners = [use.inner for use in uses]
    consumers, finishers = [], []
    for use in uses:
        partial = use.consumer.partial
        axes = _gather_base(use, gathered_spec, dim, schedule)
        summed = summed_axes(partial, axes)
        base = tuple(axes[label] for label in partial.einsum.out)
        consumers.append(use.consumer)
        finishers.append((use.out_spec, base, summed))

    def body(shard, *locals_):
        if any(inners):
            outs = loops.nested_gather_einsum(shard, locals_, consumers, inners, schedule, **ring)
        else:
            outs = loops.all_gather_einsum(shard, locals_, consumers, schedule, **ring)
        done = [finish(out, *args) for out, args in zip(outs, finishers, strict=False)]
        return [*done, *outs[len(uses) :]]

    own = tuple(gathered_dim(d) for d in range(gathered.ndim))
    ins, outs = use_dims(uses)
    if hand_out:
        outs.append((own, without_ring(gathered_spec, dim, schedule)))
    return on_shards(body, mesh, (gathered, *locals_), [(own, gathered_spec), *ins], outs)


def gathered_dim(d: int) -> tuple[str, int]:
    """Name dimension ``d`` of the gathered operand, in whichever einsum it occurs."""
    return "gathered", d


def use_dims(uses: Sequence[GatherUse]) -> tuple[list[tuple[Dims, Spec]], list[tuple[Dims, Spec]]]:
    """Name the dimensions of the local operands and of the results, with their shardings."""
    ins: list[tuple[Dims, Spec]] = []
    outs: list[tuple[Dims, Spec]] = []
    for i, use in enumerate(uses):
        consumer = use.consumer
        names = {label: gathered_dim(d) for d, label in enumerate(consumer.gathered_labels())}
        local = tuple(names.get(label, (i, label)) for label in consumer.local_labels())
        out = tuple(names.get(label, (i, label)) for label in consumer.partial.einsum.out)
        ins.append((local, before_inner(use.local_spec, 1 - consumer.gathered_operand, use.inner)))
        outs.append((out, use.out_spec))
    return ins, outs


def _gather_abstract(gathered, *locals_, uses, gathered_spec, dim, schedule, mesh, hand_out):
    avals = []
    whole = list(gathered.shape)
    if mesh is None:
        whole[dim] *= schedule.ring_size
    for local, use in zip(locals_, uses, strict=True):
        partial = use.consumer.partial
        lhs, rhs = _ordered(use.consumer, tuple(whole), local.shape)
        shape = partial.einsum.out_shape(lhs, rhs)
        if mesh is None:
            avals.append(
                _jax.manual_aval((gathered, local), shape, partial.out_dtype, schedule.axes)
            )
            continue
        avals.append(_jax.aval_like((gathered, local), shape, partial.out_dtype, use.out_spec))
    if hand_out and mesh is None:
        avals.append(_jax.manual_aval((gathered,), tuple(whole), gathered.dtype, schedule.axes))
    elif hand_out:
        spec = without_ring(gathered_spec, dim, schedule)
        avals.append(_jax.aval_like((gathered,), gathered.shape, gathered.dtype, spec))
    return avals


def _ordered(consumer: Consumer, gathered: Any, local: Any) -> tuple[Any, Any]:
    return (local, gathered) if consumer.gathered_operand else (gathered, local)


def _gather_jvp(primals, tangents, *, uses, hand_out, **params):
    need_mesh(params["mesh"])
    gathered, *locals_ = primals
    gathered_dot, *locals_dot = tangents
    outs = all_gather_einsum(gathered, locals_, uses, hand_out=hand_out, **params)
    dots: list[Any] = [_jax.zero_like(out) for out in outs]
    if type(gathered_dot) is not _jax.Zero:
        dots = all_gather_einsum(gathered_dot, locals_, uses, hand_out=hand_out, **params)
    moving = [i for i, dot in enumerate(locals_dot) if type(dot) is not _jax.Zero]
    if moving:
        new = all_gather_einsum(
            gathered, [locals_dot[i] for i in moving], [uses[i] for i in moving], **params
        )
        for i, dot in zip(moving, new, strict=True):
            dots[i] = _jax.add_tangents(dots[i], dot)
    return outs, dots


def _gather_transpose(cts, gathered, *locals_, uses, gathered_spec, dim, schedule, mesh, hand_out):
    need_mesh(mesh)
    ring = {"dim": dim, "schedule": schedule, "mesh": mesh}
    live = [i for i, ct in enumerate(cts[: len(uses)]) if type(ct) is not _jax.Zero]
    results: list[Any] = [None] * (1 + len(locals_))
    if _jax.is_undefined_primal(gathered):
        parts = [(cts[i], locals_[i], uses[i]) for i in live]
        turned = dict(ring, schedule=_turned(schedule))
        total = _gathered_cotangent(parts, gathered.aval, gathered_spec, turned)
        if hand_out and type(cts[-1]) is not _jax.Zero:
            # The value handed out is the operand itself, only elsewhere.
            total = _jax.add_tangents(total, _jax.resharded_like(cts[-1], gathered.aval))
        results[0] = total
        return results
    wanted = [i for i in live if _jax.is_undefined_primal(locals_[i])]
    if wanted:
        new_uses = [
            _local_cotangent_use(uses[i], locals_[i].aval.dtype, gathered_spec, dim, schedule)
            for i in wanted
        ]
        grads = all_gather_einsum(
            gathered, [cts[i] for i in wanted], new_uses, gathered_spec=gathered_spec, **ring
        )
        for i, grad in zip(wanted, grads, strict=True):
            nested = uses[i].inner is not None
            results[1 + i] = _jax.resharded_like(grad, locals_[i].aval) if nested else grad
    return results


def _turned(schedule: Schedule) -> Schedule:
    """The schedule of the other kind of ring: chunks say nothing of accumulators."""
    return dataclasses.replace(schedule, chains=None)


def _local_cotangent_use(use, dtype, gathered_spec, dim, schedule) -> GatherUse:
    """Return the use whose result is the cotangent of a local operand."""
    consumer = use.consumer
    einsum = consumer.partial.einsum
    einsum = einsum.grad_lhs() if consumer.gathered_operand else einsum.grad_rhs()
    axes = _gather_base(use, gathered_spec, dim, schedule)
    # The gathered operand keeps its side; the cotangent takes the place of the result.
    side = 1 if consumer.gathered_operand else 0
    partial = dataclasses.replace(consumer.partial, einsum=einsum, out_dtype=dtype)
    ct_spec = tuple(axes[label] for label in consumer.partial.einsum.out)
    return GatherUse(Consumer(partial, side), ct_spec, use.local_spec)


def _gathered_cotangent(parts, aval, gathered_spec, ring):
    """Return the cotangent of the gathered operand: one ring of einsums + reduce-scatter."""
    operands, terms, total = [], [], None
    for ct, local, use in parts:
        consumer = use.consumer
        einsum = consumer.partial.einsum
        einsum = einsum.grad_rhs() if consumer.gathered_operand else einsum.grad_lhs()
        partial = dataclasses.replace(consumer.partial, einsum=einsum, out_dtype=aval.dtype)
        axes = _gather_base(use, gathered_spec, ring["dim"], ring["schedule"])
        ct_spec = tuple(axes[label] for label in consumer.partial.einsum.out)
        pair, specs = (ct, local), (ct_spec, use.local_spec)
        if consumer.gathered_operand:
            pair, specs = pair[::-1], specs[::-1]
        if set(ring["schedule"].axes) <= set(summed_axes(partial, axes)):
            operands.append(pair)
            terms.append(ScatterTerm(partial, *specs))
        else:
            # Nothing is summed round the ring: every device has the whole cotangent already.
            whole = partial.dot(*pair)
            total = whole if total is None else lax.add(total, whole)
    for group in _same_sums(terms):
        part = einsum_reduce_scatter(
            [operands[i] for i in group],
            [terms[i] for i in group],
            out_spec=gathered_spec,
            **ring,
        )
        total = part if total is None else lax.add(total, part)
    return _jax.Zero(aval) if total is None else total


def _same_sums(terms: Sequence[ScatterTerm]) -> list[list[int]]:
    """Group terms by the axes they are summed over: one ring can add up only equal ones."""
    groups: dict[frozenset[str], list[int]] = {}
    for i, term in enumerate(terms):
        groups.setdefault(frozenset(summed_axes(term.partial, _term_axes(term))), []).append(i)
    return list(groups.values())


def _gather_batch(
    size, spmd, operands, dims, *, uses, gathered_spec, dim, schedule, mesh, hand_out
):
    need_mesh(mesh)
    operands, batched = _batch_to_front(operands, dims, size)
    new_uses = []
    for use, local_batched in zip(uses, batched[1:], strict=True):
        consumer = use.consumer
        sides = (batched[0], local_batched)
        lhs, rhs = sides[::-1] if consumer.gathered_operand else sides
        partial = _batched_partial(consumer.partial, lhs, rhs)
        new_uses.append(
            GatherUse(
                dataclasses.replace(consumer, partial=partial),
                _batched_spec(use.local_spec, local_batched, spmd),
                _batched_spec(use.out_spec, batched[0] or local_batched, spmd),
                _batched_inner(use.inner, local_batched),
            )
        )
    outs = all_gather_einsum(
        operands[0],
        operands[1:],
        new_uses,
        gathered_spec=_batched_spec(gathered_spec, batched[0], spmd),
        dim=dim + batched[0],
        schedule=schedule,
        mesh=mesh,
        hand_out=hand_out,
    )
    mapped = [batched[0] or b for b in batched[1:]] + [batched[0]] * hand_out
    return outs, [0 if m else _jax.not_mapped for m in mapped]


# --- einsum_reduce_scatter ---


def _term_axes(term: ScatterTerm) -> dict[int, tuple[str, ...]]:
    einsum = term.partial.einsum
    return label_axes_of((einsum.lhs, term.lhs_spec), (einsum.rhs, term.rhs_spec))


def _scatter_impl(*operands, terms, out_spec, dim, schedule, mesh):
    if mesh is None:
        lhs, rhs = operands[::2], operands[1::2]
        triples = list(zip(lhs, rhs, (term.partial for term in terms), strict=True))
        return [loops.einsum_reduce_scatter(triples, dim, schedule)]
    axes = _term_axes(terms[0])
    summed = summed_axes(terms[0].partial, axes)
    rest = tuple(a for a in summed if a not in schedule.axes)
    base = [axes[label] for label in terms[0].partial.einsum.out]
    base[dim] = (*base[dim], *schedule.axes)
    partials = [term.partial for term in terms]
    inners = [term.inner for term in terms]

    def body(*operands):
        triples = [
            (lhs, rhs, partial)
            for lhs, rhs, partial in zip(operands[::2], operands[1::2], partials, strict=True)
        ]
        if any(inners):
            out = loops.nested_reduce_scatter(triples, inners, dim, schedule)
        else:
            out = loops.einsum_reduce_scatter(triples, dim, schedule)
        return [finish(out, out_spec, tuple(base), rest)]

    result = tuple(("result", d) for d in range(len(out_spec)))
    ins = [named for i, term in enumerate(terms) for named in _term_dims(i, term)]
    return on_shards(body, mesh, operands, ins, [(result, out_spec)])


def _term_dims(i: int, term: ScatterTerm) -> list[tuple[Dims, Spec]]:
    """Name the dimensions of both operands of term ``i``; those of the result are shared."""
    einsum = term.partial.einsum
    names = {label: ("result", d) for d, label in enumerate(einsum.out)}
    specs = (term.lhs_spec, term.rhs_spec)
    return [
        (
            tuple(names.get(label, (i, label)) for label in labels),
            before_inner(spec, k, term.inner),
        )
        for k, (labels, spec) in enumerate(zip((einsum.lhs, einsum.rhs), specs, strict=True))
    ]


def _scatter_abstract(*operands, terms, out_spec, dim, schedule, mesh):
    partial = terms[0].partial
    shape = partial.einsum.out_shape(operands[0].shape, operands[1].shape)
    if mesh is None:
        shape = (*shape[:dim], shape[dim] // schedule.ring_size, *shape[dim + 1 :])
        return [_jax.manual_aval(operands, shape, partial.out_dtype, schedule.axes)]
    return [_jax.aval_like(operands, shape, partial.out_dtype, out_spec)]


def _scatter_jvp(primals, tangents, *, terms, **params):
    need_mesh(params["mesh"])
    pairs = list(zip(primals[::2], primals[1::2], strict=True))
    out = einsum_reduce_scatter(pairs, terms, **params)
    new_pairs, new_terms = [], []
    for i, term in enumerate(terms):
        (lhs, rhs), lhs_dot, rhs_dot = pairs[i], tangents[2 * i], tangents[2 * i + 1]
        if type(lhs_dot) is not _jax.Zero:
            new_pairs.append((lhs_dot, rhs))
            new_terms.append(term)
        if type(rhs_dot) is not _jax.Zero:
            new_pairs.append((lhs, rhs_dot))
            new_terms.append(term)
    if not new_pairs:
        return [out], [_jax.zero_like(out)]
    return [out], [einsum_reduce_scatter(new_pairs, new_terms, **params)]


def _scatter_transpose(cts, *operands, terms, out_spec, dim, schedule, mesh):
    need_mesh(mesh)
    (ct,) = cts
    results: list[Any] = [None] * len(operands)
    if type(ct) is _jax.Zero:
        return results
    where, locals_, uses = [], [], []
    for i, term in enumerate(terms):
        lhs, rhs = operands[2 * i], operands[2 * i + 1]
        einsum = term.partial.einsum
        if _jax.is_undefined_primal(lhs):
            partial = dataclasses.replace(
                term.partial, einsum=einsum.grad_lhs(), out_dtype=lhs.aval.dtype
            )
            where.append(2 * i)
            locals_.append(rhs)
            uses.append(GatherUse(Consumer(partial, 0), term.rhs_spec, term.lhs_spec))
        else:
            partial = dataclasses.replace(
                term.partial, einsum=einsum.grad_rhs(), out_dtype=rhs.aval.dtype
            )
            where.append(2 * i + 1)
            locals_.append(lhs)
            uses.append(GatherUse(Consumer(partial, 1), term.lhs_spec, term.rhs_spec))
    axes = _term_axes(terms[0])
    gathered_spec = [axes[label] for label in terms[0].partial.einsum.out]
    gathered_spec[dim] = (*gathered_spec[dim], *schedule.axes)
    grads = all_gather_einsum(
        ct,
        locals_,
        uses,
        gathered_spec=tuple(gathered_spec),
        dim=dim,
        schedule=_turned(schedule),
        mesh=mesh,
    )
    for i, grad in zip(where, grads, strict=True):
        nested = terms[i // 2].inner is not None
        results[i] = _jax.resharded_like(grad, operands[i].aval) if nested else grad
    return results


def _scatter_batch(size, spmd, operands, dims, *, terms, out_spec, dim, schedule, mesh):
    need_mesh(mesh)
    operands, batched = _batch_to_front(operands, dims, size)
    new_terms = []
    for i, term in enumerate(terms):
        lhs, rhs = 2 * i, 2 * i + 1
        if not (batched[lhs] or batched[rhs]):
            operands[lhs] = _jax.to_front(operands[lhs], _jax.not_mapped, size)
            batched[lhs] = True
        new_terms.append(
            ScatterTerm(
                _batched_partial(term.partial, batched[lhs], batched[rhs]),
                _batched_spec(term.lhs_spec, batched[lhs], spmd),
                _batched_spec(term.rhs_spec, batched[rhs], spmd),
                _batched_inner(term.inner, batched[lhs + term.inner.operand])
                if term.inner
                else None,
            )
        )
    out = einsum_reduce_scatter(
        list(zip(operands[::2], operands[1::2], strict=True)),
        new_terms,
        out_spec=_batched_spec(out_spec, True, spmd),
        dim=dim + 1,
        schedule=schedule,
        mesh=mesh,
    )
    return [out], [0]


# --- vmap ---


def _batch_to_front(operands, dims, size) -> tuple[list[Any], list[bool]]:
    batched = [d is not _jax.not_mapped for d in dims]
    moved = [
        _jax.to_front(x, d, size) if b else x
        for x, d, b in zip(operands, dims, batched, strict=True)
    ]
    return moved, batched


def _batched_partial(partial: PartialEinsum, lhs: bool, rhs: bool) -> PartialEinsum:
    einsum = partial.einsum.batched(0 if lhs else None, 0 if rhs else None)
    return dataclasses.replace(partial, einsum=einsum)


def _batched_inner(inner: Inner | None, batched: bool) -> Inner | None:
    return inner and dataclasses.replace(inner, dim=inner.dim + batched)


def _batched_spec(spec: Spec, batched: bool, spmd: tuple[str, ...]) -> Spec:
    return (spmd, *spec) if batched else spec


all_gather_einsum_p = _jax.define_primitive(
    "all_gather_einsum",
    impl=_gather_impl,
    abstract=_gather_abstract,
    jvp=_gather_jvp,
    transpose=_gather_transpose,
    batch=_gather_batch,
)
einsum_reduce_scatter_p = _jax.define_primitive(
    "einsum_reduce_scatter",
    impl=_scatter_impl,
    abstract=_scatter_abstract,
    jvp=_scatter_jvp,
    transpose=_scatter_transpose,
    batch=_scatter_batch,
)
