"""Prologue: the elementwise work between a narrow value and the operand of an einsum.

    x = mul (convert_element_type[bfloat16] x8) s      # x8: float8 or int8; s: a scale
    y = dot_general x w

Casts and scales are done again on each block of the value, with the equations that the user wrote:
the same casts, in the same order, on the same elements. So the narrow value can travel and be made
wide where it arrives.

Refuses (there is no prologue) where nothing narrower than the operand is found behind it.

Where a user gathers by hand and works on the whole value, the prologue starts from the shards: what
stays (a scale that does not run along the gathered dimension) is this device's own, as it was.
Refuses there what runs along the gathered dimension and is not gathered in the same way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collmm import _jax

# Cheap, and the same on a block as on the whole.
_ELEMENTWISE = frozenset({"convert_element_type", "mul", "div", "add", "sub", "neg"})
# Longer chains are no dequantisation, and the work is done again for every block.
_MAX_EQUATIONS = 8
# They change no value: a block of the one is a block of the other.
_SAME = frozenset({"all_gather", "all_gather_invariant", "pvary"})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value that a prologue starts from.

    Attributes:
      var: the value.
      dims: per dimension of it the dimension of the result that it runs along; None where it has
        one element for all.
    """

    var: Any
    dims: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Prologue:
    """Equations that make ``out`` of the leaves; ``apply`` does them on blocks.

    Attributes:
      leaves: what it starts from, each once.
      eqns: in order.
      out: the value they make.
    """

    leaves: tuple[Leaf, ...]
    eqns: tuple[Any, ...]
    out: Any

    def apply(self, blocks: Sequence[Any]) -> Any:
        """Return the block of ``out`` that belongs to one block of each leaf."""
        whole = tuple(range(self.out.aval.ndim))
        shape = next(
            b.shape for leaf, b in zip(self.leaves, blocks, strict=True) if leaf.dims == whole
        )
        known = {leaf.var: block for leaf, block in zip(self.leaves, blocks, strict=True)}
        for eqn in self.eqns:
            args = [v.val if isinstance(v, _jax.Literal) else known[v] for v in eqn.invars]
            if _jax.is_resharding(eqn) or eqn.primitive.name in _SAME:
                (known[eqn.outvars[0]],) = args
                continue
            changed: dict[str, Any] = {"sharding": None} if "sharding" in eqn.params else {}
            if eqn.primitive.name == "broadcast_in_dim":
                changed["shape"] = shape
            known[eqn.outvars[0]] = _jax.replay_eqn(eqn, args, **changed)
        return known[self.out]


def prologue_of(var: Any, producers: Mapping[Any, Any], dim: int) -> Prologue | None:
    """Return the prologue of ``var`` with the least to send when blocks of ``dim`` travel.

    Args:
      var: the operand of an einsum.
      producers: the equation that makes each variable of the same jaxpr.
      dim: the dimension along which blocks travel.

    Returns:
      None where nothing takes fewer bytes than ``var`` itself.
    """
    if isinstance(var, _jax.Literal) or var.aval.ndim == 0:
        return None
    var = before_resharding(var, producers)
    leaves = _Cut(var.aval.shape, producers, dim).leaves(var)
    names = {leaf.var for leaf in leaves}
    whole = tuple(range(var.aval.ndim))
    if var in names or all(leaf.dims != whole for leaf in leaves):
        return None  # nothing narrower, or nothing that says how long a block is
    if len(names) < len(leaves):
        return None  # one value along two dimensions: its blocks are not the same
    eqns = _between(var, names, producers)
    return None if len(eqns) > _MAX_EQUATIONS else Prologue(tuple(leaves), tuple(eqns), var)


def gathered_prologue(
    var: Any, producers: Mapping[Any, Any], dim: int, gathers: Callable[[Any, int], bool]
) -> Prologue | None:
    """Return the prologue of ``var``, a whole value, that starts from the shards gathered for it.

    Args:
      var: the operand of an einsum inside a ``shard_map``.
      producers: the equation that makes each variable of the same jaxpr.
      dim: the dimension along which it is gathered.
      gathers: whether an equation is the gather of a given dimension of its operand.

    Returns:
      None where ``var`` is not made by elementwise work of gathered values alone.
    """
    leaves = _Gathered(producers, dim, gathers).leaves(var, tuple(range(var.aval.ndim)))
    if leaves is None or all(leaf.dims != tuple(range(var.aval.ndim)) for leaf in leaves):
        return None
    names = {leaf.var for leaf in leaves}
    if len(names) < len(leaves):
        return None
    eqns = _between(var, names, producers)
    return None if len(eqns) > _MAX_EQUATIONS else Prologue(tuple(leaves), tuple(eqns), var)


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """Finds the shards from which a value is made, gathered along ``dim``."""

    producers: Mapping[Any, Any]
    dim: int
    gathers: Callable[[Any, int], bool]

    def leaves(
        self, var: Any, dims: tuple[int | None, ...], depth: int = _MAX_EQUATIONS
    ) -> list[Leaf] | None:
        """Return what makes ``var``, whose dimensions are ``dims`` of the result."""
        if self.dim not in dims:
            return [Leaf(var, dims)]
        eqn = self.producers.get(var)
        if eqn is None or depth == 0 or len(eqn.outvars) != 1:
            return None
        if self.gathers(eqn, dims.index(self.dim)):
            return [Leaf(eqn.invars[0], dims)]
        found: list[Leaf] = []
        for atom in eqn.invars:
            if isinstance(atom, _jax.Literal):
                continue
            along = self._along(eqn, atom, dims)
            part = None if along is None else self.leaves(atom, along, depth - 1)
            if part is None:
                return None
            found += [leaf for leaf in part if leaf not in found]
        return found

    def _along(
        self, eqn: Any, atom: Any, dims: tuple[int | None, ...]
    ) -> tuple[int | None, ...] | None:
        """Return along which dimensions of the result an operand runs; None if that is unknown."""
        shape = eqn.outvars[0].aval.shape
        if eqn.primitive.name == "broadcast_in_dim":
            places = eqn.params["broadcast_dimensions"]
        elif eqn.primitive.name in _ELEMENTWISE or eqn.primitive.name == "pvary":
            places = range(atom.aval.ndim)
        else:
            return None
        if atom.aval.ndim not in (0, len(places)):
            return None
        pairs = zip(places, atom.aval.shape, strict=True)
        return tuple(dims[d] if extent == shape[d] else None for d, extent in pairs)


def narrow_share(var: Any, producers: Mapping[Any, Any]) -> tuple[float, ...]:
    """Return, per dimension of ``var``, the share of its bytes to send if blocks of it travel.

    1.0 where nothing narrower is found behind it.
    """
    if isinstance(var, _jax.Literal):
        return ()
    whole = math.prod(var.aval.shape) * var.aval.dtype.itemsize
    found = [prologue_of(var, producers, dim) for dim in range(var.aval.ndim)]
    return tuple(
        1.0 if p is None else travelling_bytes(p.leaves, dim) / whole for dim, p in enumerate(found)
    )


def before_resharding(var: Any, producers: Mapping[Any, Any]) -> Any:
    """Return the value that ``var`` is, before anything that only says how it is sharded."""
    while (eqn := producers.get(var)) is not None and _jax.is_resharding(eqn):
        (source,) = eqn.invars
        if isinstance(source, _jax.Literal):
            break
        var = source
    return var


def travelling_bytes(leaves: Sequence[Leaf], dim: int) -> int:
    """Return the bytes of the whole values that travel: those that run along ``dim``."""
    moved = [leaf.var.aval for leaf in leaves if dim in leaf.dims]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in moved)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Finds the cheapest values to send from which a value of ``shape`` can be made."""

    shape: tuple[int, ...]
    producers: Mapping[Any, Any]
    dim: int

    def leaves(self, var: Any, depth: int = _MAX_EQUATIONS) -> list[Leaf]:
        var = before_resharding(var, self.producers)
        itself = [Leaf(var, tuple(range(len(self.shape))))]
        eqn = self.producers.get(var)
        if eqn is None or depth == 0 or eqn.effects or len(eqn.outvars) != 1:
            return itself
        if eqn.primitive.name == "broadcast_in_dim":
            found = self._broadcast(eqn)
        elif eqn.primitive.name in _ELEMENTWISE:
            found = self._operands(eqn, depth)
        else:
            return itself
        if found is None:
            return itself
        fewer = travelling_bytes(found, self.dim) < travelling_bytes(itself, self.dim)
        return found if fewer else itself

    def _broadcast(self, eqn: Any) -> list[Leaf] | None:
        (source,) = eqn.invars
        if isinstance(source, _jax.Literal):
            return []
        along = eqn.params["broadcast_dimensions"]
        return self._leaf(source, along)

    def _operands(self, eqn: Any, depth: int) -> list[Leaf] | None:
        found: list[Leaf] = []
        for atom in eqn.invars:
            if isinstance(atom, _jax.Literal):
                continue
            if atom.aval.shape == self.shape:
                part: list[Leaf] | None = self.leaves(atom, depth - 1)
            elif atom.aval.ndim in (0, len(self.shape)):
                part = self._leaf(atom, range(atom.aval.ndim))
            else:
                return None
            if part is None:
                return None
            found += [leaf for leaf in part if leaf not in found]
        return found

    def _leaf(self, var: Any, along: Sequence[int]) -> list[Leaf] | None:
        var, dims = before_resharding(var, self.producers), []
        for d, extent in zip(along, var.aval.shape, strict=True):
            if extent not in (1, self.shape[d]):
                return None
            dims.append(d if extent == self.shape[d] else None)
        return [Leaf(var, tuple(dims))]


def _between(var: Any, leaves: set[Any], producers: Mapping[Any, Any]) -> list[Any]:
    """Return the equations that make ``var`` of ``leaves``, what is read before what reads it."""
    done: list[Any] = []
    seen: set[Any] = set(leaves)

    def visit(atom: Any) -> None:
        if isinstance(atom, _jax.Literal) or atom in seen:
            return
        seen.add(atom)
        eqn = producers[atom]
        for operand in eqn.invars:
            visit(operand)
        done.append(eqn)

    visit(var)
    return done
