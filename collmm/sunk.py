"""Sunk gathers: elementwise work between a gather that the user wrote and the einsum.

Before::

    g = sharding_constraint[P(None, None)] x8        # x8: float8, sharded; gathered here
    b = convert_element_type[bfloat16] g
    x = mul b s
    y = dot_general x w

after::

    b = convert_element_type[bfloat16] x8            # on the shard
    x = mul b s
    y = all_gather_einsum[dim=0 ...] x w

The work is the user's own, done again on the value before the gather: a resharding changes no
value. Where that value is narrower the ring then sends it (``narrow``). Refuses (the gather is not
the einsum's) where no resharding is found, or where something besides einsums reads what is made
of the gathered value: the gather would stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from collmm import _jax

# Cheap, and the same on a shard as on the whole.
_ELEMENTWISE = frozenset(
    {"convert_element_type", "mul", "div", "add", "sub", "neg", "max", "min", "copy"}
)
# The same operations as the analysis meets them.
STABLEHLO = frozenset(
    f"stablehlo.{name}"
    for name in (
        "convert",
        "multiply",
        "divide",
        "add",
        "subtract",
        "negate",
        "maximum",
        "minimum",
    )
)
# Longer chains are no dequantisation, and every device would do the work for the whole value.
MOST_EQUATIONS = 8

# What may stand between a gathered value and the einsums that it is for.
_READERS = _ELEMENTWISE | {"broadcast_in_dim", "pvary", "sharding_constraint", "reshard"}
# A value that more elementwise results are made of is no operand of einsums alone.
_MOST_READERS = 32

Readers = Mapping[Any, list[Any]]


def gathers_early(var: Any, producers: Mapping[Any, Any], readers: Readers) -> bool:
    """Whether a resharding stands behind elementwise work that makes ``var`` for einsums alone.

    Args:
      var: the operand of an einsum.
      producers: the equation that makes each variable of the same jaxpr.
      readers: the equations that read each variable; None for what the jaxpr returns.
    """
    behind = list(elementwise_behind(var, producers))
    found = any(map(_jax.is_resharding, behind))
    return found and all(only_for_einsums(eqn.outvars[0], readers) for eqn in behind)


def only_for_einsums(var: Any, readers: Readers, but: Any = None) -> bool:
    """Whether a value is read by einsums alone, or by elementwise work for einsums alone.

    ``but``: a value that anything may read, since a ring hands it out.
    """
    todo, seen = [var], {var, but}
    while todo:
        for reader in readers.get(todo.pop(), ()):
            name = None if reader is None else reader.primitive.name
            if name == "dot_general":
                continue
            if name not in _READERS or len(seen) > _MOST_READERS:
                return False
            new = [v for v in reader.outvars if v not in seen]
            seen.update(new)
            todo += new
    return True


def worked_on(var: Any, readers: Readers) -> bool:
    """Whether elementwise work reads a value, as it is or resharded."""
    for reader in readers.get(var, ()):
        if reader is None or reader.primitive.name not in _READERS:
            continue
        if not _jax.is_resharding(reader) or worked_on(reader.outvars[0], readers):
            return True
    return False


def sink(
    var: Any, producers: Mapping[Any, Any], before: Callable[[Any], Any]
) -> tuple[list[Any], Any]:
    """Return (equations, value): ``var`` made of what stands before the reshardings behind it.

    ``before`` gives the value before a resharding. Without one there are no equations, and the
    value is ``var`` itself.
    """
    made: dict[Any, Any] = {}
    eqns = []
    for eqn in reversed(list(elementwise_behind(var, producers))):
        (out,) = eqn.outvars
        if _jax.is_resharding(eqn):
            made[out] = before(out)
            continue
        invars = [v if isinstance(v, _jax.Literal) else made.get(v, v) for v in eqn.invars]
        if all(a is b for a, b in zip(invars, eqn.invars, strict=True)):
            continue
        made[out] = _jax.fresh_like(out)
        new = eqn.replace(invars=invars, outvars=[made[out]])
        if _jax.typed_sharding(out.aval) is not None:
            made[out] = _jax.Var(_jax.result_type(new))
            new = new.replace(outvars=[made[out]])
        eqns.append(new)
    return eqns, made.get(var, var)


def elementwise_behind(var: Any, producers: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the elementwise equations that make ``var``, and the reshardings they start from.

    What reads a value comes before what makes it.
    """
    found: dict[int, Any] = {}
    todo = [var]
    while todo and len(found) < MOST_EQUATIONS:
        atom = todo.pop(0)
        eqn = None if isinstance(atom, _jax.Literal) else producers.get(atom)
        if eqn is None or atom.aval.shape != var.aval.shape:
            continue
        resharding = _jax.is_resharding(eqn)
        if not resharding and eqn.primitive.name not in _ELEMENTWISE:
            continue
        found.pop(id(eqn), None)  # made before every one that reads it
        found[id(eqn)] = eqn
        if not resharding:
            todo += eqn.invars
    yield from found.values()
