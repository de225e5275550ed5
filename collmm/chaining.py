"""Chaining: a gather ring and a scatter ring with only elementwise work between become one.

Before::

    h = all_gather_einsum[...] x w
    a = gelu h
    y = einsum_reduce_scatter[...] a v

after::

    y = chained_einsums[middle={ lambda ; h. let a = gelu h in (a,) } ...] x w v

Refuses unless both rings run over the same members in the same order and have no inner ones, the
scattered dimension is the gathered one, no shard is padded, nothing but elementwise equations
stands between, every value between has one shape and one sharding, no einsum of the gather ring
sums much over the gathered dimension, and nothing else that the chain needs is made from its own
results. What others read of the values between is handed out, or made again from what is handed
out where that is smaller; what nobody reads never exists as a whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any

from collmm import _jax
from collmm.chained import Chain, Extra, chained_einsums_p, use_axes
from collmm.primitives import all_gather_einsum_p, einsum_reduce_scatter_p, summed_axes
from collmm.rewrite_manual import type_change
from collmm.schedule import Schedule
from collmm.sites import Spec, shard_shape
from collmm.uneven import uneven_dims

_ELEMENTWISE = frozenset(
    """
    abs add add_any and atan2 cbrt ceil clamp convert_element_type copy cos div eq erf erf_inv erfc
    exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not
    one_minus_square or pow reduce_precision rem round rsqrt select_n sign sin sqrt square sub tan
    tanh xor
    """.split()  # noqa: SIM905
)
# Bytes. On v5e the backward pass of an MLP with two sums of 32 MiB took 2.9 ms longer in one loop.
_SMALL_SUMS = 4 * 2**20
_WRAPPERS = ("custom_jvp_call", "custom_vjp_call", "jit", "pjit")
# What the two rings may be asked for; one with more than that is left as it is.
_GATHER_PARAMS = {"uses", "gathered_spec", "dim", "schedule", "mesh", "hand_out"}
_SCATTER_PARAMS = {"terms", "out_spec", "dim", "schedule", "mesh"}


def chain_rings(jaxpr: Any, apart: Collection[Any] = ()) -> Any:
    """Return ``jaxpr`` with rings chained, in its sub-jaxprs too.

    ``apart``: results of scatter rings that stay rings of their own.
    """
    eqns = []
    for eqn in jaxpr.eqns:
        new = {
            (key, index): chain_rings(_jax.open_jaxpr(sub), apart)
            for key, index, sub in _jax.jaxprs_in(eqn)
            if _has_both(_jax.open_jaxpr(sub))
        }
        eqns.append(_jax.with_jaxprs(eqn, new) if new else eqn)
    jaxpr = jaxpr.replace(eqns=eqns)
    done: set[Any] = set(apart)
    while True:
        before = len(done)
        jaxpr = _chain_some(jaxpr, done)
        if len(done) == before:
            return jaxpr


def _chain_some(jaxpr: Any, done: set[Any]) -> Any:
    """Return ``jaxpr`` with links chained that do not overlap; ``done`` gets those that were tried.

    Several at a time, so that the time to chain a program grows with its length and no faster.
    """
    body = _Body(jaxpr)
    chains: dict[int, tuple[Any, list[int]]] = {}
    gone: set[int] = set()
    touched: set[int] = set()
    end = -1
    for link in body.links(done):
        ours = {link.first, link.last, *link.between, *link.inside}
        if link.first <= end or ours & touched:
            continue  # in the next turn, when its neighbour is a chain
        done.add(link.scatter.outvars[0])
        made = _chained(body, link)
        if made is not None:
            new, late, removed = made
            chains[link.last] = new, late
            gone |= removed
            touched |= ours
            end = link.last
    return jaxpr.replace(eqns=_assembled(body, chains, gone))


def _assembled(body: _Body, chains: dict[int, tuple[Any, list[int]]], gone: set[int]) -> list[Any]:
    """Return the equations with ``chains`` in their places, what must wait for each after it."""
    waiting = {k for _, late in chains.values() for k in late}
    eqns = []
    for i, eqn in enumerate(body.eqns):
        if i in chains:
            new, late = chains[i]
            eqns += [new, *(body.eqns[k] for k in late if k not in gone)]
        elif i not in gone and i not in waiting:
            eqns.append(eqn)
    return eqns


def _has_both(jaxpr: Any) -> bool:
    names = {eqn.primitive for eqn in jaxpr.eqns}
    return {all_gather_einsum_p, einsum_reduce_scatter_p} <= names or any(
        _has_both(_jax.open_jaxpr(sub)) for eqn in jaxpr.eqns for _, _, sub in _jax.jaxprs_in(eqn)
    )


# --- gate ---


@dataclasses.dataclass
class _Link:
    """A gather ring, a scatter ring, and what is between them.

    Attributes:
      first, last: places of the two rings' equations.
      gather, scatter: those equations.
      shape, spec, dim: of every value between, and its cut dimension.
      takes: places of the gather's results that the middle reads.
      between: places of the elementwise equations that depend on these.
      inside: places of further elementwise equations that only the middle reads.
    """

    first: int
    last: int
    gather: Any
    scatter: Any
    shape: tuple[int, ...]
    spec: Spec
    dim: int
    takes: list[int]
    between: list[int]
    inside: list[int]


class _Body:
    """One jaxpr's equations, with who makes and who reads each value."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self.eqns = list(jaxpr.eqns)
        self.made = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.readers: dict[Any, set[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for v in variables(eqn.invars):
                self.readers.setdefault(v, set()).add(i)
        self.results = set(variables(jaxpr.outvars))

    def links(self, done: set[Any]) -> Iterable[_Link]:
        """Return the pairs of rings that stand next to each other, but not those in ``done``."""
        for i, eqn in enumerate(self.eqns):
            plain = eqn.primitive is einsum_reduce_scatter_p and _plain(eqn, _SCATTER_PARAMS)
            if plain and eqn.outvars[0] not in done:
                for operand, spec, dim in _cut_operands(eqn):
                    link = self._link(i, operand, spec, dim)
                    if link is not None:
                        yield link
                        break

    def _link(self, last: int, operand: Any, spec: Spec, dim: int) -> _Link | None:
        shape = operand.aval.shape
        first = None
        takes: list[int] = []
        elementwise: list[int] = []
        todo, seen = [operand], set()
        while todo:
            v = todo.pop()
            i = self.made.get(v)
            if v in seen or i is None:
                continue
            seen.add(v)
            if v.aval.shape != shape:
                continue
            if self.eqns[i].primitive is all_gather_einsum_p:
                k = self.eqns[i].outvars.index(v)
                if first in (None, i) and _fits(self.eqns[i], k, self.eqns[last], spec, dim):
                    first = i
                    takes.append(k)
            elif is_elementwise(self.eqns[i], shape, spec):
                elementwise.append(i)
                todo += variables(self.eqns[i].invars)
        if first is None:
            return None
        between, inside = self._sorted_out(first, takes, elementwise)
        return _Link(
            first,
            last,
            self.eqns[first],
            self.eqns[last],
            shape,
            spec,
            dim,
            sorted(takes),
            between,
            inside,
        )

    def _sorted_out(
        self, first: int, takes: list[int], elementwise: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the equations that depend on the gather, and those made for them alone."""
        moving = {self.eqns[first].outvars[k] for k in takes}
        between = []
        for i in sorted(elementwise):
            if moving & set(variables(self.eqns[i].invars)):
                between.append(i)
                moving.update(self.eqns[i].outvars)
        inside: list[int] = []
        for i in sorted(set(elementwise) - set(between), reverse=True):
            outs = self.eqns[i].outvars
            ours = {*between, *inside}
            if all(self.readers.get(v, set()) <= ours and v not in self.results for v in outs):
                inside.append(i)
        return between, sorted(inside)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return ``atoms`` without the literals."""
    return [v for v in atoms if not isinstance(v, _jax.Literal)]


def _plain(eqn: Any, known: set[str]) -> bool:
    return not any(value for key, value in eqn.params.items() if key not in known)


def _cut_operands(scatter: Any) -> Iterable[tuple[Any, Spec, int]]:
    """Return the operands of a scatter ring that it takes in blocks: (variable, spec, dim)."""
    for t, term in enumerate(scatter.params["terms"]):
        einsum = term.partial.einsum
        label = einsum.out[scatter.params["dim"]]
        sides = ((einsum.lhs, term.lhs_spec), (einsum.rhs, term.rhs_spec))
        for s, (labels, spec) in enumerate(sides):
            atom = scatter.invars[2 * t + s]
            if label in labels and not isinstance(atom, _jax.Literal):
                yield atom, spec, labels.index(label)


def _fits(gather: Any, k: int, scatter: Any, spec: Spec, dim: int) -> bool:
    """Whether result ``k`` of a gather ring can be cut for a scatter ring as it comes."""
    g, s = gather.params, scatter.params
    a, b = g["schedule"], s["schedule"]
    if (a.axes, a.ring_size, a.order) != (b.axes, b.ring_size, b.order) or a.ring_size < 2:
        return False
    if a.chunked or a.grouped or b.grouped:
        return False  # a chain cuts its shards by its accumulators, and takes one at a time
    if g["mesh"] != s["mesh"] or not _plain(gather, _GATHER_PARAMS):
        return False
    if any(part.inner for part in (*g["uses"], *s["terms"])):
        return False  # an inner ring needs a first step of its own
    if k >= len(g["uses"]):
        return False  # the gathered operand itself
    if _sums(gather) > _SMALL_SUMS:
        return False
    use = g["uses"][k]
    einsum = use.consumer.partial.einsum
    label = use.consumer.gathered_labels()[g["dim"]]
    if label not in einsum.out or einsum.out.index(label) != dim:
        return False
    if g["mesh"] is None:
        return True
    axes = use_axes_of(gather, use)
    summed = summed_axes(use.consumer.partial, axes)
    base = tuple(axes[x] for x in einsum.out)
    return not summed and base == use.out_spec == spec and _even(gather, scatter)


def _sums(gather: Any) -> int:
    """Bytes, on one device, of the results that sum over the gathered dimension.

    Those of a weight's gradient do. A chain cuts every shard into a part for each accumulator, and
    each part's share is added to the whole sum.
    """
    g, total = gather.params, 0
    for use, out in zip(g["uses"], gather.outvars, strict=False):
        partial = use.consumer.partial
        if use.consumer.gathered_labels()[g["dim"]] in partial.einsum.out:
            continue
        shape = out.aval.shape
        if g["mesh"] is not None:
            shape = shard_shape(shape, use.out_spec, dict(g["mesh"].shape))
        total += math.prod(shape) * partial.accumulation_dtype.itemsize
    return total


def use_axes_of(gather: Any, use: Any) -> dict[int, tuple[str, ...]]:
    """Return the mesh axes of each label of one use of a gather ring."""
    p = gather.params
    return use_axes(use, p["gathered_spec"], p["dim"], p["schedule"])


def _even(gather: Any, scatter: Any) -> bool:
    """Whether nothing is padded: the elementwise part may make anything of what is."""
    g, s = gather.params, scatter.params
    shards = [(gather.invars[0], g["gathered_spec"]), (scatter.outvars[0], s["out_spec"])]
    for use, local, out in zip(g["uses"], gather.invars[1:], gather.outvars, strict=False):
        shards += [(local, use.local_spec), (out, use.out_spec)]
    for t, term in enumerate(s["terms"]):
        shards += [
            (scatter.invars[2 * t], term.lhs_spec),
            (scatter.invars[2 * t + 1], term.rhs_spec),
        ]
    return not any(uneven_dims(v.aval.shape, spec, g["mesh"]) for v, spec in shards)


def is_elementwise(eqn: Any, shape: tuple[int, ...], spec: Spec) -> bool:
    """Whether ``eqn`` makes each element of its result from the same element of its operands."""
    if eqn.effects or any(v.aval.shape != shape for v in eqn.outvars):
        return False
    name = eqn.primitive.name
    if name in _WRAPPERS:
        subs = [_jax.open_jaxpr(sub) for _, _, sub in _jax.jaxprs_in(eqn)][:1]
        return (
            bool(subs)
            and all(is_elementwise(e, shape, spec) for sub in subs for e in sub.eqns)
            and not any(sub.constvars for sub in subs)
        )
    if name == "broadcast_in_dim":
        return len(eqn.invars) == 1
    if name == "sharding_constraint":
        wanted = _jax.resharding_spec(eqn)
        return wanted is not None and (*wanted, *((),) * (len(shape) - len(wanted))) == spec
    same_rank = all(len(v.aval.shape) in (0, len(shape)) for v in eqn.invars)
    return name in _ELEMENTWISE and same_rank


# --- rewrite one ---


def _chained(body: _Body, link: _Link) -> tuple[Any, list[int], set[int]] | None:
    """Return the chain, what must stand after it and what it replaces; None if none can be."""
    handed, again = _handed_out(body, link)
    results = link.gather.outvars[: len(link.gather.params["uses"])]
    kept_uses = [k for k, v in enumerate(results) if v in handed]
    kept_values = [v for i in link.between for v in body.eqns[i].outvars if v in handed]
    new = _chain_eqn(body, link, kept_uses, kept_values)
    if new is None or type_change(new.outvars, new):
        return None
    gone = {link.first, link.last, *link.between, *link.inside} - again
    late = _late(body, link, new, gone)
    return None if late is None else (new, late, gone)


def _handed_out(body: _Body, link: _Link) -> tuple[set[Any], set[int]]:
    """Return the values between that others read, and the equations that make the rest again.

    An elementwise value is made again from the gather's results where these are smaller in all.
    """
    ours = {link.last, *link.between, *link.inside}

    def read_outside(v: Any) -> bool:
        return v in body.results or not body.readers.get(v, set()) <= ours

    taken = {link.gather.outvars[k] for k in link.takes}
    handed = {v for v in link.gather.outvars if read_outside(v)}
    values = [v for i in link.between for v in body.eqns[i].outvars if read_outside(v)]
    handed.update(v for v in values if v in body.results)
    free, constraints = _unconstrained(body, link, [v for v in values if v not in body.results])
    again, sources = _made_again(body, link, list(free))
    extra = (sources & taken) - handed
    if free and _bytes(extra) < _bytes(free - handed):
        return handed | extra, again | constraints
    return handed | free, constraints


def _unconstrained(body: _Body, link: _Link, values: list[Any]) -> tuple[set[Any], set[int]]:
    """Return ``values`` before any constraint, and the places of the constraints after them."""
    free, constraints = set(), set()
    for v in values:
        while True:
            i = body.made[v]
            if i not in link.between or body.eqns[i].primitive.name != "sharding_constraint":
                break
            constraints.add(i)
            (v,) = body.eqns[i].invars
        free.add(v)
    return free, constraints


def _made_again(body: _Body, link: _Link, values: list[Any]) -> tuple[set[int], set[Any]]:
    """Return the places of the equations that ``values`` come from, and what these start from."""
    ours, todo = {*link.between, *link.inside}, list(values)
    again: set[int] = set()
    sources: set[Any] = set()
    while todo:
        v = todo.pop()
        i = body.made.get(v)
        if i in ours:
            if i not in again:
                again.add(i)
                todo += variables(body.eqns[i].invars)
        else:
            sources.add(v)
    return again, sources


def _bytes(values: Iterable[Any]) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in values)


def _late(body: _Body, link: _Link, new: Any, gone: set[int]) -> list[int] | None:
    """Return what must wait for the chain; None if the chain waits for some of it, or it acts."""
    results = set(new.outvars)
    late = []
    for i in range(link.first + 1, link.last):
        eqn = body.eqns[i]
        if i in gone or not results & set(variables(eqn.invars)):
            continue
        if _jax.has_side_effects(eqn):
            return None
        late.append(i)
        results.update(eqn.outvars)
    if results & set(variables(new.invars)):
        return None
    return late


def _chain_eqn(body: _Body, link: _Link, kept_uses: list[int], kept_values: list[Any]) -> Any:
    g, s = link.gather.params, link.scatter.params
    inner = [body.eqns[i] for i in sorted({*link.between, *link.inside})]
    taken = [link.gather.outvars[k] for k in link.takes]
    known = {*taken, *(v for eqn in inner for v in eqn.outvars)}
    moving = {*taken, *(v for i in link.between for v in body.eqns[i].outvars)}
    extras = list(dict.fromkeys(v for e in inner for v in variables(e.invars) if v not in known))
    specs = [_extra_of(v, inner, link) for v in extras]
    if any(extra is None for extra in specs):
        return None
    values: list[Any] = list(kept_values)
    sources, arrays = [], []
    for t in range(len(s["terms"])):
        pair: list[int | None] = []
        for v, labels_spec in zip(
            link.scatter.invars[2 * t : 2 * t + 2], _sides(s["terms"][t], s["dim"]), strict=True
        ):
            if v in moving and labels_spec == (link.dim, link.spec):
                if v not in values:
                    values.append(v)
                pair.append(values.index(v))
            else:
                pair.append(None)
                arrays.append(v)
        sources.append((pair[0], pair[1]))
    if any(v in moving for v in arrays) or all(p == (None, None) for p in sources):
        return None
    chain = Chain(
        uses=g["uses"],
        takes=tuple(link.takes),
        middle=_jax.plain_jaxpr([*taken, *extras], values, inner),
        middle_spec=link.spec,
        middle_dim=link.dim,
        extras=tuple(extra for extra in specs if extra is not None),
        terms=s["terms"],
        sources=tuple(sources),
        out_spec=s["out_spec"],
        out_dim=s["dim"],
        gathered_spec=g["gathered_spec"],
        dim=g["dim"],
        kept_uses=tuple(kept_uses),
        kept_middle=tuple(range(len(kept_values))),
        keep_gathered=g["hand_out"],
        schedule=_schedule(g["schedule"], s["schedule"]),
    )
    invars = [*link.gather.invars, *extras, *arrays]
    results = link.gather.outvars
    outvars = [*link.scatter.outvars, *(results[k] for k in kept_uses), *kept_values]
    outvars += results[len(g["uses"]) :]
    params = {"chain": chain, "mesh": g["mesh"]}
    return _jax.primitive_eqn(link.scatter, chained_einsums_p, invars, outvars, params)


def _sides(term: Any, dim: int) -> list[tuple[int | None, Spec]]:
    """Return where the scattered label is in each operand of a term, and the operand's spec."""
    einsum = term.partial.einsum
    label = einsum.out[dim]
    sides = ((einsum.lhs, term.lhs_spec), (einsum.rhs, term.rhs_spec))
    return [(labels.index(label) if label in labels else None, spec) for labels, spec in sides]


def _extra_of(v: Any, inner: list[Any], link: _Link) -> Extra | None:
    """Return how an operand from outside is sharded and cut; None if its readers disagree."""
    ways = set()
    for eqn in inner:
        if v in variables(eqn.invars):
            dims = tuple(range(len(link.shape))) if v.aval.shape else ()
            if eqn.primitive.name == "broadcast_in_dim":
                dims = eqn.params["broadcast_dimensions"]
            ways.add(dims)
    if len(ways) != 1:
        return None
    (dims,) = ways
    spec, cut = [], None
    for k, (size, d) in enumerate(zip(v.aval.shape, dims, strict=True)):
        whole = size != link.shape[d]
        spec.append(() if whole else link.spec[d])
        if d == link.dim and not whole:
            cut = k
    return Extra(tuple(spec), cut)


def _schedule(gather: Schedule, scatter: Schedule) -> Schedule:
    """The gather's schedule, with the scatter's accumulators where both go the same ways."""
    same = gather.two_way == scatter.two_way and gather.unroll == scatter.unroll
    return dataclasses.replace(gather, chains=scatter.chains if same else None)
