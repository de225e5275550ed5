"""Invariance: gathers that give the same value in every turn of a loop.

    scan[jaxpr={ lambda ; w c. let
        g = sharding_constraint[P(None, None)] w      # w is a constant of the loop
        y = dot_general[collmm_site=0] c g
      in (y,) }] w x

A compiler takes such a constraint out of the loop, and gathers once. What it gathers for an einsum
of its own accord, or what is gathered by hand inside a ``shard_map``, it gathers in every turn; so
it does in a branch, and under a ``checkpoint`` that keeps its work apart from the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from collmm import _jax
from collmm.sites import Spec
from collmm.sunk import elementwise_behind

# Of lhs and rhs.
_Specs = tuple[Spec | None, Spec | None]


def gathered_once(
    jaxpr: Any, site_of: Callable[[Any], int | None]
) -> dict[int, tuple[Spec | None, Spec | None]]:
    """Return, by number, how the operands of einsums in loops are constrained before the loops.

    None for an operand that a turn may change, or that is not constrained.

    ``site_of`` gives the number of an equation, None if it has none.
    """
    found: dict[int, _Specs] = {}
    if _jax.COMPILER_HOISTS_CONSTRAINTS:
        _visit(jaxpr, frozenset(), False, site_of, found)
    return found


def _visit(
    jaxpr: Any,
    fixed: Collection[Any],
    in_loop: bool,
    site_of: Callable[[Any], int | None],
    found: dict[int, _Specs],
) -> None:
    """Note the einsums of ``jaxpr``, whose inputs ``fixed`` are the same in every turn."""
    same = {*fixed, *jaxpr.constvars}
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def is_fixed(atom: Any) -> bool:
        return isinstance(atom, _jax.Literal) or atom in same

    def once(atom: Any) -> Spec | None:
        if isinstance(atom, _jax.Literal) or not in_loop or atom not in same:
            return None
        behind = elementwise_behind(atom, producers)
        return next((_jax.resharding_spec(e) for e in behind if _jax.is_resharding(e)), None)

    for eqn in jaxpr.eqns:
        number = site_of(eqn)
        if number is not None:
            lhs, rhs = map(once, eqn.invars)
            found[number] = lhs, rhs
        for key, _, sub in _jax.jaxprs_in(eqn):
            inner = _jax.open_jaxpr(sub)
            at, turns = _kept(eqn, key, inner)
            if turns:
                _visit(inner, [inner.invars[i] for i in at], True, site_of, found)
            else:
                kept = [inner.invars[i] for i in at if is_fixed(eqn.invars[i])]
                _visit(inner, kept, in_loop, site_of, found)
        if not eqn.effects and all(map(is_fixed, eqn.invars)):
            same.update(eqn.outvars)


def _kept(eqn: Any, key: str, inner: Any) -> tuple[list[int], bool]:
    """Return which inputs of a jaxpr of ``eqn`` it does not change, and whether it is a loop.

    Of what is no loop, those that have the value of the operand in their place.
    """
    name = eqn.primitive.name
    if name == "scan":
        consts, carried = _jax.scan_counts(eqn)
        unchanged = _unchanged(inner, consts, carried)
        return [*range(consts), *unchanged], eqn.params["length"] > 1
    if name == "while" and key == "body_jaxpr":
        consts = eqn.params["body_nconsts"]
        carried = len(inner.invars) - consts
        return [*range(consts), *_unchanged(inner, consts, carried)], True
    apart = eqn.params.get("prevent_cse") and eqn.params.get("differentiated")
    if name in ("while", "cond", "shard_map") or apart or len(inner.invars) != len(eqn.invars):
        return [], False
    return list(range(len(inner.invars))), False


def _unchanged(inner: Any, consts: int, carried: int) -> list[int]:
    """Return the places of carried inputs that a body hands on as they are."""
    outs = inner.outvars[:carried]
    places = range(consts, consts + carried)
    return [i for i, out in zip(places, outs, strict=True) if out is inner.invars[i]]
