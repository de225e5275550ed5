"""A ring hands out what it gathers where something else needs it whole: one transfer, not two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives, rings
from ringtools import FORMS, mesh_of
from test_manual import ints, mapped

from collmm import Options, Reason, _jax, overlap_collectives
from collmm.einsum import Einsum
from collmm.loops import Consumer, PartialEinsum
from collmm.primitives import GatherUse, all_gather_einsum, all_gather_einsum_p
from collmm.ring import scatter_permutes
from collmm.schedule import Schedule

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tp"))


def put(a, *spec):
    return jax.device_put(a, NamedSharding(MESH, P(*spec)))


def wsc(a, *spec):
    return lax.with_sharding_constraint(a, NamedSharding(MESH, P(*spec)))


def whole(x):
    return wsc(x, "data", None, None)


def operands():
    x = put(ints(0, 4, 16, 8), "data", "tp", None)
    return x, *(put(ints(i, 8, 16), None, "tp") for i in (1, 2, 3))


def handing_out(fn, *args):
    """Whether each gather ring of the program hands out, in program order."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive is all_gather_einsum_p:
                found.append(eqn.params["hand_out"])
            for _, _, sub in _jax.jaxprs_in(eqn):
                walk(_jax.open_jaxpr(sub))

    walk(fn.trace(*args).jaxpr.jaxpr)
    return found


def check(fn, *args, hands_out, permutes=3, gathers=0):
    """Equal values, rings that hand out as said, and no more collectives than said."""
    o = always(fn)
    assert handing_out(o, *args) == hands_out
    found = collectives(o, *args)
    assert (found["collective-permute"], found["all-gather"]) == (permutes, gathers)
    assert_equal_trees(o(*args), fn(*args))
    return o


# --- the primitive ---


def one_ring(n, form):
    """A ring of n: the gathered label free, contracting and batch; plain is what it equals."""
    mesh = mesh_of(m=n)
    schedule = Schedule(("m",), n, *form)
    uses = []
    for lhs, rhs, out, local in (
        ("asd", "df", "asf", ((), ())),
        ("asd", "sf", "adf", ((), ())),
        ("asd", "sdf", "sfa", ((), (), ())),
    ):
        einsum = Einsum(*(tuple(map(ord, labels)) for labels in (lhs, rhs, out)))
        consumer = Consumer(PartialEinsum(einsum, None, None, jnp.dtype("float32")), 0)
        uses.append(GatherUse(consumer, local, ((),) * 3))

    def fn(x, *ws):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "m", None)))
        return all_gather_einsum(
            x,
            ws,
            uses,
            gathered_spec=((), ("m",), ()),
            dim=1,
            schedule=schedule,
            mesh=mesh,
            hand_out=True,
        )

    def plain(x, a, b, c):
        outs = [jnp.einsum(s, x, w) for s, w in (("asd,df->asf", a), ("asd,sf->adf", b))]
        return [*outs, jnp.einsum("asd,sdf->sfa", x, c), x]

    args = ints(0, 2, 2 * n, 3), ints(1, 3, 4), ints(2, 2 * n, 4), ints(3, 2 * n, 3, 4)
    return fn, plain, args


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_values_tangents_and_cotangents_with_the_gathered_value(n, form):
    fn, plain, args = one_ring(n, form)
    tangents = tuple(ints(10 + i, *x.shape) for i, x in enumerate(args))
    cts = [ints(20 + i, *y.shape) for i, y in enumerate(jax.eval_shape(plain, *args))]

    def everything(f):
        def run(args, tangents, cts):
            outs, pull = jax.vjp(f, *args)
            return outs, jax.jvp(f, args, tangents)[1], pull(cts)

        return run

    got = jax.jit(everything(fn))(args, tangents, cts)
    assert_equal_trees(got, everything(plain)(args, tangents, cts))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_by_product_costs_no_permute(n, form):
    fn, _, args = one_ring(n, form)
    text = jax.jit(fn).lower(*args).as_text()
    found = text.count("stablehlo.collective_permute")
    # A rolled ring has its sends in the text once each, however often they run.
    assert found == n - 1 if form[1] else 1 <= found <= 5
    assert "all_gather" not in text


def test_only_a_cotangent_of_the_value_itself_needs_no_ring():
    fn, _, args = one_ring(4, (True, True))
    grad = jax.jit(jax.grad(lambda x: jnp.sum(fn(x, *args[1:])[-1] * 3)))
    np.testing.assert_array_equal(grad(args[0]), np.full(args[0].shape, 3.0))


# --- constraints that gather ---


def test_a_value_that_is_read_whole_as_well_comes_from_the_ring():
    @jax.jit
    def fn(x, wq, wk, wv):
        g = whole(x)
        return wsc(g @ wq, "data", None, "tp"), wsc(g @ wk, "data", None, "tp"), jnp.cos(g)

    check(fn, *operands(), hands_out=[True])


def test_nothing_is_handed_out_that_nothing_reads():
    @jax.jit
    def fn(x, wq, wk, wv):
        g = whole(x)
        return wsc(g @ wq, "data", None, "tp"), jnp.cos(x)

    check(fn, *operands(), hands_out=[False])


def test_a_reader_in_front_of_the_ring_waits_for_it():
    @jax.jit
    def fn(x, wq, wk, wv):
        g = whole(x)
        before = g[:, ::-1] * 2  # a reversal needs every shard
        w = wq + wk.sum()
        return wsc(g @ w, "data", None, "tp"), before

    check(fn, *operands(), hands_out=[True])


def test_a_ring_that_needs_the_reader_cannot_serve_it():
    @jax.jit
    def fn(x, wq, wk, wv):
        g = whole(x)
        w = wq + jnp.flip(g, 1).sum()
        return wsc(g @ w, "data", None, "tp"), jnp.flip(g, 1)

    o = always(fn)
    args = operands()
    assert handing_out(o, *args) == [False]
    assert collectives(o, *args)["all-gather"] == 1
    assert_equal_trees(o(*args), fn(*args))


def test_an_einsum_of_the_gathered_value_with_itself():
    @jax.jit
    def fn(x, wq, wk, wv):
        g = whole(x)
        return jnp.einsum("bsd,btd->bst", g, g), wsc(g @ wq, "data", None, "tp"), jnp.cos(g)

    o = always(fn)
    args = operands()
    assert_equal_trees(o(*args), fn(*args))
    assert collectives(o, *args)["all-gather"] <= 1


def test_the_gathered_value_itself_as_a_result():
    @jax.jit
    def fn(x, wq, wk, wv):
        g = whole(x)
        return g, wsc(g @ wq, "data", None, "tp")

    o = check(fn, *operands(), hands_out=[True])
    got, want = o(*operands())[0], fn(*operands())[0]
    assert got.sharding.is_equivalent_to(want.sharding, 3)


def test_a_constraint_written_twice_is_gathered_once():
    @jax.jit
    def fn(x, wq, wk, wv):
        a = wsc(whole(x) @ wq, "data", None, "tp")
        return a, jnp.cos(whole(x)), jnp.flip(whole(x), 1)

    check(fn, *operands(), hands_out=[True])


def test_a_constraint_to_another_sharding_keeps_its_own_gather():
    @jax.jit
    def fn(x, wq, wk, wv):
        return wsc(whole(x) @ wq, "data", None, "tp"), jnp.flip(wsc(x, None, None, None), (0, 1))

    o = always(fn)
    args = operands()
    assert handing_out(o, *args) == [False]
    assert_equal_trees(o(*args), fn(*args))


def loss_with_a_whole_reader(x, w, v):
    g = whole(x)
    h = wsc(g @ w, "data", None, "tp")
    # The statistics go over the gathered dimension, so they need the value whole.
    return (h * jnp.flip(h, 1)).sum() + (jnp.flip(g, 1) * g * v).sum()


@pytest.mark.parametrize("wrap", ["plain", "checkpoint"])
def test_gradients_where_the_value_is_read_whole_as_well(wrap):
    f = loss_with_a_whole_reader
    if wrap == "checkpoint":
        f = jax.checkpoint(f)

    @jax.jit
    def fn(x, w, v):
        value, (dx, dw) = jax.value_and_grad(f, argnums=(0, 1))(x, w, v)
        return value, wsc(dx, "data", "tp", None), dw

    x, w, _, _ = operands()
    args = x, w, put(ints(7, 8))
    o = always(fn)
    assert any(handing_out(o, *args))
    assert collectives(o, *args)["all-gather"] == 0
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_inside_a_scan_body_forward_and_backward(checkpoint):
    def step(c, w):
        g = whole(c)
        h = wsc(g @ w, "data", None, "tp")
        y = wsc(jnp.einsum("bsf,df->bsd", h, w), "data", "tp", None)
        y = wsc(y + jnp.flip(g, 1), "data", "tp", None)
        return y - 5 * jnp.floor(y / 5), None

    body = jax.checkpoint(step) if checkpoint else step

    def loss(x, ws):
        return (lax.scan(body, x, ws)[0] * 2).sum()

    x, *ws = operands()
    args = x, put(jnp.stack(ws), None, None, "tp")
    forward = jax.jit(lambda x, ws: lax.scan(step, x, ws)[0])
    schedule = always(forward).plan(*args).decisions[1].schedule
    sent = scatter_permutes(4, 4, schedule.accumulators)
    o = check(forward, *args, hands_out=[True], permutes=3 + sent)
    assert rings(o, *args) == [("gather", 1), ("scatter", 1)]
    fn = jax.jit(jax.grad(loss, argnums=(0, 1)))
    o = always(fn)
    assert True in handing_out(o, *args)
    assert_equal_trees(o(*args), fn(*args))


def test_reshards_of_explicit_axes():
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(AxisType.Explicit,) * 2)

    def at(a, *spec):
        return jax.device_put(a, NamedSharding(mesh, P(*spec)))

    @jax.jit
    def fn(x, w):
        g = jax.sharding.reshard(x, P("data", None, None))
        return jnp.einsum("bsd,df->bsf", g, w), jnp.flip(g, 1)

    with jax.set_mesh(mesh):
        args = at(ints(0, 4, 16, 8), "data", "tp", None), at(ints(1, 8, 16), None, "tp")
        check(fn, *args, hands_out=[True])


# --- einsums that gather the same value and were left, or loop something else ---


def test_an_einsum_that_no_loop_takes_reads_what_another_ones_ring_gathers():
    @jax.jit
    def fn(x, w, w4):
        a = wsc(jnp.einsum("bsd,df->bsf", x, w), "data", None, "tp")
        b = jnp.einsum("bsd,df->bsf", x, w4, preferred_element_type=jnp.int32)
        return a, wsc(b, "data", None, "tp")

    x = put(ints(0, 4, 16, 8, dtype=jnp.int8), "data", "tp", None)
    w = put(ints(1, 8, 16, dtype=jnp.int8), None, "tp")
    w4 = put(ints(2, 8, 16).astype(jnp.int4), None, "tp")
    o = always(fn)
    reasons = [d.reason for d in o.plan(x, w, w4).decisions]
    assert reasons == [None, Reason.UNSUPPORTED_DTYPE]
    check(fn, x, w, w4, hands_out=[True])


def test_an_einsum_that_is_forbidden_to_loop_reads_what_another_ones_ring_gathers():
    @jax.jit
    def fn(x, w, v):
        with jax.named_scope("first"):
            a = wsc(jnp.einsum("bsd,df->bsf", x, w), "data", None, "tp")
        with jax.named_scope("second"):
            return a, wsc(jnp.einsum("bsd,df->bsf", x, v), "data", None, "tp")

    args = operands()[:3]
    o = overlap_collectives(fn, Options("always", strict=True, overrides={"second": "never"}))
    assert [d.reason for d in o.plan(*args).decisions] == [None, Reason.OVERRIDE]
    assert handing_out(o, *args) == [True]
    assert collectives(o, *args)["all-gather"] == 0
    assert_equal_trees(o(*args), fn(*args))


def test_an_einsum_that_loops_its_sum_reads_what_another_ones_ring_gathers(monkeypatch):
    # Else the model would have both share the ring of x, which is right at these sizes.
    monkeypatch.setattr("collmm.plan._groups", lambda sites: [])

    @jax.jit
    def fn(x, w, dy):
        h = wsc(jnp.einsum("bsd,df->bsf", x, w), "data", None, "tp")
        # Gathers x too, but loops its sum over data.
        dw = wsc(jnp.einsum("bsd,bsf->df", x, dy), "data", "tp")
        return h, dw

    x = put(ints(0, 4, 16, 32), "data", "tp", None)
    args = x, put(ints(1, 32, 32), None, "tp"), put(ints(2, 4, 16, 32), "data", None, "tp")
    o = always(fn)
    assert [d.collective.kind for d in o.plan(*args).decisions] == ["all-gather", "reduce-scatter"]
    check(fn, *args, hands_out=[True], permutes=3 + 1)


# --- inside a shard_map ---


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("tiled", [True, False])
def test_a_hand_written_gather_that_others_read_too_disappears(tiled, check_vma):
    def body(x, w):
        g = lax.all_gather(x, "m", axis=0, tiled=tiled)
        before = jnp.cos(g).sum(keepdims=True)
        return jnp.einsum("...d,df->...f", g, w), before, jnp.flip(g, 0)[None]

    out = P(None, "m") if tiled else P(None, None, "m")
    fn = mapped(body, (P("m", None), P(None, "m")), (out, P("m"), P("m")), check_vma)
    check(fn, ints(0, 16, 8), ints(1, 8, 16), hands_out=[True])


def test_two_dots_and_another_reader_of_one_hand_written_gather():
    def body(x, wq, wk):
        g = lax.all_gather(x, "m", axis=0, tiled=True)
        return g @ wq, g @ wk, jnp.flip(g, 0)

    specs = (P("m", None), P(None, "m"), P(None, "m"))
    fn = mapped(body, specs, (P(None, "m"),) * 2 + (P("m"),))
    o = check(fn, ints(0, 16, 8), ints(1, 8, 8), ints(2, 8, 16), hands_out=[True])
    assert rings(o, ints(0, 16, 8), ints(1, 8, 8), ints(2, 8, 16)) == [("gather", 2)]


@pytest.mark.parametrize(("read", "hands_out"), [("cast", True), ("value", False)])
def test_what_travels_is_handed_out_and_what_was_cast_from_is_not(read, hands_out):
    def body(x, w):
        g = lax.all_gather(x, "m", axis=0, tiled=True)
        c = g.astype(jnp.float32)
        return c @ w, jnp.flip(c if read == "cast" else g, 0)

    fn = mapped(body, (P("m", None), P(None, "m")), (P(None, "m"), P("m")))
    args = ints(0, 16, 8, dtype=jnp.int32), ints(1, 8, 16)
    check(fn, *args, hands_out=[hands_out], gathers=not hands_out)


def test_a_hand_written_gather_over_two_axes_is_handed_out():
    def body(x, w):
        g = lax.all_gather(x, ("d", "m"), axis=0, tiled=True)
        return g @ w, jnp.flip(g, 0)

    fn = mapped(body, (P(("d", "m"), None), P()), (P(), P()), check_vma=False)
    check(fn, ints(0, 16, 8), ints(1, 8, 4), hands_out=[True], permutes=7)


def test_the_product_of_a_hand_written_gather_with_itself():
    def body(x):
        g = lax.all_gather(x, "m", axis=0, tiled=True)
        return g @ g.T, jnp.einsum("sd,td->st", g, g)

    fn = mapped(body, (P("m", None),), (P(), P()), check_vma=False)
    o = always(fn)
    assert_equal_trees(o(ints(0, 16, 8)), fn(ints(0, 16, 8)))
    assert collectives(o, ints(0, 16, 8))["all-gather"] == 1
