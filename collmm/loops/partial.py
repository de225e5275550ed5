"""One partial einsum of a ring: the only place where a loop multiplies.

Numbers: a sum across shards is carried in the accumulation dtype and rounded once, at its end.
A partial einsum that is not summed is the user's own, on a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from collmm.einsum import Einsum


@dataclass(frozen=True)
class PartialEinsum:
    """One einsum as the user wrote it, to be run on slices of its operands.

    ``precision`` and ``preferred_element_type`` are those of the user's ``lax.dot_general``, in
    any form it accepts; ``out_dtype`` is the dtype of its result.
    """

    einsum: Einsum
    precision: Any
    preferred_element_type: Any | None
    out_dtype: Any

    @property
    def accumulation_dtype(self) -> Any:
        """The dtype that carries a sum across shards.

        float32 for results of bfloat16, float16, float8 and smaller floats; else the result's own
        dtype, in which integers wrap just as the whole einsum would.
        """
        out = jnp.dtype(self.out_dtype)
        small_float = jnp.issubdtype(out, jnp.floating) and jnp.finfo(out).bits < 32
        return jnp.dtype(jnp.float32) if small_float else out

    def dot(self, lhs: Array, rhs: Array) -> Array:
        """The einsum of two slices, in ``out_dtype``; nothing is summed across shards."""
        part = self._dot_general(lhs, rhs, self.preferred_element_type)
        return lax.convert_element_type(part, self.out_dtype)

    def partial_sum(self, lhs: Array, rhs: Array) -> Array:
        """One shard's share of a sum across shards, in ``accumulation_dtype``."""
        wanted = self.accumulation_dtype
        # An algorithm pins the type of the sum inside the dot, and limits the types of the result.
        pinned = getattr(self.precision, "accumulation_type", None)
        keep = pinned is not None and jnp.dtype(pinned) != wanted
        part = self._dot_general(lhs, rhs, self.preferred_element_type if keep else wanted)
        return lax.convert_element_type(part, wanted)

    def _dot_general(self, lhs: Array, rhs: Array, preferred: Any | None) -> Array:
        numbers, permutation = self.einsum.to_dot_general()

        def dot(lhs: Array, rhs: Array) -> Array:
            return lax.dot_general(
                lhs, rhs, numbers, precision=self.precision, preferred_element_type=preferred
            )

        if _widens(lhs, rhs, preferred):
            # XLA's CPU runtime cannot run every dot of half floats into float32 ("Unsupported
            # element type for DotThunk"); the products of half floats are exact in float32.
            def wide_dot(lhs: Array, rhs: Array) -> Array:
                return dot(lhs.astype(preferred), rhs.astype(preferred))

            out = lax.platform_dependent(lhs, rhs, cpu=wide_dot, default=dot)
        else:
            out = dot(lhs, rhs)
        return out if permutation is None else lax.transpose(out, permutation)


def _widens(lhs: Array, rhs: Array, preferred: Any | None) -> bool:
    """Whether a dot of half floats gives a wider float."""
    halves = (jnp.bfloat16, jnp.float16)
    return preferred == jnp.float32 and lhs.dtype in halves and rhs.dtype in halves


def add(total: Array, part: Array) -> Array:
    """Add one share to a sum; the sum of booleans is their disjunction, as in ``dot_general``."""
    if total.dtype == jnp.bool_:
        return lax.bitwise_or(total, part)
    return lax.add(total, part)
