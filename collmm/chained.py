"""The primitive of a chain: gather, einsum, elementwise, einsum, scatter, all on one ring.

In a jaxpr::

    y h = chained_einsums[middle={ lambda ; h. let a = gelu h in (a,) } ...] x w v

``x`` is sharded over the ring; ``h`` is there only if somebody else reads it. Chains are made
after autodiff (``collmm.chaining``) and have no derivative of their own. With ``mesh=None`` a chain
stands inside a ``shard_map`` and its operands are one device's shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from collmm import _jax
from collmm.loops.chained import ChainLoop
from collmm.primitives import (
    GatherUse,
    ScatterTerm,
    finish,
    label_axes_of,
    summed_axes,
    without_ring,
)
from collmm.schedule import Schedule
from collmm.sites import Spec
from collmm.uneven import pspec


@dataclasses.dataclass(frozen=True)
class Extra:
    """An operand of the elementwise part: its sharding, and the dimension that is cut, or None."""

    spec: Spec
    cut: int | None


@dataclasses.dataclass(frozen=True, repr=False)
class Chain:
    """Everything static about one chain.

    Attributes:
      uses: the einsums of the gathered operand.
      takes: which of their results the elementwise part reads.
      middle: jaxpr of the elementwise part: (taken results, extras) -> values of one shape.
      middle_spec: the sharding of those values.
      middle_dim: the dimension of theirs that is gathered and scattered.
      extras: the other operands of the elementwise part.
      terms: the einsums whose results are added and scattered.
      sources: per term, for lhs and rhs, which result of ``middle`` it is; None: an array.
      out_spec, out_dim: of the scattered sum.
      gathered_spec, dim: of the gathered operand, before the gather.
      kept_uses: the uses whose results are handed out.
      kept_middle: the results of ``middle`` that are handed out.
      keep_gathered: whether the gathered operand is handed out too, last.
      schedule: how the ring runs.
    """

    uses: tuple[GatherUse, ...]
    takes: tuple[int, ...]
    middle: Any
    middle_spec: Spec
    middle_dim: int
    extras: tuple[Extra, ...]
    terms: tuple[ScatterTerm, ...]
    sources: tuple[tuple[int | None, int | None], ...]
    out_spec: Spec
    out_dim: int
    gathered_spec: Spec
    dim: int
    kept_uses: tuple[int, ...]
    kept_middle: tuple[int, ...]
    keep_gathered: bool
    schedule: Schedule

    def __str__(self) -> str:
        """Every field but the jaxpr, which is shown as it is printed anywhere."""
        fields = [f for f in dataclasses.fields(self) if f.name != "middle"]
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields)
        return f"Chain(middle={self.middle}, {shown})"

    __repr__ = __str__

    @property
    def arrays(self) -> list[tuple[int, int]]:
        """The (term, side) of every operand of a term that is an array of its own."""
        return [(t, s) for t, pair in enumerate(self.sources) for s in (0, 1) if pair[s] is None]


def _impl(*operands: Any, chain: Chain, mesh: Any) -> list[Any]:
    if mesh is None:
        return _loop(chain, operands).run()
    finishers = _finishers(chain)

    def body(*operands: Any) -> list[Any]:
        outs = _loop(chain, operands).run()
        return [f(out) for f, out in zip(finishers, outs, strict=True)]

    terms = [(chain.terms[t].lhs_spec, chain.terms[t].rhs_spec)[s] for t, s in chain.arrays]
    in_specs = [
        chain.gathered_spec,
        *(use.local_spec for use in chain.uses),
        *(extra.spec for extra in chain.extras),
        *terms,
    ]
    out_specs = [
        chain.out_spec,
        *(chain.uses[k].out_spec for k in chain.kept_uses),
        *(chain.middle_spec for _ in chain.kept_middle),
        *([_gathered_spec(chain)] if chain.keep_gathered else []),
    ]
    mapped = _jax.shard_map_all(
        body, mesh, tuple(map(pspec, in_specs)), list(map(pspec, out_specs))
    )
    return mapped(*operands)


def _loop(chain: Chain, operands: Sequence[Any]) -> ChainLoop:
    n_uses, n_extras = len(chain.uses), len(chain.extras)
    shard, locals_ = operands[0], tuple(operands[1 : 1 + n_uses])
    extras = operands[1 + n_uses : 1 + n_uses + n_extras]
    arrays = dict(zip(chain.arrays, operands[1 + n_uses + n_extras :], strict=True))
    pairs = tuple(
        (arrays[t, 0] if lhs is None else lhs, arrays[t, 1] if rhs is None else rhs)
        for t, (lhs, rhs) in enumerate(chain.sources)
    )
    return ChainLoop(
        schedule=chain.schedule,
        shard=shard,
        dim=chain.dim,
        locals_=locals_,
        consumers=tuple(use.consumer for use in chain.uses),
        takes=chain.takes,
        middle=lambda *args: run_elementwise(chain.middle, args, args[0].shape),
        middle_dim=chain.middle_dim,
        extras=tuple((x, e.cut) for x, e in zip(extras, chain.extras, strict=True)),
        operands=pairs,
        terms=tuple(term.partial for term in chain.terms),
        out_dim=chain.out_dim,
        kept_consumers=chain.kept_uses,
        kept_middle=chain.kept_middle,
        keep_gathered=chain.keep_gathered,
    )


def run_elementwise(jaxpr: Any, args: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    """Evaluate an elementwise jaxpr on slices of ``shape``, not of the shapes in the jaxpr."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        inner = next(iter(_jax.jaxprs_in(eqn)), None)
        if inner is not None:
            outs = run_elementwise(_jax.open_jaxpr(inner[2]), inputs, shape)
        elif eqn.primitive.name == "broadcast_in_dim":
            (x,) = inputs
            outs = [lax.broadcast_in_dim(x, shape, eqn.params["broadcast_dimensions"])]
        elif eqn.primitive.name == "sharding_constraint":
            outs = inputs  # it asks for the sharding that the value has
        else:
            out = eqn.primitive.bind(*inputs, **eqn.params)
            outs = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _finishers(chain: Chain) -> list[Callable[[Any], Any]]:
    """Return what each result still needs: reductions over axes that are not the ring's."""
    term = chain.terms[0]
    einsum = term.partial.einsum
    axes = label_axes_of((einsum.lhs, term.lhs_spec), (einsum.rhs, term.rhs_spec))
    base = [axes[label] for label in einsum.out]
    base[chain.out_dim] = (*base[chain.out_dim], *chain.schedule.axes)
    rest = tuple(a for a in summed_axes(term.partial, axes) if a not in chain.schedule.axes)
    steps = [_finisher(chain.out_spec, tuple(base), rest)]
    for k in chain.kept_uses:
        use = chain.uses[k]
        axes = use_axes(use, chain.gathered_spec, chain.dim, chain.schedule)
        out = tuple(axes[label] for label in use.consumer.partial.einsum.out)
        steps.append(_finisher(use.out_spec, out, summed_axes(use.consumer.partial, axes)))
    as_it_is = len(chain.kept_middle) + chain.keep_gathered
    return [*steps, *(lambda x: x for _ in range(as_it_is))]


def _gathered_spec(chain: Chain) -> Spec:
    return without_ring(chain.gathered_spec, chain.dim, chain.schedule)


def use_axes(
    use: GatherUse, spec: Spec, dim: int, schedule: Schedule
) -> dict[int, tuple[str, ...]]:
    """Return the mesh axes of each label of a use, once the gather is done.

    ``spec`` and ``dim`` are those of the gathered operand, before the gather.
    """
    whole = without_ring(spec, dim, schedule)
    return label_axes_of(
        (use.consumer.gathered_labels(), whole), (use.consumer.local_labels(), use.local_spec)
    )


def _finisher(spec: Spec, base: Spec, summed: Sequence[str]) -> Callable[[Any], Any]:
    return lambda x: finish(x, spec, base, summed)


def _abstract(*operands: Any, chain: Chain, mesh: Any) -> list[Any]:
    n_uses, n = len(chain.uses), chain.schedule.ring_size
    whole = list(operands[0].shape)
    if mesh is None:
        whole[chain.dim] *= n
    results = []
    for use, local in zip(chain.uses, operands[1 : 1 + n_uses], strict=True):
        sides = (tuple(whole), local.shape)
        lhs, rhs = sides[::-1] if use.consumer.gathered_operand else sides
        results.append((use.consumer.partial.einsum.out_shape(lhs, rhs), use))
    hidden = results[chain.takes[0]][0]
    values = [v.aval for v in chain.middle.outvars]
    arrays = dict(zip(chain.arrays, operands[1 + n_uses + len(chain.extras) :], strict=True))
    shapes = [
        arrays[0, s].shape if source is None else hidden
        for s, source in enumerate(chain.sources[0])
    ]
    partial = chain.terms[0].partial
    out = list(partial.einsum.out_shape(*shapes))
    if mesh is None:
        out[chain.out_dim] //= n
    made = [(tuple(out), partial.out_dtype, chain.out_spec)]
    for k in chain.kept_uses:
        shape, use = results[k]
        made.append((shape, use.consumer.partial.out_dtype, use.out_spec))
    made += [(hidden, values[k].dtype, chain.middle_spec) for k in chain.kept_middle]
    if chain.keep_gathered:
        made.append((tuple(whole), operands[0].dtype, _gathered_spec(chain)))
    if mesh is None:
        return [_jax.manual_aval(operands, s, d, chain.schedule.axes) for s, d, _ in made]
    return [_jax.aval_like(operands, s, d, spec) for s, d, spec in made]


def _no_rule(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "a chain of einsums was differentiated or batched after its program was rewritten; "
        "transform the overlapped function instead, not its jaxpr"
    )


chained_einsums_p = _jax.define_primitive(
    "chained_einsums",
    impl=_impl,
    abstract=_abstract,
    jvp=_no_rule,
    transpose=_no_rule,
    batch=_no_rule,
)
