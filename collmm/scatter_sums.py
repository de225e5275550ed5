"""Scatter sums: an einsum + all-reduce becomes an einsum + reduce-scatter, and what follows it
works on the shard.

Before, plain tensor parallelism::

    y = dot_general h w                       # summed over model, wanted whole
    z = sharding_constraint[P("data", None, None)] y
    r = add x z

after, its sequence-parallel form::

    y = einsum_reduce_scatter[dim=1 ...] h w
    z = sharding_constraint[P("data", "model", None)] y
    r = add x z                               # on the shard; the next einsum's ring gathers it

The values are the same; only where they lie changes. A constraint that asks for the whole sum is
relaxed along elementwise equations, in the bodies of loops too. Where the whole is needed after
all, the compiler gathers it there. The shardings of the program's results are pinned to what they
were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from collmm import _jax
from collmm.capture import Captured, site_of
from collmm.plan import Decision, Plan
from collmm.primitives import einsum_reduce_scatter_p
from collmm.rewrite import MeshOf, scatter_eqn
from collmm.sites import ALL_REDUCE, Spec
from collmm.subaxes import is_part
from collmm.uneven import pspec

# (dimension, mesh axes) by which a value is scattered.
_Mark = tuple[int, tuple[str, ...]]
_CALLS = ("jit", "pjit", "checkpoint", "remat", "remat2", "closed_call", "core_call")


def scatter_sums(captured: Captured, plan: Plan, sums: Set[int], meshes: MeshOf) -> Any:
    """Return the numbered program with the all-reduces of the sites ``sums`` scattered."""
    walker = _Walker(captured, plan, sums, meshes)
    jaxpr, _ = walker.walk(captured.closed.jaxpr, {})
    return captured.closed.replace(jaxpr=jaxpr)


def next_sums(plan: Plan, done: Collection[int]) -> set[int]:
    """Return the numbers of the sites whose all-reduce should be scattered next.

    One set of mesh axes at a time, the one with the most bytes first: once activations are
    scattered, an einsum that had only an all-reduce over other axes may have a gather to loop.
    """
    by_axes: dict[tuple[str, ...], list[Decision]] = {}
    for d in plan.rewritten:
        c = d.collective
        if c is None or d.site.manual or d.site.index in done:
            continue
        if c.kind == ALL_REDUCE:
            by_axes.setdefault(c.axes, []).append(d)
    if not by_axes:
        return set()
    most = max(by_axes.values(), key=lambda ds: sum(d.collective.bytes for d in ds if d.collective))
    return {d.site.index for d in most}


def pin_results(
    closed: Any, specs: Sequence[Spec | None], given: Sequence[Any], meshes: Sequence[Any]
) -> Any:
    """Return ``closed`` with its results constrained to the shardings they had.

    Args:
      closed: the program.
      specs: the sharding of each flat result before the rewrite; None where it cannot be said.
      given: the shardings that the caller asked for; these need no pin.
      meshes: those of the program; a result is pinned on the first that has its axes.
    """
    jaxpr = closed.jaxpr
    eqns, outvars = list(jaxpr.eqns), []
    for var, spec, sharding in zip(jaxpr.outvars, specs, given, strict=True):
        literal = isinstance(var, _jax.Literal)
        typed = not literal and _jax.typed_sharding(var.aval) is not None
        if literal or typed or spec is None or sharding is not None or not var.aval.shape:
            outvars.append(var)
            continue
        names = {name for axes in spec for name in axes}
        mesh = next((m for m in meshes if names <= set(m.axis_names)), None)
        if mesh is None:
            outvars.append(var)
            continue
        wanted = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
        eqn = _jax.constraint_eqn(var, wanted)
        eqns.append(eqn)
        outvars.append(eqn.outvars[0])
    return closed.replace(jaxpr=jaxpr.replace(eqns=eqns, outvars=outvars))


def plain_sums(closed: Any) -> Any:
    """Return ``closed`` with the sums scattered on a split mesh as einsums between constraints.

    For the analysis: Shardy shards an einsum on one mesh, and what a ring on a split mesh leaves
    behind would be on another than what it meets. A constraint can be put back on the whole mesh.
    """
    return closed.replace(jaxpr=_plain(closed.jaxpr))


def _plain(jaxpr: Any) -> Any:
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is einsum_reduce_scatter_p and any(map(is_part, _axis_names(eqn))):
            eqns += _jax.inlined(_plain_sum(eqn), eqn)
            continue
        new = {(key, i): _plain(_jax.open_jaxpr(sub)) for key, i, sub in _jax.jaxprs_in(eqn)}
        eqns.append(_jax.with_jaxprs(eqn, new) if new else eqn)
    return jaxpr.replace(eqns=eqns)


def _axis_names(eqn: Any) -> tuple[str, ...]:
    mesh = eqn.params["mesh"]
    return () if mesh is None else mesh.axis_names


def _plain_sum(eqn: Any) -> Callable:
    (term,) = eqn.params["terms"]
    mesh, out_spec = eqn.params["mesh"], eqn.params["out_spec"]

    def at(x, spec):
        return _jax.constrain(x, NamedSharding(mesh, pspec(spec)))

    def fn(lhs, rhs):
        out = term.partial.dot(at(lhs, term.lhs_spec), at(rhs, term.rhs_spec))
        return at(out, out_spec)

    return fn


class _Walker:
    """One walk: scatters sums and follows them."""

    def __init__(self, captured: Captured, plan: Plan, sums: Set[int], meshes: MeshOf) -> None:
        self._captured = captured
        self._plan = plan
        self._meshes = meshes
        self._chosen = sums

    def walk(self, jaxpr: Any, marks: dict[Any, _Mark]) -> tuple[Any, list[_Mark | None]]:
        """Return ``jaxpr`` rewritten and the marks of its results; ``marks`` are its inputs'."""
        marks = dict(marks)
        eqns = [self._visit(eqn, marks) for eqn in jaxpr.eqns]
        outs = [None if isinstance(v, _jax.Literal) else marks.get(v) for v in jaxpr.outvars]
        return jaxpr.replace(eqns=eqns), outs

    def _visit(self, eqn: Any, marks: dict[Any, _Mark]) -> Any:
        number = site_of(eqn)
        if number is not None:
            if number not in self._chosen:
                return eqn
            decision = self._plan.decisions[number]
            assert decision.collective is not None
            marks[eqn.outvars[0]] = (decision.collective.dim, decision.collective.axes)
            eqn = eqn.replace(ctx=self._captured.dots[number].eqn.ctx)
            return scatter_eqn(eqn, decision, self._meshes[decision.site.axis_sizes])
        if _jax.is_resharding(eqn):
            return self._relax(eqn, marks)
        name = eqn.primitive.name
        if name in _CALLS:
            return self._call(eqn, marks)
        if name == "scan":
            return self._scan(eqn, marks)
        if name == "transpose":
            mark = _mark(marks, eqn.invars[0])
            if mark is not None:
                marks[eqn.outvars[0]] = (eqn.params["permutation"].index(mark[0]), mark[1])
            return eqn
        if any(True for _ in _jax.jaxprs_in(eqn)) and not _same_shapes(eqn):
            new = {
                (key, i): self.walk(_jax.open_jaxpr(sub), {})[0]
                for key, i, sub in _jax.jaxprs_in(eqn)
            }
            return _jax.with_jaxprs(eqn, new)
        _mark_elementwise(eqn, marks)
        return eqn

    def _relax(self, eqn: Any, marks: dict[Any, _Mark]) -> Any:
        mark = _mark(marks, eqn.invars[0])
        spec = _jax.resharding_spec(eqn)
        if mark is not None and _jax.is_open(eqn, mark[0]):
            marks[eqn.outvars[0]] = mark
            return eqn
        if mark is None or spec is None or eqn.primitive.name != "sharding_constraint":
            return eqn
        dim, axes = mark
        whole = [*spec, *(((),) * (eqn.invars[0].aval.ndim - len(spec)))]
        if whole[dim] or any(set(a) & set(axes) for a in whole):
            return eqn
        sharding = eqn.params["sharding"]
        if not set(axes) <= set(sharding.mesh.axis_names):
            return eqn  # a part of an axis, which no constraint on this mesh can name
        whole[dim] = axes
        marks[eqn.outvars[0]] = mark
        wanted = NamedSharding(sharding.mesh, PartitionSpec(*(a or None for a in whole)))
        return eqn.replace(params=dict(eqn.params, sharding=wanted))

    def _call(self, eqn: Any, marks: dict[Any, _Mark]) -> Any:
        ((key, index, sub),) = _jax.jaxprs_in(eqn)
        inner = _jax.open_jaxpr(sub)
        inside = dict(_given(zip(inner.invars, eqn.invars, strict=True), marks))
        jaxpr, outs = self.walk(inner, inside)
        marks.update((v, m) for v, m in zip(eqn.outvars, outs, strict=True) if m is not None)
        return _jax.with_jaxprs(eqn, {(key, index): jaxpr})

    def _scan(self, eqn: Any, marks: dict[Any, _Mark]) -> Any:
        inner = _jax.open_jaxpr(eqn.params["jaxpr"])
        consts, carried = _jax.scan_counts(eqn)
        whole = consts + carried
        inside = dict(_given(zip(inner.invars[:whole], eqn.invars[:whole], strict=True), marks))
        for var, atom in zip(inner.invars[whole:], eqn.invars[whole:], strict=True):
            mark = _mark(marks, atom)
            if mark is not None and mark[0] > 0:
                inside[var] = (mark[0] - 1, mark[1])
        jaxpr, outs = self.walk(inner, inside)
        # What the body scatters is scattered when it comes round again.
        again = {
            v: m for v, m in zip(inner.invars[consts:whole], outs, strict=False) if m is not None
        }
        if again.keys() - inside.keys():
            jaxpr, outs = self.walk(inner, {**again, **inside})
        for i, (var, mark) in enumerate(zip(eqn.outvars, outs, strict=True)):
            if mark is not None:
                marks[var] = mark if i < carried else (mark[0] + 1, mark[1])
        return _jax.with_jaxprs(eqn, {("jaxpr", None): jaxpr})


def _mark(marks: dict[Any, _Mark], atom: Any) -> _Mark | None:
    return None if isinstance(atom, _jax.Literal) else marks.get(atom)


def _given(pairs: Any, marks: dict[Any, _Mark]) -> Any:
    for inner, atom in pairs:
        mark = _mark(marks, atom)
        if mark is not None:
            yield inner, mark


def _same_shapes(eqn: Any) -> bool:
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars) if v.aval.shape}
    return len(shapes) == 1


def _mark_elementwise(eqn: Any, marks: dict[Any, _Mark]) -> None:
    """Mark results that have the shape of a marked operand: what is done to it is elementwise.

    A mark only relaxes constraints, so a wrong guess costs a reshard and never a value.
    """
    if eqn.primitive.name in ("dot_general", "shard_map"):
        return
    for atom in eqn.invars:
        mark = _mark(marks, atom)
        if mark is None:
            continue
        for var in eqn.outvars:
            if var.aval.shape == atom.aval.shape:
                marks.setdefault(var, mark)
