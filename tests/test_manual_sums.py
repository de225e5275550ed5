"""A psum that a user wrote after an einsum: its reduce-scatter runs as a ring, exactly."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives, rings
from test_manual import MESH, ints, mapped, mesh_of

from collmm import Reason, _jax
from collmm.ring import scatter_permutes
from collmm.sites import ALL_REDUCE

CUBE = mesh_of((2, 2, 2), ("a", "b", "c"))
BOTH = pytest.mark.parametrize("check_vma", [True, False])


def sums(o, *args):
    """The collectives of the plan's loops; every einsum of the program, in order."""
    return [d.collective and d.collective.describe() for d in o.plan(*args).decisions]


def permutes_of(decision):
    """How many sends the ring of a decision has."""
    dim, ring = decision.collective.dim, decision.schedule
    block = decision.site.shapes[2][dim] // ring.ring_size
    return scatter_permutes(ring.ring_size, block, ring.accumulators)


def compare(fn, *args, found, gathers=1, reduces=0):
    """Check values bit by bit, what is looped, and every collective that is left."""
    o = always(fn)
    assert sums(o, *args) == found
    decisions = o.plan(*args).decisions
    assert all(d.rewritten for d in decisions)
    assert_equal_trees(o(*args), fn(*args))
    assert collectives(o, *args) == {
        "all-gather": gathers,
        "reduce-scatter": 0,
        "all-reduce": reduces,
        "all-to-all": 0,
        "collective-permute": sum(map(permutes_of, decisions)),
    }
    return o


def names(o, *args):
    """The names of every equation of the rewritten program."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found.append(eqn.primitive.name)
            for _, _, sub in _jax.jaxprs_in(eqn):
                walk(_jax.open_jaxpr(sub))

    walk(o.trace(*args).jaxpr.jaxpr)
    return found


def jaxpr_text(o, *args):
    return str(o.trace(*args).jaxpr)


def varying(x, axis, check_vma):
    """With checks, jax asks for a cast before a sum over an axis on which nothing differs."""
    return lax.pcast(x, axis, to="varying") if check_vma else x


@BOTH
def test_a_psum_becomes_a_ring_and_a_gather_of_its_blocks(check_vma):
    def body(x, w):
        return lax.psum(x @ w, "m")

    fn = mapped(body, (P(None, "m"), P("m", None)), P(), check_vma)
    args = ints(0, 16, 8), ints(1, 8, 12)
    o = compare(fn, *args, found=["all-reduce result[0] over m"])
    assert rings(o, *args) == [("scatter", 1)]
    gather = "all_gather_invariant" if check_vma else "all_gather"
    assert [n for n in names(o, *args) if n.startswith(("psum", "all_gather"))] == [gather]


@BOTH
def test_the_first_dimension_that_divides_is_scattered(check_vma):
    def body(x, w):
        return lax.psum(jnp.einsum("abk,kc->abc", x, w), "m")

    fn = mapped(body, (P(None, None, "m"), P("m", None)), P(), check_vma)
    args = ints(0, 3, 5, 8), ints(1, 8, 4)
    compare(fn, *args, found=["all-reduce result[2] over m"])


@BOTH
def test_a_sum_that_no_dimension_can_scatter_stays_a_psum(check_vma):
    fn = mapped(lambda x, w: lax.psum(x @ w, "m"), (P(None, "m"), P("m")), P(), check_vma)
    args = ints(0, 3, 8), ints(1, 8, 5)
    o = always(fn)
    (decision,) = o.plan(*args).decisions
    assert decision.reason is Reason.ALL_REDUCE
    assert decision.detail == "no dimension of (3, 5) divides into blocks"
    assert_equal_trees(o(*args), fn(*args))
    assert collectives(o, *args)["all-reduce"] == 1


@BOTH
def test_casts_transposes_and_reshapes_before_the_sum_are_done_on_the_block(check_vma):
    def body(x, w):
        y = jnp.einsum("sd,df->sf", x, w).T.reshape(12, 4, 4).astype(jnp.bfloat16)
        return lax.psum(y, "m")

    fn = mapped(body, (P(None, "m"), P("m", None)), P(), check_vma)
    args = ints(0, 16, 8), ints(1, 8, 12)
    o = compare(fn, *args, found=["all-reduce result[0] over m"])
    # What is gathered is narrow already: four of sixteen rows of bf16.
    assert "bf16[12,1,4]" in jaxpr_text(o, *args)


def test_a_reshape_that_mixes_one_dimension_leaves_another_one():
    def body(x, w):
        y = x @ w  # [2, 12]: a reshape to [3, 8] breaks both dimensions' blocks of four
        return lax.psum(y.reshape(3, 8), "m"), lax.psum((x @ w).reshape(2, 3, 4), "m")

    fn = mapped(body, (P(None, "m"), P("m", None)), (P(), P()))
    args = ints(0, 2, 8), ints(1, 8, 12)
    o = always(fn)
    assert [d.rewritten for d in o.plan(*args).decisions] == [False, False]
    assert_equal_trees(o(*args), fn(*args))


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int8])
def test_a_cast_that_widens_before_the_sum_is_kept_before_it(dtype, check_vma):
    wide = jnp.float32 if dtype == jnp.float16 else jnp.int32
    value = 40000 if dtype == jnp.float16 else 100

    def body(x, w):
        y = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
        return lax.psum(y.astype(wide), "m")

    fn = mapped(body, (P(None, "m"), P("m")), P(), check_vma)
    args = jnp.full((4, 4), value, dtype), jnp.ones((4, 4), dtype)
    o = always(fn)
    (decision,) = o.plan(*args).decisions
    assert decision.reason is Reason.ALL_REDUCE
    assert decision.detail == "a cast before the sum would change it after"
    assert_equal_trees(o(*args), fn(*args))


@BOTH
def test_a_sum_over_two_axes_is_one_ring_where_a_dimension_divides(check_vma):
    def body(x, w):
        return lax.psum(x @ w, ("d", "m"))

    fn = mapped(body, (P(None, ("d", "m")), P(("d", "m"), None)), P(), check_vma)
    args = ints(0, 8, 16), ints(1, 16, 3)
    compare(fn, *args, found=["all-reduce result[0] over d,m"])


@BOTH
def test_of_several_axes_those_form_the_ring_that_a_dimension_can_hold(check_vma):
    def body(x, w):
        return lax.psum(x @ w, ("c", "a", "b"))

    axes = ("a", "b", "c")
    fn = mapped(body, (P(None, axes), P(axes, None)), P(), check_vma, mesh=CUBE)
    # Four rows: a ring of a and b, of four; what is left is summed over c on the block.
    args = ints(0, 4, 16), ints(1, 16, 3)
    o = compare(fn, *args, found=["all-reduce result[0] over a,b"], reduces=1)
    text = jaxpr_text(o, *args)
    assert f"psum{'_invariant' if check_vma else ''}[axes=('c',)" in text


@BOTH
def test_axes_over_which_the_operands_do_not_vary_count_too(check_vma):
    def body(x, w):
        # Every row of d adds the same: twice the product.
        return lax.psum(varying(x @ w, "d", check_vma), ("d", "m"))

    fn = mapped(body, (P(None, "m"), P("m", None)), P(), check_vma)
    args = ints(0, 8, 16), ints(1, 16, 3)
    compare(fn, *args, found=["all-reduce result[0] over d,m"])


@BOTH
def test_operands_that_vary_nowhere(check_vma):
    def body(x, w):
        return lax.psum(varying(x @ w, "m", check_vma), "m")

    fn = mapped(body, (P(), P()), P(), check_vma)
    args = ints(0, 4, 8), ints(1, 8, 3)
    compare(fn, *args, found=["all-reduce result[0] over m"])


@BOTH
def test_a_scattered_sum_over_an_axis_on_which_the_operands_do_not_vary(check_vma):
    def body(x, w):
        y = varying(x @ w, "d", check_vma)
        return lax.psum_scatter(y, ("d", "m"), scatter_dimension=0, tiled=True)

    fn = mapped(body, (P(None, "m"), P("m", None)), P(("d", "m")), check_vma)
    args = ints(0, 8, 16), ints(1, 16, 3)
    found = ["reduce-scatter result[0] over d,m"]
    compare(fn, *args, found=found, gathers=0)


@BOTH
def test_several_values_in_one_psum_are_a_ring_each(check_vma):
    def body(x, w, v):
        return lax.psum((x @ w, {"b": x @ v}), "m")

    fn = mapped(body, (P(None, "m"), P("m"), P("m")), (P(), {"b": P()}), check_vma)
    args = ints(0, 4, 8), ints(1, 8, 3), ints(2, 8, 5)
    o = compare(fn, *args, found=["all-reduce result[0] over m"] * 2, gathers=2)
    assert rings(o, *args) == [("scatter", 1), ("scatter", 1)]


@pytest.mark.parametrize("form", ["all_gather", "psum_scatter", "psum"])
def test_groups_of_an_axis_are_left_alone_with_their_reason(form):
    groups = [[0, 1], [2, 3]]

    def body(x, w):
        if form == "all_gather":
            g = lax.all_gather(x, "m", axis=0, tiled=True, axis_index_groups=groups)
            return g @ w
        if form == "psum":
            return lax.psum(x @ w, "m", axis_index_groups=groups)
        return lax.psum_scatter(
            x @ w, "m", scatter_dimension=0, tiled=True, axis_index_groups=groups
        )

    fn = mapped(body, (P("m"), P()), P("m"), check_vma=False)
    args = ints(0, 16, 8), ints(1, 8, 4)
    o = always(fn)
    assert [d.reason for d in o.plan(*args).decisions] == [Reason.AXIS_GROUPS]
    assert_equal_trees(o(*args), fn(*args))


@BOTH
def test_a_sum_that_is_sliced_by_hand_is_left_as_it_is(check_vma):
    def body(x, w):
        y = lax.psum(x @ w, "m")
        return lax.dynamic_slice_in_dim(y, lax.axis_index("m") * 2, 2, 0)

    fn = mapped(body, (P(None, "m"), P("m")), P("m"), check_vma)
    args = ints(0, 8, 8), ints(1, 8, 4)
    o = always(fn)
    (decision,) = o.plan(*args).decisions
    assert decision.reason is Reason.ALL_REDUCE
    assert decision.detail == "the sum is sliced by hand"
    assert_equal_trees(o(*args), fn(*args))


@BOTH
def test_a_product_that_is_read_before_the_sum_too_is_left(check_vma):
    def body(x, w):
        y = x @ w
        return lax.psum(y, "m"), y[None]

    fn = mapped(body, (P(None, "m"), P("m")), (P(), P("m")), check_vma)
    args = ints(0, 8, 8), ints(1, 8, 4)
    o = always(fn)
    assert [d.reason for d in o.plan(*args).decisions] == [Reason.INSIDE_SHARD_MAP]
    assert_equal_trees(o(*args), fn(*args))


def test_an_axis_of_one_device_is_no_collective():
    mesh = mesh_of((1, 4), ("d", "m"))
    fn = mapped(lambda x, w: lax.psum(x @ w, "d"), (P(), P(None, "m")), P(None, "m"), mesh=mesh)
    args = ints(0, 8, 8), ints(1, 8, 4)
    assert [d.reason for d in always(fn).plan(*args).decisions] == [Reason.NO_COLLECTIVE]
    assert_equal_trees(always(fn)(*args), fn(*args))


@BOTH
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.complex64, jnp.bfloat16])
def test_element_types(dtype, check_vma):
    fn = mapped(lambda x, w: lax.psum(x @ w, "m"), (P(None, "m"), P("m")), P(), check_vma)
    args = ints(0, 4, 8).astype(dtype), ints(1, 8, 3).astype(dtype)
    compare(fn, *args, found=["all-reduce result[0] over m"])


def megatron(x, w1, w2):
    """One column- and one row-parallel product, plain: the sum is wanted whole."""
    h = jnp.maximum(x @ w1, 0)
    return x + lax.psum(h @ w2, "m")


@BOTH
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_of_a_plain_tensor_parallel_block(inside, check_vma):
    specs = (P("d", None), P(None, "m"), P("m", None))
    args = ints(0, 16, 8), ints(1, 8, 16), ints(2, 16, 8)
    block = jax.shard_map(
        megatron, mesh=MESH, in_specs=specs, out_specs=P("d", None), check_vma=check_vma
    )

    def loss(*args):
        return (block(*args) * 2).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    if inside:
        o = always(step)
        found = [f for f in sums(o, *args) if f]
        # Forward the sum of the block, backward that of the input's gradient, and those of the
        # weights' gradients over d.
        assert found.count("all-reduce result[0] over m") >= 1
        assert found.count("all-reduce result[0] over d") == 2
        assert_equal_trees(o(*args), step(*args))
        if check_vma:
            assert found.count("all-reduce result[0] over m") == 2
    else:
        outer = always(jax.jit(block))
        grad = jax.jit(jax.grad(lambda *a: (outer(*a) * 2).sum(), argnums=(0, 1, 2)))
        assert_equal_trees(grad(*args), step(*args))


@BOTH
def test_gradients_of_a_gathered_weight(check_vma):
    def body(x, w):
        y = x @ lax.all_gather(w, "d", axis=0, tiled=True)
        return lax.psum(jnp.sum(y * y), ("d", "m"))

    fn = jax.shard_map(
        body,
        mesh=MESH,
        in_specs=(P(("d", "m"), None), P("d", None)),
        out_specs=P(),
        check_vma=check_vma,
    )
    step = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))
    args = ints(0, 16, 8), ints(1, 8, 4)
    o = always(step)
    kinds = {d.collective.kind for d in o.plan(*args).decisions if d.rewritten}
    # Forward y; backward dW, which is summed over m by a psum as well.
    assert kinds == {"all-gather", "reduce-scatter"}
    # The ring over d comes first: what is summed over m is a block of half the rows.
    sums_over_m = r"f32\[([\d,]+)\](?:\{V:d\})? = psum(?:_invariant)?\[axes=\('m',\)"
    assert re.findall(sums_over_m, jaxpr_text(o, *args)) == ["4,4"]
    assert_equal_trees(o(*args), step(*args))


@BOTH
def test_inside_a_scan_and_under_checkpoint(check_vma):
    def body(x, w1s, w2s):
        @jax.checkpoint
        def layer(c, ws):
            return jnp.round(megatron(c, *ws)) % 5, None

        return lax.scan(layer, x, (w1s, w2s))[0]

    specs = (P("d"), P(None, None, "m"), P(None, "m", None))
    fn = mapped(body, specs, P("d"), check_vma)
    args = ints(0, 8, 8), ints(1, 3, 8, 16), ints(2, 3, 16, 8)
    o = always(fn)
    assert sums(o, *args) == [None, "all-reduce result[0] over m"]
    assert_equal_trees(o(*args), fn(*args))
    assert rings(o, *args) == [("scatter", 1)]


def test_one_axis_by_hand_and_the_other_left_to_the_compiler():
    @jax.jit
    def fn(x, w):
        def body(x, w):
            return lax.psum(x @ w, "m")

        return jax.shard_map(
            body,
            mesh=MESH,
            in_specs=(P(None, "m"), P("m", None)),
            out_specs=P(),
            axis_names={"m"},
        )(x, w)

    args = ints(0, 8, 8), ints(1, 8, 4)
    args = tuple(
        jax.device_put(a, jax.sharding.NamedSharding(MESH, P(*spec)))
        for a, spec in zip(args, (("d", "m"), ("m", None)), strict=True)
    )
    o = always(fn)
    assert sums(o, *args) == ["all-reduce result[0] over m"]
    assert_equal_trees(o(*args), fn(*args))
    assert collectives(o, *args)["all-reduce"] == 0


def test_auto_weighs_the_gather_that_stays():
    def body(x, w):
        return lax.psum(x @ w, "m")

    fn = mapped(body, (P(None, "m"), P("m", None)), P())
    x = jax.ShapeDtypeStruct((16, 8), np.float32)
    from collmm import Options, overlap_collectives

    o = overlap_collectives(fn, Options("auto", strict=True))
    (decision,) = o.plan(x, jax.ShapeDtypeStruct((8, 12), np.float32)).decisions
    assert decision.reason is Reason.NOT_WORTH
    assert decision.collective.kind == ALL_REDUCE
    assert decision.estimate.rest_s > 0


@BOTH
def test_a_ring_by_hand_beside_a_psum_stays_untouched(check_vma):
    def body(x, w, v):
        total = lax.psum(x @ w, "m")
        blk, out = x, []
        for step in range(4):
            out.append(blk @ v)
            if step == 3:
                break
            blk = lax.ppermute(blk, "m", [(i, (i + 1) % 4) for i in range(4)])
        return total, jnp.stack(out)

    fn = mapped(body, (P(None, "m"), P("m"), P()), (P(), P(None, None, "m")), check_vma)
    args = ints(0, 4, 8), ints(1, 8, 4), ints(2, 2, 4)
    o = always(fn)
    decisions = o.plan(*args).decisions
    assert [d.rewritten for d in decisions] == [True, False, False, False, False]
    assert {d.reason for d in decisions[1:]} == {Reason.INSIDE_SHARD_MAP}
    assert names(o, *args).count("ppermute") == 3
    assert_equal_trees(o(*args), fn(*args))
