"""A labelled contraction of two operands, and its translation to and from dot_general numbers.

Pure: imports nothing of jax. Gathering, scattering, transposing and batching an einsum are all
easier to say with one label per dimension than with positions, so everything in between the
front doors and the partial dots speaks :class:`Einsum`.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collmm.errors import OptionError

DimensionNumbers = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]
"""``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``, as ``lax.dot_general`` has."""


@dataclass(frozen=True)
class Einsum:
    """A labelled contraction of two operands: one small integer label per dimension.

    A label occurs at most once in each of ``lhs``, ``rhs`` and ``out``, and in at least two of
    the three. In all three it is a *batch* label; in ``lhs`` and ``rhs`` only, *contracting*; in
    one operand and ``out``, *free*. A contraction over one operand alone is no dot, and is refused.

    Raises ``OptionError`` when a label breaks these rules.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]

    def __post_init__(self) -> None:
        parts = (("lhs", self.lhs), ("rhs", self.rhs), ("out", self.out))
        for name, labels in parts:
            if not isinstance(labels, tuple):
                raise OptionError(
                    f"Einsum {name} must be a tuple of labels, got {type(labels).__name__}"
                )
            if len(set(labels)) != len(labels):
                raise OptionError(f"Einsum {name}={labels} repeats a label; use each at most once")
        for label in {*self.lhs, *self.rhs, *self.out}:
            where = [name for name, labels in parts if label in labels]
            if len(where) < 2:
                raise OptionError(
                    f"Einsum label {label} occurs only in {where[0]}; "
                    "it must be in at least two of lhs, rhs, out"
                )

    @classmethod
    def from_dot_general(cls, dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> Einsum:
        """The einsum of ``lax.dot_general(lhs, rhs, dimension_numbers)``.

        ``dimension_numbers`` is ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``;
        the dimensions may come in any order. The result has the batch dimensions in the order of
        ``lhs_batch``, then the free dimensions of lhs, then those of rhs, as ``dot_general`` has.
        The dimension of lhs at position i gets label i.
        """
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        lhs = tuple(range(lhs_ndim))
        rhs_labels = {
            r: lhs[dim]
            for dim, r in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True)
        }
        fresh = iter(range(lhs_ndim, lhs_ndim + rhs_ndim))
        rhs = tuple(rhs_labels[r] if r in rhs_labels else next(fresh) for r in range(rhs_ndim))
        paired = set(rhs_labels.values())
        out = (
            *(lhs[dim] for dim in lhs_batch),
            *(label for label in lhs if label not in paired),
            *(label for label in rhs if label not in paired),
        )
        return cls(lhs, rhs, out)

    def to_dot_general(self) -> tuple[DimensionNumbers, tuple[int, ...] | None]:
        """Dimension numbers, and the transpose that follows: ``(dimension_numbers, permutation)``.

        ``dot_general(lhs, rhs, dimension_numbers)`` transposed by ``permutation`` has the
        dimensions ``out``; the permutation is None where no transpose is needed.
        """
        batch, contracting = self.batch, self.contracting
        numbers = (
            (
                tuple(self.lhs.index(label) for label in contracting),
                tuple(self.rhs.index(label) for label in contracting),
            ),
            (
                tuple(self.lhs.index(label) for label in batch),
                tuple(self.rhs.index(label) for label in batch),
            ),
        )
        natural = (*batch, *self.lhs_free, *self.rhs_free)
        permutation = tuple(natural.index(label) for label in self.out)
        return numbers, None if natural == self.out else permutation

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        """Labels of both operands and the result, in the order of the result."""
        return tuple(x for x in self.out if x in self.lhs and x in self.rhs)

    @functools.cached_property
    def contracting(self) -> tuple[int, ...]:
        """Labels of both operands that are summed over, in the order of lhs."""
        return tuple(x for x in self.lhs if x in self.rhs and x not in self.out)

    @functools.cached_property
    def lhs_free(self) -> tuple[int, ...]:
        """Labels of lhs and the result only, in the order of lhs."""
        return tuple(x for x in self.lhs if x not in self.rhs)

    @functools.cached_property
    def rhs_free(self) -> tuple[int, ...]:
        """Labels of rhs and the result only, in the order of rhs."""
        return tuple(x for x in self.rhs if x not in self.lhs)

    def grad_lhs(self) -> Einsum:
        """The einsum ``(out cotangent, rhs) -> lhs cotangent``, operands in that order."""
        return Einsum(self.out, self.rhs, self.lhs)

    def grad_rhs(self) -> Einsum:
        """The einsum ``(lhs, out cotangent) -> rhs cotangent``, operands in that order."""
        return Einsum(self.lhs, self.out, self.rhs)

    def batched(self, lhs: int | None, rhs: int | None) -> Einsum:
        """The einsum under ``vmap``: a new dimension at index ``lhs`` of lhs and ``rhs`` of rhs.

        None means that the operand has no new dimension. The new label stands first in ``out``;
        with None for both the einsum is returned unchanged.
        """
        if lhs is None and rhs is None:
            return self
        new = 1 + max((*self.lhs, *self.rhs, *self.out), default=-1)

        def insert(labels: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
            return labels if dim is None else (*labels[:dim], new, *labels[dim:])

        return Einsum(insert(self.lhs, lhs), insert(self.rhs, rhs), (new, *self.out))

    def sizes(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> dict[int, int]:
        """The size of every label; ``OptionError`` if the shapes do not fit the labels."""
        sizes: dict[int, int] = {}
        for name, labels, shape in (("lhs", self.lhs, lhs_shape), ("rhs", self.rhs, rhs_shape)):
            if len(labels) != len(shape):
                raise OptionError(
                    f"{name} has shape {tuple(shape)}, but the einsum {self.equation()} "
                    f"wants {len(labels)} dimensions"
                )
            for label, size in zip(labels, shape, strict=True):
                if sizes.setdefault(label, size) != size:
                    raise OptionError(
                        f"label {label} of the einsum {self.equation()} has size {sizes[label]} "
                        f"in lhs and {size} in rhs"
                    )
        return sizes

    def out_shape(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the result."""
        sizes = self.sizes(lhs_shape, rhs_shape)
        return tuple(sizes[label] for label in self.out)

    def flops(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> int:
        """Floating-point operations: 2 (a multiply and an add) times the product of all sizes.

        That is the count for real elements; a caller multiplies it for complex ones.
        """
        return 2 * math.prod(self.sizes(lhs_shape, rhs_shape).values())

    def names(self) -> dict[int, str]:
        """A letter for every label, in order of first appearance."""
        order = dict.fromkeys((*self.lhs, *self.rhs, *self.out))
        return {
            label: string.ascii_letters[i] if i < 52 else f"<{label}>"
            for i, label in enumerate(order)
        }

    def equation(self, names: Mapping[int, str] | None = None) -> str:
        """The einsum as text for people, such as ``"abc,cd->abd"``.

        ``names`` gives a label's name; without it letters in order of first appearance.
        """
        names = self.names() if names is None else names
        lhs, rhs, out = (
            "".join(names[label] for label in labels) for labels in (self.lhs, self.rhs, self.out)
        )
        return f"{lhs},{rhs}->{out}"
