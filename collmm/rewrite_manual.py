"""Rewrite one einsum inside a ``shard_map``: the user's collective and the dot become one ring.

Before::

    g = all_gather[axis_name=('model',) tiled=True] x
    c = convert_element_type[bfloat16] g
    y = dot_general c w

after::

    d = convert_element_type[bfloat16] x          # on the shard
    y = all_gather_einsum[mesh=None dim=0 ...] d w

A sum that is wanted whole, ``psum(dot_general h w)``, becomes a ring that scatters it and a plain
gather of the blocks, which what follows may overlap. Einsums whose results are added first become
rings whose blocks are added, and ``share`` makes one ring of them.

What stands between collective and dot is done on one block instead of the whole. The original
equations stay where something else reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collmm import _jax
from collmm.blocks import block_shape, is_add, replay, vary_first, without_varying
from collmm.errors import AnalysisError
from collmm.exchange import exchange_einsum_p
from collmm.loops import Consumer, PartialEinsum
from collmm.manual import Match
from collmm.narrow import narrow_gather_einsum_p
from collmm.plan import Decision
from collmm.primitives import (
    GatherUse,
    ScatterTerm,
    all_gather_einsum_p,
    einsum_reduce_scatter_p,
)


def manual_gather(dot: Any, decision: Decision, match: Match) -> list[Any]:
    """Return the equations that take the place of ``dot``, whose operand ``match`` gathers."""
    assert match.operand is not None
    if match.prologue is not None:
        return [_narrow_gather(dot, decision, match)]
    eqns: list[Any] = []
    (block,) = match.eqn.invars
    dim = match.eqn.params["all_gather_dimension"]
    if not match.eqn.params["tiled"]:
        whole = match.eqn.outvars[0]
        expanded = _jax.var_like(whole, block_shape(whole.aval.shape, dim, match.size))
        eqns.append(_jax.reshape_eqn(match.eqn, block, expanded))
        block = expanded
    for step in without_varying(match.between, match.axes):
        new, dim = replay(step, block, dim, match.size)
        eqns.append(new)
        (block,) = new.outvars
    params = _gather_params(dot, decision, match.operand, dim)
    invars = [block, dot.invars[1 - match.operand]]
    new = _jax.primitive_eqn(dot, all_gather_einsum_p, invars, dot.outvars, params)
    check_type(dot, new)
    return [*eqns, new]


def _narrow_gather(dot: Any, decision: Decision, match: Match) -> Any:
    """Return the ring in place of ``dot`` that casts and scales each shard where it arrives."""
    assert match.operand is not None
    assert match.prologue is not None
    params = _gather_params(dot, decision, match.operand, match.dim)
    params["prologue"] = match.prologue
    invars = [*(leaf.var for leaf in match.prologue.leaves), dot.invars[1 - match.operand]]
    new = _jax.primitive_eqn(dot, narrow_gather_einsum_p, invars, dot.outvars, params)
    check_type(dot, new)
    return new


def _gather_params(dot: Any, decision: Decision, side: int, dim: int) -> dict[str, Any]:
    site = decision.site
    specs = [site.lhs_spec, site.rhs_spec]
    use = GatherUse(Consumer(partial_einsum(dot, site), side), specs[1 - side], site.out_spec)
    return {
        "uses": (use,),
        "gathered_spec": specs[side],
        "dim": dim,
        "schedule": decision.schedule,
        "mesh": None,
        "hand_out": False,
    }


# An einsum whose result is reduced, as it was, what happens to it, and the collective.
Term = tuple[Any, Decision, Match]


def manual_scatter(terms: Sequence[Term]) -> list[Any]:
    """Return the equations in place of the reduce-scatter of the sum of ``terms``."""
    match = terms[0][2]
    eqns, block, _ = _scattered(terms)
    if match.eqn.params["tiled"]:
        eqns[-1] = eqns[-1].replace(outvars=match.eqn.outvars)
    else:
        eqns.append(_jax.reshape_eqn(match.eqn, block, match.eqn.outvars[0]))
    return eqns


def manual_sum(terms: Sequence[Term]) -> list[Any]:
    """Return the equations in place of the psum of the sum of ``terms``.

    The ring scatters the sum over its own axes, the others are summed on the block, and the blocks
    are gathered.
    """
    match = terms[0][2]
    eqns, block, dim = _scattered(terms)
    rest = tuple(a for a in match.eqn.params["axes"] if str(a) not in match.axes)
    if rest:
        summed = _jax.var_like(match.eqn.outvars[0], block.aval.shape)
        params = dict(match.eqn.params, axes=rest)
        eqns.append(match.eqn.replace(invars=[block], outvars=[summed], params=params))
        block = summed
    eqns.append(_jax.gather_eqn(match.eqn, block, match.eqn.outvars[0], match.axes, dim))
    return eqns


def _scattered(terms: Sequence[Term]) -> tuple[list[Any], Any, int]:
    """Return (equations, this device's block of the sum that is reduced, where its blocks are).

    A ring for each term, and on its block what follows the term, up to where another is added.
    """
    eqns: list[Any] = []
    blocks: dict[Any, Any] = {}  # of the values that are added
    for dot, decision, match in terms:
        new, block = _ring(dot, decision, match)
        eqns += new
        dim, whole = match.dim, dot.outvars[0]
        for step in match.between:
            if is_add(step):
                blocks[whole] = block
                if not all(v in blocks for v in step.invars):
                    break
                out = _jax.var_like(step.outvars[0], block.aval.shape)
                added = [blocks[v] for v in step.invars]
                eqns.append(step.replace(invars=added, outvars=[out]))
                block = out
            elif kept := without_varying([step], match.axes):
                new_step, dim = replay(kept[0], block, dim, match.size)
                eqns.append(new_step)
                (block,) = new_step.outvars
            (whole,) = step.outvars
    return eqns, block, dim


def _ring(dot: Any, decision: Decision, match: Match) -> tuple[list[Any], Any]:
    """Return the equations that scatter the sum of one einsum, and this device's block."""
    site, dim = decision.site, match.dim
    (whole,) = dot.outvars
    eqns, invars = vary_first(dot, match.between, match.axes)
    block = _jax.var_like(whole, block_shape(whole.aval.shape, dim, match.size))
    params = {
        "terms": (ScatterTerm(partial_einsum(dot, site), site.lhs_spec, site.rhs_spec),),
        "out_spec": site.out_spec,
        "dim": dim,
        "schedule": decision.schedule,
        "mesh": None,
    }
    eqns.append(_jax.primitive_eqn(dot, einsum_reduce_scatter_p, invars, [block], params))
    return eqns, block


def manual_exchanged(terms: Sequence[Term]) -> list[Any]:
    """Return the equations in place of the all-to-all that follows the one einsum of ``terms``."""
    ((dot, decision, match),) = terms
    return manual_exchange(dot, decision, match)


def manual_exchange(dot: Any, decision: Decision, match: Match) -> list[Any]:
    """Return the equations in place of ``dot``, or of the all-to-all that follows it."""
    site, eqns = decision.site, []
    invars = list(dot.invars)
    if match.operand is not None:
        (block,) = match.eqn.invars
        for step in match.between:  # casts only: they do not care where elements are
            out = _jax.var_like(step.outvars[0], block.aval.shape)
            eqns.append(step.replace(invars=[block], outvars=[out]))
            block = out
        invars[match.operand] = block
    params = {
        "partial": partial_einsum(dot, site),
        "operand": match.operand,
        "split_dim": match.split_dim,
        "join_dim": match.dim,
        "specs": (site.lhs_spec, site.rhs_spec, site.out_spec),
        "schedule": decision.schedule,
        "mesh": None,
    }
    if match.operand is not None:
        new = _jax.primitive_eqn(dot, exchange_einsum_p, invars, dot.outvars, params)
        check_type(dot, new)
        return [*eqns, new]
    target = match.eqn.outvars[0]
    out = _jax.var_like(dot.outvars[0], target.aval.shape)
    eqns = [_jax.primitive_eqn(dot, exchange_einsum_p, invars, [out], params)]
    for step in match.between:
        last = _jax.var_like(step.outvars[0], target.aval.shape)
        eqns.append(step.replace(invars=[out], outvars=[last]))
        out = last
    eqns[-1] = eqns[-1].replace(outvars=[target])
    return eqns


def partial_einsum(eqn: Any, site: Any) -> PartialEinsum:
    """Return the einsum of ``eqn`` as the loops take it."""
    p = eqn.params
    return PartialEinsum(
        site.einsum, p["precision"], p["preferred_element_type"], eqn.outvars[0].aval.dtype
    )


def check_type(old: Any, new: Any) -> None:
    """Raise unless the new equation's results have the types of the old one's."""
    change = type_change(old.outvars, new)
    if change:
        raise AnalysisError(f"rewriting {old.primitive}: {change}")


def type_change(outvars: Any, new: Any) -> str:
    """Return how the results of ``new`` differ in type from ``outvars``; '' if they do not."""
    for var, aval in zip(outvars, _jax.result_types(new), strict=True):
        want = var.aval
        same = (want.shape, want.dtype) == (aval.shape, aval.dtype)
        if not same or _jax.typed_sharding(want) != _jax.typed_sharding(aval):
            return f"{want} would become {aval}"
    return ""
