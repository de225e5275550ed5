"""Hand out: what a ring gathers is needed whole by something else too, and the ring gives it.

Before::

    g = sharding_constraint[P("data", None, None)] x
    y = all_gather_einsum[dim=1 ...] x w
    z = tanh g                                       # a second gather, by the compiler

after::

    y g = all_gather_einsum[dim=1 hand_out=True ...] x w
    z = tanh g

The same inside a user's ``shard_map``, where ``g`` is an ``all_gather``, and for einsums that
gather the same value but were given another loop or none: they read what is handed out.

Refuses when one of the readers is needed by the ring itself, when the value handed out would have
another type, and when the plain gather has readers that the ring cannot serve (it travels as a
cast of the value, say). The ring moves up to its first reader where it stands behind it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from collmm import _jax
from collmm.primitives import all_gather_einsum_p, einsum_reduce_scatter_p, without_ring
from collmm.rewrite_manual import type_change
from collmm.share import canonical_names, gathers, has_rings
from collmm.sites import Spec, trimmed


@dataclasses.dataclass
class Notes:
    """What the rewrite knows of a program beyond its jaxpr; variables outlive the passes.

    Attributes:
      operands: by the result of an einsum that a ring took over inside a ``shard_map``, the
        operand that it read: the gathered value.
      gathered: (value, sharding, mesh) of operands that a ring reads besides its own, and that
        the compiler gathers for it.
      dots: by the result of an einsum that was left, such operands of it: (position, sharding,
        mesh).
    """

    operands: dict[Any, Any] = dataclasses.field(default_factory=dict)
    gathered: set[tuple[Any, Spec, Any]] = dataclasses.field(default_factory=set)
    dots: dict[Any, list[tuple[int, Spec, Any]]] = dataclasses.field(default_factory=dict)


def hand_out(jaxpr: Any, notes: Notes) -> Any:
    """Return ``jaxpr`` with gathered values handed out by its rings, in its sub-jaxprs too."""
    eqns = []
    for eqn in jaxpr.eqns:
        new = {
            (key, index): hand_out(_jax.open_jaxpr(sub), notes)
            for key, index, sub in _jax.jaxprs_in(eqn)
            if has_rings(_jax.open_jaxpr(sub))
        }
        eqns.append(_jax.with_jaxprs(eqn, new) if new else eqn)
    body = _Body(eqns, jaxpr.outvars, notes)
    for ring in eqns:
        if gathers(ring) and not ring.params["hand_out"]:
            body = body.served_by(ring) or body
    return jaxpr.replace(eqns=body.eqns, outvars=body.outvars)


@dataclasses.dataclass(frozen=True)
class _Copies:
    """Where a ring's gathered value is to be had without it.

    ``values``: variables that hold it; ``makers``: the equations that gather it and can go;
    ``reads``: (equation, position) of operands that the compiler would gather.
    """

    values: list[Any]
    makers: set[int]
    reads: set[tuple[int, int]]


class _Body:
    """One list of equations: who makes and who reads each value."""

    def __init__(self, eqns: list[Any], outvars: Any, notes: Notes) -> None:
        self.eqns = eqns
        self.outvars = outvars
        self._notes = notes
        self._made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
        self._names = canonical_names(eqns)
        self._readers: dict[Any, set[int]] = {}
        for i, eqn in enumerate(eqns):
            for v in eqn.invars:
                if not _is_literal(v):
                    self._readers.setdefault(v, set()).add(i)
        for v in outvars:
            if not _is_literal(v):
                self._readers.setdefault(v, set()).add(len(eqns))
        # By the sharding that they gather to: constraints, and operands (equation, position).
        self._makers: dict[Any, list[int]] = {}
        self._reads: dict[Any, list[tuple[int, int]]] = {}
        for i, eqn in enumerate(eqns):
            if _jax.is_resharding(eqn):
                self._makers.setdefault(_jax.resharding_spec(eqn), []).append(i)
            for k, spec, mesh in self._gathered_operands(eqn):
                self._reads.setdefault((spec, mesh), []).append((i, k))

    def served_by(self, ring: Any) -> _Body | None:
        """Return the body with ``ring`` handing out; None if nothing can have use of that."""
        # An earlier ring may have changed what this one reads, but not what it makes.
        at = self._made[ring.outvars[0]]
        ring = self.eqns[at]
        copies = self._manual(ring) if ring.params["mesh"] is None else self._resharded(ring)
        readers = {i for v in copies.values for i in self._readers.get(v, ())} - copies.makers
        readers |= {i for i, _ in copies.reads}
        if not readers:
            return None
        needs = self._needs(at)
        first = min([at, *readers])
        moved = sorted(i for i in needs if i > first)
        stuck = any(_jax.has_side_effects(self.eqns[i]) for i in moved)
        new = self._handing_out(ring, copies)
        if at in readers or needs & (readers | copies.makers) or stuck or new is None:
            return None
        order = dict.fromkeys([*range(first), *moved, at, *range(first, len(self.eqns))])
        eqns = {i: new if i == at else self.eqns[i] for i in order if i not in copies.makers}
        return self._reading(eqns, copies, new.outvars[-1])

    def _handing_out(self, ring: Any, copies: _Copies) -> Any:
        """Return ``ring`` with one result more; None if that has not the type of the copies."""
        new = ring.replace(params=dict(ring.params, hand_out=True))
        aval = _jax.result_types(new)[-1]
        value = copies.values[0] if copies.values else _jax.Var(aval)
        new = new.replace(outvars=[*ring.outvars, value])
        same = all(not type_change([*ring.outvars, v], new) for v in copies.values)
        return new if same else None

    def _reading(self, eqns: dict[int, Any], copies: _Copies, value: Any) -> _Body:
        """Return the body of ``eqns`` reading ``value`` in place of its copies."""
        renamed = dict.fromkeys(copies.values, value)

        def named(v: Any) -> Any:
            return v if _is_literal(v) else renamed.get(v, v)

        result = []
        for i, eqn in eqns.items():
            invars = [
                value if (i, k) in copies.reads else named(v) for k, v in enumerate(eqn.invars)
            ]
            same = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
            result.append(eqn if same else eqn.replace(invars=invars))
        return _Body(result, [named(v) for v in self.outvars], self._notes)

    def _needs(self, at: int) -> set[int]:
        """Return the equations that the one at ``at`` depends on."""
        found: set[int] = set()
        todo = [at]
        while todo:
            for v in self.eqns[todo.pop()].invars:
                i = None if _is_literal(v) else self._made.get(v)
                if i is not None and i not in found:
                    found.add(i)
                    todo.append(i)
        return found

    # --- whole values: constraints that gather, and einsums whose operand the compiler gathers ---

    def _resharded(self, ring: Any) -> _Copies:
        p = ring.params
        whole = without_ring(p["gathered_spec"], p["dim"], p["schedule"])
        source = self._name(ring.invars[0])

        def gathers(i: int, k: int) -> bool:
            return self.eqns[i] is not ring and self._descends(self.eqns[i].invars[k], source)

        makers = {i for i in self._makers.get(trimmed(whole), ()) if gathers(i, 0)}
        reads = {at for at in self._reads.get((whole, p["mesh"]), ()) if gathers(*at)}
        return _Copies([self.eqns[i].outvars[0] for i in sorted(makers)], makers, reads)

    def _name(self, v: Any) -> Any:
        return self._names.get(v, v)

    def _descends(self, v: Any, source: Any) -> bool:
        """Whether ``v`` is ``source``, perhaps resharded."""
        while not _is_literal(v):
            if self._name(v) is source:
                return True
            i = self._made.get(v)
            if i is None or not _jax.is_resharding(self.eqns[i]):
                return False
            v = self.eqns[i].invars[0]
        return False

    def _gathered_operands(self, eqn: Any) -> list[tuple[int, Spec, Any]]:
        """Return the operands of ``eqn`` that the compiler gathers: (position, sharding, mesh)."""
        specs: list[Spec | None]
        if eqn.primitive is all_gather_einsum_p:
            # What an inner ring gathers the compiler does not.
            specs = [None, *(None if u.inner else u.local_spec for u in eqn.params["uses"])]
        elif eqn.primitive is einsum_reduce_scatter_p:
            specs = [
                None if t.inner and t.inner.operand == k else s
                for t in eqn.params["terms"]
                for k, s in enumerate((t.lhs_spec, t.rhs_spec))
            ]
        else:
            return self._notes.dots.get(eqn.outvars[0], []) if eqn.outvars else []
        mesh = eqn.params["mesh"]
        return [
            (k, spec, mesh)
            for k, (v, spec) in enumerate(zip(eqn.invars, specs, strict=True))
            if spec is not None and not _is_literal(v) and (v, spec, mesh) in self._notes.gathered
        ]

    # --- inside a shard_map: the user's own all_gather, and what stands between it and the dot ---

    def _manual(self, ring: Any) -> _Copies:
        values = [self._notes.operands[v] for v in ring.outvars if v in self._notes.operands]
        values = [v for v in dict.fromkeys(values) if v in self._made]
        makers: set[int] = set()
        for v in values:
            prologue = ring.params.get("prologue")
            if prologue is not None:
                makers |= {self._made[e.outvars[0]] for e in prologue.eqns}
                continue
            i = self._made.get(v)
            while i is not None:
                makers.add(i)
                last = self.eqns[i].primitive.name in ("all_gather", "all_gather_invariant")
                i = None if last else self._made.get(self.eqns[i].invars[0])
        between = [v for i in makers for v in self.eqns[i].outvars if v not in values]
        if any(self._readers.get(v, set()) - makers for v in between):
            return _Copies([], set(), set())  # the plain gather has to stay: nothing is won
        return _Copies(values, makers, set())


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal)
