"""Collectives that a user wrote by hand: einsums inside a ``shard_map``.

There is nothing to propagate; the pattern is matched in the jaxpr, in both directions from a dot::

    g = all_gather[axis_name=('model',) all_gather_dimension=0 tiled=True] x
    y = dot_general g w                         # -> a ring that gathers lhs, dimension 0

    y = dot_general h w
    s = reduce_scatter[axis_name=('model',) scatter_dimension=0 tiled=True] y

looking through casts, transposes and reshapes in between that keep the blocks of the ring whole.
Refuses: groups of an axis, a sum that something else reads too, any other collective. A ring of
permutes that the user wrote is no pattern here and stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from collmm import _jax

_THROUGH = ("convert_element_type", "transpose", "reshape", "pvary", "pcast", "copy")


@dataclasses.dataclass(frozen=True)
class Match:
    """A collective found next to a dot inside a ``shard_map``.

    Attributes:
      kind: ``"all-gather"``, ``"reduce-scatter"`` or, for what no ring replaces, its HLO name.
      operand: 0 or 1 for a gathered operand, None for the result.
      dim: gathered dimension of the dot's operand, or scattered dimension of its result.
      axes: mesh axes, major to minor.
      size: number of devices on the ring.
      eqn: the collective's equation.
      between: what stands between collective and dot, in program order.
      split_dim: of an all-to-all, the dimension that is whole before it.
    """

    kind: str
    operand: int | None
    dim: int
    axes: tuple[str, ...]
    size: int
    eqn: Any
    between: tuple[Any, ...]
    split_dim: int = -1


class Body:
    """One jaxpr inside a ``shard_map``: who makes and who reads each value."""

    def __init__(self, jaxpr: Any) -> None:
        self.producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.reads = Counter(
            v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)
        )
        self.reads.update(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal))
        self.readers = {
            v: eqn for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)
        }

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
        if name not in ("all_gather", "all_gather_invariant") or _grouped(eqn):
            return None
        size = eqn.params["axis_size"]
        dim = _through(between, eqn.params["all_gather_dimension"], size, _forward)
        if dim is None:
            return None
        return Match("all-gather", operand, dim, _axes(eqn), size, eqn, tuple(between))

    def _after(self, dot: Any) -> Match | None:
        between: list[Any] = []
        (var,) = dot.outvars
        eqn = self._only_reader(var)
        while eqn is not None and eqn.primitive.name in _THROUGH:
            between.append(eqn)
            eqn = self._only_reader(eqn.outvars[0])
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name in ("psum", "psum_invariant", "psum2"):
            return Match("all-reduce", None, -1, tuple(map(str, eqn.params["axes"])), 1, eqn, ())
        if name == "all_to_all":
            return _exchange(eqn, None, between)
        if name != "reduce_scatter" or _grouped(eqn):
            return None
        size = eqn.params["axis_size"]
        if not all(_sum_may_come_first(step) for step in between):
            return None
        dim = _through(between[::-1], eqn.params["scatter_dimension"], size, _backward)
        if dim is None or dot.outvars[0].aval.shape[dim] % size:
            return None
        return Match("reduce-scatter", None, dim, _axes(eqn), size, eqn, tuple(between))

    def _producer(self, var: Any) -> Any:
        return None if isinstance(var, _jax.Literal) else self.producers.get(var)

    def _only_reader(self, var: Any) -> Any:
        return self.readers.get(var) if self.reads[var] == 1 else None


def _exchange(eqn: Any, operand: int | None, between: list[Any]) -> Match:
    p = eqn.params
    moved = any(step.primitive.name in ("transpose", "reshape") for step in between)
    dim = -1 if moved or not p["tiled"] or _grouped(eqn) else p["concat_axis"]
    # The axis size is not among the parameters; the shapes tell.
    size = eqn.invars[0].aval.shape[p["split_axis"]]
    size //= max(eqn.outvars[0].aval.shape[p["split_axis"]], 1)
    return Match("all-to-all", operand, dim, _axes(eqn), size, eqn, tuple(between), p["split_axis"])


# --- following the blocks of a ring through an equation ---


def _through(steps: list[Any], dim: int, size: int, follow: Callable) -> int | None:
    """Follow the blocks of dimension ``dim`` through equations; None where they break up."""
    for step in steps:
        new = follow(step, dim, size)
        if new is None:
            return None
        dim = new
    return dim


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


def _axes(eqn: Any) -> tuple[str, ...]:
    name = eqn.params["axis_name"]
    return tuple(map(str, name)) if isinstance(name, (tuple, list)) else (str(name),)


def _grouped(eqn: Any) -> bool:
    return eqn.params.get("axis_index_groups") is not None
