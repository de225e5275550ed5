"""Rewrite: a numbered program and a plan to a program whose chosen dots are our primitives.

Before (``n`` is sharded over ``model`` on dimension 1)::

    g = sharding_constraint[P("data", None, None)] n       # the gather, as the user wrote it
    y = dot_general[collmm_site=0] g w

after::

    y = all_gather_einsum[dim=1 schedule=two-way x4] n w   # g is dead, unless something needs it

A dot that the plan leaves alone gets back exactly what it was; for a TPU, one that the cost model
declined is marked, so that the compiler does not decompose it either. Equations keep their place,
source line and name stack. Refuses when a rewritten equation would have another type than the one
it replaces.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from collmm import _jax
from collmm.capture import Captured, site_of
from collmm.chaining import chain_rings
from collmm.errors import AnalysisError
from collmm.exchange import exchange_einsum_p, moved_spec
from collmm.hand_out import Notes, hand_out
from collmm.loops import Consumer, Inner
from collmm.manual import Match
from collmm.narrow import narrow_rings
from collmm.nesting import inner_collective
from collmm.plan import Decision, Plan, better_apart
from collmm.primitives import (
    GatherUse,
    ScatterTerm,
    all_gather_einsum_p,
    einsum_reduce_scatter_p,
)
from collmm.rewrite_manual import (
    Term,
    manual_exchange,
    manual_exchanged,
    manual_gather,
    manual_scatter,
    manual_sum,
    partial_einsum,
    type_change,
)
from collmm.schedule import Schedule
from collmm.share import share_rings
from collmm.sites import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    Spec,
    trimmed,
)
from collmm.subaxes import AxisSizes, joined, whole_axes
from collmm.sunk import sink

# What takes the place of a hand-written collective on the result of a dot, or on a sum of them.
_AFTER = {
    ALL_TO_ALL: manual_exchanged,
    ALL_REDUCE: manual_sum,
    REDUCE_SCATTER: manual_scatter,
}

# The compiler does not decompose an einsum that carries this, whatever its own rule says.
_WHOLE = {"_xla_collective_matmul": "none"}

MeshOf = Mapping[tuple[tuple[str, int], ...], Any]


def rewrite(
    captured: Captured,
    plan: Plan,
    meshes: MeshOf,
    refused: dict[int, str],
    *,
    whole: Collection[int] = (),
    chains: bool = True,
) -> Any:
    """Return the closed jaxpr of ``captured`` with the plan carried out.

    Args:
      captured: the numbered program.
      plan: one decision per number.
      meshes: the ``jax.sharding.Mesh`` for each ``axis_sizes`` that a site names.
      refused: filled with the sites that could not be rewritten after all, and why.
      whole: numbers of einsums that the compiler is told to leave whole.
      chains: whether a gather and a scatter with elementwise work between become one loop.
    """
    walker = _Rewriter(captured, plan, meshes, whole)
    jaxpr = walker.walk(captured.closed.jaxpr)
    refused.update(walker.refused)
    closed = _jax.drop_dead(captured.closed.replace(jaxpr=jaxpr))
    jaxpr = narrow_rings(hand_out(share_rings(closed.jaxpr), walker.notes))
    if chains:
        jaxpr = chain_rings(jaxpr, walker.apart)
    closed = _jax.drop_dead(closed.replace(jaxpr=jaxpr))
    _check_bound(closed.jaxpr)
    return closed


def _check_bound(jaxpr: Any) -> None:
    """Raise ``AnalysisError`` if an equation reads what is not there yet: a rewrite went wrong."""
    known = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, _jax.Literal) and atom not in known:
                raise AnalysisError(f"after the rewrite {eqn.primitive} reads an unbound value")
        for _, _, sub in _jax.jaxprs_in(eqn):
            _check_bound(_jax.open_jaxpr(sub))
        known.update(eqn.outvars)


class _Rewriter:
    """One walk over a numbered program."""

    def __init__(
        self, captured: Captured, plan: Plan, meshes: MeshOf, whole: Collection[int]
    ) -> None:
        self._captured = captured
        self._plan = plan
        self._meshes = meshes
        self._whole = whole
        self.refused: dict[int, str] = {}
        self.notes = Notes()
        self.apart: set[Any] = set()
        # (operand, sharding) -> what a ring sends for it, where the gather was sunk.
        self._sunk: dict[Any, Any] = {}

    def walk(self, jaxpr: Any) -> Any:
        producers: dict[Any, Any] = {}
        endings = self._endings(jaxpr)
        reshards = _typed_reshards(jaxpr)
        eqns: list[Any] = []
        made: set[Any] = set()
        for eqn in jaxpr.eqns:
            if any(v in made for v in eqn.outvars):
                continue  # a reshard that its einsum took over
            if id(eqn) in endings:
                terms = endings[id(eqn)]
                new = _AFTER[terms[0][2].kind](terms)
            else:
                new = self._visit(eqn, producers, reshards)
            producers.update((v, e) for e in new for v in e.outvars)
            made.update(v for e in new for v in e.outvars)
            eqns += new
        return jaxpr.replace(eqns=eqns)

    def _endings(self, jaxpr: Any) -> dict[int, list[Term]]:
        """Return the collectives on results that become rings, with the dots they reduce."""
        found: dict[int, list[Term]] = {}
        for eqn in jaxpr.eqns:
            number = site_of(eqn)
            if number is None:
                continue
            decision = self._plan.decisions[number]
            if decision.rewritten and decision.site.manual:
                match = self._match(decision)
                if match.operand is None:
                    term = self._untagged(eqn, number), decision, match
                    found.setdefault(id(match.eqn), []).append(term)
        return found

    def _match(self, decision: Decision) -> Match:
        collective = decision.collective
        assert collective is not None
        dot = self._captured.dots[decision.site.index]
        return next(
            m for m in dot.matches if (m.operand, m.dim) == (collective.operand, collective.dim)
        )

    def _untagged(self, eqn: Any, number: int) -> Any:
        return eqn.replace(ctx=self._captured.dots[number].eqn.ctx)

    def _visit(self, eqn: Any, producers: dict[Any, Any], reshards: dict[Any, Any]) -> list[Any]:
        number = site_of(eqn)
        if number is not None:
            decision = self._plan.decisions[number]
            eqn = self._untagged(eqn, number)
            if not decision.rewritten:
                self._note_gathers(eqn, decision, None)
                return [_jax.with_metadata(eqn, **_WHOLE) if number in self._whole else eqn]
            if not decision.site.manual:
                return self._rewrite_one(eqn, decision, producers, reshards)
            match = self._match(decision)
            if match.operand is None:
                return [eqn]  # the ring stands where the user's collective was
            if match.kind == ALL_TO_ALL:
                return manual_exchange(eqn, decision, match)
            self.notes.operands[eqn.outvars[0]] = eqn.invars[match.operand]
            return manual_gather(eqn, decision, match)
        new = {
            (key, index): self.walk(_jax.open_jaxpr(sub))
            for key, index, sub in _jax.jaxprs_in(eqn)
            if _has_number(_jax.open_jaxpr(sub))
        }
        return [_jax.with_jaxprs(eqn, new) if new else eqn]

    def _rewrite_one(
        self,
        eqn: Any,
        decision: Decision,
        producers: dict[Any, Any],
        reshards: dict[Any, Any],
    ) -> list[Any]:
        site = decision.site
        mesh = self._meshes[site.axis_sizes]
        assert decision.collective is not None
        self._note_gathers(eqn, decision, decision.collective)
        sunk: list[Any] = []
        if decision.collective.kind == ALL_TO_ALL:
            new = _exchange_eqn(eqn, decision, mesh, producers)
        elif decision.collective.kind == ALL_GATHER:
            sunk, new = _gather_eqns(eqn, decision, mesh, producers, self._sunk)
        else:
            new = scatter_eqn(eqn, decision, mesh, producers)
            if _better_apart(decision, self._plan):
                self.apart.update(eqn.outvars)
        # Where shardings are types, the user's reshard of the result is what scatters it.
        reshard = reshards.get(eqn.outvars[0])
        if reshard is not None and type_change(eqn.outvars, new):
            new = new.replace(outvars=reshard.outvars)
            if not type_change(reshard.outvars, new):
                self.apart.update(new.outvars if eqn.outvars[0] in self.apart else ())
                return self._with_sunk(eqn, decision, sunk, new)
        change = type_change(eqn.outvars, new)
        if change:
            self.refused[site.index] = change
            self._note_gathers(eqn, decision, None)
            return [eqn]
        return self._with_sunk(eqn, decision, sunk, new)

    def _with_sunk(self, eqn: Any, decision: Decision, sunk: list[Any], new: Any) -> list[Any]:
        """Return the equations of a ring; others that gather the same value start from these."""
        c = decision.collective
        if sunk and c is not None and c.operand is not None:
            self._sunk[eqn.invars[c.operand], new.params["gathered_spec"]] = new.invars[0]
        return [*sunk, new]

    def _note_gathers(self, dot: Any, decision: Decision, looped: Collective | None) -> None:
        """Note the operands of a dot that the compiler gathers; a ring may hand them out."""
        site = decision.site
        mesh = self._meshes.get(site.axis_sizes)
        if site.manual or mesh is None:
            return
        nested = None if looped is None else _nested(decision)
        for c in site.collectives:
            if c.kind != ALL_GATHER or c in (looped, nested) or c.operand is None:
                continue
            spec = (site.lhs_spec, site.rhs_spec)[c.operand]
            self.notes.dots.setdefault(dot.outvars[0], []).append((c.operand, spec, mesh))
            if not isinstance(dot.invars[c.operand], _jax.Literal):
                self.notes.gathered.add((dot.invars[c.operand], spec, mesh))


def _better_apart(decision: Decision, plan: Plan) -> bool:
    tpu = plan.row is not None and plan.row.kind == "tpu"
    return better_apart(decision.estimate, plan.policy, tpu)


def _typed_reshards(jaxpr: Any) -> dict[Any, Any]:
    """Return, by their operand, the reshards that alone read a typed value."""
    readers = Counter(
        v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)
    )
    readers.update(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal))
    reshards = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reshard"]
    return {
        eqn.invars[0]: eqn
        for eqn in reshards
        if not isinstance(eqn.invars[0], _jax.Literal) and readers[eqn.invars[0]] == 1
    }


def _gather_eqns(
    eqn: Any, decision: Decision, mesh: Any, producers: dict[Any, Any], known: dict[Any, Any]
) -> tuple[list[Any], Any]:
    """Return what makes the value that the ring sends, and the ring in place of ``eqn``.

    ``known`` are such values that others made already.
    """
    site, collective = decision.site, decision.collective
    assert collective is not None
    side, dim = collective.operand, collective.dim
    assert side is not None
    specs = [site.lhs_spec, site.rhs_spec]
    gathered_spec = _appended(specs[side], dim, collective.axes)

    def before(atom: Any) -> Any:
        return _before_gather(atom, gathered_spec, site.axis_sizes, producers)

    sunk: list[Any] = []
    gathered = known.get((eqn.invars[side], gathered_spec))
    if gathered is None:
        gathered = before(eqn.invars[side])
        if collective.early:
            sunk, gathered = sink(gathered, producers, before)
    others, inner = _before_inner(eqn, decision, producers)
    consumer = Consumer(partial_einsum(eqn, site), side)
    use = GatherUse(consumer, specs[1 - side], _result_spec(decision), inner)
    params = {
        "uses": (use,),
        "gathered_spec": gathered_spec,
        "dim": dim,
        "schedule": _outer(decision),
        "mesh": mesh,
        "hand_out": False,
    }
    invars = [gathered, others[1 - side]]
    return sunk, _jax.primitive_eqn(eqn, all_gather_einsum_p, invars, eqn.outvars, params)


def _nested(decision: Decision) -> Collective | None:
    """Return the collective that the inner ring of a decision takes over; None without one."""
    assert decision.collective is not None
    return inner_collective(decision.site, decision.collective, decision.schedule)


def _outer(decision: Decision) -> Schedule:
    """Return the schedule of the outer ring; the inner one is an einsum's own."""
    assert decision.schedule is not None
    return dataclasses.replace(decision.schedule, inner=None)


def _before_inner(
    eqn: Any, decision: Decision, producers: dict[Any, Any]
) -> tuple[list[Any], Inner | None]:
    """Return the operands of an einsum, before the gather of its inner ring, and that ring."""
    site, c, invars = decision.site, _nested(decision), list(eqn.invars)
    if c is None or c.operand is None:
        return invars, None
    assert decision.schedule is not None
    assert decision.schedule.inner is not None
    spec = _appended((site.lhs_spec, site.rhs_spec)[c.operand], c.dim, c.axes)
    invars[c.operand] = _before_gather(invars[c.operand], spec, site.axis_sizes, producers)
    return invars, Inner(c.operand, c.dim, decision.schedule.inner)


def _exchange_eqn(eqn: Any, decision: Decision, mesh: Any, producers: dict[Any, Any]) -> Any:
    site, c = decision.site, decision.collective
    assert c is not None
    invars = list(eqn.invars)
    specs = [site.lhs_spec, site.rhs_spec, _result_spec(decision)]
    if c.operand is None:
        specs[2] = moved_spec(specs[2], c.dim, c.split_dim, c.axes)
    else:
        # The specs of the site are those after the exchange; it starts from before.
        specs[c.operand] = moved_spec(specs[c.operand], c.split_dim, c.dim, c.axes)
        spec = specs[c.operand]
        invars[c.operand] = _before_gather(invars[c.operand], spec, site.axis_sizes, producers)
    params = {
        "partial": partial_einsum(eqn, site),
        "operand": c.operand,
        "split_dim": c.split_dim,
        "join_dim": c.dim,
        "specs": tuple(specs),
        "schedule": decision.schedule,
        "mesh": mesh,
    }
    return _jax.primitive_eqn(eqn, exchange_einsum_p, invars, eqn.outvars, params)


def scatter_eqn(
    eqn: Any, decision: Decision, mesh: Any, producers: dict[Any, Any] | None = None
) -> Any:
    """Return the equation of an einsum whose sum is scattered on a ring, in place of ``eqn``."""
    site, collective = decision.site, decision.collective
    assert collective is not None
    invars, inner = _before_inner(eqn, decision, producers or {})
    term = ScatterTerm(partial_einsum(eqn, site), site.lhs_spec, site.rhs_spec, inner)
    params = {
        "terms": (term,),
        "out_spec": _result_spec(decision),
        "dim": collective.dim,
        "schedule": _outer(decision),
        "mesh": mesh,
    }
    return _jax.primitive_eqn(eqn, einsum_reduce_scatter_p, invars, eqn.outvars, params)


def _result_spec(decision: Decision) -> Spec:
    """Return the sharding of the result after every reduce-scatter next to the einsum."""
    spec = decision.site.out_spec
    for c in decision.site.loopable:
        scattered_first = c.kind == ALL_REDUCE and c == decision.collective
        if c.kind == REDUCE_SCATTER or scattered_first:
            spec = _appended(spec, c.dim, c.axes)
    return spec


def _appended(spec: Spec, dim: int, axes: tuple[str, ...]) -> Spec:
    return (*spec[:dim], (*spec[dim], *axes), *spec[dim + 1 :])


def _before_gather(atom: Any, spec: Spec, axis_sizes: AxisSizes, producers: dict[Any, Any]) -> Any:
    """Return the value that the gather starts from: look through constraints that gather.

    A ``with_sharding_constraint`` to the gathered sharding is the gather itself, as a user writes
    it; one to ``spec`` is where the ring starts.
    """
    sizes = dict(whole_axes(axis_sizes))
    wanted = trimmed(tuple(joined(axes, sizes) for axes in spec))
    while True:
        producer = None if isinstance(atom, _jax.Literal) else producers.get(atom)
        if producer is None or not _jax.is_resharding(producer):
            return atom
        if _jax.resharding_spec(producer) == wanted:
            return atom
        atom = producer.invars[0]


def _has_number(jaxpr: Any) -> bool:
    return any(
        site_of(eqn) is not None
        or any(_has_number(_jax.open_jaxpr(sub)) for _, _, sub in _jax.jaxprs_in(eqn))
        for eqn in jaxpr.eqns
    )
