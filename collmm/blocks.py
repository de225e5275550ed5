"""Blocks: where the blocks of a ring are after an equation, and the equation on one block.

    y = reshape[new_sizes=(16, 6)] g          # g[16, 3, 2], gathered in four blocks of rows
    y = reshape[new_sizes=(4, 6)] b           # the same on the block b[4, 3, 2]

Casts, additions, transposes, and reshapes that keep every block whole; inside a ``shard_map``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from collmm import _jax

ADDS = ("add", "add_any")


def through(steps: list[Any], dim: int, size: int, follow: Callable) -> int | None:
    """Follow the blocks of dimension ``dim`` through equations; None where they break up."""
    for step in steps:
        new = follow(step, dim, size)
        if new is None:
            return None
        dim = new
    return dim


def common_blocks(dot: Any, terms: Sequence[tuple[Any, list[Any]]], size: int) -> int | None:
    """Return the dimension of ``dot`` by which the sum of all ``terms`` splits into blocks.

    Every term has to split so, and all their blocks are the same of the sum.
    """
    first, path = terms[0]
    for dim, extent in enumerate(first.outvars[0].aval.shape):
        if extent % size or not extent:
            continue
        end = through(path, dim, size, forward)
        if end is None:
            continue
        dims = [dim, *(through(steps[::-1], end, size, backward) for _, steps in terms[1:])]
        results = [term.outvars[0].aval.shape for term, _ in terms]
        if all(d is not None and r[d] % size == 0 for d, r in zip(dims, results, strict=True)):
            return next(d for d, (term, _) in zip(dims, terms, strict=True) if term is dot)
    return None


def is_add(eqn: Any) -> bool:
    """Whether ``eqn`` adds two values."""
    return eqn.primitive.name in ADDS


def sum_may_come_first(eqn: Any) -> bool:
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


def forward(eqn: Any, dim: int, size: int) -> int | None:
    """Return where dimension ``dim`` of the operand, made of ``size`` blocks, is in the result."""
    if eqn.primitive.name == "transpose":
        return eqn.params["permutation"].index(dim)
    if eqn.primitive.name == "reshape":
        return _reshaped(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, dim, size)
    return dim


def backward(eqn: Any, dim: int, size: int) -> int | None:
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
    new_dim = forward(eqn, dim, size)
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
