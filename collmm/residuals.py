"""Residuals: what one loop saves for another is saved as it lies where it was computed.

Autodiff of a ``scan`` saves values of the forward body for the backward one. How the stack of them
is sharded is nobody's word, and the partitioner often saves what the backward body would like to
read: the gathered activation, on every device. Before::

    scan (forward):  g = sharding_constraint[P("data", None, None)] x
                     y = dot_general g w                     # g is saved, whole
    scan (backward): dw = dot_general g dy                   # nothing to overlap any more

after::

    scan (forward):  y = all_gather_einsum x w               # x is saved, a shard
    scan (backward): dw = all_gather_einsum x dy             # and gathered again, on a ring

The backward body reads the value through the same constraint as the forward body does. Dimensions
that are whole where the value is computed stay open. Refuses, value by value: explicit mesh axes,
values that something besides loops reads, and, once a plan is made, those whose gathers, forward
or backward, no ring takes over.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from collmm import _jax
from collmm.capture import Captured, site_of
from collmm.plan import Plan
from collmm.sites import ALL_GATHER, Spec

SAVED_KEY = "collmm_saved"


@dataclasses.dataclass(frozen=True)
class Saved:
    """A value that loops save for other loops.

    Attributes:
      number: its number in the program.
      stack: the variable that holds every turn's value.
      names: that and others that hold the same, resharded.
      value: the variable in the saving body.
      source: what ``value`` is a constraint of; ``value`` itself if it is none.
      constraint: the equation that makes ``value`` of ``source``, or None.
      reads: (number of an einsum, operand) for einsums of the saving body that read ``source``.
      later: the same for the einsums of the bodies that it is saved for.
    """

    number: int
    stack: Any
    names: tuple[Any, ...]
    value: Any
    source: Any
    constraint: Any
    reads: tuple[tuple[int, int], ...]
    later: tuple[tuple[int, int], ...]


def save_as_computed(
    captured: Captured,
    plan: Plan,
    meshes: Mapping[Any, Any],
    tagged: Callable[[Captured], Mapping[int, tuple[Spec, Any]]],
    planned: Callable[[Captured], Plan],
) -> tuple[Captured, Plan]:
    """Return the numbered program with residuals pinned, and its plan; or what came.

    Args:
      captured: the numbered program.
      plan: its plan as it is.
      meshes: by axes and their sizes.
      tagged: asks the partitioner for the shardings of tagged values, with their meshes.
      planned: partitions and plans a program.
    """
    every = find_saved(captured.closed.jaxpr) if plan.rewritten else []
    if not every:
        return captured, plan

    def with_jaxpr(jaxpr: Any) -> Captured:
        return dataclasses.replace(captured, closed=captured.closed.replace(jaxpr=jaxpr))

    found = dict(tagged(with_jaxpr(probe(captured.closed.jaxpr, every))))
    found.update((s.number, f) for s in every if (f := _before_gather(s, plan)) is not None)
    specs = {n: spec for n, (spec, sizes) in found.items() if sizes in meshes}
    while every := [s for s in every if s.number in specs]:
        pinned = with_jaxpr(pin(captured.closed.jaxpr, every, specs, lambda n: meshes[found[n][1]]))
        new = planned(pinned)
        lost = unlooped(every, new)
        if not lost:
            return pinned, new
        every = [s for s in every if s.number not in lost]
    return captured, plan


def _before_gather(s: Saved, plan: Plan) -> tuple[Spec, Any] | None:
    """Return the sharding of a stack of what einsums of the saving body gather, and its mesh."""
    for number, operand in s.reads:
        site = plan.decisions[number].site
        spec = (site.lhs_spec, site.rhs_spec)[operand]
        for c in site.collectives:
            if c.kind == ALL_GATHER and c.operand == operand:
                spec = (*spec[: c.dim], (*spec[c.dim], *c.axes), *spec[c.dim + 1 :])
        if spec != (site.lhs_spec, site.rhs_spec)[operand]:
            return ((), *spec), site.axis_sizes
    return None


def find_saved(jaxpr: Any) -> list[Saved]:
    """Return what the loops of a numbered program save for each other, at every depth."""
    numbers = itertools.count()
    return [saved for level in _levels(jaxpr) for saved in _saved_at(level, numbers)]


def probe(jaxpr: Any, every: Collection[Saved]) -> Any:
    """Return a program in which the readers of saved values have no say in how they are sharded.

    Each stack goes into a tagged equation instead, from which its sharding can be read.
    """
    stacks = {s.stack: s for s in every}

    def visit(eqns: list[Any]) -> list[Any]:
        result: list[Any] = []
        stand_ins: dict[Any, Any] = {}
        for eqn in eqns:
            invars = [v if _is_literal(v) else stand_ins.get(v, v) for v in eqn.invars]
            result.append(eqn.replace(invars=invars))
            for v in eqn.outvars:
                if v in stacks:
                    tag = {SAVED_KEY: str(stacks[v].number)}
                    zeros = _jax.zeros_eqn(v)
                    # One barrier for both: it lives as long as the stand-in is read.
                    barrier = _jax.barrier_eqn([v, *zeros.outvars])
                    stand_ins.update(dict.fromkeys(stacks[v].names, barrier.outvars[1]))
                    result += [zeros, _jax.with_metadata(barrier, **tag)]
        return result

    return _rebuilt(jaxpr, visit)


def pin(jaxpr: Any, every: Collection[Saved], specs: Mapping[int, Spec], mesh_of: Callable) -> Any:
    """Return the program with saved values sharded as ``specs`` says, by number.

    A value that has none, or that cannot have it, stays as it is. Where it is the sharding from
    which the constraint of the value gathers, what the constraint starts from is saved.
    ``mesh_of(number)`` is the mesh of a sharding.
    """
    specs, gathered = _as_saved(every, specs)
    # The user's own constraint names an axis whole that is split on the mesh of the found sharding.
    specs = {n: spec for n, spec in specs.items() if _named(spec, mesh_of(n))}
    chosen = {v: s for s in every if s.number in specs for v in s.names}

    def sharding(s: Saved, spec: Spec) -> Any:
        open_ = PartitionSpec.UNCONSTRAINED
        return NamedSharding(mesh_of(s.number), PartitionSpec(*(axes or open_ for axes in spec)))

    def visit(eqns: list[Any]) -> list[Any]:
        result: list[Any] = []
        pinned: dict[Any, Any] = {}
        for eqn in eqns:
            if _is_scan(eqn):
                eqn = _saving(eqn, {v: s.source for v, s in gathered.items()})
                eqn = _reading(eqn, chosen, gathered, specs, sharding)
            invars = [v if _is_literal(v) else pinned.get(v, v) for v in eqn.invars]
            result.append(eqn.replace(invars=invars))
            once: dict[Any, Any] = {}
            for s in [chosen[v] for v in eqn.outvars if v in chosen and chosen[v].stack is v]:
                v = s.stack
                saved = s.source if v in gathered else s.value
                if saved not in once:
                    constraint = _jax.constraint_eqn(v, sharding(s, specs[s.number]))
                    result.append(constraint)
                    once[saved] = constraint.outvars[0]
                pinned.update(dict.fromkeys(s.names, once[saved]))
        return result

    return _rebuilt(jaxpr, visit)


def _named(spec: Spec, mesh: Any) -> bool:
    return all(a in mesh.shape for axes in spec for a in axes)


def _as_saved(
    every: Collection[Saved], found: Mapping[int, Spec]
) -> tuple[dict[int, Spec], dict[Any, Saved]]:
    """Return the shardings to save stacks with, and what is saved before it is gathered."""
    specs, gathered = {}, {}
    for s in every:
        spec = found.get(s.number)
        if spec is None or spec[0]:
            continue
        if _gathers(s, spec[1:]):
            gathered[s.stack] = s
        elif s.constraint is not None:
            spec = _own_spec(s)
        if spec is not None and any(spec):
            specs[s.number] = spec
    return specs, gathered


def unlooped(every: Collection[Saved], plan: Plan) -> set[int]:
    """Return the numbers of saved values with a gather, in either loop, that no ring replaces."""
    looped = {
        (d.site.sources[d.collective.operand], d.collective.dim, d.collective.axes)
        for d in plan.rewritten
        if d.collective is not None and d.collective.operand is not None
    }
    return {
        s.number
        for s in every
        for number, operand in (*s.reads, *s.later)
        for c in plan.decisions[number].site.collectives
        if c.kind == ALL_GATHER
        and c.operand == operand
        and (plan.decisions[number].site.sources[operand], c.dim, c.axes) not in looped
    }


# --- finding ---


def _levels(jaxpr: Any) -> Iterator[Any]:
    yield jaxpr
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "shard_map":
            for _, _, sub in _jax.jaxprs_in(eqn):
                yield from _levels(_jax.open_jaxpr(sub))


def _saved_at(jaxpr: Any, numbers: Iterator[int]) -> Iterator[Saved]:
    readers: dict[Any, list[tuple[Any, int]]] = {}
    for eqn in jaxpr.eqns:
        for k, v in enumerate(eqn.invars):
            if not _is_literal(v):
                readers.setdefault(v, []).append((eqn, k))
    results = {v for v in jaxpr.outvars if not _is_literal(v)}
    for eqn in filter(_is_scan, jaxpr.eqns):
        body = _jax.open_jaxpr(eqn.params["jaxpr"])
        _, carried = _jax.scan_counts(eqn)
        made = {v: e for e in body.eqns for v in e.outvars}
        for stack, value in list(zip(eqn.outvars, body.outvars, strict=True))[carried:]:
            names, scanned = _followed(stack, readers)
            if not scanned or results & set(names) or _is_literal(value) or None in scanned:
                continue
            if not _jax.is_plain_array(stack.aval) or stack.aval.ndim < 2:
                continue
            constraint = made.get(value)
            if constraint is None or not _jax.is_resharding(constraint):
                constraint = None
            source = value if constraint is None else constraint.invars[0]
            if _is_literal(source):
                continue
            reads = tuple(_reads(body, source))
            later = tuple(read for inner, v in scanned for read in _reads(inner, v))
            yield Saved(next(numbers), stack, names, value, source, constraint, reads, later)


def _followed(stack: Any, readers: Mapping[Any, list[tuple[Any, int]]]) -> tuple[Any, list[Any]]:
    """Return the names of a stack, and what its readers make of it, as ``_scanned`` says."""
    names, scanned = [stack], []
    for name in names:  # grows
        for eqn, k in readers.get(name, ()):
            if _jax.is_resharding(eqn):
                names += eqn.outvars
            else:
                scanned.append(_scanned(eqn, k))
    return tuple(names), scanned


def _scanned(eqn: Any, k: int) -> Any:
    """Return (body, variable of one turn) where operand ``k`` is scanned over; else None."""
    if not _is_scan(eqn) or k < sum(_jax.scan_counts(eqn)):
        return None
    body = _jax.open_jaxpr(eqn.params["jaxpr"])
    return body, body.invars[k]


def _reads(jaxpr: Any, var: Any) -> Iterator[tuple[int, int]]:
    """Yield (number, operand) of the einsums that read ``var``, resharded perhaps."""
    same = {var}
    for eqn in jaxpr.eqns:
        places = [k for k, v in enumerate(eqn.invars) if not _is_literal(v) and v in same]
        if not places:
            continue
        number = site_of(eqn)
        if number is not None:
            yield from ((number, k) for k in places)
        elif _jax.is_resharding(eqn):
            same.update(eqn.outvars)
        else:
            for _, _, sub in _jax.jaxprs_in(eqn):
                inner = _jax.open_jaxpr(sub)
                if len(inner.invars) == len(eqn.invars):
                    for k in places:
                        yield from _reads(inner, inner.invars[k])


# --- rewriting ---


def _rebuilt(jaxpr: Any, visit: Callable[[list[Any]], list[Any]]) -> Any:
    eqns = []
    for eqn in jaxpr.eqns:
        new = {}
        if eqn.primitive.name != "shard_map":
            for key, index, sub in _jax.jaxprs_in(eqn):
                old = _jax.open_jaxpr(sub)
                if any(True for level in _levels(old) for e in level.eqns if _is_scan(e)):
                    new[key, index] = _rebuilt(old, visit)
        eqns.append(_jax.with_jaxprs(eqn, new) if new else eqn)
    return jaxpr.replace(eqns=visit(eqns))


def _saving(scan: Any, sources: Mapping[Any, Any]) -> Any:
    """Return ``scan`` saving ``sources[stack]`` instead of what it saves into a stack."""
    body = _jax.open_jaxpr(scan.params["jaxpr"])
    outvars = [sources.get(v, old) for v, old in zip(scan.outvars, body.outvars, strict=True)]
    if all(a is b for a, b in zip(outvars, body.outvars, strict=True)):
        return scan
    return _jax.with_jaxprs(scan, {("jaxpr", None): body.replace(outvars=outvars)})


def _reading(scan: Any, chosen: Any, gathered: Any, specs: Any, sharding: Callable) -> Any:
    """Return ``scan`` whose body pins what it scans over of ``chosen``, and gathers it again."""
    body = _jax.open_jaxpr(scan.params["jaxpr"])
    first, renamed = [], {}
    for atom, var in zip(scan.invars, body.invars, strict=True):
        if _is_literal(atom) or atom not in chosen:
            continue
        s = chosen[atom]
        eqn = _jax.constraint_eqn(var, sharding(s, specs[s.number][1:]))
        first.append(eqn)
        if s.stack in gathered:
            eqn = s.constraint.replace(invars=eqn.outvars, outvars=[_jax.Var(var.aval)])
            first.append(eqn)
        renamed[var] = eqn.outvars[0]
    if not first:
        return scan

    def named(v: Any) -> Any:
        return v if _is_literal(v) else renamed.get(v, v)

    rest = [eqn.replace(invars=[*map(named, eqn.invars)]) for eqn in body.eqns]
    new = body.replace(eqns=[*first, *rest], outvars=[*map(named, body.outvars)])
    return _jax.with_jaxprs(scan, {("jaxpr", None): new})


def _gathers(s: Saved, spec: Spec) -> bool:
    """Whether the constraint of ``s`` gathers a value that is sharded by ``spec``."""
    own = _own_spec(s)
    if own is None:
        return False
    kept = all(have[: len(want)] == want for have, want in zip(spec, own[1:], strict=True))
    return kept and own[1:] != spec


def _own_spec(s: Saved) -> Spec | None:
    """Return the sharding of the stack that the constraint of ``s`` asks for."""
    wanted = None if s.constraint is None else _jax.resharding_spec(s.constraint)
    return None if wanted is None else ((), *wanted, *((),) * (s.stack.aval.ndim - 1 - len(wanted)))


def _is_scan(eqn: Any) -> bool:
    return eqn.primitive.name == "scan"


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal)
