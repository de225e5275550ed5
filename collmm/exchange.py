"""The primitive that stands for an all-to-all and its einsum in a jaxpr.

    y = exchange_einsum[operand=0 split_dim=0 join_dim=1 ...] x w    # x is exchanged first
    y = exchange_einsum[operand=None split_dim=1 join_dim=0 ...] x w # the result is exchanged

It is made after autodiff, as every rewrite is. Differentiated or batched all the same, it gives
plain einsums: the values are those of one, and only the overlap is gone.
"""

from __future__ import annotations

import dataclasses

from collmm import _jax, loops
from collmm.loops import Consumer
from collmm.primitives import finish, label_axes_of, need_mesh, summed_axes
from collmm.sites import Spec
from collmm.uneven import on_shards


def _impl(lhs, rhs, *, partial, operand, split_dim, join_dim, specs, schedule, mesh):
    dims = {"split_dim": split_dim, "join_dim": join_dim}
    if mesh is None:
        return [_exchanged(lhs, rhs, partial, operand, schedule, dims)]
    lhs_spec, rhs_spec, out_spec = specs
    inside = [lhs_spec, rhs_spec]
    axes = schedule.axes
    if operand is not None:
        inside[operand] = moved_spec(inside[operand], join_dim, split_dim, axes)
    label_axes = label_axes_of((partial.einsum.lhs, inside[0]), (partial.einsum.rhs, inside[1]))
    summed = summed_axes(partial, label_axes)
    base = tuple(label_axes[label] for label in partial.einsum.out)
    if operand is None:
        base = moved_spec(base, join_dim, split_dim, axes)

    def body(lhs, rhs):
        out = _exchanged(lhs, rhs, partial, operand, schedule, dims)
        return [finish(out, out_spec, base, summed)]

    einsum = partial.einsum
    # Before and after the exchange alike, a dimension divides by all that ever shards it.
    ins = [(einsum.lhs, lhs_spec), (einsum.rhs, rhs_spec)]
    return on_shards(body, mesh, (lhs, rhs), ins, [(einsum.out, out_spec)])


def _exchanged(lhs, rhs, partial, operand, schedule, dims):
    if operand is None:
        return loops.einsum_all_to_all(lhs, rhs, partial, schedule, **dims)
    moved, local = (rhs, lhs) if operand else (lhs, rhs)
    return loops.all_to_all_einsum(moved, local, Consumer(partial, operand), schedule, **dims)


def moved_spec(spec: Spec, source: int, target: int, axes: tuple[str, ...]) -> Spec:
    """Return ``spec`` with ``axes`` moved from the end of one dimension to the end of another."""
    assert spec[source][-len(axes) :] == axes, (spec, source, axes)
    new = list(spec)
    new[source] = new[source][: -len(axes)]
    new[target] = (*new[target], *axes)
    return tuple(new)


def _abstract(lhs, rhs, *, partial, operand, split_dim, join_dim, specs, schedule, mesh):
    shapes = [lhs.shape, rhs.shape]
    if mesh is None and operand is not None:
        shapes[operand] = _exchanged_shape(shapes[operand], split_dim, join_dim, schedule)
    shape = partial.einsum.out_shape(*shapes)
    if mesh is None:
        if operand is None:
            shape = _exchanged_shape(shape, split_dim, join_dim, schedule)
        return [_jax.manual_aval((lhs, rhs), shape, partial.out_dtype, schedule.axes)]
    return [_jax.aval_like((lhs, rhs), shape, partial.out_dtype, specs[2])]


def _exchanged_shape(shape, split_dim, join_dim, schedule):
    new = list(shape)
    new[split_dim] //= schedule.ring_size
    new[join_dim] *= schedule.ring_size
    return tuple(new)


def _jvp(primals, tangents, *, partial, mesh, **params):
    need_mesh(mesh)
    lhs, rhs = primals
    (out,) = exchange_einsum_p.bind(lhs, rhs, partial=partial, mesh=mesh, **params)
    dot = _jax.zero_like(out)
    for i, tangent in enumerate(tangents):
        if type(tangent) is not _jax.Zero:
            pair = (tangent, rhs) if i == 0 else (lhs, tangent)
            dot = _jax.add_tangents(dot, partial.dot(*pair))
    return [out], [dot]


def _batch(size, spmd, operands, dims, *, partial, mesh, **params):
    del size, spmd, params
    need_mesh(mesh)
    einsum = partial.einsum.batched(*dims)
    return [dataclasses.replace(partial, einsum=einsum).dot(*operands)], [0]


def _transpose(cts, *operands, **params):
    raise AssertionError("the tangents of an exchange are plain einsums")


exchange_einsum_p = _jax.define_primitive(
    "exchange_einsum",
    impl=_impl,
    abstract=_abstract,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
