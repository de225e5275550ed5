"""Collectives that a user wrote by hand: einsums inside a ``shard_map``.

There is nothing to propagate; the pattern is matched in the jaxpr, in both directions from a dot::

    g = all_gather[axis_name=('model',) all_gather_dimension=0 tiled=True] x
    y = dot_general g w                         # -> a ring that gathers lhs, dimension 0

    y = dot_general h w
    s = reduce_scatter[axis_name=('model',) scatter_dimension=0 tiled=True] y
    s = psum[axes=('model',)] y                 # -> the same ring, and an all-gather of its blocks
    s = psum[axes=('model',)] (add y z)         # -> the same, if z is the result of a dot as well

looking through casts, transposes and reshapes in between that keep the blocks of the ring whole.
Refuses: groups of an axis, a sum that something else reads too or that is sliced by hand, a sum of
a dot's result and of what is none, any other collective. A ring of permutes that the user wrote is
no pattern here and stays as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from collmm import _jax
from collmm.errors import Reason
from collmm.sites import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

_SUMS = ("psum", "psum_invariant")
_GATHERS = ("all_gather", "all_gather_invariant")
_ADDS = ("add", "add_any")
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
    refusal: Reason | None = None
    detail: str = ""

    @property
    def only_added(self) -> bool:
        """Whether the result of the dot is added to all others as it is."""
        last = max((i for i, step in enumerate(self.between) if is_add(step)), default=0)
        names = {step.primitive.name for step in self.between[:last]}
        return names <= {"pvary", *_ADDS}


class Body:
    """One jaxpr inside a ``shard_map``: who makes and who reads each value.

    ``axis_sizes``: of the mesh of the ``shard_map``, in its order.
    """

    def __init__(self, jaxpr: Any, axis_sizes: Mapping[str, int]) -> None:
        self.axis_sizes = axis_sizes
        self.producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        # None reads what the body returns.
        self.readers: dict[Any, list[Any]] = {}
        for reader, atoms in (*((e, e.invars) for e in jaxpr.eqns), (None, jaxpr.outvars)):
            for v in atoms:
                if not isinstance(v, _jax.Literal):
                    self.readers.setdefault(v, []).append(reader)

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
            return None
        size = eqn.params["axis_size"]
        if _grouped(eqn):
            return _no_ring(ALL_GATHER, operand, eqn, Reason.AXIS_GROUPS)
        dim = _through(between, eqn.params["all_gather_dimension"], size, _forward)
        if dim is None:
            return None
        varies = [_jax.varies_over(v, axes_of(eqn)) for v in (eqn.invars[0], dot.outvars[0])]
        if name == "all_gather_invariant" and varies == [True, False]:
            # What a ring makes varies over its axes, and the result must not.
            detail = f"the result must not vary over {','.join(axes_of(eqn))}"
            return _no_ring(ALL_GATHER, operand, eqn, Reason.INSIDE_SHARD_MAP, detail)
        return Match(ALL_GATHER, operand, dim, axes_of(eqn), size, eqn, tuple(between))

    def _after(self, dot: Any) -> Match | None:
        between, eqn = self._followed(dot.outvars[0])
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name in _SUMS:
            return self._summed_and_scattered(dot, eqn, between) or self._summed(dot, eqn, between)
        if name == "all_to_all":
            return _exchange(eqn, None, between)
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
        if not all(_sum_may_come_first(step) for step in between):
            return None
        dim = _through(between[::-1], eqn.params["scatter_dimension"], size, _backward)
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
        elif not all(_sum_may_come_first(step) for step in between):
            detail = "a cast before the sum would change it after"
        elif self._sliced(eqn):
            detail = "the sum is sliced by hand"
        else:
            terms = self.terms(eqn.invars[0])
            for axes, size in rings:
                dim = _common_blocks(dot, terms, size)
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


# --- following the blocks of a ring through an equation ---


def _through(steps: list[Any], dim: int, size: int, follow: Callable) -> int | None:
    """Follow the blocks of dimension ``dim`` through equations; None where they break up."""
    for step in steps:
        new = follow(step, dim, size)
        if new is None:
            return None
        dim = new
    return dim


def _common_blocks(dot: Any, terms: Sequence[tuple[Any, list[Any]]], size: int) -> int | None:
    """Return the dimension of ``dot`` by which the sum of all ``terms`` splits into blocks.

    Every term has to split so, and all their blocks are the same of the sum.
    """
    first, path = terms[0]
    for dim, extent in enumerate(first.outvars[0].aval.shape):
        if extent % size or not extent:
            continue
        end = _through(path, dim, size, _forward)
        if end is None:
            continue
        dims = [dim, *(_through(steps[::-1], end, size, _backward) for _, steps in terms[1:])]
        results = [term.outvars[0].aval.shape for term, _ in terms]
        if all(d is not None and r[d] % size == 0 for d, r in zip(dims, results, strict=True)):
            return next(d for d, (term, _) in zip(dims, terms, strict=True) if term is dot)
    return None


def is_add(eqn: Any) -> bool:
    """Whether ``eqn`` adds two values."""
    return eqn.primitive.name in _ADDS


def _sum_may_come_first(eqn: Any) -> bool:
    """Whether summing before ``eqn`` gives what summing after it gives, or a more exact value.

    The ring sums before what stands between dot and reduce-scatter. A cast to a narrower type of
    the same kind may wait (integers wrap alike); any other cast would change the sum.
    """
    if eqn.primitive.name != "convert_element_type":
        return True
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    for kind in (jnp.integer, jnp.floating):
        if jnp.issubdtype(old, kind) and jnp.issubdtype(new, kind):
            return new.itemsize <= old.itemsize and not _half_swap(old, new)
    return False


def _half_swap(old: Any, new: Any) -> bool:
    """Whether a cast goes between two floats of one size, each of which rounds what it gets."""
    return old != new and old.itemsize == new.itemsize and jnp.issubdtype(old, jnp.floating)


def _forward(eqn: Any, dim: int, size: int) -> int | None:
    """Return where dimension ``dim`` of the operand, made of ``size`` blocks, is in the result."""
    if eqn.primitive.name == "transpose":
        return eqn.params["permutation"].index(dim)
    if eqn.primitive.name == "reshape":
        return _reshaped(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, dim, size)
    return dim


def _backward(eqn: Any, dim: int, size: int) -> int | None:
    """Return which dimension of the operand becomes ``dim`` of the result."""
    if eqn.primitive.name == "transpose":
        return eqn.params["permutation"][dim]
    if eqn.primitive.name == "reshape":
        return _reshaped(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, dim, size)
    return dim


def _reshaped(old: tuple[int, ...], new: tuple[int, ...], dim: int, size: int) -> int | None:
    """Return the dimension of ``new`` whose ``size`` blocks are those of ``old[dim]``.

    Blocks stay whole when as much stands before both dimensions and the new one still divides.
    """
    before = math.prod(old[:dim])
    for j, extent in enumerate(new):
        if math.prod(new[:j]) == before and extent % size == 0:
            return j
    return None


def block_shape(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """Return ``shape`` with one block of dimension ``dim`` in place of ``size``."""
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def replay(eqn: Any, operand: Any, dim: int, size: int) -> tuple[Any, int]:
    """Return ``eqn`` on one block instead of the whole value, and where the blocks are then."""
    new_dim = _forward(eqn, dim, size)
    assert new_dim is not None
    shape = block_shape(eqn.outvars[0].aval.shape, new_dim, size)
    out = _jax.var_like(eqn.outvars[0], shape)
    params = dict(eqn.params)
    if eqn.primitive.name == "reshape":
        params["new_sizes"] = shape
    return eqn.replace(invars=[operand], outvars=[out], params=params), new_dim


def vary_first(
    dot: Any, between: Sequence[Any], axes: Sequence[str]
) -> tuple[list[Any], list[Any]]:
    """Return (equations, operands of the dot that vary over ``axes`` after them).

    A sum over axes over which the einsum does not vary comes after a ``pvary``. What a ring makes
    varies over its axes from the start, so an operand of the einsum has to.
    """
    before, invars = [], list(dot.invars)
    for step in between:
        ring = tuple(a for a in _varied(step) if a in axes)
        if ring:
            before.append(_jax.pvary_eqn(step, invars[0], ring))
            invars[0] = before[-1].outvars[0]
    return before, invars


def without_varying(steps: Sequence[Any], axes: Sequence[str]) -> list[Any]:
    """Return ``steps`` for a value that varies over ``axes`` already: no ``pvary`` over them."""
    kept = []
    for step in steps:
        rest = tuple(a for a in _varied(step) if a not in axes)
        if len(rest) < len(_varied(step)):
            step = step.replace(params={"axes": rest})
        if rest or step.primitive.name != "pvary":
            kept.append(step)
    return kept


def _varied(eqn: Any) -> tuple[Any, ...]:
    return eqn.params["axes"] if eqn.primitive.name == "pvary" else ()


def axes_of(eqn: Any) -> tuple[str, ...]:
    """Return the mesh axes that a collective's equation runs over."""
    name = eqn.params["axes" if "axes" in eqn.params else "axis_name"]
    return tuple(map(str, name)) if isinstance(name, (tuple, list)) else (str(name),)


def _grouped(eqn: Any) -> bool:
    return eqn.params.get("axis_index_groups") is not None
