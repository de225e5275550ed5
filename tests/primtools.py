"""Problems for the tests of the primitives: one ring each, its operands, and the plain einsums."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm.einsum import Einsum
from collmm.loops import Consumer, PartialEinsum
from collmm.primitives import (
    GatherUse,
    ScatterTerm,
    all_gather_einsum,
    einsum_reduce_scatter,
    without_ring,
)
from collmm.schedule import default_schedule

SIZES = {"b": 8, "s": 16, "k": 8, "f": 8, "h": 4}


def make_mesh():
    """Two axes, d of 2 and m of 4 devices."""
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("d", "m"))


def spec_of(text):
    """``"d - m,d"`` is ``(("d",), (), ("m", "d"))``: the mesh axes of each dimension."""
    return tuple(() if axes == "-" else tuple(axes.split(",")) for axes in text.split())


def sharding(mesh, spec):
    return NamedSharding(mesh, P(*(axes or None for axes in spec)))


def labels_of(equation):
    operands, out = equation.split("->")
    return (*operands.split(","), out)


def partial_of(equation, dtype, out_dtype, preferred, precision=None):
    einsum = Einsum(*(tuple(map(ord, part)) for part in labels_of(equation)))
    return PartialEinsum(einsum, precision, preferred, jnp.dtype(out_dtype or dtype))


def shape_of(labels, sizes=None):
    return tuple((sizes or SIZES)[x] for x in labels)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One ring: ``fn(*operands)`` binds the primitive, ``plain(*operands)`` is what it equals.

    ``shapes`` and ``specs``: of every operand; ``out_specs``: of every result.
    """

    fn: Any
    plain: Any
    shapes: tuple
    specs: tuple
    out_specs: tuple
    mesh: Mesh
    dtype: Any

    def everywhere(self, *arrays):
        """The arrays on every device of the mesh, whole."""
        return jax.device_put(list(arrays), NamedSharding(self.mesh, P()))

    def operands(self, seed=0, place=True):
        """Whole numbers, small enough that every sum of products is exact."""
        rng = np.random.default_rng(seed)
        made = []
        for shape, spec in zip(self.shapes, self.specs, strict=True):
            x = rng.integers(-4, 5, shape)
            if jnp.issubdtype(self.dtype, jnp.complexfloating):
                x = x + 1j * rng.integers(-4, 5, shape)
            x = x.astype(self.dtype)
            made.append(jax.device_put(x, sharding(self.mesh, spec)) if place else x)
        return made


def gather(
    uses, gathered, dim, ring="m", *, dtype=jnp.float32, out_dtype=None, preferred=None,
    schedule=None, hand_out=False, sizes=None,
):  # fmt: skip
    """A gather ring.

    ``uses``: (equation, side of the gathered operand, spec of the local one, spec of the result);
    ``gathered``: (labels, spec); ``dim``: the dimension that travels; ``ring``: its axes.
    """
    mesh = make_mesh()
    axes = tuple(ring.split(","))
    schedule = schedule or default_schedule(axes, math.prod(mesh.shape[a] for a in axes))
    labels, spec = gathered
    made, shapes, specs = [], [shape_of(labels, sizes)], [spec_of(spec)]
    for equation, side, local_spec, out_spec in uses:
        partial = partial_of(equation, dtype, out_dtype, preferred)
        assert labels_of(equation)[side] == labels
        made.append(GatherUse(Consumer(partial, side), spec_of(local_spec), spec_of(out_spec)))
        shapes.append(shape_of(labels_of(equation)[1 - side], sizes))
        specs.append(spec_of(local_spec))

    def fn(gathered, *locals_):
        return all_gather_einsum(
            gathered,
            locals_,
            made,
            gathered_spec=specs[0],
            dim=dim,
            schedule=schedule,
            mesh=mesh,
            hand_out=hand_out,
        )

    def plain(gathered, *locals_):
        outs = [
            _plain(use.consumer.partial, *((x, gathered) if side else (gathered, x)))
            for use, (_, side, _, _), x in zip(made, uses, locals_, strict=True)
        ]
        return [*outs, gathered] if hand_out else outs

    outs = tuple(use.out_spec for use in made)
    if hand_out:
        outs = (*outs, without_ring(specs[0], dim, schedule))
    return Problem(fn, plain, tuple(shapes), tuple(specs), outs, mesh, dtype)


def scatter(
    terms, out, dim, ring="m", *, dtype=jnp.float32, out_dtype=None, preferred=None,
    schedule=None, sizes=None,
):  # fmt: skip
    """A reduce-scatter ring: ``terms`` of (equation, lhs spec, rhs spec), and the result's spec."""
    mesh = make_mesh()
    axes = tuple(ring.split(","))
    schedule = schedule or default_schedule(axes, math.prod(mesh.shape[a] for a in axes))
    made, shapes, specs = [], [], []
    for equation, lhs_spec, rhs_spec in terms:
        partial = partial_of(equation, dtype, out_dtype, preferred)
        made.append(ScatterTerm(partial, spec_of(lhs_spec), spec_of(rhs_spec)))
        shapes += [shape_of(labels, sizes) for labels in labels_of(equation)[:2]]
        specs += [spec_of(lhs_spec), spec_of(rhs_spec)]

    def pairs(operands):
        return list(zip(operands[::2], operands[1::2], strict=True))

    def fn(*operands):
        return [
            einsum_reduce_scatter(
                pairs(operands), made, out_spec=spec_of(out), dim=dim, schedule=schedule, mesh=mesh
            )
        ]

    def plain(*operands):
        parts = [_plain(t.partial, *pair) for t, pair in zip(made, pairs(operands), strict=True)]
        return [sum(parts[1:], parts[0])]

    return Problem(fn, plain, tuple(shapes), tuple(specs), (spec_of(out),), mesh, dtype)


def _plain(partial, lhs, rhs):
    numbers, permutation = partial.einsum.to_dot_general()
    out = jax.lax.dot_general(
        lhs, rhs, numbers, preferred_element_type=partial.preferred_element_type
    ).astype(partial.out_dtype)
    return out if permutation is None else out.transpose(permutation)


# One ring each, by what is special about it. Axes: d of 2, m of 4. Once an operand is gathered
# over an axis, that axis is free to shard another dimension of the einsum, as it does in practice.
GATHERS = {
    "free": lambda **k: gather([("bsk,kf->bsf", 0, "- m", "d - m")], ("bsk", "d m -"), 1, **k),
    "free-rhs": lambda **k: gather([("fk,bsk->fbs", 1, "m -", "m d -")], ("bsk", "d m -"), 1, **k),
    "contracting": lambda **k: gather([("sk,kf->sf", 1, "d,m -", "d,m -")], ("kf", "m -"), 0, **k),
    "batch": lambda **k: gather([("bsk,bkf->bsf", 0, "- - m", "- d m")], ("bsk", "m d -"), 0, **k),
    "two-axes": lambda **k: gather(
        [("sk,kf->sf", 0, "- d,m", "- d,m")], ("sk", "d,m -"), 0, "d,m", **k
    ),
    "two-axes-minor-first": lambda **k: gather(
        [("sk,kf->fs", 0, "- m,d", "m,d -")], ("sk", "m,d -"), 0, "m,d", **k
    ),
    "minor-axis-of-two": lambda **k: gather(
        [("sk,kf->sf", 0, "- m", "d m")], ("sk", "d,m -"), 0, **k
    ),
    "different-sums": lambda **k: gather(
        [("sk,kf->sf", 0, "- m", "- m"), ("kf,sk->fs", 1, "- m,d", "m,d -")], ("sk", "m -"), 0, **k
    ),
    "local-is-whole": lambda **k: gather([("sk,kf->sf", 0, "- -", "- -")], ("sk", "m -"), 0, **k),
    "sum-over-another-axis": lambda **k: gather(
        [("sk,kf->sf", 0, "d m", "- m")], ("sk", "m d"), 0, **k
    ),
    "sum-scattered-over-another-axis": lambda **k: gather(
        [("sk,kf->sf", 0, "d m", "d m")], ("sk", "m d"), 0, **k
    ),
    "hand-out": lambda **k: gather(
        [("bsk,kf->bsf", 0, "- m", "d - m")], ("bsk", "d m -"), 1, hand_out=True, **k
    ),
    "hand-out-two-axes": lambda **k: gather(
        [("sk,kf->sf", 0, "- d,m", "- d,m"), ("sk,fs->fk", 0, "d,m -", "d,m -")],
        ("sk", "d,m -"),
        0,
        "d,m",
        hand_out=True,
        **k,
    ),
    "hand-out-sum-over-another-axis": lambda **k: gather(
        [("sk,kf->sf", 0, "d m", "- m")], ("sk", "m d"), 0, hand_out=True, **k
    ),
    "many-uses": lambda **k: gather(
        [
            ("bsk,kf->bsf", 0, "- m", "d - m"),
            ("kh,bsk->bsh", 1, "- m", "d - m"),
            ("bsk,bsf->kf", 0, "d - m", "- m"),
            ("bsk,sf->bkf", 0, "- m", "d - m"),
        ],
        ("bsk", "d m -"),
        1,
        **k,
    ),
}
SCATTERS = {
    "free-lhs": lambda **k: scatter([("bsk,kf->bsf", "d - m", "m -")], "d m -", 1, **k),
    "free-rhs": lambda **k: scatter([("sk,kf->sf", "d m", "m -")], "d m", 1, **k),
    "batch": lambda **k: scatter([("bsk,bkf->bsf", "- - m", "- m d")], "m - d", 0, **k),
    "two-axes": lambda **k: scatter([("sk,kf->sf", "- d,m", "d,m -")], "d,m -", 0, "d,m", **k),
    "two-axes-minor-first": lambda **k: scatter(
        [("sk,fk->sf", "- m,d", "- m,d")], "m,d -", 0, "m,d", **k
    ),
    "behind-a-sharded-axis": lambda **k: scatter([("sk,kf->sf", "d m", "m -")], "d,m -", 0, **k),
    "sum-over-another-axis": lambda **k: scatter([("sk,kf->sf", "- d,m", "d,m -")], "m -", 0, **k),
    "sum-scattered-over-another-axis": lambda **k: scatter(
        [("sk,kf->sf", "- d,m", "d,m -")], "m d", 0, **k
    ),
    "many-terms": lambda **k: scatter(
        [
            ("bsk,kf->bsf", "d - m", "m -"),
            ("bsh,fh->bsf", "d - m", "- m"),
            ("kf,bsk->bsf", "m -", "d - m"),
        ],
        "d m -",
        1,
        **k,
    ),
}
PROBLEMS = {
    **{f"gather-{name}": make for name, make in GATHERS.items()},
    **{f"scatter-{name}": make for name, make in SCATTERS.items()},
}
