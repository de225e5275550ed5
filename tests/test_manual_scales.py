"""Casts and scales between a hand-written gather and its einsum: done on arrival, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives
from test_manual import MESH, ints, mapped
from test_narrow import E4M3, E5M2, compare, equations, permuted, scales, sent

from collmm import Reason

BOTH = pytest.mark.parametrize("check_vma", [True, False])
NAMES = {E4M3: "f8E4M3FN", E5M2: "f8E5M2", jnp.int8: "i8"}


def gathered(x, axis=0, axes="m"):
    return lax.all_gather(x, axes, axis=axis, tiled=True)


@BOTH
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shape", [(), (8,), (1, 8), (1, 1)])
def test_a_scale_that_every_device_has(dtype, shape, check_vma):
    def body(x8, s, w):
        return (gathered(x8).astype(jnp.float32) * s) @ w

    fn = mapped(body, (P("m"), P(), P(None, "m")), P(None, "m"), check_vma)
    args = ints(0, 16, 8).astype(dtype), scales(1, *shape), ints(2, 8, 12)
    o = compare(fn, *args, found=[[np.dtype(dtype).name]], permutes=3)
    assert permuted(o, *args) == [NAMES[dtype]] * 3
    (decision,) = o.plan(*args).decisions
    assert decision.collective.bytes == decision.collective.ring_bytes == 16 * 8


@BOTH
@pytest.mark.parametrize("how", ["column", "vector", "cast"])
def test_a_scale_per_row_is_gathered_with_its_rows(how, check_vma):
    def body(x8, s, w):
        rows = gathered(s[:, 0])[:, None] if how == "vector" else gathered(s)
        x = gathered(x8).astype(jnp.float32) * rows.astype(jnp.float32)
        return (x - 1) @ w

    fn = mapped(body, (P("m"), P("m"), P(None, "m")), P(None, "m"), check_vma)
    kind = jnp.bfloat16 if how == "cast" else jnp.float32
    args = ints(0, 16, 8).astype(E4M3), scales(1, 16, 1, dtype=kind), ints(2, 8, 12)
    o = compare(fn, *args, found=[["float8_e4m3fn", np.dtype(kind).name]], permutes=6)
    (decision,) = o.plan(*args).decisions
    assert decision.collective.bytes == 16 * 8 + 16 * kind.dtype.itemsize


@BOTH
def test_a_scale_of_each_device_stays_its_own(check_vma):
    """What arrives is scaled by the device that multiplies it, as the user wrote it."""

    def body(x8, s, w):
        return (gathered(x8).astype(jnp.float32) * s[0]) @ w

    fn = mapped(body, (P("m"), P("m"), P(None, "m")), P(None, "m"), check_vma)
    args = ints(0, 16, 8).astype(E4M3), jnp.asarray([1.0, 2.0, 4.0, 8.0]), ints(2, 8, 12)
    compare(fn, *args, found=[["float8_e4m3fn"]], permutes=3)


@BOTH
@pytest.mark.parametrize("axis", [0, 1])
def test_a_gathered_weight(axis, check_vma):
    def body(x, w8, zero, s):
        if axis:  # they run along the gathered dimension then
            zero, s = gathered(zero, 0, "d"), gathered(s, 0, "d")
        return x @ ((gathered(w8, axis, "d").astype(jnp.float32) - zero) * s)

    columns = P(("m", "d")) if axis else P("m")
    specs = (P("d"), P(None, ("m", "d")) if axis else P("d", "m"), columns, columns)
    fn = mapped(body, specs, P("d", "m"), check_vma)
    args = ints(0, 16, 8), ints(1, 8, 16).astype(jnp.int8), ints(2, 16), scales(3, 16)
    kinds = ["int8", "float32", "float32"] if axis else ["int8"]
    compare(fn, *args, found=[kinds], permutes=len(kinds))


@BOTH
def test_several_einsums_share_the_ring(check_vma):
    def body(x8, s, wq, wk):
        x = gathered(x8).astype(jnp.float32) * s
        return x @ wq, x @ wk

    specs = (P("m"), P(), P(None, "m"), P(None, "m"))
    fn = mapped(body, specs, (P(None, "m"),) * 2, check_vma)
    args = ints(0, 16, 8).astype(jnp.int8), scales(1), ints(2, 8, 12), ints(3, 8, 8)
    o = compare(fn, *args, found=[["int8"]], permutes=3)
    (ring,) = [e for e in equations(o, *args) if e.primitive.name == "narrow_gather_einsum"]
    assert len(ring.params["uses"]) == 2


@BOTH
def test_the_same_width(check_vma):
    def body(x, s, w):
        return jnp.maximum(gathered(x) * s, 0) @ w

    fn = mapped(body, (P("m"), P(), P(None, "m")), P(None, "m"), check_vma)
    o = always(fn)
    args = ints(0, 16, 8), scales(1), ints(2, 8, 12)
    # Work that is no cast and no scale is not moved into a ring.
    assert [d.reason for d in o.plan(*args).decisions] == [Reason.INSIDE_SHARD_MAP]

    def scaled(x, s, w):
        return (gathered(x) * s) @ w

    fn = mapped(scaled, (P("m"), P(), P(None, "m")), P(None, "m"), check_vma)
    compare(fn, *args, found=[["float32"]], permutes=3)


@BOTH
def test_what_runs_along_the_gathered_dimension_and_is_not_gathered_is_left(check_vma):
    def body(x8, rows, w):
        return (gathered(x8).astype(jnp.float32) * rows) @ w

    fn = mapped(body, (P("m"), P(), P(None, "m")), P(None, "m"), check_vma)
    args = ints(0, 16, 8).astype(E4M3), scales(1, 16, 1), ints(2, 8, 12)
    o = always(fn)
    assert [d.reason for d in o.plan(*args).decisions] == [Reason.INSIDE_SHARD_MAP]
    assert_equal_trees(o(*args), fn(*args))


@BOTH
def test_a_gathered_value_that_its_scale_is_made_of_stays_gathered(check_vma):
    def body(x8, w):
        g = gathered(x8).astype(jnp.float32)
        return (g * g.max()) @ w

    fn = mapped(body, (P("m"), P(None, "m")), P(None, "m"), check_vma)
    args = ints(0, 16, 8).astype(E4M3), ints(2, 8, 12)
    o = always(fn)
    assert [d.reason for d in o.plan(*args).decisions] == [Reason.INSIDE_SHARD_MAP]
    assert_equal_trees(o(*args), fn(*args))
    assert collectives(o, *args) == collectives(fn, *args)


@BOTH
def test_the_wide_value_is_handed_out_to_what_else_reads_it(check_vma):
    def body(x8, s, w, v):
        x = gathered(x8).astype(jnp.float32) * s
        return x @ w, x[None], (x * 2) @ v, x.sum()[None]

    specs = (P("m"), P(), P(None, "m"), P(None, "m"))
    fn = mapped(body, specs, (P(None, "m"), P("m"), P(None, "m"), P("m")), check_vma)
    args = ints(0, 16, 8).astype(E4M3), scales(1), ints(2, 8, 12), ints(3, 8, 12)
    o = compare(fn, *args, found=[["float8_e4m3fn"]], permutes=3)
    (ring,) = [e for e in equations(o, *args) if e.primitive.name == "narrow_gather_einsum"]
    assert ring.params["hand_out"]


@BOTH
@pytest.mark.parametrize("argnums", [(2,), (1, 2)])
def test_gradients(argnums, check_vma):
    specs = (P("m"), P(), P(None, "m"))

    def body(x8, s, w):
        return (gathered(x8).astype(jnp.float32) * s) @ w

    block = jax.shard_map(
        body, mesh=MESH, in_specs=specs, out_specs=P(None, "m"), check_vma=check_vma
    )
    step = jax.jit(jax.grad(lambda *a: (block(*a) ** 2).sum(), argnums=argnums))
    args = ints(0, 16, 8).astype(E4M3), scales(1), ints(2, 8, 12)
    o = always(step)
    assert_equal_trees(o(*args), step(*args))
    # What the forward pass saves for the weight's gradient is the ring's by-product. For that of
    # the scale it saves the gathered value before the scale, too: the gather stays as it is.
    assert sent(o, *args) == ([["float8_e4m3fn"]] if argnums == (2,) else [])
    outer = always(jax.jit(block))
    grad = jax.jit(jax.grad(lambda *a: (outer(*a) ** 2).sum(), argnums=argnums))
    assert_equal_trees(grad(*args), step(*args))


@BOTH
def test_in_a_scan(check_vma):
    def body(x, w8s, ss):
        def layer(c, ws):
            w8, s = ws
            return (c @ (gathered(w8, 0, "d").astype(jnp.float32) * s)) % 5, None

        return lax.scan(layer, x, (w8s, ss))[0]

    fn = mapped(body, (P("d"), P(None, "d"), P()), P("d"), check_vma)
    args = ints(0, 16, 8), ints(1, 3, 8, 8).astype(jnp.int8), scales(2, 3)
    compare(fn, *args, found=[["int8"]], permutes=1)
