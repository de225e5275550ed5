"""What the tests of the decorator share: a mesh, a small step with whole numbers, and counters."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import Options

ALWAYS = Options(policy="always")
X, UP, DOWN = P("d", "m", None), P(None, "m"), P("m", None)


def make_mesh(order=None, kind=AxisType.Auto):
    """Axes d of 2 and m of 4, on the first eight devices or on those of ``order``."""
    devices = np.array(jax.devices()[:8], dtype=object)
    if order is not None:
        devices = devices[list(order)]
    return Mesh(devices.reshape(2, 4), ("d", "m"), axis_types=(kind,) * 2)


def put(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def placer(mesh):
    """(put an array on ``mesh``, constrain a traced one), both by the entries of a spec."""

    def put(a, *spec):
        return jax.device_put(a, NamedSharding(mesh, P(*spec)))

    def at(a, *spec):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*spec)))

    return put, at


def whole_numbers(*shape, seed=0, dtype=np.float32):
    """Small whole numbers: sums of their products are exact in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def host_arguments(dtype=np.float32, batch=4):
    return (
        whole_numbers(batch, 8, 8, seed=1, dtype=dtype),
        whole_numbers(8, 16, seed=2, dtype=dtype),
        whole_numbers(16, 8, seed=3, dtype=dtype),
    )


def arguments(mesh, dtype=np.float32, batch=4):
    """x [batch@d, 8@m, 8], up [8, 16@m], down [16@m, 8]."""
    specs = (X, UP, DOWN)
    pairs = zip(host_arguments(dtype, batch), specs, strict=True)
    return [put(mesh, array, spec) for array, spec in pairs]


def make_step(mesh):
    """A gathered einsum, then one that is summed and scattered; ``mesh`` may be a context's."""

    def constrain(x, *spec):
        spec = P(*spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec) if mesh else spec)

    def step(x, up, down):
        h = constrain(jnp.maximum(jnp.einsum("bsk,kf->bsf", x, up), 0), "d", None, "m")
        return constrain(jnp.einsum("bsf,fk->bsk", h, down), "d", "m", None)

    return step


def answer(x, up, down):
    """The step in numpy."""
    return np.maximum(np.asarray(x) @ np.asarray(up), 0) @ np.asarray(down)


def permutes(compiled):
    """Collective-permutes in the optimized HLO."""
    return len(re.findall(r" collective-permute(?:-start)?\(", compiled.as_text()))


def same(got, want):
    """Every array of ``got`` equals that of ``want``: values, types and structure."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.result_type(g) == jnp.result_type(w)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))
