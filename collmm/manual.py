"""Collectives that a user wrote by hand: einsums inside a ``shard_map``.

There is nothing to propagate; the pattern is matched in the jaxpr, in both directions from a dot::

    g = all_gather[axis_name=('model',) all_gather_dimension=0 tiled=True] x
    y = dot_general g w                         # -> a ring that gathers lhs, dimension 0

    y = dot_general h w
    s = reduce_scatter[axis_name=('model',) scatter_dimension=0 tiled=True] y
    s = psum[axes=('model',)] y                 # -> the same ring, and an all-gather of its blocks
    s = psum[axes=('model',)] (add y z)         # -> the same, if z is the result of a dot as well

looking through casts, transposes and reshapes in between that keep the blocks of the ring whole,
and before a dot through casts and scales.
Refuses: groups of an axis, a sum that something else reads too or that is sliced by hand, a sum of
a dot's result and of what is none, any other collective. A ring of permutes that the user wrote is
no pattern here and stays as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from collmm import _jax
from collmm.blocks import (
    ADDS,
    backward,
    common_blocks,
    forward,
    is_add,
    sum_may_come_first,
    through,
)
from collmm.errors import Reason
from collmm.prologue import Prologue, gathered_prologue
from collmm.sites import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from collmm.sunk import only_for_einsums

_SUMS = ("psum", "psum_invariant")
_GATHERS = ("all_gather", "all_gather_invariant")
_THROUGH = ("convert_element_type", "transpose", "reshape", "pvary", "pcast", "copy")


@dataclasses.dataclass(frozen=True)
class Match:
    """A collective found next to a dot inside a ``shard_map``.

    Attributes:
      kind: its HLO name.
      operand: 0 or 1 for a gathered operand, None for the result.
      dim: gathered dimension of the dot's operand, or scattered dimension of its result; of a sum
        that is wanted whole, the dimension by which a ring scatters it first. -1: no ring.
      axes: mesh axes of the ring, major to minor.
      size: number of devices on the ring.
      eqn: the collective's equation.
      between: what stands between collective and dot, in program order.
      prologue: casts and scales between a gather and the dot, done where each shard arrives; then
        nothing is ``between``.
      split_dim: of an all-to-all, the dimension that is whole before it.
      refusal: where no ring replaces it, a reason that only the equation tells; or None.
      detail: more about it, in words.
    """

    kind: str
    operand: int | None
    dim: int
    axes: tuple[str, ...]
    size: int
    eqn: Any
    between: tuple[Any, ...]
    split_dim: int = -1
    prologue: Prologue | None = None
    refusal: Reason | None = None
    detail: str = ""

    @property
    def only_added(self) -> bool:
        """Whether the result of the dot is added to all others as it is."""
        last = max((i for i, step in enumerate(self.between) if is_add(step)), default=0)
        names = {step.primitive.name for step in self.between[:last]}
        return names <= {"pvary", *ADDS}


class Body:
    """One jaxpr inside a ``shard_map``: who makes and who reads each value.

    ``axis_sizes``: of the mesh of the ``shard_map``, in its order.
    """

    def __init__(self, jaxpr: Any, axis_sizes: Mapping[str, int]) -> None:
        self.axis_sizes = axis_sizes
        self.producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.readers = _jax.readers_of(jaxpr)
        self._prologues: dict[Any, tuple[Prologue, Any] | None] = {}

    def matches(self, dot: Any) -> list[Match]:
        """Return the collectives next to one dot of this body."""
        found = [self._before(dot, operand) for operand in (0, 1)]
        found.append(self._after(dot))
        return [m for m in found if m is not None]

    def _before(self, dot: Any, operand: int) -> Match | None:
        between: list[Any] = []
        var = dot.invars[operand]
        eqn = self._producer(var)
        while eqn is not None and eqn.primitive.name in _THROUGH:
            between.insert(0, eqn)
            eqn = self._producer(eqn.invars[0])
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name == "all_to_all":
            return _exchange(eqn, operand, between)
        if name not in _GATHERS:
            return self._scaled(dot, operand)
        size = eqn.params["axis_size"]
        if _grouped(eqn):
            return _no_ring(ALL_GATHER, operand, eqn, Reason.AXIS_GROUPS)
        dim = through(between, eqn.params["all_gather_dimension"], size, forward)
        if dim is None:
            return None
        varies = [_jax.varies_over(v, axes_of(eqn)) for v in (eqn.invars[0], dot.outvars[0])]
        if name == "all_gather_invariant" and varies == [True, False]:
            # What a ring makes varies over its axes, and the result must not.
            detail = f"the result must not vary over {','.join(axes_of(eqn))}"
            return _no_ring(ALL_GATHER, operand, eqn, Reason.INSIDE_SHARD_MAP, detail)
        return Match(ALL_GATHER, operand, dim, axes_of(eqn), size, eqn, tuple(between))

    def _scaled(self, dot: Any, operand: int) -> Match | None:
        """Return the match of a gather that casts and scales separate from the dot."""
        var = dot.invars[operand]
        if var not in self._prologues:
            self._prologues[var] = self._prologue(var)
        found = self._prologues[var]
        if found is None or not _jax.varies_over(dot.outvars[0], self._ring_axes(found[1])):
            return None
        prologue, eqn = found
        dim = eqn.params["all_gather_dimension"]
        size = eqn.params["axis_size"]
        return Match(ALL_GATHER, operand, dim, axes_of(eqn), size, eqn, (), prologue=prologue)

    def _ring_axes(self, eqn: Any) -> tuple[str, ...]:
        """Return the axes over which the result of a ring in place of ``eqn`` varies, typed."""
        typed = _jax.varies_over(eqn.invars[0], axes_of(eqn))
        return axes_of(eqn) if typed and eqn.primitive.name == "all_gather_invariant" else ()

    def _prologue(self, var: Any) -> tuple[Prologue, Any] | None:
        """Return the prologue of ``var``, and the gather of the value itself."""
        first = self._producer(var)
        while first is not None and first.primitive.name not in _GATHERS:
            same = [v for v in first.invars if v.aval.shape == var.aval.shape]
            first = self._producer(same[0]) if same else None
        if first is None or _grouped(first) or not first.params["tiled"]:
            return None

        def gathers(eqn: Any, dim: int) -> bool:
            alike = eqn.primitive.name in _GATHERS and eqn.params["tiled"] and not _grouped(eqn)
            there = alike and eqn.params["all_gather_dimension"] == dim
            return there and axes_of(eqn) == axes_of(first)

        dim = first.params["all_gather_dimension"]
        prologue = gathered_prologue(var, self.producers, dim, gathers)
        if prologue is None:
            return None
        between = [e.outvars[0] for e in prologue.eqns if var not in e.outvars]
        if not all(only_for_einsums(v, self.readers, but=var) for v in between):
            return None  # the plain gather would stay
        return prologue, first

    def _after(self, dot: Any) -> Match | None:
        between, eqn = self._followed(dot.outvars[0])
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name in _SUMS:
            return self._summed_and_scattered(dot, eqn, between) or self._summed(dot, eqn, between)
        if name == "all_to_all":
            # A sum is exchanged once; its terms would be exchanged one by one.
            return None if any(map(is_add, between)) else _exchange(eqn, None, between)
        return self._scattered(dot, eqn, between) if name == "reduce_scatter" else None

    def _followed(self, var: Any) -> tuple[list[Any], Any]:
        """Return what is looked through after ``var``, and what reads it then; None if several."""
        between: list[Any] = []
        eqn = self._only_reader(var)
        while eqn is not None and (eqn.primitive.name in _THROUGH or self._adds_dots(eqn)):
            between.append(eqn)
            eqn = self._only_reader(eqn.outvars[0])
        return between, eqn

    def _adds_dots(self, eqn: Any) -> bool:
        """Whether ``eqn`` adds results of dots, and nothing else."""
        return is_add(eqn) and bool(self.terms(eqn.outvars[0]))

    def terms(self, var: Any) -> list[tuple[Any, list[Any]]]:
        """Return the dots of which ``var`` is the sum, each with what stands between, in order.

        Nothing where ``var`` is also a sum of something else, or something else reads a part.
        """
        found: list[tuple[Any, list[Any]]] = []
        todo: list[tuple[Any, list[Any]]] = [(var, [])]
        while todo:
            part, path = todo.pop()
            eqn = self._producer(part)
            if eqn is None or (path and self._only_reader(part) is None):
                return []
            if eqn.primitive.name == "dot_general":
                found.append((eqn, path))
            elif eqn.primitive.name in _THROUGH or is_add(eqn):
                todo += [(v, [eqn, *path]) for v in reversed(eqn.invars)]
            else:
                return []
        return found

    def _scattered(self, dot: Any, eqn: Any, between: list[Any]) -> Match | None:
        size = eqn.params["axis_size"]
        if _grouped(eqn):
            return _no_ring(REDUCE_SCATTER, None, eqn, Reason.AXIS_GROUPS)
        if not all(sum_may_come_first(step) for step in between):
            return None
        dim = through(between[::-1], eqn.params["scatter_dimension"], size, backward)
        if dim is None or dot.outvars[0].aval.shape[dim] % size:
            return None
        return Match(REDUCE_SCATTER, None, dim, axes_of(eqn), size, eqn, tuple(between))

    def _summed_and_scattered(self, dot: Any, eqn: Any, between: list[Any]) -> Match | None:
        """Return the match of a reduce-scatter after a sum over other axes, which can wait for it.

        Gradients of a weight that is gathered over one axis and whole on another have this form.
        """
        more, scatter = self._followed(eqn.outvars[0])
        if scatter is None or scatter.primitive.name != "reduce_scatter" or _grouped(eqn):
            return None
        if eqn.outvars[0].aval.shape != eqn.invars[0].aval.shape:
            return None
        match = self._scattered(dot, scatter, [*between, eqn, *more])
        return match if match is not None and match.refusal is None else None

    def _summed(self, dot: Any, eqn: Any, between: list[Any]) -> Match:
        """Return the match of a sum that is wanted whole: the ring that can scatter it first."""
        rings = self._rings(axes_of(eqn))
        if _grouped(eqn):
            return _no_ring(ALL_REDUCE, None, eqn, Reason.AXIS_GROUPS)
        if not rings:
            return _no_ring(ALL_REDUCE, None, eqn, Reason.NO_COLLECTIVE)
        if eqn.outvars[0].aval.shape != eqn.invars[0].aval.shape:
            detail = "the sum takes in a dimension of the value itself"
        elif not all(sum_may_come_first(step) for step in between):
            detail = "a cast before the sum would change it after"
        elif self._sliced(eqn):
            detail = "the sum is sliced by hand"
        else:
            terms = self.terms(eqn.invars[0])
            for axes, size in rings:
                dim = common_blocks(dot, terms, size)
                if dim is not None:
                    return Match(ALL_REDUCE, None, dim, axes, size, eqn, tuple(between))
            detail = f"no dimension of {dot.outvars[0].aval.shape} divides into blocks"
        return _no_ring(ALL_REDUCE, None, eqn, Reason.ALL_REDUCE, detail)

    def _rings(self, axes: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
        """Return (axes, size) of the rings that some of ``axes`` make, the longest first."""
        here = [a for a, size in self.axis_sizes.items() if a in axes and size > 1]
        every = [c for n in range(len(here), 0, -1) for c in itertools.combinations(here, n)]
        sized = [(ring, math.prod(self.axis_sizes[a] for a in ring)) for ring in every]
        return sorted(sized, key=lambda pair: -pair[1])

    def _sliced(self, eqn: Any) -> bool:
        """Whether a part of what ``eqn`` makes is cut out at a place that is computed."""
        readers = [r for r in self.readers.get(eqn.outvars[0], ()) if r is not None]
        return any(
            r.primitive.name == "dynamic_slice" or (r.primitive.name == "pvary" and self._sliced(r))
            for r in readers
        )

    def _producer(self, var: Any) -> Any:
        return None if isinstance(var, _jax.Literal) else self.producers.get(var)

    def _only_reader(self, var: Any) -> Any:
        readers = self.readers.get(var, ())
        return readers[0] if len(readers) == 1 else None


def _no_ring(kind: str, operand: int | None, eqn: Any, reason: Reason, detail: str = "") -> Match:
    """Return the match of a collective that no ring replaces, and why."""
    return Match(kind, operand, -1, axes_of(eqn), 1, eqn, (), refusal=reason, detail=detail)


def _exchange(eqn: Any, operand: int | None, between: list[Any]) -> Match:
    p = eqn.params
    moved = any(step.primitive.name in ("transpose", "reshape") for step in between)
    dim = -1 if moved or not p["tiled"] or _grouped(eqn) else p["concat_axis"]
    # The axis size is not among the parameters; the shapes tell.
    size = eqn.invars[0].aval.shape[p["split_axis"]]
    size //= max(eqn.outvars[0].aval.shape[p["split_axis"]], 1)
    return Match(ALL_TO_ALL, operand, dim, axes_of(eqn), size, eqn, tuple(between), p["split_axis"])


def axes_of(eqn: Any) -> tuple[str, ...]:
    """Return the mesh axes that a collective's equation runs over."""
    name = eqn.params["axes" if "axes" in eqn.params else "axis_name"]
    return tuple(map(str, name)) if isinstance(name, (tuple, list)) else (str(name),)


def _grouped(eqn: Any) -> bool:
    return eqn.params.get("axis_index_groups") is not None
