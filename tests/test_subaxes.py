"""Shardings that split a mesh axis: heads and features of one sharded dimension; their rings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives, rings
from test_manual import ints, mesh_of

from collmm import Reason
from collmm.partition import DotSharding, _on_split_mesh
from collmm.sites import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from collmm.subaxes import join_axes, joined, on_split, read_axes, split_axes, whole_axes

SPLIT = (("d", 2), ("m:(1)4", 4), ("m:(4)2", 2))
WHOLE = (("d", 2), ("m", 8))


# --- names ---


def test_axes_are_read_with_their_parts():
    assert read_axes('[{}, {"x", "y":(1)2}, {"y":(2)4}]') == ((), ("x", "y:(1)2"), ("y:(2)4",))
    assert read_axes('"x", "y":(4)2') == (("x", "y:(4)2"),)


def test_a_mesh_is_split_at_every_end_of_a_part():
    assert split_axes(WHOLE, ["m:(4)2", "d"]) == SPLIT
    assert split_axes(WHOLE, ["m:(2)2"]) == (("d", 2), ("m:(1)2", 2), ("m:(2)2", 2), ("m:(4)2", 2))
    assert split_axes(WHOLE, ["m", "d"]) == WHOLE
    assert split_axes((("m", 12),), ["m:(1)4", "m:(1)6"]) is None


def test_axes_are_split_and_joined_again():
    assert on_split(("m", "d"), SPLIT) == ("m:(1)4", "m:(4)2", "d")
    finer = split_axes(WHOLE, ["m:(1)2", "m:(2)2"])
    assert on_split(("m:(1)4",), finer) == ("m:(1)2", "m:(2)2")
    assert whole_axes(SPLIT) == whole_axes(finer) == WHOLE
    assert joined(("d", "m:(1)4", "m:(4)2"), dict(WHOLE)) == ("d", "m")
    assert joined(("m:(2)2", "m:(4)2"), dict(WHOLE)) == ("m:(2)4",)
    assert joined(("m:(4)2", "m:(1)4"), dict(WHOLE)) == ("m:(4)2", "m:(1)4")


def test_the_text_of_a_module_is_put_back_on_the_whole_mesh():
    before = (
        'sdy.mesh @s = <["d"=2, "m:(1)4"=4, "m:(4)2"=2]> {a = [{name = "m:(1)4"}]}\n'
        '<@s, [{}, {"m:(4)2"}, {"d", "m:(1)4", "m:(4)2"}]> <@t, [{"d"}, {}]>'
    )
    after = 'sdy.mesh @s = <["d"=2, "m"=8]>\n<@s, [{}, {"m":(4)2}, {"d", "m"}]> <@t, [{"d"}, {}]>'
    assert join_axes(before, [SPLIT]) == after


def test_parts_that_overlap_are_refused():
    dot = DotSharding(lhs=(("m:(1)4",),), rhs=(("m:(1)6",),), out=(), axis_sizes=(("m", 12),))
    dot = _on_split_mesh(dot)
    assert dot.refusal is Reason.SUB_AXIS
    assert dot.detail == "parts that overlap: m:(1)4, m:(1)6"


# --- programs ---


def at(mesh, x, *axes):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


def attention(mesh, heads, kv_heads, width):
    """Attention without its softmax, so that whole numbers stay exact; heads of one dimension."""

    def fn(x, wq, wk, wv, wo):
        batch, length, _ = x.shape

        def project(w, *shape):
            return at(mesh, x @ w, None, None, "m").reshape(batch, length, *shape, width)

        q = project(wq, kv_heads, heads // kv_heads)
        k, v = project(wk, kv_heads), project(wv, kv_heads)
        scores = jnp.einsum("bqkgd,btkd->bkgqt", q, k)
        mixed = jnp.einsum("bkgqt,btkd->bqkgd", scores, v).reshape(batch, length, heads * width)
        return at(mesh, at(mesh, mixed, None, None, "m") @ wo, None, "m", None)

    return fn


def attention_arguments(mesh, heads, kv_heads, width):
    def put(x, *axes):
        return jax.device_put(jnp.sign(x), NamedSharding(mesh, P(*axes)))

    return (
        put(ints(0, 2, 8, 6), None, "m", None),
        put(ints(1, 6, heads * width), None, "m"),
        put(ints(2, 6, kv_heads * width), None, "m"),
        put(ints(3, 6, kv_heads * width), None, "m"),
        put(ints(4, heads * width, 6), "m", None),
    )


def without_sharding(fn, args):
    """The result on one device."""
    return fn(*(jnp.asarray(np.asarray(x)) for x in args))


def gradients(fn, several=False):
    def loss(*args):
        out = fn(*args)
        return jnp.sum(out), out

    return jax.value_and_grad(loss, tuple(range(5)), has_aux=True)


# heads, heads of keys and values, features per head; the axis has 8 devices.
GQA = {"kv-half": (8, 4, 8), "kv-quarter": (8, 2, 8), "kv-half-of-more": (16, 4, 4)}
FEW_HEADS = {"half": (4, 4, 8), "quarter": (2, 2, 8), "few-and-grouped": (4, 2, 8)}


@pytest.mark.parametrize("case", GQA)
def test_grouped_heads_gather_on_a_part_of_the_axis(case):
    mesh = mesh_of((8,), ("m",))
    fn, args = attention(mesh, *GQA[case]), attention_arguments(mesh, *GQA[case])
    o = always(jax.jit(fn))
    plan = o.plan(*args)
    found = [(d.collective.kind, d.collective.axes) for d in plan.decisions if d.rewritten]
    part = f"m:({GQA[case][1]}){8 // GQA[case][1]}"
    whole = [(ALL_GATHER, ("m",))] * 3
    assert found == [*whole, *[(ALL_GATHER, (part,))] * 2, (REDUCE_SCATTER, ("m",))]
    after = collectives(o, *args)
    assert after["all-gather"] == after["all-reduce"] == after["all-to-all"] == 0
    # The ring of x, those of k and v, and that of the sum, whose block is one row.
    assert after["collective-permute"] == 7 + 2 * (8 // GQA[case][1] - 1) + 7
    assert_equal_trees(np.asarray(o(*args)), np.asarray(without_sharding(fn, args)))


@pytest.mark.parametrize("case", {**GQA, **FEW_HEADS})
def test_gradients_of_attention_whose_heads_split_the_axis(case):
    sizes = {**GQA, **FEW_HEADS}[case]
    mesh = mesh_of((8,), ("m",))
    fn, args = gradients(attention(mesh, *sizes)), attention_arguments(mesh, *sizes)
    o = always(jax.jit(fn))
    plan = o.plan(*args)
    assert len(plan.rewritten) >= len(plan.decisions) - 1, plan
    got = jax.tree.map(np.asarray, o(*args))
    assert_equal_trees(got, jax.tree.map(np.asarray, without_sharding(fn, args)))


@pytest.mark.parametrize("case", FEW_HEADS)
def test_scores_of_few_heads_are_scattered_on_the_part_left_over(case):
    mesh = mesh_of((8,), ("m",))
    fn, args = attention(mesh, *FEW_HEADS[case]), attention_arguments(mesh, *FEW_HEADS[case])
    o = always(jax.jit(fn))
    plan = o.plan(*args)
    heads = FEW_HEADS[case][1]
    assert len(plan.rewritten) == len(plan.decisions) == 6, plan
    if case != "few-and-grouped":
        assert plan.decisions[3].collective.kind == ALL_REDUCE
        assert plan.decisions[3].collective.axes == (f"m:({heads}){8 // heads}",)
        after = collectives(o, *args)
        assert after["all-gather"] == after["all-reduce"] == after["all-to-all"] == 0
    assert_equal_trees(np.asarray(o(*args)), np.asarray(without_sharding(fn, args)))


def split_matmul(mesh, equation, shape):
    """``x`` is sharded, then reshaped to ``shape``, which splits its sharded dimension."""

    def fn(x, w):
        x = at(mesh, x * 2, None, "m").reshape(x.shape[0], *shape)
        return jnp.einsum(equation, x, w)

    return fn


@pytest.mark.parametrize("order", [None, [3, 0, 6, 1, 7, 2, 5, 4]])
@pytest.mark.parametrize("equation", ["bhd,hdf->bf", "bhd,hdf->bhf", "bhd,df->bhf", "bhd,bdf->bhf"])
def test_a_dimension_that_a_reshape_splits(equation, order):
    devices = np.array(jax.devices()[:8], dtype=object)
    devices = devices if order is None else devices[order]
    mesh = Mesh(devices.reshape(2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    labels = equation.split(",")[1].split("->")[0]
    w = ints(1, *({"b": 4, "h": 2, "d": 6, "f": 8}[x] for x in labels))
    args = jax.device_put((ints(0, 4, 12), w), NamedSharding(mesh, P()))
    inner = split_matmul(mesh, equation, (2, 6))

    def fn(x, w):
        out = inner(x, w)
        return jnp.sum(out * out), at(mesh, out, "d", *(None,) * (out.ndim - 2), "m")

    fn = jax.value_and_grad(fn, (0, 1), has_aux=True)
    o = always(jax.jit(fn))
    plan = o.plan(*args)
    split = [d for d in plan.decisions if ("m:(1)2", 2) in d.site.axis_sizes]
    assert any(d.rewritten for d in split), plan
    got = jax.tree.map(np.asarray, o(*args))
    assert_equal_trees(got, jax.tree.map(np.asarray, without_sharding(fn, args)))


def test_one_gathered_value_keeps_one_ring_where_only_one_reader_splits_the_axis():
    mesh = mesh_of((8,), ("m",))

    def fn(x, wq, wk):
        x = at(mesh, x, "m", None)
        q = at(mesh, x @ wq, None, "m")
        wk = at(mesh, wk, None, "m").reshape(6, 2, 8)
        k = jnp.einsum("sc,chd->shd", x, wk)
        return jnp.max(q, 0), jnp.max(k, (0, 2))

    args = ints(0, 8, 6), ints(1, 6, 16), ints(2, 6, 16)
    o = always(jax.jit(fn))
    assert rings(o, *args) == [("gather", 2)]
    assert collectives(o, *args)["collective-permute"] == 7
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("wrap", ["jit", "grad", "scan", "checkpoint"])
def test_under_other_transforms(wrap):
    mesh = mesh_of((8,), ("m",))
    fn, args = attention(mesh, 8, 4, 8), attention_arguments(mesh, 8, 4, 8)

    def wrapped(f):
        def loss(*args):
            return jnp.sum(f(*args))

        if wrap == "grad":
            return jax.grad(loss, tuple(range(5)))
        if wrap == "checkpoint":
            return jax.grad(jax.checkpoint(loss), tuple(range(5)))
        if wrap == "scan":
            # Whole numbers stay small: one of two steps is undone by the sign.
            return lambda x, *w: jax.lax.scan(lambda c, _: (jnp.sign(f(c, *w)), None), x, None, 2)
        return lambda *args: f(*args) * 2

    o = always(jax.jit(fn))
    got = jax.tree.map(np.asarray, jax.jit(wrapped(o))(*args))
    assert_equal_trees(got, jax.tree.map(np.asarray, without_sharding(wrapped(fn), args)))
    if wrap != "scan":
        text = jax.jit(wrapped(o)).lower(*args).compile().as_text()
        assert "collective-permute" in text


def test_a_call_between_reshapes_of_an_outer_jit_is_planned_with_what_can_be_told():
    mesh = mesh_of((8,), ("m",))
    inner = always(jax.jit(lambda q, k, w: jnp.einsum("bqkgd,btkd->bkgqt", q, k) @ w))

    def outer(call):
        def fn(q, k, w):
            q = at(mesh, q * 2, None, None, "m").reshape(2, 8, 4, 2, 8)
            k = at(mesh, k * 2, None, None, "m").reshape(2, 8, 4, 8)
            # Twice: the second call is lowered where the first one's ring stands already.
            return call(q, k, w) + call(q, k + 1, w)

        return fn

    args = ints(0, 2, 8, 64), ints(1, 2, 8, 32), ints(2, 8, 8)
    args = jax.device_put(args, NamedSharding(mesh, P()))
    got = np.asarray(jax.jit(outer(inner))(*args))
    assert_equal_trees(got, np.asarray(without_sharding(outer(inner.original), args)))


# --- parts of which no mesh is made ---

# Twelve devices as 4 x 3 for one operand and as 6 x 2 for the other: the first part of the one
# ends in the middle of a part of the other.
OVERLAPPING = {
    "free": ("abk,cdk->abcd", "m:(1)4, m:(1)6, m:(4)3, m:(6)2"),
    "batch": ("abk,bdk->adb", "m:(1)4, m:(3)2, m:(4)3, m:(6)2"),
    "contracting": ("abk,bdk->ad", "m:(1)4, m:(3)2, m:(4)3, m:(6)2"),
}


@pytest.mark.parametrize("case", OVERLAPPING)
def test_a_program_with_parts_that_overlap_runs_as_it_was(case):
    equation, parts = OVERLAPPING[case]
    mesh = mesh_of((12,), ("m",))

    @jax.jit
    def fn(x, y):
        return jnp.einsum(equation, x.reshape(4, 6, 8), y.reshape(6, 2, 8))

    rows = NamedSharding(mesh, P("m", None))
    x, y = (jax.device_put(ints(i, n, 8), rows) for i, n in enumerate((24, 12)))
    o = always(fn)
    (decision,) = o.plan(x, y).decisions
    assert (decision.reason, decision.detail) == (Reason.SUB_AXIS, f"parts that overlap: {parts}")
    assert_equal_trees(o(x, y), fn(x, y))
    assert_equal_trees(o(x, y), fn(np.asarray(x), np.asarray(y)))
    assert o.lower(x, y).as_text() == fn.lower(x, y).as_text()


def test_what_a_scan_saves_under_a_constraint_that_names_the_whole_of_a_split_axis():
    mesh = mesh_of((4, 2), ("d", "m"))

    def at(x, *axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def loss(x, q, k, v):
        def turn(c, _):
            h = at(c, "m", "d", None)
            y = at(h @ q, None, "m", "d") + at(h @ k, "d", "m", None) - at(h @ v, "d", None, "m")
            return jnp.where(abs(y) > 3, 0, y), c[0].sum()

        y, sums = jax.lax.scan(turn, x, None, length=3)
        return jnp.sum(y), sums

    x = jax.device_put(ints(0, 8, 8, 16), NamedSharding(mesh, P(None, None, "d")))
    specs = P("d", "m"), P(("d", "m"), None), P(None, ("d", "m"))
    ws = [jax.device_put(ints(i, 16, 16), NamedSharding(mesh, s)) for i, s in enumerate(specs)]
    fn = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))
    o = always(fn)
    assert rings(o, x, *ws)
    assert_equal_trees(o(x, *ws), fn(x, *ws))
