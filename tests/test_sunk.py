"""A user gathers a value, works on it, and then multiplies: a ring all the same, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives, rings
from test_manual import ints
from test_narrow import E4M3, E5M2, compare, permuted, put, scales, sent, wsc

from collmm import Options, Reason, overlap_collectives

NARROW = pytest.mark.parametrize("dtype", [E4M3, E5M2, jnp.int8])
NAMES = {E4M3: "f8E4M3FN", E5M2: "f8E5M2", jnp.int8: "i8"}
SCALES = {
    "none": (lambda: None, ()),
    "scalar": (lambda: scales(1, dtype=jnp.bfloat16), ()),
    "column": (lambda: scales(1, 8, dtype=jnp.bfloat16), ()),
    "row, sharded": (lambda: scales(1, 16, 1, dtype=jnp.bfloat16), ("m", None)),
    "row, whole": (lambda: scales(1, 16, 1, dtype=jnp.bfloat16), ()),
}


@NARROW
@pytest.mark.parametrize("kind", SCALES)
def test_a_value_that_is_gathered_before_its_cast_travels_narrow(dtype, kind):
    make, spec = SCALES[kind]

    @jax.jit
    def fn(x8, scale, w):
        x = wsc(x8, None, None).astype(jnp.bfloat16)
        if scale is not None:
            # A scale along the gathered dimension is gathered as well, as the value is.
            x = x * (wsc(scale, None, None) if spec else scale)
        return wsc(x @ w, None, "m")

    x8 = put(ints(0, 16, 8).astype(dtype), "m", None)
    w = put(ints(2, 8, 12).astype(jnp.bfloat16), None, "m")
    scale = make()
    args = x8, None if scale is None else put(scale, *spec), w
    name = np.dtype(dtype).name
    rows = kind.startswith("row")
    o = compare(fn, *args, found=[[name, "bfloat16"][: 1 + rows]], permutes=3 * (1 + rows))
    assert set(permuted(o, *args)) == {NAMES[dtype], "bf16"} if rows else {NAMES[dtype]}
    (decision,) = o.plan(*args).decisions
    # The compiler gathers one byte an element; so does a ring, and the scales of the rows.
    assert decision.collective.bytes == 16 * 8
    assert decision.collective.ring_bytes == 16 * 8 + rows * 16 * 2


@NARROW
def test_a_weight_that_is_gathered_before_its_cast(dtype):
    """Fully sharded and quantised: zero point and scales are applied where it arrives."""

    @jax.jit
    def fn(x, w8, zero, scale):
        w = (wsc(w8, None, "m").astype(jnp.float32) - zero) * scale
        return wsc(x @ w, None, "m")

    args = (
        put(ints(0, 16, 8)),
        put(ints(1, 8, 12).astype(dtype), "d", "m"),
        put(ints(2, 12), "m"),
        put(scales(3, 12), "m"),
    )
    compare(fn, *args, found=[[np.dtype(dtype).name]], permutes=1)


def test_the_same_width_is_gathered_on_a_ring_and_worked_on_as_a_shard():
    @jax.jit
    def fn(x, scale, w):
        g = wsc(x, None, None)
        return wsc(jnp.maximum(g * scale + 1, 0) @ w, None, "m")

    args = put(ints(0, 16, 8), "m", None), put(scales(1)), put(ints(2, 8, 12), None, "m")
    o = compare(fn, *args, found=[["float32"]], permutes=3)
    assert rings(o, *args) == [("gather", 1)]
    # What is left of the work is done on a quarter of the rows.
    assert "f32[4,8]" in o.lower(*args).compile().as_text()


def test_several_gathered_values_make_one_that_travels():
    @jax.jit
    def fn(gate, up, w):
        return wsc((wsc(gate, None, None) * wsc(up, None, None)) @ w, None, "m")

    args = *(put(ints(k, 16, 8), "m", None) for k in (0, 1)), put(ints(2, 8, 12), None, "m")
    o = compare(fn, *args, found=[["float32"]], permutes=3)
    (decision,) = o.plan(*args).decisions
    # The compiler gathers both; a ring sends their product.
    assert decision.collective.bytes == 2 * decision.collective.ring_bytes == 2 * 16 * 8 * 4


def test_several_einsums_share_the_ring():
    @jax.jit
    def fn(x8, wq, wk):
        x = wsc(x8, None, None).astype(jnp.float32) * 0.5
        return wsc(x @ wq, None, "m"), wsc(x @ wk, None, "m")

    args = (
        put(ints(0, 16, 8).astype(jnp.int8), "m", None),
        *(put(ints(k, 8, 12), None, "m") for k in (1, 2)),
    )
    compare(fn, *args, found=[["int8"]], permutes=3)


def test_gradients():
    @jax.jit
    def step(x8, scale, w):
        def loss(scale, w):
            x = wsc(x8, None, None).astype(jnp.float32) * scale
            return (wsc(x @ w, None, "m") ** 2).sum()

        return jax.value_and_grad(loss, argnums=(0, 1))(scale, w)

    args = (
        put(ints(0, 16, 8).astype(E4M3), "m", None),
        put(scales(1)),
        put(ints(2, 8, 12), None, "m"),
    )
    o = always(step)
    assert_equal_trees(o(*args), step(*args))
    # dW needs the gathered value again: both einsums are on rings.
    assert [d.collective.kind for d in o.plan(*args).rewritten].count("all-gather") >= 2


def test_in_a_scan_over_stacked_weights():
    @jax.jit
    def fn(x, w8s, ss):
        def layer(c, ws):
            w8, s = ws
            w = wsc(w8, None, None).astype(jnp.float32) * s
            return wsc(c @ w, "d", None) % 5, None

        return jax.lax.scan(layer, x, (w8s, ss))[0]

    args = (
        put(ints(0, 16, 8), "d", None),
        put(ints(1, 3, 8, 8).astype(jnp.int8), None, "m", None),
        put(scales(2, 3)),
    )
    compare(fn, *args, found=[["int8"]], permutes=3)


def test_explicit_axes():
    shape, names = (2, 4), ("d", "m")
    devices = np.array(jax.devices()[:8]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, names, axis_types=(AxisType.Explicit,) * 2)

    @jax.jit
    def fn(x8, w):
        x = jax.sharding.reshard(x8, P(None, None)).astype(jnp.float32) * 0.5
        return jnp.einsum("sd,df->sf", x, w, out_sharding=P(None, "m"))

    with jax.set_mesh(mesh):
        x8 = jax.device_put(ints(0, 16, 8).astype(E4M3), NamedSharding(mesh, P("m", None)))
        w = jax.device_put(ints(1, 8, 12), NamedSharding(mesh, P(None, "m")))
        o = always(fn)
        assert len(o.plan(x8, w).rewritten) == 1
        got, want = o(x8, w), fn(x8, w)
        assert got.sharding == want.sharding
        assert_equal_trees(got, want)
        assert sent(o, x8, w) == [["float8_e4m3fn"]]
        assert collectives(o, x8, w)["all-gather"] == 0


@pytest.mark.parametrize("reader", ["returned", "sum"])
def test_a_value_that_something_else_reads_stays_gathered_once(reader):
    @jax.jit
    def fn(x8, w):
        x = wsc(x8, None, None).astype(jnp.float32) * 0.5
        return wsc(x @ w, None, "m"), x if reader == "returned" else x.sum()

    args = put(ints(0, 16, 8).astype(E4M3), "m", None), put(ints(2, 8, 12), None, "m")
    o = always(fn)
    assert [d.reason for d in o.plan(*args).decisions] == [Reason.NO_COLLECTIVE]
    assert_equal_trees(o(*args), fn(*args))
    assert collectives(o, *args) == collectives(fn, *args)


def test_work_that_is_not_elementwise_is_not_looked_through():
    @jax.jit
    def fn(x, w):
        return wsc(jnp.cumsum(wsc(x, None, None), axis=0) @ w, None, "m")

    args = put(ints(0, 16, 8), "m", None), put(ints(2, 8, 12), None, "m")
    o = always(fn)
    assert [d.reason for d in o.plan(*args).decisions] == [Reason.NO_COLLECTIVE]
    assert_equal_trees(o(*args), fn(*args))


def test_a_ring_that_does_not_pay_leaves_the_narrow_gather():
    @jax.jit
    def fn(x8, w):
        return wsc(wsc(x8, None, None).astype(jnp.float32) @ w, None, "m")

    args = put(ints(0, 16, 8).astype(E4M3), "m", None), put(ints(2, 8, 12), None, "m")
    o = overlap_collectives(fn, Options(strict=True))
    assert [d.reason for d in o.plan(*args).decisions] == [Reason.NOT_WORTH]
    text = o.lower(*args).compile().as_text()
    assert text.count(" all-gather(") == 1
    assert_equal_trees(o(*args), fn(*args))
