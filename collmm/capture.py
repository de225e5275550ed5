"""Capture: a closed jaxpr with nested jits inlined and every ``dot_general`` numbered.

Before::

    { lambda ; x w. let y = jit[name=_einsum jaxpr={... dot_general ...}] x w in (y,) }

after::

    { lambda ; x w. let y = dot_general x w in (y,) }       # carrying collmm_site="0"

The number travels as XLA metadata on the equation, so the same jaxpr serves the analysis (which
finds the einsum again in StableHLO by its number) and the rewrite. A nested jit that has options
of its own (shardings, donation, layouts, compiler options) is kept as a call and entered. Control
flow is entered; kernels and other opaque bodies are only searched for einsums, never changed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from collmm import _jax
from collmm.dependence import Dependence, dependences
from collmm.errors import Reason
from collmm.invariance import gathered_once
from collmm.manual import Body, Match
from collmm.prologue import narrow_share
from collmm.sites import Location, Spec
from collmm.sunk import gathers_early, worked_on

SITE_KEY = "collmm_site"
OVERLAP_KEY = "collmm_overlap"

# Primitives whose jaxprs run as they stand, once or many times, on values of the program.
_ENTERED = frozenset(
    {
        "jit",
        "pjit",
        "scan",
        "while",
        "cond",
        "checkpoint",
        "remat",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "closed_call",
        "core_call",
        "overlap_call",
    }
)


@dataclasses.dataclass(frozen=True)
class CapturedDot:
    """One numbered ``dot_general``.

    Attributes:
      index: its number in program order.
      eqn: the equation before the number was attached.
      location: the user's line.
      scope: enclosing control flow, outermost first.
      refusal: a reason already known from the jaxpr alone, or None.
      matches: inside a ``shard_map``, the user's own collectives next to it.
      together: numbers of the dots whose results are added before one of ``matches``, its own too.
      one_ring: those can share a ring.
      manual_axes: the axes of that ``shard_map``'s mesh and their sizes.
      typed: the result's sharding is part of its type (explicit mesh axes).
      sources: which value each operand is, before any resharding: equal numbers, equal values.
      narrow: per operand and dimension, how much of its bytes a ring would send: less than 1.0
        where it is made of a narrower value by casts and scales.
      early: per operand, whether it is made by elementwise work of what the user gathers.
      once: per operand, how it is constrained before the loop that the einsum stands in, or None.
      dependence: which einsums it waits for and which wait for it.
      follows: the einsum whose result an operand is an elementwise function of; -1: none.
      worked: whether elementwise work reads the result.
    """

    index: int
    eqn: Any
    location: Location
    scope: tuple[str, ...]
    refusal: Reason | None
    matches: tuple[Match, ...] = ()
    together: tuple[int, ...] = ()
    one_ring: bool = False
    manual_axes: tuple[tuple[str, int], ...] = ()
    typed: bool = False
    sources: tuple[int, int] = (-1, -1)
    narrow: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    early: tuple[bool, bool] = (False, False)
    once: tuple[Spec | None, Spec | None] = (None, None)
    dependence: Dependence | None = None
    follows: int = -1
    worked: bool = False


@dataclasses.dataclass(frozen=True)
class Captured:
    """A numbered program: the inlined closed jaxpr and its dots by number."""

    closed: Any
    dots: tuple[CapturedDot, ...]


def capture(closed: Any) -> Captured:
    """Inline nested jits of ``closed`` and number its dots; see the module docstring."""
    walker = _Walker()
    jaxpr = walker.rebuild(closed.jaxpr, (), None)
    _match_manual(jaxpr, walker.dots, ())
    _note_sums(walker.dots)
    _number_sources(jaxpr, walker.dots, itertools.count())
    for number, found in dependences(jaxpr, site_of).items():
        walker.dots[number] = dataclasses.replace(walker.dots[number], dependence=found)
    for number, once in gathered_once(jaxpr, site_of).items():
        walker.dots[number] = dataclasses.replace(walker.dots[number], once=once)
    return Captured(closed.replace(jaxpr=jaxpr), tuple(walker.dots))


def _match_manual(jaxpr: Any, dots: list[CapturedDot], axes: tuple[tuple[str, int], ...]) -> None:
    """Note the hand-written collectives next to the dots inside shard_maps."""
    body = Body(jaxpr, dict(axes)) if axes else None
    for eqn in jaxpr.eqns:
        number = site_of(eqn)
        if number is not None and body is not None:
            dots[number] = dataclasses.replace(
                dots[number], matches=tuple(body.matches(eqn)), manual_axes=axes
            )
        inner = axes
        if eqn.primitive.name == "shard_map":
            inner = tuple((str(k), v) for k, v in eqn.params["mesh"].shape.items())
        elif eqn.primitive.name not in _ENTERED:
            continue
        for _, _, sub in _jax.jaxprs_in(eqn):
            _match_manual(_jax.open_jaxpr(sub), dots, inner)


def _note_sums(dots: list[CapturedDot]) -> None:
    """Note which dots one hand-written collective reduces the sum of."""
    reduced: dict[int, list[tuple[int, Match]]] = {}
    for dot in dots:
        for match in dot.matches:
            if match.operand is None:
                reduced.setdefault(id(match.eqn), []).append((dot.index, match))
    for found in filter(lambda terms: len(terms) > 1, reduced.values()):
        numbers, matches = zip(*found, strict=True)
        one_ring = len({m.dim for m in matches}) == 1 and all(m.only_added for m in matches)
        for i in numbers:
            dots[i] = dataclasses.replace(dots[i], together=numbers, one_ring=one_ring)


def _number_sources(jaxpr: Any, dots: list[CapturedDot], numbers: Iterator[int]) -> None:
    """Number the values that the dots of a jaxpr read, looking through reshardings."""
    roots: dict[Any, Any] = {}
    known: dict[Any, int] = {}

    def number_of(atom: Any) -> int:
        if isinstance(atom, _jax.Literal):
            return next(numbers)
        root = roots.get(atom, atom)
        if root not in known:
            known[root] = next(numbers)
        return known[root]

    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    readers = _jax.readers_of(jaxpr)
    makers: dict[Any, int] = {}  # the einsum that a value is an elementwise function of
    for eqn in jaxpr.eqns:
        number = site_of(eqn)
        made = [(v, makers[v]) for v in eqn.invars if not _is_literal(v) and v in makers]
        if number is not None:
            lhs, rhs = map(number_of, eqn.invars)
            if made:
                dots[number] = dataclasses.replace(dots[number], follows=made[0][1])
            makers[eqn.outvars[0]] = number
            left, right = (narrow_share(v, producers) for v in eqn.invars)
            first, second = (gathers_early(v, producers, readers) for v in eqn.invars)
            dots[number] = dataclasses.replace(
                dots[number],
                sources=(lhs, rhs),
                narrow=(left, right),
                early=(first, second),
                worked=worked_on(eqn.outvars[0], readers),
            )
            continue
        for v, maker in made:
            same = [out for out in eqn.outvars if out.aval.shape == v.aval.shape]
            makers.update((out, maker) for out in same)
        if _jax.is_resharding(eqn):
            (source,) = eqn.invars
            if not isinstance(source, _jax.Literal):
                roots[eqn.outvars[0]] = roots.get(source, source)
        for _, _, sub in _jax.jaxprs_in(eqn):
            _number_sources(_jax.open_jaxpr(sub), dots, numbers)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal)


def site_of(eqn: Any) -> int | None:
    """Return the number that ``capture`` gave to ``eqn``, or None."""
    if eqn.primitive.name != "dot_general" or not eqn.ctx.xla_metadata:
        return None
    number = eqn.ctx.xla_metadata.get(SITE_KEY)
    return None if number is None else int(number)


class _Walker:
    """One walk over a program, in order."""

    def __init__(self) -> None:
        self.dots: list[CapturedDot] = []
        self._has_dots: dict[int, bool] = {}
        # Name stacks of the enclosing equations: those of a body start anew.
        self._stacks: list[str] = []

    def rebuild(self, jaxpr: Any, scope: tuple[str, ...], refusal: Reason | None) -> Any:
        """Return ``jaxpr`` inlined and numbered; its own variables stay."""
        eqns: list[Any] = []
        env: dict[Any, Any] = {}
        self._emit(jaxpr, env, eqns, None, scope, refusal)
        outvars = [_read(env, v) for v in jaxpr.outvars]
        return jaxpr.replace(eqns=eqns, outvars=outvars)

    def _emit(self, jaxpr, env, eqns, call, scope, refusal) -> None:
        for eqn in jaxpr.eqns:
            source = eqn.source_info
            if call is not None:
                source = _jax.under_scope(source, call.source_info, call.params["name"])
            invars = [_read(env, v) for v in eqn.invars]
            if _jax.is_plain_call(eqn):
                self._inline(eqn.replace(source_info=source), invars, env, eqns, scope, refusal)
                continue
            outvars = eqn.outvars
            if call is not None:
                outvars = [_jax.fresh_like(v) for v in eqn.outvars]
                env.update(zip(eqn.outvars, outvars, strict=True))
            eqn = eqn.replace(invars=invars, outvars=outvars, source_info=source)
            eqns.append(self._visit(eqn, scope, refusal))

    def _inline(self, eqn, invars, env, eqns, scope, refusal) -> None:
        inner = eqn.params["jaxpr"].jaxpr
        inner_env = dict(zip(inner.invars, invars, strict=True))
        self._emit(inner, inner_env, eqns, eqn, scope, refusal)
        for outer_var, inner_var in zip(eqn.outvars, inner.outvars, strict=True):
            env[outer_var] = _read(inner_env, inner_var)

    def _visit(self, eqn, scope, refusal) -> Any:
        if eqn.primitive.name == "dot_general":
            return self._number(eqn, scope, refusal)
        name = eqn.primitive.name
        new = {}
        for key, index, sub in _jax.jaxprs_in(eqn):
            inner = _jax.open_jaxpr(sub)
            if not self._contains_dots(inner):
                continue
            inner_refusal = refusal
            if name == "shard_map":
                inner_refusal = Reason.INSIDE_SHARD_MAP
            elif name not in _ENTERED:
                inner_refusal = Reason.OPAQUE
            self._stacks.append(str(eqn.source_info.name_stack))
            new[key, index] = self.rebuild(inner, (*scope, name), inner_refusal)
            self._stacks.pop()
        for sub in _jax.hidden_jaxprs(eqn):
            self.rebuild(_jax.open_jaxpr(sub), (*scope, name), Reason.OPAQUE)
        # Kernels and other opaque bodies keep the very jaxpr they came with.
        entered = name in _ENTERED or name == "shard_map"
        return _jax.with_jaxprs(eqn, new) if new and entered else eqn

    def _number(self, eqn, scope, refusal) -> Any:
        index = len(self.dots)
        metadata = _jax.eqn_metadata(eqn)
        if metadata.get(OVERLAP_KEY) == "none":
            refusal = Reason.NO_OVERLAP
        elif any(_jax.is_unreduced(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            refusal = Reason.UNREDUCED
        file, line, function = _jax.user_frame(eqn)
        stacks = (*self._stacks, str(eqn.source_info.name_stack))
        location = Location(file, line, function, "/".join(filter(None, stacks)))
        typed = _jax.typed_sharding(eqn.outvars[0].aval) is not None
        self.dots.append(CapturedDot(index, eqn, location, scope, refusal, typed=typed))
        return _jax.with_metadata(eqn, **{SITE_KEY: str(index)})

    def _contains_dots(self, jaxpr) -> bool:
        known = self._has_dots.get(id(jaxpr))
        if known is None:
            known = any(
                eqn.primitive.name == "dot_general"
                or any(self._contains_dots(_jax.open_jaxpr(sub)) for sub in _inside(eqn))
                for eqn in jaxpr.eqns
            )
            self._has_dots[id(jaxpr)] = known
        return known


def _inside(eqn: Any) -> list[Any]:
    return [*(sub for _, _, sub in _jax.jaxprs_in(eqn)), *_jax.hidden_jaxprs(eqn)]


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, _jax.Literal) else env.get(atom, atom)
