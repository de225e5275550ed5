"""Quantised operands travel as they are, and are made wide where they arrive; exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives
from test_manual import ints, mapped, mesh_of

from collmm import Options, _jax, overlap_collectives
from collmm.primitives import all_gather_einsum_p

MESH = mesh_of((2, 4), ("d", "m"))
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def put(a, *spec):
    return jax.device_put(a, NamedSharding(MESH, P(*spec)))


def wsc(a, *spec):
    return jax.lax.with_sharding_constraint(a, NamedSharding(MESH, P(*spec)))


def scales(seed, *shape, dtype=jnp.float32):
    """Small powers of two: products with them are exact."""
    return jnp.asarray(2.0 ** np.random.default_rng(seed).integers(-2, 3, shape), dtype)


def equations(o, *args):
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found.append(eqn)
            for _, _, sub in _jax.jaxprs_in(eqn):
                walk(_jax.open_jaxpr(sub))

    walk(o.trace(*args).jaxpr.jaxpr)
    return found


def sent(o, *args):
    """Per ring of the rewritten program, the types of the values it sends."""
    kinds = []
    for eqn in equations(o, *args):
        if eqn.primitive is all_gather_einsum_p:
            kinds.append([eqn.invars[0].aval.dtype.name])
        elif eqn.primitive.name == "narrow_gather_einsum":
            leaves = eqn.params["prologue"].leaves
            kinds.append(
                [leaf.var.aval.dtype.name for leaf in leaves if eqn.params["dim"] in leaf.dims]
            )
    return kinds


def compare(fn, *args, found, permutes):
    """Check values bit by bit, what is sent, and that no gather is left."""
    o = always(fn)
    assert_equal_trees(o(*args), fn(*args))
    assert sent(o, *args) == found
    counted = collectives(o, *args)
    assert counted["all-gather"] == 0
    assert counted["collective-permute"] == permutes
    return o


def permuted(o, *args):
    """The element types of every ppermute of the lowered program, in order."""
    text = o.lower(*args).as_text()
    lines = [line for line in text.splitlines() if "collective_permute" in line]
    return [line.rsplit("tensor<", 1)[1].split("x")[-1].rstrip(">") for line in lines]


@pytest.mark.parametrize("dtype", [E4M3, E5M2, jnp.int8])
@pytest.mark.parametrize("wide", [jnp.bfloat16, jnp.float32])
def test_a_scalar_scale(dtype, wide):
    @jax.jit
    def fn(x8, scale, w):
        x = x8.astype(wide) * scale.astype(wide)
        return wsc(x @ w, None, "m")

    x8 = put(ints(0, 16, 8).astype(dtype), "m", None)
    args = x8, put(scales(1)), put(ints(2, 8, 12).astype(wide), None, "m")
    o = always(fn)
    assert sent(o, *args) == [[np.dtype(dtype).name]]
    assert collectives(o, *args)["all-gather"] == 0
    assert collectives(o, *args)["collective-permute"] == 3
    names = {E4M3: "f8E4M3FN", E5M2: "f8E5M2", jnp.int8: "i8"}
    assert permuted(o, *args) == [names[dtype]] * 3
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("dtype", [E4M3, jnp.int8])
def test_a_scale_per_row_of_the_gathered_dimension_travels_with_its_shard(dtype):
    @jax.jit
    def fn(x8, scale, w):
        x = x8.astype(jnp.float32) * scale
        return wsc(x.astype(jnp.bfloat16) @ w, None, "m")

    x8, rows = ints(0, 16, 8).astype(dtype), scales(1, 16, 1)
    w = put(ints(2, 8, 12).astype(jnp.bfloat16), None, "m")
    o = always(fn)
    for args in (
        (put(x8, "m", None), put(rows, "m", None), w),
        (put(x8, "m", None), put(rows), w),
    ):
        assert sent(o, *args) == [[np.dtype(dtype).name, "float32"]]
        assert collectives(o, *args)["all-gather"] == 0
        assert collectives(o, *args)["collective-permute"] == 6
        assert_equal_trees(o(*args), fn(*args))


def test_the_plan_counts_what_is_sent():
    @jax.jit
    def fn(x8, scale, w):
        return wsc((x8.astype(jnp.float32) * scale) @ w, None, "m")

    x8, rows = ints(0, 16, 8).astype(E4M3), scales(1, 16, 1)
    args = put(x8, "m", None), put(rows, "m", None), put(ints(2, 8, 12), None, "m")
    (decision,) = always(fn).plan(*args).decisions
    # 16 x 8 floats are gathered; 16 x 8 bytes and 16 floats are sent, three quarters of them.
    assert decision.collective.bytes == 16 * 8 * 4
    assert decision.collective.ring_bytes == 16 * 8 + 16 * 4
    assert decision.estimate.link_bytes == (16 * 8 + 16 * 4) * 3 // 4


def test_a_scale_per_column_stays_where_it_is():
    @jax.jit
    def fn(x8, scale, w):
        return wsc((x8.astype(jnp.bfloat16) * scale) @ w, None, "m")

    x8 = put(ints(0, 16, 8).astype(E4M3), "m", None)
    args = x8, put(scales(1, 8, dtype=jnp.bfloat16)), put(ints(2, 8, 12).astype(jnp.bfloat16))
    args = (*args[:2], put(args[2], None, "m"))
    o = always(fn)
    assert sent(o, *args) == [["float8_e4m3fn"]]
    assert_equal_trees(o(*args), fn(*args))


def test_a_scale_given_as_a_vector_or_broadcast_to_the_whole():
    @jax.jit
    def fn(x8, rows, columns, w):
        x = x8.astype(jnp.float32) * jnp.broadcast_to(rows[:, None], x8.shape)
        return wsc((x * jnp.broadcast_to(columns, x8.shape)) @ w, None, "m")

    x8 = put(ints(0, 16, 8).astype(E4M3), "m", None)
    rows, columns = put(scales(1, 16), "m"), put(scales(2, 8))
    args = x8, rows, columns, put(ints(3, 8, 12), None, "m")
    o = always(fn)
    assert sent(o, *args) == [["float8_e4m3fn", "float32"]]
    assert_equal_trees(o(*args), fn(*args))


def test_int8_weights_with_zero_points_gathered_over_the_contracted_dimension():
    @jax.jit
    def fn(x, w8, zero, scale):
        w = (w8.astype(jnp.float32) - zero) * scale
        return wsc(x @ w, "d", None)

    w8 = put(ints(1, 8, 12).astype(jnp.int8), "d", None)
    args = put(ints(0, 16, 8), "d", None), w8, put(ints(2, 1, 12)), put(scales(3, 1, 12))
    o = always(fn)
    assert sent(o, *args) == [["int8"]]
    assert_equal_trees(o(*args), fn(*args))


def test_several_einsums_share_the_narrow_ring():
    @jax.jit
    def fn(x8, scale, wq, wk):
        x = x8.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
        return wsc(x @ wq, None, "m"), wsc(x @ wk, None, "m")

    x8 = put(ints(0, 16, 8).astype(E4M3), "m", None)
    weights = [put(ints(i, 8, 12).astype(jnp.bfloat16), None, "m") for i in (2, 3)]
    args = x8, put(scales(1)), *weights
    o = always(fn)
    assert sent(o, *args) == [["float8_e4m3fn"]]
    assert collectives(o, *args)["collective-permute"] == 3
    assert_equal_trees(o(*args), fn(*args))


def test_a_widening_cast_alone_waits_for_the_arrival_too():
    @jax.jit
    def fn(x, w):
        return wsc(x.astype(jnp.float32) @ w, None, "m")

    args = put(ints(0, 16, 8).astype(jnp.bfloat16), "m", None), put(ints(1, 8, 12), None, "m")
    o = always(fn)
    assert sent(o, *args) == [["bfloat16"]]
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_a_cast_waits_too_and_a_scale_does_not(check_vma):
    def cast(x8, scale, w):
        del scale
        return jax.lax.all_gather(x8, "m", axis=0, tiled=True).astype(jnp.bfloat16) @ w

    def scaled(x8, scale, w):
        x = x8.astype(jnp.bfloat16) * scale[0]  # another scale on every device
        return jax.lax.all_gather(x, "m", axis=0, tiled=True) @ w

    args = ints(0, 16, 8).astype(E4M3), scales(1, 4, dtype=jnp.bfloat16), ints(2, 8, 12)
    args = (*args[:2], args[2].astype(jnp.bfloat16))
    for body, kind in ((cast, "float8_e4m3fn"), (scaled, "bfloat16")):
        fn = mapped(body, (P("m"), P("m"), P(None, "m")), P(None, "m"), check_vma)
        o = always(fn)
        assert sent(o, *args) == [[kind]]
        assert collectives(o, *args)["collective-permute"] == 3
        assert_equal_trees(o(*args), fn(*args))


def test_a_narrowing_cast_is_done_before_as_ever():
    @jax.jit
    def fn(x, scale, w):
        return wsc((x * scale).astype(jnp.bfloat16) @ w, None, "m")

    args = put(ints(0, 16, 8), "m", None), put(scales(1)), put(ints(2, 8, 12), None, "m")
    args = (*args[:2], args[2].astype(jnp.bfloat16))
    o = always(fn)
    assert sent(o, *args) == [["bfloat16"]]
    assert_equal_trees(o(*args), fn(*args))


def test_two_narrow_factors_that_weigh_as_much_as_their_product_stay():
    @jax.jit
    def fn(a8, b8, w):
        return wsc((a8.astype(jnp.bfloat16) * b8.astype(jnp.bfloat16)) @ w, None, "m")

    a8, b8 = (put(ints(i, 16, 8).astype(E4M3), "m", None) for i in (0, 1))
    args = a8, b8, put(ints(2, 8, 12).astype(jnp.bfloat16), None, "m")
    o = always(fn)
    assert sent(o, *args) == [["bfloat16"]]
    assert_equal_trees(o(*args), fn(*args))


def test_one_vector_along_both_dimensions_stays_wide():
    @jax.jit
    def fn(x8, s, w):
        return wsc((x8.astype(jnp.float32) * s[:, None] * s) @ w, None, "m")

    @jax.jit
    def same(x8, s, w):
        rows = jnp.broadcast_to(jax.lax.broadcast_in_dim(s, (8, 8), (0,)), (8, 8))
        x = x8.astype(jnp.float32) * rows * jax.lax.broadcast_in_dim(s, (8, 8), (1,))
        return wsc(x @ w, None, "m")

    args = put(ints(0, 8, 8).astype(E4M3), "m", None), put(scales(1, 8)), put(ints(2, 8, 12))
    args = (*args[:2], put(args[2], None, "m"))
    assert_equal_trees(always(fn)(*args), fn(*args))
    o = always(same)
    assert sent(o, *args) == [["float32"]]
    assert_equal_trees(o(*args), same(*args))


def test_scales_that_round_give_what_the_program_gives():
    @jax.jit
    def fn(x8, scale, w):
        x = (x8.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)).astype(jnp.float32)
        return wsc(x @ w, None, "m")

    rng = np.random.default_rng(0)
    x8 = put(jnp.asarray(rng.standard_normal((16, 8)), E4M3), "m", None)
    scale = put(jnp.asarray(rng.standard_normal((16, 1)), jnp.float32), "m", None)
    # Each result is one element of x times one: what is multiplied can be read off.
    args = x8, scale, put(jnp.eye(8, dtype=jnp.float32), None, "m")
    o = always(fn)
    assert sent(o, *args) == [["float8_e4m3fn", "bfloat16"]]
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("chip", ["v5e", "h100"])
def test_a_long_ring_that_is_rolled(chip):
    mesh = mesh_of((16,), ("m",))

    @jax.jit
    def fn(x8, scale, w):
        x = x8.astype(jnp.float32) * scale
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, "m")))

    args = ints(0, 32, 8).astype(E4M3), scales(1, 32, 1), ints(2, 8, 16)
    args = [
        jax.device_put(a, NamedSharding(mesh, P(*spec)))
        for a, spec in zip(args, (("m",), ("m",), (None, "m")), strict=True)
    ]
    o = overlap_collectives(fn, Options("always", chip=chip, strict=True))
    assert sent(o, *args) == [["float8_e4m3fn", "float32"]]
    assert collectives(o, *args)["all-gather"] == 0
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("two", [False, True])
def test_rings_over_two_axes_and_sharded_other_dimensions(two):
    spec = (("d", "m"), None) if two else ("m", "d")

    @jax.jit
    def fn(x8, scale, columns, w):
        x = x8.astype(jnp.float32) * scale * columns
        return wsc(x @ w, None, "m")

    x8 = put(ints(0, 16, 8).astype(E4M3), *spec)
    scale, columns = put(scales(1, 16, 1), spec[0], None), put(scales(2, 1, 8), None, spec[1])
    args = x8, scale, columns, put(ints(3, 8, 12), spec[1], "m")
    o = always(fn)
    assert sent(o, *args)[0] == ["float8_e4m3fn", "float32"]
    assert_equal_trees(o(*args), fn(*args))


def layer(x, ws):
    """A layer with quantised weights that are sharded over the data axis, as FSDP has them."""
    w8, scale = ws
    w = w8.astype(jnp.float32) * scale
    return wsc((x @ w) % 8, "d", None), None


@pytest.mark.parametrize("remat", [False, True])
def test_quantised_weights_forward_and_backward_through_a_scan(remat):
    body = jax.checkpoint(layer) if remat else layer

    def loss(x, ws):
        return (jax.lax.scan(body, x, ws)[0] * 2).sum()

    fn = jax.jit(jax.value_and_grad(loss))
    w8 = put(ints(1, 3, 8, 8).astype(jnp.int8), None, "d", None)
    args = put(ints(0, 16, 8), "d", None), (w8, put(scales(2, 3, 1, 8)))
    o = always(fn)
    kinds = sent(o, *args)
    assert ["int8"] in kinds
    assert_equal_trees(o(*args), fn(*args))
    if remat:
        # The backward pass gathers the weights again, and makes them wide again.
        assert len(kinds) > 1
        assert all(kind == ["int8"] for kind in kinds)


def test_a_narrow_ring_can_be_differentiated_and_batched_after_the_rewrite():
    @jax.jit
    def fn(x8, scale, w):
        return wsc((x8.astype(jnp.float32) * scale) @ w, None, "m")

    x8 = put(ints(0, 16, 8).astype(jnp.int8), "m", None)
    args = x8, put(scales(1, 16, 1), "m", None), put(ints(2, 8, 12), None, "m")
    closed = always(fn).trace(*args).jaxpr

    def rewritten(*args):
        return _jax.eval_jaxpr(closed.jaxpr, closed.consts, *args)[0]

    assert sent(always(fn), *args) == [["int8", "float32"]]
    got = jax.grad(lambda s, w: (rewritten(x8, s, w) * 3).sum(), argnums=(0, 1))(*args[1:])
    want = jax.grad(lambda s, w: (fn(x8, s, w) * 3).sum(), argnums=(0, 1))(*args[1:])
    assert_equal_trees(got, want)
    batch = jnp.stack([args[2], args[2] + 1])
    mapped = jax.vmap(rewritten, in_axes=(None, None, 0))(*args[:2], batch)
    assert_equal_trees(mapped, jax.vmap(fn, in_axes=(None, None, 0))(*args[:2], batch))


@pytest.mark.parametrize("rows", [16, 13])
@pytest.mark.parametrize("dtype", [E4M3, jnp.int8])
def test_a_ring_that_hands_out_the_wide_value_sends_the_narrow_one(dtype, rows):
    @jax.jit
    def fn(x8, scale, w):
        x = wsc(x8, "m", None).astype(jnp.float32) * scale
        return wsc(x @ w, None, "m"), jnp.sort(wsc(x, None, None), axis=0)

    args = put(ints(0, rows, 8).astype(dtype)), put(scales(1)), put(ints(2, 8, 12), None, "m")
    o = always(fn)
    assert_equal_trees(o(*args), fn(*args))
    assert sent(o, *args) == [[np.dtype(dtype).name]]
    (ring,) = [e for e in equations(o, *args) if e.primitive.name == "narrow_gather_einsum"]
    assert ring.params["hand_out"]
    counted = collectives(o, *args)
    assert (counted["all-gather"], counted["collective-permute"]) == (0, 3)
