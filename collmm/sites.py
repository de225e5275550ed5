"""What the analysis found: einsum sites and the collectives that stand next to them.

Pure dataclasses on names and numbers; nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from collmm.einsum import Einsum
from collmm.errors import Reason

# The mesh axes that shard each dimension of a value, major to minor; () is a whole dimension.
Spec = tuple[tuple[str, ...], ...]

ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_REDUCE = "all-reduce"
ALL_TO_ALL = "all-to-all"
LOOPED = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL)


@dataclasses.dataclass(frozen=True)
class Location:
    """Where the user wrote the einsum."""

    file: str = "?"
    line: int = 0
    function: str = ""
    name_stack: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective next to an einsum.

    Attributes:
      kind: ``all-gather``, ``reduce-scatter``, ``all-reduce``, or another kind's HLO name.
      operand: 0 (lhs) or 1 (rhs) for a collective on an operand, None for one on the result.
      dim: the dimension of that operand, or of the result, that is gathered or scattered; for an
        all-reduce the dimension by which a ring can scatter the sum first; -1 if there is none.
      axes: the mesh axes it runs over, major to minor.
      bytes: bytes per device of the whole (gathered, or not yet scattered) value.
      split_dim: of an all-to-all, the dimension that is whole before it and sharded after it; it
        joins the shards of ``dim``. -1 for every other kind.
      narrow_bytes: the same as ``bytes`` of what a ring would send in its place, where that is
        another value, such as a narrower one that this one is made of; 0 where it is not.
      early: elementwise work stands between the gather and the einsum.
    """

    kind: str
    operand: int | None
    dim: int
    axes: tuple[str, ...]
    bytes: int
    split_dim: int = -1
    narrow_bytes: int = 0
    early: bool = False

    @property
    def ring_bytes(self) -> int:
        """Bytes per device of the whole value as a ring sends it."""
        return self.narrow_bytes or self.bytes

    def describe(self) -> str:
        """Return e.g. ``all-gather lhs[1] over model``."""
        where = "result" if self.operand is None else ("lhs", "rhs")[self.operand]
        dim = f"[{self.dim}]" if self.dim >= 0 else ""
        over = f" over {','.join(self.axes)}" if self.axes else ""
        return f"{self.kind} {where}{dim}{over}"


@dataclasses.dataclass(frozen=True)
class EinsumSite:
    """A ``dot_general`` of the program with its shardings and collectives.

    Attributes:
      index: number of the dot_general in program order, from 0.
      einsum: the labelled contraction.
      shapes: global shapes of lhs, rhs and result.
      dtypes: names of their element types, lhs, rhs, result.
      itemsizes: bytes per element of the same three.
      lhs_spec, rhs_spec: shardings as the einsum itself sees them: after every gather.
      out_spec: sharding of the result before any reduction is scattered.
      collectives: the collectives next to it; those that a loop can take first.
      location: the user's line.
      axis_sizes: size of every axis of the mesh, in mesh order.
      scope: the enclosing control flow, outermost first, e.g. ``("scan", "checkpoint")``.
      refusal: why no loop can take it, None when at least one can.
      detail: more about the refusal, in words.
      manual: it stands inside a user's ``shard_map``: shapes are one device's, specs are empty.
      typed: the result's sharding is part of its type (explicit mesh axes).
      follows: number of the einsum whose result an operand is an elementwise function of; -1: none.
      worked: whether elementwise work reads the result, which a TPU's compiler does in the einsum.
      sources: which value lhs and rhs are, before any resharding: einsums with the same number
        read the same value.
      together: the numbers of the einsums whose results are added before the one collective on
        them, its own too; empty when alone.
      one_ring: those einsums can share a ring: nothing but additions stands between them.
      once: for lhs and rhs, whether the compiler gathers it once, before the loop that the einsum
        stands in.
      precision: of the user's ``dot_general``: ``"default"``, or ``"highest"``.
      body: number of the computation it stands in: the program, or one loop body or branch.
      ready: for lhs and rhs, the number of the last einsum of the same body that it depends on; -1
        where it depends on none, as a parameter does. None where that is not known.
      needed: the number of the first einsum of the same body that depends on the result; -1 where
        none does. None where that is not known.
    """

    index: int
    einsum: Einsum
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str, str]
    itemsizes: tuple[int, int, int]
    lhs_spec: Spec = ()
    rhs_spec: Spec = ()
    out_spec: Spec = ()
    collectives: tuple[Collective, ...] = ()
    location: Location = Location()
    axis_sizes: tuple[tuple[str, int], ...] = ()
    scope: tuple[str, ...] = ()
    refusal: Reason | None = None
    detail: str = ""
    manual: bool = False
    typed: bool = False
    sources: tuple[int, int] = (-1, -1)
    follows: int = -1
    worked: bool = False
    together: tuple[int, ...] = ()
    one_ring: bool = False
    once: tuple[bool, bool] = (False, False)
    precision: str = "default"
    body: int = 0
    ready: tuple[int, int] | None = None
    needed: int | None = None

    @functools.cached_property
    def loopable(self) -> tuple[Collective, ...]:
        """The collectives that a ring can replace."""
        return tuple(c for c in self.collectives if c.kind in LOOPED and c.dim >= 0)

    @functools.cached_property
    def label_shards(self) -> dict[int, tuple[int, int]]:
        """Of every label of the operands: its size, and into how many shards that is cut."""
        sizes = dict(self.axis_sizes)
        found = {}
        operands = ((self.einsum.lhs, self.lhs_spec), (self.einsum.rhs, self.rhs_spec))
        for (labels, spec), shape in zip(operands, self.shapes[:2], strict=True):
            for label, axes, size in zip(labels, spec, shape, strict=True):
                found[label] = size, math.prod(sizes[a] for a in axes)
        return found

    def ring_size(self, collective: Collective) -> int:
        """Number of devices on the ring of ``collective``."""
        sizes = dict(self.axis_sizes)
        return math.prod(sizes[a] for a in collective.axes)

    def device_flops(self) -> int:
        """Floating-point operations one device spends on the undecomposed einsum."""
        sizes = dict(self.axis_sizes)
        lhs = shard_shape(self.shapes[0], self.lhs_spec, sizes)
        rhs = shard_shape(self.shapes[1], self.rhs_spec, sizes)
        # Multiplying a complex number costs four real multiply-adds.
        complex_factor = 4 if self.dtypes[2].startswith("complex") else 1
        return complex_factor * self.einsum.flops(lhs, rhs)


def worked_after(sites: Sequence[EinsumSite]) -> list[EinsumSite]:
    """Return ``sites`` without the work on a result that the next einsum's loop does in its steps.

    A reduce-scatter's reads its operand block by block, each once.
    """
    sums = {ALL_REDUCE, REDUCE_SCATTER}
    inside = {site.follows for site in sites if any(c.kind in sums for c in site.loopable)}
    return [dataclasses.replace(s, worked=s.worked and s.index not in inside) for s in sites]


def trimmed(spec: Spec) -> Spec:
    """Return ``spec`` without trailing whole dimensions, as constraints are compared."""
    n = len(spec)
    while n and not spec[n - 1]:
        n -= 1
    return spec[:n]


def shard_shape(shape: tuple[int, ...], spec: Spec, axis_sizes: dict[str, int]) -> tuple[int, ...]:
    """Shape of one device's shard; where a dimension does not divide, with its padding."""
    shards = (math.prod(axis_sizes[a] for a in axes) for axes in spec)
    return tuple(-(-size // n) for size, n in zip(shape, shards, strict=True))
