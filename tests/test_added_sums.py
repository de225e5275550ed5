"""Einsums whose results a user adds before a collective by hand: one ring, exactly."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives, rings
from test_manual import ints, mapped

import collmm
from collmm import Options, Reason, overlap_collectives

BOTH = pytest.mark.parametrize("check_vma", [True, False])
PAIR = (P(None, "m"), P("m"), P(None, "m"), P("m"))


def pairs(dtype=jnp.float32, n=2):
    found = []
    for k in range(n):
        found += [ints(2 * k, 16, 8, dtype=dtype), ints(2 * k + 1, 8, 12, dtype=dtype)]
    return found


def compare(fn, args, *, terms, gathers=0, reduces=0, permutes=3):
    """Check values bit by bit, one ring for all terms, and every collective that is left."""
    o = always(fn)
    decisions = o.plan(*args).decisions
    assert all(d.rewritten for d in decisions)
    assert {d.group for d in decisions} == {tuple(range(terms))}
    assert_equal_trees(o(*args), fn(*args))
    assert rings(o, *args) == [("scatter", terms)]
    assert collectives(o, *args) == {
        "all-gather": gathers,
        "reduce-scatter": 0,
        "all-reduce": reduces,
        "all-to-all": 0,
        "collective-permute": permutes,
    }
    return o


def left(fn, args, *details):
    """Check that nothing is rewritten, why, and that the values stay what they were."""
    o = always(fn)
    assert [d.detail for d in o.plan(*args).decisions] == list(details)
    assert not o.plan(*args).rewritten
    assert_equal_trees(o(*args), fn(*args))


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.int8, jnp.bfloat16, jnp.complex64])
def test_a_psum_of_two_products_is_one_ring_and_one_gather(dtype, check_vma):
    fn = mapped(lambda x, w, y, v: lax.psum(x @ w + y @ v, "m"), PAIR, P(), check_vma)
    compare(fn, pairs(dtype), terms=2, gathers=1)


@BOTH
@pytest.mark.parametrize("tiled", [True, False])
def test_a_scattered_sum_of_two_products_is_one_ring(tiled, check_vma):
    def body(x, w, y, v):
        s = x @ w + y @ v
        if not tiled:
            s = s.reshape(4, 4, 12)
        return lax.psum_scatter(s, "m", scatter_dimension=0, tiled=tiled)

    compare(mapped(body, PAIR, P("m"), check_vma), pairs(), terms=2)


@BOTH
def test_however_three_are_added(check_vma):
    for add in (lambda a, b, c: a + b + c, lambda a, b, c: a + (b + c)):

        def body(x, w, y, v, z, u, add=add):
            return lax.psum(add(x @ w, y @ v, z @ u), "m")

        fn = mapped(body, PAIR + PAIR[:2], P(), check_vma)
        compare(fn, pairs(n=3), terms=3, gathers=1)


@BOTH
def test_what_follows_the_sum_is_done_on_the_block(check_vma):
    def body(x, w, y, v):
        s = (x @ w + y @ v).T.reshape(12, 4, 4).astype(jnp.bfloat16)
        return lax.psum(s, "m")

    o = compare(mapped(body, PAIR, P(), check_vma), pairs(), terms=2, gathers=1)
    assert "bf16[12,1,4]" in str(o.trace(*pairs()).jaxpr)


@BOTH
def test_terms_that_are_laid_out_in_other_ways_are_split_by_the_same_blocks(check_vma):
    def body(x, w, y, v):
        return lax.psum(jnp.einsum("sd,df->fs", x, w).T + (y @ v), "m")

    fn = mapped(body, PAIR, P(), check_vma)
    args = pairs()
    o = always(fn)
    # A block of columns is dimension 0 of the first result and dimension 1 of the second.
    found = [d.collective.describe() for d in o.plan(*args).decisions]
    assert found == ["all-reduce result[0] over m", "all-reduce result[1] over m"]
    assert [d.group for d in o.plan(*args).decisions] == [(), ()]
    assert_equal_trees(o(*args), fn(*args))
    assert rings(o, *args) == [("scatter", 1), ("scatter", 1)]
    assert collectives(o, *args)["all-reduce"] == 0
    assert collectives(o, *args)["all-gather"] == 1


@BOTH
def test_products_that_are_cast_before_they_are_added_have_rings_of_their_own(check_vma):
    def body(x, w, y, v):
        s = (x @ w).astype(jnp.bfloat16) + (y @ v).astype(jnp.bfloat16)
        return lax.psum_scatter(s, "m", scatter_dimension=0, tiled=True)

    fn = mapped(body, PAIR, P("m"), check_vma)
    o = always(fn)
    assert [d.group for d in o.plan(*pairs()).decisions] == [(), ()]
    assert_equal_trees(o(*pairs()), fn(*pairs()))
    assert rings(o, *pairs()) == [("scatter", 1), ("scatter", 1)]
    assert collectives(o, *pairs())["reduce-scatter"] == 0


@BOTH
def test_a_sum_over_further_axes_waits_for_the_scatter(check_vma):
    def body(x, w, y, v):
        s = lax.psum(x @ w + y @ v, "d")
        return lax.psum_scatter(s, "m", scatter_dimension=0, tiled=True)

    specs = (P(None, ("d", "m")), P(("d", "m"))) * 2
    compare(mapped(body, specs, P("m"), check_vma), pairs(), terms=2, reduces=1)


@BOTH
def test_terms_that_do_not_vary_over_the_ring(check_vma):
    def body(x, w, y, v):
        other = y @ v  # the same on all of m: four times the product
        if check_vma:
            other = lax.pcast(other, "m", to="varying")
        return lax.psum(x @ w + other, "m")

    fn = mapped(body, (*PAIR[:2], P(), P()), P(), check_vma)
    compare(fn, pairs(), terms=2, gathers=1)


@BOTH
def test_a_sum_that_is_exchanged_stays_as_it_is(check_vma):
    def body(x, w, v):
        y = jnp.einsum("ecd,edf->ecf", x, w) + jnp.einsum("ecd,edf->ecf", x, v)
        return lax.all_to_all(y, "m", split_axis=1, concat_axis=0, tiled=True)

    fn = mapped(body, (P("m"), P("m"), P("m")), P(None, "m"), check_vma)
    left(fn, [ints(0, 4, 8, 8), ints(1, 4, 8, 6), ints(2, 4, 8, 6)], "", "")


@BOTH
def test_what_is_no_product_keeps_the_sum_as_it_is(check_vma):
    def body(x, w, y, v):
        return lax.psum(x @ w + jnp.sum(y) * 2 + x[:, :1], "m")

    left(mapped(body, PAIR, P(), check_vma), pairs(), "")


@BOTH
def test_a_product_that_is_read_elsewhere_keeps_the_sum_as_it_is(check_vma):
    def body(x, w, y, v):
        part = x @ w
        return lax.psum(part + y @ v, "m"), part[None]

    left(mapped(body, PAIR, (P(), P("m")), check_vma), pairs(), "", "")

    def twice(x, w):
        part = x @ w
        return lax.psum(part + part, "m")

    left(mapped(twice, PAIR[:2], P(), check_vma), pairs(n=1), "")


@BOTH
def test_a_cast_of_one_term_that_widens_keeps_the_whole_sum(check_vma):
    def body(x, w, y, v):
        a = lax.dot(x, w, preferred_element_type=jnp.float16).astype(jnp.float32)
        return lax.psum(a + lax.dot(y, v, preferred_element_type=jnp.float32), "m")

    fn = mapped(body, PAIR, P(), check_vma)
    args = [jnp.full(s, 300, jnp.float16) for s in ((4, 8), (8, 4)) * 2]
    about_first = "a cast before the sum would change it after"
    with_it = "einsum 0 is left, and its result is added before the collective"
    left(fn, args, about_first, with_it)


@BOTH
def test_one_term_that_stays_keeps_the_others(check_vma):
    def body(x, w, y, v):
        with collmm.no_overlap():
            a = x @ w
        return lax.psum(a + y @ v, "m")

    fn = mapped(body, PAIR, P(), check_vma)
    left(fn, pairs(), "", "einsum 0 is left, and its result is added before the collective")


@BOTH
def test_an_override_of_one_term_is_one_of_the_sum(check_vma):
    def body(x, w, y, v):
        with jax.named_scope("kept"):
            a = x @ w
        return lax.psum(a + y @ v, "m")

    fn = mapped(body, PAIR, P(), check_vma)
    o = overlap_collectives(fn, Options("always", strict=True, overrides={"kept": "never"}))
    first, second = o.plan(*pairs()).decisions
    assert (first.reason, second.reason) == (Reason.OVERRIDE, Reason.OVERRIDE)
    assert "einsum 0 is left" in second.detail
    assert_equal_trees(o(*pairs()), fn(*pairs()))


def test_a_budget_counts_the_ring_once():
    fn = mapped(lambda x, w, y, v: lax.psum(x @ w + y @ v, "m"), PAIR, P())
    for budget, rewritten in ((3, 2), (2, 0)):
        o = overlap_collectives(fn, Options("always", strict=True, max_permutes=budget))
        assert len(o.plan(*pairs()).rewritten) == rewritten
        assert_equal_trees(o(*pairs()), fn(*pairs()))


def test_the_collective_is_paid_once():
    wide = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 16384), (16384, 8192)) * 2]

    def body(x, w, y, v):
        return lax.psum_scatter(x @ w + y @ v, "m", scatter_dimension=0, tiled=True)

    def single(x, w):
        return lax.psum_scatter(x @ w, "m", scatter_dimension=0, tiled=True)

    both = overlap_collectives(mapped(body, PAIR, P("m")), Options(strict=True))
    one = overlap_collectives(mapped(single, PAIR[:2], P("m")), Options(strict=True))
    first, second = (d.estimate for d in both.plan(*wide).decisions)
    (alone,) = (d.estimate for d in one.plan(*wide[:2]).decisions)
    assert first == second
    assert first.einsums == 2
    assert first.collective_s == alone.collective_s
    assert first.einsum_s == pytest.approx(2 * alone.einsum_s)


def attention_like(x, wq, wk, wv):
    return (x @ wq) * (x @ wk) + (x @ wv)


@BOTH
def test_gradients_of_three_projections_of_one_value(check_vma):
    """The input's gradient is the sum of three products, wanted whole: one ring."""
    fn = mapped(attention_like, (P(), *[P(None, "m")] * 3), P(None, "m"), check_vma)
    step = jax.jit(jax.grad(lambda *a: (fn(*a) * 2).sum(), argnums=(0, 1, 2, 3)))
    args = [ints(0, 16, 8), *(ints(k, 8, 12) for k in (1, 2, 3))]
    o = always(step)
    # With checks jax sums every product for itself and adds then; without, it adds first.
    assert rings(o, *args)[0] == ("scatter", 3)
    assert_equal_trees(o(*args), step(*args))
    if check_vma:
        found = collectives(o, *args)
        assert (found["all-gather"], found["all-reduce"]) == (1, 0)
        assert found["collective-permute"] == 3
    outer = always(fn)
    grad = jax.jit(jax.grad(lambda *a: (outer(*a) * 2).sum(), argnums=(0, 1, 2, 3)))
    assert_equal_trees(grad(*args), step(*args))


@BOTH
def test_sums_that_are_added_after_are_added_before_the_gather(check_vma):
    def body(x, w, y, v, r):
        return (r + lax.psum(x @ w, "m")) + lax.psum(y @ v, "m")

    fn = mapped(body, (*PAIR, P()), P(), check_vma)
    args = (*pairs(), ints(9, 16, 12))
    o = always(fn)
    assert_equal_trees(o(*args), fn(*args))
    assert rings(o, *args) == [("scatter", 2)]
    found = collectives(o, *args)
    assert (found["all-gather"], found["collective-permute"]) == (1, 3)


@BOTH
def test_sums_that_are_read_apart_too_stay_apart(check_vma):
    def body(x, w, y, v):
        a, b = lax.psum(x @ w, "m"), lax.psum(y @ v, "m")
        return a + b, a

    fn = mapped(body, PAIR, (P(), P()), check_vma)
    o = always(fn)
    assert_equal_trees(o(*pairs()), fn(*pairs()))
    assert rings(o, *pairs()) == [("scatter", 1), ("scatter", 1)]
    assert collectives(o, *pairs())["all-gather"] == 2


@BOTH
def test_inside_a_scan_and_under_checkpoint(check_vma):
    def body(x, ws, vs):
        @jax.checkpoint
        def layer(c, pair):
            w, v = pair
            return lax.psum(c @ w @ w.T + (c * 2) @ v @ v.T, "m") % 5, None

        return lax.scan(layer, x, (ws, vs))[0]

    specs = (P(), P(None, None, "m"), P(None, None, "m"))
    fn = mapped(body, specs, P(), check_vma)
    args = ints(0, 8, 8), ints(1, 3, 8, 16), ints(2, 3, 8, 16)
    o = always(fn)
    assert len(o.plan(*args).rewritten) == 2
    assert rings(o, *args) == [("scatter", 2)]
    assert_equal_trees(o(*args), fn(*args))
