"""Which einsums depend on which, and how much of a collective they hide."""

import jax
import jax.numpy as jnp
import pytest

from collmm.capture import capture
from collmm.cost.hiding import hidden_seconds
from collmm.einsum import Einsum
from collmm.sites import ALL_GATHER, Collective, EinsumSite

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def facts(fn, *args):
    """(body, ready, needed) of every einsum, in program order."""
    found = capture(jax.jit(fn).trace(*args).jaxpr).dots
    return [(d.dependence.body, d.dependence.ready, d.dependence.needed) for d in found]


def test_a_chain_of_einsums():
    def fn(x, a, b):
        return jnp.tanh(x @ a) @ b

    assert facts(fn, X, X, X) == [(0, (-1, -1), 1), (0, (0, -1), -1)]


def test_what_is_made_of_parameters_waits_for_no_einsum():
    def fn(x, a, b):
        return (x @ a) @ (b * 2).T

    assert facts(fn, X, X, X)[1] == (0, (0, -1), -1)


def test_gradients_of_weights_are_needed_by_nothing():
    def fn(x, a, b):
        return jax.grad(lambda ab: jnp.sum(jnp.tanh(x @ ab[0]) @ ab[1]))((a, b))

    # h = x a, y = h b, dB, dh, dA: nothing reads y again, and no einsum what is a gradient.
    assert [needed for _, _, needed in facts(fn, X, X, X)] == [1, -1, -1, 4, -1]


def test_nested_functions_and_checkpoints_are_part_of_the_body_they_stand_in():
    @jax.checkpoint
    def layer(x, a):
        return jnp.tanh(x @ a)

    def fn(x, a, b):
        return layer(layer(x, a), b)

    assert facts(fn, X, X, X) == [(0, (-1, -1), 1), (0, (0, -1), -1)]


def test_a_loop_is_a_body_of_its_own():
    def fn(x, ws, b):
        def step(x, w):
            return x @ w, None

        return jax.lax.scan(step, x, ws)[0] @ b

    ws = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    assert facts(fn, X, ws, X) == [(1, (-1, -1), -1), (0, (0, -1), -1)]


def test_what_a_loop_reads_is_needed_by_its_first_einsum():
    def fn(x, a):
        def step(x, _):
            return jnp.tanh(x @ a) @ a, None

        return jax.lax.scan(step, x @ a, None, length=3)[0]

    assert [needed for _, _, needed in facts(fn, X, X)] == [1, 2, -1]


@pytest.mark.parametrize("n", [200, 400])
def test_dependences_are_linear(n):
    """Every equation is looked at a fixed number of times."""
    from collmm import dependence

    seen = 0

    def site_of(eqn):
        nonlocal seen
        seen += 1
        return None

    def fn(x):
        for _ in range(n):
            x = jnp.tanh(x)
        return x

    closed = jax.make_jaxpr(fn)(X)
    dependence.dependences(closed.jaxpr, site_of)
    assert seen == 2 * len(closed.jaxpr.eqns)


# --- what is hidden ---

MATMUL = Einsum((0, 1), (1, 2), (0, 2))


def site(index, ready, *, source=-1, axes=("fsdp",)):
    c = Collective(ALL_GATHER, 1, 0, axes, 1000)
    return EinsumSite(
        index,
        MATMUL,
        ((8, 8),) * 3,
        ("float32",) * 3,
        (4, 4, 4),
        collectives=(c,),
        ready=ready,
        sources=(-1, source),
    )


def hidden(sites, einsum, gather):
    seconds = {s.index: einsum for s in sites}
    moved = {(s.index, s.collectives[0]): gather for s in sites}
    found = hidden_seconds(sites, seconds, moved)
    return [found[s.index, s.collectives[0]].hidden_s for s in sites]


def displaced(sites, einsum, gather):
    seconds = {s.index: einsum for s in sites}
    found = hidden_seconds(sites, seconds, {(s.index, s.collectives[0]): gather for s in sites})
    return [found[s.index, s.collectives[0]].displaced_s for s in sites]


def test_parameters_are_gathered_behind_earlier_einsums():
    sites = [site(0, (-1, -1)), site(1, (0, -1)), site(2, (1, -1))]
    # The first has nothing before it.
    assert hidden(sites, 1.0, 0.75) == [0.0, 0.75, 0.75]


def test_gathers_over_the_same_axes_queue_for_their_links():
    sites = [site(0, (-1, -1)), site(1, (0, -1)), site(2, (1, -1))]
    # 1.5 s each, and one second of einsum before every next one.
    assert hidden(sites, 1.0, 1.5) == [0.0, 1.0, 1.0]
    apart = [site(0, (-1, -1)), site(1, (0, -1)), site(2, (1, -1), axes=("model",))]
    assert hidden(apart, 1.0, 1.5) == [0.0, 1.0, 1.5]


def test_activations_that_the_einsum_before_made_are_exposed():
    sites = [site(0, (-1, -1)), site(1, (-1, 0)), site(2, (-1, 1))]
    assert hidden(sites, 1.0, 0.5) == [0.0, 0.0, 0.0]


def test_one_value_is_gathered_once():
    sites = [site(0, (-1, -1)), site(1, (0, -1), source=7), site(2, (1, -1), source=7)]
    assert hidden(sites, 1.0, 1.5) == [0.0, 1.0, 1.0]
    third = [*sites, site(3, (2, -1))]
    assert hidden(third, 1.0, 1.5)[3] == 1.5


def test_a_ring_would_push_aside_what_runs_behind_its_einsum():
    sites = [site(0, (-1, -1)), site(1, (0, -1)), site(2, (1, -1))]
    # The gathers of 1 and 2 run from 0 to 0.75 and from 0.75 to 1.5; an einsum takes 1.
    assert displaced(sites, 1.0, 0.75) == [1.0, 0.5, 0.0]
    other = [site(0, (-1, -1), axes=("model",)), site(1, (0, -1)), site(2, (1, -1))]
    assert displaced(other, 1.0, 0.75)[0] == 0.0
