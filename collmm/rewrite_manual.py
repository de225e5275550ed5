"""Rewrite one einsum inside a ``shard_map``: the user's collective and the dot become one ring.

Before::

    g = all_gather[axis_name=('model',) tiled=True] x
    c = convert_element_type[bfloat16] g
    y = dot_general c w

after::

    d = convert_element_type[bfloat16] x          # on the shard
    y = all_gather_einsum[mesh=None dim=0 ...] d w

A sum that is wanted whole, ``psum(dot_general h w)``, becomes a ring that scatters it and a plain
gather of the blocks, which what follows may overlap.

What stands between collective and dot is done on one block instead of the whole. The original
equations stay where something else reads them.
"""

from __future__ import annotations

from typing import Any

from collmm import _jax
from collmm.errors import AnalysisError
from collmm.exchange import exchange_einsum_p
from collmm.loops import Consumer, PartialEinsum
from collmm.manual import Match, block_shape, replay, vary_first, without_varying
from collmm.plan import Decision
from collmm.primitives import (
    GatherUse,
    ScatterTerm,
    all_gather_einsum_p,
    einsum_reduce_scatter_p,
)


def manual_gather(dot: Any, decision: Decision, match: Match) -> list[Any]:
    """Return the equations that take the place of ``dot``, whose operand ``match`` gathers."""
    site = decision.site
    assert match.operand is not None
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
    side = match.operand
    specs = [site.lhs_spec, site.rhs_spec]
    use = GatherUse(Consumer(partial_einsum(dot, site), side), specs[1 - side], site.out_spec)
    params = {
        "uses": (use,),
        "gathered_spec": specs[side],
        "dim": dim,
        "schedule": decision.schedule,
        "mesh": None,
        "hand_out": False,
    }
    new = _jax.primitive_eqn(
        dot, all_gather_einsum_p, [block, dot.invars[1 - side]], dot.outvars, params
    )
    check_type(dot, new)
    return [*eqns, new]


def manual_scatter(dot: Any, decision: Decision, match: Match) -> list[Any]:
    """Return the equations that take the place of the reduce-scatter that follows ``dot``."""
    eqns, block, _ = _scattered(dot, decision, match)
    if match.eqn.params["tiled"]:
        eqns[-1] = eqns[-1].replace(outvars=match.eqn.outvars)
    else:
        eqns.append(_jax.reshape_eqn(match.eqn, block, match.eqn.outvars[0]))
    return eqns


def manual_sum(dot: Any, decision: Decision, match: Match) -> list[Any]:
    """Return the equations that take the place of the psum that follows ``dot``.

    The ring scatters the sum over its own axes, the others are summed on the block, and the blocks
    are gathered.
    """
    eqns, block, dim = _scattered(dot, decision, match)
    rest = tuple(a for a in match.eqn.params["axes"] if str(a) not in match.axes)
    if rest:
        summed = _jax.var_like(match.eqn.outvars[0], block.aval.shape)
        params = dict(match.eqn.params, axes=rest)
        eqns.append(match.eqn.replace(invars=[block], outvars=[summed], params=params))
        block = summed
    eqns.append(_jax.gather_eqn(match.eqn, block, match.eqn.outvars[0], match.axes, dim))
    return eqns


def _scattered(dot: Any, decision: Decision, match: Match) -> tuple[list[Any], Any, int]:
    """Return (equations, this device's block of the sum after what follows the dot, where)."""
    site, dim = decision.site, match.dim
    (whole,) = dot.outvars
    eqns, invars, between = vary_first(dot, match.between, match.axes)
    block = _jax.var_like(whole, block_shape(whole.aval.shape, dim, match.size))
    params = {
        "terms": (ScatterTerm(partial_einsum(dot, site), site.lhs_spec, site.rhs_spec),),
        "out_spec": site.out_spec,
        "dim": dim,
        "schedule": decision.schedule,
        "mesh": None,
    }
    eqns.append(_jax.primitive_eqn(dot, einsum_reduce_scatter_p, invars, [block], params))
    for step in between:
        new, dim = replay(step, block, dim, match.size)
        eqns.append(new)
        (block,) = new.outvars
    return eqns, block, dim


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
