"""Narrow rings: what travels is the narrow value, and each block is made wide where it arrives.

Before::

    b = convert_element_type[bfloat16] x8            # x8: float8, sharded over the ring
    x = mul b s
    y = all_gather_einsum[dim=0 ...] x w             # sends bfloat16

after::

    y = narrow_gather_einsum[dim=0 ...] x8 s w       # sends float8, casts and scales on arrival

A scale per element of the gathered dimension travels with its shard; any other stays where it is.
The casts and products are the user's own, on the same elements in the same order. A ring that
hands out the gathered value hands out the wide one, put together of what was made on arrival.
Refuses (the ring stays as it is) when nothing narrower stands behind the operand, when the ring has
inner ones, and when an einsum sums over a dimension that is padded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from collmm import _jax, loops
from collmm.primitives import (
    all_gather_einsum,
    all_gather_einsum_p,
    finish,
    gathered_dim,
    label_axes_of,
    need_mesh,
    summed_axes,
    use_dims,
    without_ring,
)
from collmm.prologue import Leaf, prologue_of
from collmm.share import has_rings
from collmm.sites import Spec
from collmm.uneven import Dims, on_shards, uneven_dims


def narrow_rings(jaxpr: Any) -> Any:
    """Return ``jaxpr`` with narrow values on its rings where there are any, sub-jaxprs too."""
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    eqns = []
    for eqn in jaxpr.eqns:
        new = {
            (key, index): narrow_rings(_jax.open_jaxpr(sub))
            for key, index, sub in _jax.jaxprs_in(eqn)
            if has_rings(_jax.open_jaxpr(sub))
        }
        eqn = _jax.with_jaxprs(eqn, new) if new else eqn
        eqns.append(_narrowed(eqn, producers) if eqn.primitive is all_gather_einsum_p else eqn)
    return jaxpr.replace(eqns=eqns)


def _narrowed(eqn: Any, producers: dict[Any, Any]) -> Any:
    """Return the ring ``eqn`` with what it sends made narrow; itself where nothing is narrower."""
    p = dict(eqn.params)
    if any(use.inner for use in p["uses"]):
        return eqn
    prologue = prologue_of(eqn.invars[0], producers, p["dim"])
    if prologue is None:
        return eqn
    # Inside a shard_map nothing is padded, but a scale may be another one on every device.
    refused = len(prologue.leaves) > 1 if p["mesh"] is None else _sums_padding(eqn)
    if refused:
        return eqn
    invars = [*(leaf.var for leaf in prologue.leaves), *eqn.invars[1:]]
    p["prologue"] = prologue
    return _jax.primitive_eqn(eqn, narrow_gather_einsum_p, invars, eqn.outvars, p)


def _sums_padding(eqn: Any) -> bool:
    """Whether an einsum sums over an uneven dimension: made wide, its padding may not be zero."""
    p = eqn.params
    uneven = uneven_dims(eqn.invars[0].aval.shape, p["gathered_spec"], p["mesh"])
    labels = [(use.consumer.gathered_labels(), use.consumer.partial.einsum) for use in p["uses"]]
    return any(own[d] in einsum.contracting for own, einsum in labels for d in uneven)


def travels(leaf: Leaf, dim: int) -> bool:
    """Whether a leaf is sent along when blocks of ``dim`` travel."""
    return dim in leaf.dims


def leaf_spec(leaf: Leaf, gathered_spec: Spec) -> Spec:
    """Return the mesh axes per dimension of a leaf of a value that is sharded so."""
    return tuple(() if d is None else gathered_spec[d] for d in leaf.dims)


def _impl(*operands, prologue, uses, gathered_spec, dim, schedule, mesh, hand_out):
    count = len(prologue.leaves)

    def ring(*operands):
        leaves, locals_ = operands[:count], operands[count:]
        return _ring(leaves, locals_, prologue, uses, dim, schedule, hand_out)

    if mesh is None:
        return ring(*operands)
    finishers = []
    for use in uses:
        consumer = use.consumer
        whole = without_ring(gathered_spec, dim, schedule)
        axes = label_axes_of(
            (consumer.gathered_labels(), whole), (consumer.local_labels(), use.local_spec)
        )
        base = tuple(axes[label] for label in consumer.partial.einsum.out)
        finishers.append((use.out_spec, base, summed_axes(consumer.partial, axes)))

    def body(*operands):
        outs = ring(*operands)
        done = [finish(out, *args) for out, args in zip(outs, finishers, strict=False)]
        return [*done, *outs[len(uses) :]]

    named = [
        (_leaf_dims(i, leaf), leaf_spec(leaf, gathered_spec))
        for i, leaf in enumerate(prologue.leaves)
    ]
    ins, outs = use_dims(uses)
    if hand_out:
        own = tuple(gathered_dim(d) for d in range(prologue.out.aval.ndim))
        outs.append((own, without_ring(gathered_spec, dim, schedule)))
    return on_shards(body, mesh, operands, [*named, *ins], outs)


def _leaf_dims(i: int, leaf: Leaf) -> Dims:
    return tuple(("leaf", i, k) if d is None else gathered_dim(d) for k, d in enumerate(leaf.dims))


def _ring(leaves, locals_, prologue, uses, dim, schedule, hand_out):
    sent = [travels(leaf, dim) for leaf in prologue.leaves]

    def unpack(moved: Sequence[Any]) -> Any:
        arrived = iter(moved)
        blocks = [next(arrived) if s else x for x, s in zip(leaves, sent, strict=True)]
        return prologue.apply(blocks)

    moved = tuple(x for x, s in zip(leaves, sent, strict=True) if s)
    consumers = [use.consumer for use in uses]
    ring = {"gathered_dim": dim, "return_gathered": hand_out, "unpack": unpack}
    dims = tuple(leaf.dims.index(dim) for leaf in prologue.leaves if travels(leaf, dim))
    return loops.all_gather_einsum(moved, locals_, consumers, schedule, shard_dims=dims, **ring)


def _abstract(*operands, prologue, uses, gathered_spec, dim, schedule, mesh, hand_out):
    count = len(prologue.leaves)
    whole = prologue.out.aval.shape
    if mesh is None:
        itself = tuple(range(len(whole)))
        pairs = zip(prologue.leaves, operands, strict=False)
        shard = next(x.shape for leaf, x in pairs if leaf.dims == itself)
        whole = (*shard[:dim], shard[dim] * schedule.ring_size, *shard[dim + 1 :])
    first = operands[0]
    avals = []
    for local, use in zip(operands[count:], uses, strict=True):
        partial = use.consumer.partial
        pair = (local.shape, whole) if use.consumer.gathered_operand else (whole, local.shape)
        shape = partial.einsum.out_shape(*pair)
        if mesh is None:
            moved = (*operands[:count], local)
            avals.append(_jax.manual_aval(moved, shape, partial.out_dtype, schedule.axes))
            continue
        avals.append(_jax.aval_like((first, local), shape, partial.out_dtype, use.out_spec))
    dtype = prologue.out.aval.dtype
    if hand_out and mesh is None:
        avals.append(_jax.manual_aval(operands[:count], whole, dtype, schedule.axes))
    elif hand_out:
        spec = without_ring(gathered_spec, dim, schedule)
        avals.append(_jax.aval_like((first,), whole, dtype, spec))
    return avals


# --- derivatives: the values are those of the wide ring, which has its own rules ---


def _wide(*operands, prologue, uses, **params):
    count = len(prologue.leaves)
    gathered = prologue.apply(operands[:count])
    return all_gather_einsum(gathered, operands[count:], uses, **params)


def _jvp(primals, tangents, **params):
    need_mesh(params["mesh"])
    moving = [i for i, t in enumerate(tangents) if type(t) is not _jax.Zero]

    def of_moving(*xs):
        operands = list(primals)
        for i, x in zip(moving, xs, strict=True):
            operands[i] = x
        return _wide(*operands, **params)

    if not moving:
        outs = narrow_gather_einsum_p.bind(*primals, **params)
        return outs, [_jax.zero_like(out) for out in outs]
    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _batch(size, spmd, operands, dims, **params):
    del size
    need_mesh(params["mesh"])
    mapped = jax.vmap(
        functools.partial(_wide, **params), in_axes=tuple(dims), spmd_axis_name=spmd or None
    )
    outs = mapped(*operands)
    return outs, [0] * len(outs)


def _transpose(cts, *operands, **params):
    raise AssertionError("the tangents of a narrow ring are those of the wide one")


narrow_gather_einsum_p = _jax.define_primitive(
    "narrow_gather_einsum",
    impl=_impl,
    abstract=_abstract,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
