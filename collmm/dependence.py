"""Which einsums of a program depend on which: what a collective could be hidden behind.

    g = sharding_constraint w1            # depends on no einsum: a scheduler may gather it at once
    a = dot_general[collmm_site=0] x w0
    b = dot_general[collmm_site=1] a g    # lhs depends on 0, rhs on none

A collective on an operand can run while everything computes that stands between the einsum the
operand depends on and the einsum that reads it; one on a result, until an einsum needs it. A body
is what a compiler schedules as one: the program, the body of a loop, a branch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from collmm import _jax

NONE = -1
# Their jaxprs are computations of their own; every other one is inlined where it is called.
_BODIES = ("scan", "while", "cond")


@dataclasses.dataclass
class Dependence:
    """Of one einsum: the fields of that name of ``collmm.sites.EinsumSite``."""

    body: int
    ready: tuple[int, int]
    needed: int = NONE


def dependences(jaxpr: Any, site_of: Callable[[Any], int | None]) -> dict[int, Dependence]:
    """Return, by their numbers, what the numbered einsums of a jaxpr depend on.

    ``site_of`` gives the number of an equation, None if it has none. Linear in the program's size.
    """
    walker = _Walker(site_of)
    walker.forward(jaxpr, [NONE] * len(jaxpr.invars), 0)
    walker.backward(jaxpr, [NONE] * len(jaxpr.outvars))
    return walker.found


class _Walker:
    """One walk forward, for ``body`` and ``ready``, and one backward, for ``needed``."""

    def __init__(self, site_of: Callable[[Any], int | None]) -> None:
        self._site_of = site_of
        self._bodies = itertools.count(1)
        self.found: dict[int, Dependence] = {}

    def forward(self, jaxpr: Any, given: Sequence[int], body: int) -> list[int]:
        """Return the last einsum that each result depends on; ``given`` is that of the inputs."""
        last = _Numbers(jaxpr.invars, given)
        for eqn in jaxpr.eqns:
            operands = [last.of(atom) for atom in eqn.invars]
            number = self._site_of(eqn)
            if number is not None:
                self.found[number] = Dependence(body, (operands[0], operands[1]))
                operands.append(number)
            results = [max(operands, default=NONE)] * len(eqn.outvars)
            for inner, inlined in _jaxprs(eqn):
                if inlined:
                    results = self.forward(inner, operands, body)
                else:
                    inside = self.forward(inner, [NONE] * len(inner.invars), next(self._bodies))
                    # Nothing leaves a loop before its last turn has ended.
                    results = [max(n, *inside) if inside else n for n in results]
            last.set(eqn.outvars, results)
        return [last.of(atom) for atom in jaxpr.outvars]

    def backward(self, jaxpr: Any, wanted: Sequence[int]) -> list[int]:
        """Return the first einsum that needs each input; ``wanted`` is that of the results."""
        first = _Numbers((), ())
        first.lower(jaxpr.outvars, wanted)
        for eqn in reversed(jaxpr.eqns):
            results = [first.of(v) for v in eqn.outvars]
            number = self._site_of(eqn)
            needed = _least(results)
            if number is not None:
                self.found[number].needed = needed
                needed = number
            operands = [needed] * len(eqn.invars)
            for inner, inlined in _jaxprs(eqn):
                if inlined:
                    operands = self.backward(inner, results)
                else:
                    self.backward(inner, [NONE] * len(inner.outvars))
                    operands = [_least((n, self._least_inside(inner))) for n in operands]
            first.lower(eqn.invars, operands)
        return [first.of(v) for v in jaxpr.invars]

    def _least_inside(self, jaxpr: Any) -> int:
        found = [n for eqn in jaxpr.eqns if (n := self._site_of(eqn)) is not None]
        found += [self._least_inside(inner) for eqn in jaxpr.eqns for inner, _ in _jaxprs(eqn)]
        return _least(found)


class _Numbers:
    """Numbers of values; what is not there has ``NONE``."""

    def __init__(self, names: Sequence[Any], numbers: Sequence[int]) -> None:
        self._known: dict[Any, int] = {}
        self.set(names, numbers)

    def of(self, atom: Any) -> int:
        return NONE if isinstance(atom, _jax.Literal) else self._known.get(atom, NONE)

    def set(self, names: Sequence[Any], numbers: Sequence[int]) -> None:
        self._known.update((v, n) for v, n in zip(names, numbers, strict=True) if n != NONE)

    def lower(self, atoms: Sequence[Any], numbers: Sequence[int]) -> None:
        for atom, number in zip(atoms, numbers, strict=True):
            if number != NONE and not isinstance(atom, _jax.Literal):
                self._known[atom] = _least((number, self.of(atom)))


def _jaxprs(eqn: Any) -> list[tuple[Any, bool]]:
    """The jaxprs of an equation, and whether each runs in the body it stands in."""
    found = []
    for _, _, sub in _jax.jaxprs_in(eqn):
        inner = _jax.open_jaxpr(sub)
        fits = len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars)
        found.append((inner, fits and eqn.primitive.name not in _BODIES))
    return found


def _least(numbers: Sequence[int]) -> int:
    return min((n for n in numbers if n != NONE), default=NONE)
