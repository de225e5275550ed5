"""Share rings: one ring for all einsums of one gathered value, one for all summed and scattered.

Before::

    q = all_gather_einsum[dim=1 ...] x wq
    k = all_gather_einsum[dim=1 ...] x wk
    a = einsum_reduce_scatter[...] dq wq
    b = einsum_reduce_scatter[...] dk wk
    dx = add_any a b

after::

    q k = all_gather_einsum[dim=1 ...] x wq wk
    dx = einsum_reduce_scatter[...] dq wq dk wk

Einsums join a ring only if they gather the same value in the same way, and if the later one's
local operand can be had at the place of the earlier one: cheap elementwise equations are moved up
for that, nothing else is. A sum joins only when its parts have no other reader; what else is added
in between is added after the ring. Sums that a user wants whole inside a ``shard_map`` are added
before the blocks are gathered, so that one ring and one gather are left.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from collmm import _jax
from collmm.primitives import einsum_reduce_scatter_p

# Equations that may be computed earlier than they stand: they cost next to nothing to keep.
_MOVABLE = frozenset(
    {
        "convert_element_type",
        "transpose",
        "reshape",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "sharding_constraint",
        "reshard",
        "copy",
        "slice",
        "mul",
        "add",
        "sub",
        "neg",
        "dynamic_slice",
    }
)
# Equations of one operand that give the same value whenever they are computed.
_CANONICAL = frozenset({"convert_element_type", "sharding_constraint", "reshape", "transpose"})
_ADDS = ("add_any", "add")


def share_rings(jaxpr: Any) -> Any:
    """Return ``jaxpr`` with rings shared, in its sub-jaxprs too."""
    eqns = []
    for eqn in jaxpr.eqns:
        new = {
            (key, index): share_rings(_jax.open_jaxpr(sub))
            for key, index, sub in _jax.jaxprs_in(eqn)
            if has_rings(_jax.open_jaxpr(sub))
        }
        eqns.append(_jax.with_jaxprs(eqn, new) if new else eqn)
    eqns = _joingathers(eqns)
    eqns = _join_sums(eqns, jaxpr.outvars, _GatheredSums(eqns))
    eqns = _join_sums(eqns, jaxpr.outvars, _ScatteredSums())
    return jaxpr.replace(eqns=eqns)


def has_rings(jaxpr: Any) -> bool:
    """Whether a jaxpr holds one of our rings, in a sub-jaxpr perhaps."""
    return any(
        gathers(eqn)
        or eqn.primitive is einsum_reduce_scatter_p
        or any(has_rings(_jax.open_jaxpr(sub)) for _, _, sub in _jax.jaxprs_in(eqn))
        for eqn in jaxpr.eqns
    )


# --- one gathered value ---


def _joingathers(eqns: list[Any]) -> list[Any]:
    eqns = list(eqns)
    # Once, not per group: what has joined is a list by then, and `_needed` refuses to pass it.
    made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    for group in _gathers_by_source(eqns):
        while len(group) > 1:
            group = _join_first(eqns, made, group)
    eqns = _flat(eqns)
    for group in _gathers_by_source(eqns):
        _join_late(eqns, group)
    return _flat(eqns)


def _gathers_by_source(eqns: list[Any]) -> list[list[int]]:
    names = canonical_names(eqns)
    groups: dict[Any, list[int]] = {}
    for i, eqn in enumerate(eqns):
        if gathers(eqn) and not eqn.params.get("hand_out"):
            groups.setdefault(_gather_key(eqn, names), []).append(i)
    return [group for group in groups.values() if len(group) > 1]


def _flat(entries: list[Any]) -> list[Any]:
    return [eqn for entry in entries for eqn in _as_list(entry)]


def _gather_key(eqn: Any, names: dict[Any, Any]) -> Any:
    p = eqn.params
    source = tuple(names.get(v, v) for v in eqn.invars[: _sent(eqn)])
    return source, p.get("prologue"), p["gathered_spec"], p["dim"], p["schedule"], p["mesh"]


def gathers(eqn: Any) -> bool:
    """Whether ``eqn`` is a ring that gathers; a narrow one is, where the user scaled by hand."""
    return eqn.primitive.name in ("all_gather_einsum", "narrow_gather_einsum")


def _sent(eqn: Any) -> int:
    """The number of operands of a ring before the local ones."""
    prologue = eqn.params.get("prologue")
    return 1 if prologue is None else len(prologue.leaves)


def _join_first(eqns: list[Any], made: dict[Any, int], group: list[int]) -> list[int]:
    """Join to the first of ``group`` all that can; return those that could not."""
    first, rest = group[0], []
    members, moved = [first], []
    for other in group[1:]:
        needed = _needed(eqns, made, eqns[other].invars[_sent(eqns[other]) :], first, set(members))
        if needed is None:
            rest.append(other)
        else:
            members.append(other)
            moved += [i for i in needed if i not in moved]
    if len(members) > 1:
        joined = _joined_gather([eqns[i] for i in members])
        before = [eqns[i] for i in sorted(moved)]
        for i in (*moved, *members[1:]):
            eqns[i] = []
        eqns[first] = [*before, joined]
    return rest


def _join_late(eqns: list[Any], group: list[int]) -> None:
    """Join each of ``group`` to the next one where only cheap equations read it before that."""
    later = group[-1]
    for i in reversed(group[:-1]):
        readers = _cheap_readers(eqns, i, later)
        if readers is None:
            later = i
            continue
        joined, *rest = _as_list(eqns[later])
        after = [e for k in readers for e in _as_list(eqns[k])]
        eqns[later] = [_joined_gather([eqns[i], joined]), *after, *rest]
        for k in (i, *readers):
            eqns[k] = []


def _cheap_readers(eqns: list[Any], first: int, last: int) -> list[int] | None:
    """Return what stands between and depends on ``first``; None if it cannot wait for ``last``."""
    made = set(eqns[first].outvars)
    readers = []
    for k in range(first + 1, last + 1):
        entry = _as_list(eqns[k])
        if not any(v in made for e in entry for v in e.invars if not _is_literal(v)):
            continue
        if k == last or any(e.primitive.name not in _MOVABLE or e.effects for e in entry):
            return None
        readers.append(k)
        made.update(v for e in entry for v in e.outvars)
    return readers


def _as_list(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal)


def _needed(
    eqns: list[Any], made: dict[Any, int], atoms: Any, first: int, members: set[int]
) -> list[int] | None:
    """Return the equations after ``first`` that ``atoms`` need; None if one cannot be moved."""
    needed: set[int] = set()
    todo = list(atoms)
    while todo:
        atom = todo.pop()
        i = None if _is_literal(atom) else made.get(atom)
        if i is None or i < first or i in needed:
            continue
        eqn = eqns[i]
        if i in members or isinstance(eqn, list):
            return None
        if eqn.primitive.name not in _MOVABLE or eqn.effects:
            return None
        needed.add(i)
        todo += eqn.invars
    return sorted(needed)


def _joined_gather(eqns: list[Any]) -> Any:
    first = eqns[0]
    params = dict(first.params, uses=tuple(u for e in eqns for u in e.params["uses"]))
    count = _sent(first)
    invars = [*first.invars[:count], *(v for e in eqns for v in e.invars[count:])]
    outvars = [v for e in eqns for v in e.outvars]
    return first.replace(invars=invars, outvars=outvars, params=params)


def canonical_names(eqns: list[Any]) -> dict[Any, Any]:
    """Return, per variable, the first variable that is known to hold the same value."""
    names: dict[Any, Any] = {}
    seen: dict[Any, Any] = {}
    for eqn in eqns:
        if eqn.primitive.name not in _CANONICAL or len(eqn.invars) != 1:
            continue
        (source,) = eqn.invars
        if _is_literal(source):
            continue
        key = (eqn.primitive.name, names.get(source, source), str(eqn.params))
        (out,) = eqn.outvars
        names[out] = seen.setdefault(key, out)
    return names


# --- one scattered sum ---


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A value as a sum: a scattered ring's result, or what is gathered of one, and others.

    ``ring``: where the ring stands; None without one. ``adds``: where the additions stand.
    """

    ring: int | None
    others: tuple[Any, ...]
    adds: tuple[int, ...] = ()


class _ScatteredSums:
    """Scattered sums that are added: one ring."""

    def key(self, eqn: Any) -> Any:
        return _sum_key(eqn) if eqn.primitive is einsum_reduce_scatter_p else None

    def joined(self, a: Any, b: Any) -> list[Any]:
        return [_joined_sum(a, b)]


class _GatheredSums:
    """Scattered sums that are gathered and added: added first, and gathered once."""

    def __init__(self, eqns: list[Any]) -> None:
        self._blocks = {e.outvars[0]: e for e in eqns if e.primitive is einsum_reduce_scatter_p}

    def key(self, eqn: Any) -> Any:
        """What two gathers must have in common; None for anything but the gather of a sum."""
        if eqn.primitive.name not in ("all_gather", "all_gather_invariant"):
            return None
        ring = None if _is_literal(eqn.invars[0]) else self._blocks.get(eqn.invars[0])
        if ring is None:
            return None
        return eqn.primitive.name, str(eqn.params), _sum_key(ring)

    def joined(self, a: Any, b: Any) -> list[Any]:
        blocks = [a.invars[0], b.invars[0]]
        out = _jax.fresh_like(blocks[0])
        self._blocks[out] = self._blocks[blocks[0]]
        return [_jax.add_eqn(a, blocks, out), a.replace(invars=[out])]


def _join_sums(eqns: list[Any], outvars: Any, kind: _ScatteredSums | _GatheredSums) -> list[Any]:
    """Join rings whose results are added, in between or directly: ``(w + a) + b = w + (a + b)``."""
    readers = Counter(v for e in eqns for v in e.invars if not _is_literal(v))
    readers.update(v for v in outvars if not _is_literal(v))
    sums: dict[Any, _Sum] = {}
    result: list[Any] = []

    def as_sum(atom: Any) -> _Sum:
        alone = _is_literal(atom) or readers[atom] > 1
        return _Sum(None, (atom,)) if alone else sums.get(atom, _Sum(None, (atom,)))

    for eqn in eqns:
        at = len(result)
        result.append(eqn)
        if kind.key(eqn) is not None:
            sums[eqn.outvars[0]] = _Sum(at, ())
        elif eqn.primitive.name in _ADDS:
            (out,) = eqn.outvars
            a, b = map(as_sum, eqn.invars)
            rings = [s.ring for s in (a, b) if s.ring is not None]
            others, adds = (*a.others, *b.others), (*a.adds, *b.adds)
            if len(rings) == 2 and len({kind.key(result[k]) for k in rings}) == 1:
                joined = kind.joined(*(result[k] for k in rings))
                for k in (*rings, *adds, at):
                    result[k] = None
                sums[out] = _append_sum(result, eqn, joined, others)
            elif len(rings) == 1:
                sums[out] = _Sum(rings[0], others, (*adds, at))
    return [eqn for eqn in result if eqn is not None]


def _append_sum(result: list[Any], add: Any, joined: list[Any], others: tuple[Any, ...]) -> _Sum:
    """Append ``joined``, and the sum of its result and ``others`` as the result of ``add``."""
    (out,) = add.outvars
    parts = [*others, _jax.fresh_like(out)] if others else [out]
    *before, ring = joined
    result += before
    at = len(result)
    result.append(ring.replace(outvars=[parts[-1]]))
    total = parts[0]
    for k, part in enumerate(parts[1:], 2):
        new = out if k == len(parts) else _jax.fresh_like(out)
        result.append(add.replace(invars=[total, part], outvars=[new]))
        total = new
    return _Sum(at, others, tuple(range(at + 1, len(result))))


def _sum_key(eqn: Any) -> Any:
    """What two scattered sums must have in common to be one."""
    p = eqn.params
    term = p["terms"][0]
    einsum = term.partial.einsum
    specs = dict(zip((*einsum.lhs, *einsum.rhs), (*term.lhs_spec, *term.rhs_spec), strict=True))
    summed = frozenset(a for label in einsum.contracting for a in specs[label])
    base = tuple(specs[label] for label in einsum.out)
    dtype = term.partial.out_dtype
    ring = p["schedule"].axes, p["schedule"].order
    return p["out_spec"], p["dim"], ring, p["mesh"], summed, base, str(dtype)


def _joined_sum(a: Any, b: Any) -> Any:
    """Return the ring of both sums, run as that of the larger one."""
    terms = (*a.params["terms"], *b.params["terms"])
    schedule = max(a, b, key=_work).params["schedule"]
    params = dict(a.params, terms=terms, schedule=schedule)
    return a.replace(invars=[*a.invars, *b.invars], params=params)


def _work(eqn: Any) -> int:
    """Multiplications of a scattered sum, on all devices."""
    shapes = [v.aval.shape for v in eqn.invars]
    terms = zip(eqn.params["terms"], shapes[::2], shapes[1::2], strict=True)
    return sum(term.partial.einsum.flops(lhs, rhs) for term, lhs, rhs in terms)
