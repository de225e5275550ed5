"""Collectives that a user wrote inside a shard_map: they become rings, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives, rings

from collmm import Reason


def mesh_of(shape, names):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


MESH = mesh_of((2, 4), ("d", "m"))


def ints(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


def mapped(body, in_specs, out_specs, check_vma=True, mesh=MESH):
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    )


def compare(fn, *args, rewritten, gathers=0, scatters=0):
    """Check values bit by bit, how many dots are rewritten, and that their collectives are gone."""
    o = always(fn)
    assert len(o.plan(*args).rewritten) == rewritten
    assert_equal_trees(o(*args), fn(*args))
    found = [kind for kind, _ in rings(o, *args)]
    assert found.count("gather") == gathers
    assert found.count("scatter") == scatters
    after = collectives(o, *args)
    assert after["all-gather"] == after["reduce-scatter"] == 0
    assert after["collective-permute"] > 0
    return o


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("tiled", [True, False])
def test_a_gathered_operand_becomes_a_ring(tiled, check_vma):
    def body(x, w):
        g = lax.all_gather(x, "m", axis=0, tiled=tiled)
        return jnp.einsum("...d,df->...f", g, w)

    out = P(None, "m") if tiled else P(None, None, "m")
    fn = mapped(body, (P("m", None), P(None, "m")), out, check_vma)
    compare(fn, ints(0, 16, 8), ints(1, 8, 16), rewritten=1, gathers=1)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_gathered_contracting_dimension_on_the_rhs(check_vma):
    def body(x, w):
        return x @ lax.all_gather(w, "m", axis=0, tiled=True)

    fn = mapped(body, (P("m", None), P("m", None)), P("m", None), check_vma)
    compare(fn, ints(0, 16, 8), ints(1, 8, 12), rewritten=1, gathers=1)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("tiled", [True, False])
def test_a_scattered_sum_becomes_a_ring(tiled, check_vma):
    def body(h, w):
        y = h @ w
        if not tiled:
            y = y.reshape(4, -1, y.shape[-1])
        return lax.psum_scatter(y, "m", scatter_dimension=0, tiled=tiled)

    fn = mapped(body, (P(None, "m"), P("m", None)), P("m", None), check_vma)
    compare(fn, ints(0, 16, 8), ints(1, 8, 12), rewritten=1, scatters=1)


def test_casts_transposes_and_reshapes_in_between_are_looked_through():
    def body(x, w, w2):
        g = lax.all_gather(x, "m", axis=1, tiled=True)  # [3, 16, 2]
        g = g.astype(jnp.float32).transpose(1, 0, 2).reshape(16, 6)
        h = g @ w
        y = (h @ w2).T.astype(jnp.float32)
        return lax.psum_scatter(y, "m", scatter_dimension=1, tiled=True)

    fn = mapped(body, (P(None, "m", None), P(None, "m"), P("m", None)), P(None, "m"))
    x = ints(0, 3, 16, 2, dtype=jnp.int32)
    o = compare(fn, x, ints(1, 6, 8), ints(2, 8, 5), rewritten=2, gathers=1, scatters=1)
    # The cast is done on the shard: what travels is float32 of a quarter of the rows.
    assert "f32[3,4,2]" in str(o.trace(x, ints(1, 6, 8), ints(2, 8, 5)).jaxpr)


def test_a_reshape_that_breaks_the_blocks_is_not_looked_through():
    def body(x, w):
        g = lax.all_gather(x, "m", axis=1, tiled=True)  # [2, 16] -> 32: blocks are interleaved
        return g.reshape(32)[None] @ w

    fn = mapped(body, (P(None, "m"), P(None, "m")), P(None, "m"))
    o = always(fn)
    plan = o.plan(ints(0, 2, 16), ints(1, 32, 8))
    assert [d.reason for d in plan.decisions] == [Reason.INSIDE_SHARD_MAP]
    assert_equal_trees(o(ints(0, 2, 16), ints(1, 32, 8)), fn(ints(0, 2, 16), ints(1, 32, 8)))


def test_several_einsums_of_one_gathered_value_share_a_ring():
    def body(x, wq, wk):
        g = lax.all_gather(x, "m", axis=0, tiled=True)
        return g @ wq, g @ wk

    fn = mapped(body, (P("m", None), P(None, "m"), P(None, "m")), (P(None, "m"),) * 2)
    args = ints(0, 16, 8), ints(1, 8, 8), ints(2, 8, 16)
    o = compare(fn, *args, rewritten=2, gathers=1)
    assert rings(o, *args) == [("gather", 2)]
    assert collectives(o, *args)["collective-permute"] == 3


def test_a_gathered_value_that_is_needed_whole_as_well_stays_right():
    def body(x, w):
        g = lax.all_gather(x, "m", axis=0, tiled=True)
        return g @ w, g.sum()[None]

    fn = mapped(body, (P("m", None), P(None, "m")), (P(None, "m"), P("m")))
    o = always(fn)
    args = ints(0, 16, 8), ints(1, 8, 8)
    assert_equal_trees(o(*args), fn(*args))


def test_rings_over_two_axes_by_hand():
    def body(x, w):
        return lax.all_gather(x, ("d", "m"), axis=0, tiled=True) @ w

    fn = mapped(body, (P(("d", "m"), None), P()), P(), check_vma=False)
    compare(fn, ints(0, 16, 8), ints(1, 8, 4), rewritten=1, gathers=1)


def test_a_gathered_value_that_must_not_vary_keeps_its_type():
    def body(x, w, v):
        g = lax.all_gather(x, "m", axis=0, tiled=True, to="invarying")
        return g @ w, g @ v

    fn = mapped(body, (P("m", None), P(), P(None, "m")), (P(), P(None, "m")))
    args = ints(0, 16, 8), ints(1, 8, 8), ints(2, 8, 8)
    o = always(fn)
    assert [d.rewritten for d in o.plan(*args).decisions] == [False, True]
    assert "must not vary over m" in o.plan(*args).decisions[0].detail
    assert_equal_trees(o(*args), fn(*args))


def test_gradients_of_a_hand_written_pair():
    def body(x, w, w2):
        h = lax.all_gather(x, "m", axis=0, tiled=True) @ w
        return lax.psum_scatter(h @ w2, "m", scatter_dimension=0, tiled=True)

    specs = (P("m", None), P(None, "m"), P("m", None))
    fn = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("m", None))
    args = ints(0, 16, 8), ints(1, 8, 8), ints(2, 8, 4)
    step = jax.jit(jax.grad(lambda *a: (fn(*a) * 2).sum(), argnums=(0, 1, 2)))
    o = always(step)
    assert len(o.plan(*args).rewritten) >= 4
    assert_equal_trees(o(*args), step(*args))
    outside = jax.jit(jax.grad(lambda *a: (always(jax.jit(fn))(*a) * 2).sum(), argnums=(0, 1, 2)))
    assert_equal_trees(outside(*args), step(*args))


def test_inside_a_scan_in_a_shard_map():
    def body(x, ws):
        def step(c, w):
            g = lax.all_gather(c, "m", axis=0, tiled=True)
            return lax.psum_scatter(g @ w @ w.T, "m", scatter_dimension=0, tiled=True) % 7, None

        return lax.scan(step, x, ws)[0]

    fn = mapped(body, (P("m", None), P(None, None, "m")), P("m", None))
    o = compare(fn, ints(0, 16, 8), ints(1, 3, 8, 8), rewritten=2, gathers=1, scatters=1)
    assert o.plan(ints(0, 16, 8), ints(1, 3, 8, 8)).decisions[0].site.scope == ("shard_map", "scan")


def test_a_hand_written_ring_is_left_with_a_reason():
    def body(x, w):
        moved = lax.ppermute(x, "m", [(i, (i + 1) % 4) for i in range(4)])
        return moved @ w

    fn = mapped(body, (P(None, "m"), P("m", None)), P(None, "m"))
    o = always(fn)
    plan = o.plan(ints(0, 8, 8), ints(1, 8, 4))
    assert [d.reason for d in plan.decisions] == [Reason.INSIDE_SHARD_MAP]
    assert_equal_trees(o(ints(0, 8, 8), ints(1, 8, 4)), fn(ints(0, 8, 8), ints(1, 8, 4)))


@pytest.mark.parametrize(
    ("dtype", "wider", "value"),
    [
        (jnp.int8, jnp.int32, 100),
        (jnp.float16, jnp.float32, 40000),
        (jnp.bfloat16, jnp.float32, 201),
    ],
)
def test_a_cast_that_widens_before_the_sum_is_kept_before_the_sum(dtype, wider, value):
    def body(x, w):
        y = jnp.einsum("sd,df->sf", x, w).astype(wider)
        return lax.psum_scatter(y, "m", scatter_dimension=0, tiled=True)

    fn = mapped(body, (P(None, "m"), P("m")), P("m"))
    x, w = jnp.full((4, 4), value, dtype), jnp.ones((4, 4), dtype)
    o = always(fn)
    assert [d.reason for d in o.plan(x, w).decisions] == [Reason.INSIDE_SHARD_MAP]
    assert_equal_trees(o(x, w), fn(x, w))


def test_a_cast_that_narrows_waits_for_the_sum():
    def body(x, w):
        y = jnp.einsum("sd,df->sf", x, w).astype(jnp.bfloat16)
        return lax.psum_scatter(y, "m", scatter_dimension=0, tiled=True)

    fn = mapped(body, (P(None, "m"), P("m")), P("m"))
    compare(fn, ints(0, 8, 8), ints(1, 8, 4), rewritten=1, scatters=1)
