"""Gathers of what no turn of a loop changes: the compiler makes them once, and the plan knows."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees
from test_manual import MESH, ints

from collmm import Options, Reason, _jax, overlap_collectives

ROWS, WIDE = 2**14, 2**11
ONCE = [Reason.GATHERED_ONCE] if _jax.COMPILER_HOISTS_CONSTRAINTS else [None]


def wsc(a, *spec):
    return lax.with_sharding_constraint(a, NamedSharding(MESH, P(*spec)))


def types(rows=ROWS, wide=WIDE, dtype=jnp.bfloat16):
    def of(shape, *spec, kind=dtype):
        return jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(MESH, P(*spec)))

    return of((rows, wide), ("d", "m"), None), of((wide, wide), "m", None)


def layer(c, w):
    """One layer whose weight is sharded over m and gathered where it is used."""
    return wsc((c @ wsc(w, None, None)) % 5, ("d", "m"), None)


def in_scan(x, w):
    return lax.scan(lambda c, _: (layer(c, w), None), x, None, length=4)[0]


def in_fori(x, w):
    return lax.fori_loop(0, 4, lambda i, c: layer(c, w) + i.astype(c.dtype), x)


def in_while(x, w):
    def body(carry):
        i, c, same = carry
        return i + 1, layer(c, same), same

    return lax.while_loop(lambda carry: carry[0] < 4, body, (0, x, w))[1]


def nested(x, w):
    def outer(c, _):
        return in_scan(c, w), None

    return lax.scan(outer, x, None, length=2)[0]


def made_of_constants(x, w):
    return lax.scan(lambda c, _: (layer(c, w * 2), None), x, None, length=4)[0]


def worked_on(x, w):
    def step(c, _):
        return wsc(c @ (wsc(w, None, None) * 2).astype(c.dtype), ("d", "m"), None), None

    return lax.scan(step, x, None, length=4)[0]


def reasons(fn, *args):
    o = overlap_collectives(jax.jit(fn), Options(strict=True))
    return [d.reason for d in o.plan(*args).decisions]


@pytest.mark.parametrize("fn", [in_scan, in_fori, in_while, nested, made_of_constants, worked_on])
def test_the_same_in_every_turn(fn):
    assert reasons(fn, *types()) == ONCE


def stacked(x, w):
    ws = wsc(jnp.stack([w] * 4), None, "m", None)
    return lax.scan(lambda c, k: (layer(c, k), None), x, ws)[0]


def carried(x, w):
    def step(carry, _):
        c, k = carry
        return (layer(c, k), k * 2), None

    return lax.scan(step, (x, w), None, length=4)[0]


def of_a_turn(x, w):
    def step(c, i):
        return layer(c, w * i), None

    return lax.scan(step, x, jnp.arange(4, dtype=w.dtype))[0]


def one_turn(x, w):
    return lax.scan(lambda c, _: (layer(c, w), None), x, None, length=1)[0]


def unconstrained(x, w):
    def step(c, _):
        return wsc((c @ w) % 5, ("d", "m"), None), None

    return lax.scan(step, x, None, length=4)[0]


def constrained_as_it_is(x, w):
    """The constraint gathers nothing; the compiler gathers for the einsum, in every turn."""

    def step(c, _):
        return wsc((c @ wsc(w, "m", None)) % 5, ("d", "m"), None), None

    return lax.scan(step, x, None, length=4)[0]


@pytest.mark.parametrize(
    "fn", [layer, stacked, carried, of_a_turn, one_turn, unconstrained, constrained_as_it_is]
)
def test_another_one_in_every_turn_or_gathered_in_every_turn(fn):
    assert reasons(fn, *types()) == [None]


def test_by_hand_it_is_gathered_in_every_turn():
    def body(x, w):
        def step(c, _):
            return jnp.tanh(c @ lax.all_gather(w, "m", axis=0, tiled=True)), None

        return lax.scan(step, x, None, length=4)[0]

    specs = (P(("d", "m")), P("m"))
    fn = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=specs[0])
    assert reasons(fn, *types()) == [None]


def test_what_would_not_pay_in_one_turn_is_not_worth_it():
    assert reasons(in_scan, *types(rows=64, wide=64)) == [Reason.NOT_WORTH]


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_the_backward_pass_of_a_checkpoint_that_keeps_apart_gathers_in_every_turn(prevent_cse):
    def loss(x, w):
        body = jax.checkpoint(layer, prevent_cse=prevent_cse)
        y = lax.scan(lambda c, _: (body(c, w), None), x, None, length=4)[0]
        return y.astype(jnp.float32).sum()

    o = overlap_collectives(jax.jit(jax.grad(loss, argnums=(0, 1))), Options(strict=True))
    decisions = o.plan(*types()).decisions
    # jax takes the constraint out of the forward loop itself; of the backward one it does not.
    gathers = [d for d in decisions if d.collective and d.collective.kind == "all-gather"]
    assert len(gathers) == 2
    assert {d.reason for d in gathers} == ({None} if prevent_cse else set(ONCE))


def test_the_explanation_says_so():
    if not _jax.COMPILER_HOISTS_CONSTRAINTS:
        assert reasons(in_scan, *types()) == [None]
        return
    plan = overlap_collectives(jax.jit(in_scan), Options(strict=True)).plan(*types())
    (decision,) = plan.decisions
    assert re.fullmatch(r"before the loop; in it all-gather would take .* a turn", decision.detail)
    assert decision.estimate.before_s == pytest.approx(decision.estimate.einsum_s)
    assert "once, before the loop" in str(plan.explain())


@pytest.mark.parametrize("fn", [in_scan, in_fori, in_while, nested, worked_on])
def test_a_loop_that_is_asked_for_is_exact(fn):
    x, w = ints(0, 16, 8), ints(1, 8, 8)
    x = jax.device_put(x, NamedSharding(MESH, P(("d", "m"))))
    w = jax.device_put(w, NamedSharding(MESH, P("m")))
    fn = jax.jit(fn)
    o = always(fn)
    assert len(o.plan(x, w).rewritten) == 1
    assert_equal_trees(o(x, w), fn(x, w))
