"""Drawn einsums under drawn shardings equal the unsharded einsum exactly; none goes unexplained.

Whole numbers, small enough for their type to hold every partial sum: equality needs no tolerance.
In half of the draws sizes are such that shards may be uneven: then the program itself constrains
its operands, since no argument of a jit can be sharded so. The draws are the same on every run.
``--long`` makes 2,700 of them in place of 324.
"""

import math
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always

from collmm.sites import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

MESHES = {
    "8": {"a": 8},
    "2x4": {"a": 2, "b": 4},
    "2x2x2": {"a": 2, "b": 2, "c": 2},
    "3": {"a": 3},
    "5": {"a": 5},
    "6": {"a": 6},
}
# Of the operands and of the result; the bound of the values keeps sums exact in the narrow ones.
DTYPES = {
    "int32": (np.int32, None, 4),
    "int8": (np.int8, np.int32, 4),
    "float32": (np.float32, None, 4),
    "bfloat16": (jnp.bfloat16, None, 1),
    "complex64": (np.complex64, None, 3),
}
LARGEST = 256  # terms of a sum: with values of at most 1, the sum is exact in bfloat16
SHORT, LONG = 54, 450  # draws per mesh
OPTIONS = {"xla_backend_optimization_level": 0}  # these programs are compiled more than they run


@dataclass(frozen=True)
class Draw:
    """One einsum: its equation, sizes of the labels, shardings of lhs, rhs and result."""

    equation: str
    sizes: dict[str, int]
    specs: tuple
    dtype: str
    seed: int
    gradients: bool
    uneven: bool

    def shapes(self):
        operands, out = self.equation.split("->")
        return [tuple(self.sizes[c] for c in labels) for labels in (*operands.split(","), out)]


@st.composite
def draws(draw, axes):
    """An einsum of 0-3 batch, 1-3 contracting and 1-3 free labels a side, in any order."""
    letters = iter("abcdefghijklmnop")
    batch, left, right, summed = (
        [next(letters) for _ in range(draw(st.integers(least, 3)))] for least in (0, 1, 1, 1)
    )
    operands = [batch + left + summed, batch + right + summed, batch + left + right]
    labels = [draw(st.permutations(group)) for group in operands]
    specs = [draw(shardings(group, axes)) for group in labels]
    uneven = draw(st.booleans())
    sizes = {}
    for letter in sorted({c for group in labels for c in group}):
        # A multiple of what any of the three shards it over, or what need not be one.
        parts = [
            math.prod(axes[a] for a in spec[group.index(letter)])
            for group, spec in zip(labels, specs, strict=True)
            if letter in group
        ]
        whole = math.lcm(*parts)
        sizes[letter] = whole * draw(st.integers(1, 2)) if whole * 2 <= 16 else whole
        if uneven and draw(st.booleans()):
            sizes[letter] = draw(st.integers(1, min(2 * whole, 16)))
    while math.prod(sizes[c] for c in summed) > LARGEST:
        # Only the largest sums of the narrowest type need it; a size of 1 shards over nothing.
        largest = max(summed, key=sizes.get)
        sizes[largest] = 1
        specs = [
            tuple(() if c == largest else s for c, s in zip(group, spec, strict=True))
            for group, spec in zip(labels, specs, strict=True)
        ]
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    return Draw(
        "{},{}->{}".format(*map("".join, labels)),
        sizes,
        tuple(specs),
        dtype,
        draw(st.integers(0, 999)),
        dtype in ("float32", "complex64") and draw(st.booleans()),
        uneven,
    )


@st.composite
def shardings(draw, labels, axes):
    """Mesh axes per dimension: each axis on at most one, several on one in any order."""
    spec = [() for _ in labels]
    for axis in draw(st.permutations(sorted(axes))):
        # One place more than there are dimensions: the axis shards nothing.
        at = draw(st.integers(0, len(labels)))
        if at < len(labels):
            spec[at] = (*spec[at], axis)
    return tuple(spec)


def build(d, mesh):
    """Return the program and its arguments on the mesh, and what it must give."""
    dtype, preferred, bound = DTYPES[d.dtype]
    rng = np.random.default_rng(d.seed)

    def numbers(shape):
        real = rng.integers(-bound, bound + 1, shape)
        if d.dtype == "complex64":
            return real + 1j * rng.integers(-bound, bound + 1, shape)
        return real

    shapes = d.shapes()
    shards = [NamedSharding(mesh, P(*(axes or None for axes in spec))) for spec in d.specs]
    host = [numbers(shape) for shape in (shapes if d.gradients else shapes[:2])]
    whole = NamedSharding(mesh, P())
    given = [whole] * 3 if d.uneven else shards
    args = [jax.device_put(x.astype(dtype), s) for x, s in zip(host, given, strict=False)]

    def einsum(x, y):
        if d.uneven:
            x = jax.lax.with_sharding_constraint(x, shards[0])
            y = jax.lax.with_sharding_constraint(y, shards[1])
        out = jnp.einsum(d.equation, x, y, preferred_element_type=preferred)
        return jax.lax.with_sharding_constraint(out, shards[2])

    def with_gradients(x, y, ct):
        out, pull = jax.vjp(einsum, x, y)
        return out, *pull(ct)

    operands, out = d.equation.split("->")
    lhs, rhs = operands.split(",")
    want = [np.einsum(d.equation, *host[:2])]
    if d.gradients:
        want.append(np.einsum(f"{out},{rhs}->{lhs}", host[2], host[1]))
        want.append(np.einsum(f"{out},{lhs}->{rhs}", host[2], host[0]))
    program = with_gradients if d.gradients else lambda x, y: (einsum(x, y),)
    # jax 0.12 cannot name what the compiler may choose for a result that does not divide.
    results = whole if d.uneven else None
    return jax.jit(program, out_shardings=results, compiler_options=OPTIONS), args, want


def check(d, mesh, counts):
    """Compare with the unsharded einsum; every dot of the plan is a loop or has its reason."""
    program, args, want = build(d, mesh)
    overlapped = always(program)
    results = overlapped(*args)
    expected = DTYPES[d.dtype][1] or DTYPES[d.dtype][0]
    for got, right in zip(results, want, strict=True):
        assert got.dtype == expected
        np.testing.assert_array_equal(np.asarray(got).astype(right.dtype), right)
    decisions = overlapped.plan(*args).decisions
    assert len(decisions) == len(want)
    for decision in decisions:
        assert decision.rewritten == (decision.reason is None)
        # Some reasons have the name of a collective.
        if decision.rewritten:
            counts[f"looped {decision.collective.kind}"] += 1
            counts["looped, uneven"] += is_uneven(decision)
        else:
            counts[f"left: {decision.reason.code}"] += 1


def is_uneven(decision):
    """Whether a dimension of a looped einsum does not divide, by its shards or by the ring."""
    site, c = decision.site, decision.collective
    axes = dict(site.axis_sizes)
    specs = [list(spec) for spec in (site.lhs_spec, site.rhs_spec, site.out_spec)]
    where = specs[2 if c.operand is None else c.operand]
    where[c.dim] = (*where[c.dim], *c.axes)
    return any(
        size % math.prod(axes[a] for a in names)
        for shape, spec in zip(site.shapes, specs, strict=True)
        for size, names in zip(shape, spec, strict=True)
    )


def prove(name, examples):
    """Draw and check; return how many einsums each collective and each reason had."""
    axes = MESHES[name]
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    mesh = Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
    counts = Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(draws(axes))
    def drawn(d):
        check(d, mesh, counts)

    drawn()
    return counts


def assert_rings_were_drawn(counts, *more):
    """A generator that has stopped making rings proves nothing; the rarest take more draws."""
    for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, *more):
        assert counts[f"looped {kind}"], counts
    assert counts["looped, uneven"], counts
    assert not counts["left: analysis-failed"], counts


@pytest.mark.parametrize("name", MESHES)
def test_drawn_einsums_are_exact(name, record_property):
    counts = prove(name, SHORT)
    record_property("einsums", dict(counts))
    assert_rings_were_drawn(counts)


@pytest.mark.long
@pytest.mark.parametrize("name", MESHES)
def test_thousands_of_drawn_einsums_are_exact(name, record_property):
    counts = prove(name, LONG)
    record_property("einsums", dict(counts))
    print(f"{name}: {dict(counts)}")
    assert_rings_were_drawn(counts, ALL_REDUCE)
