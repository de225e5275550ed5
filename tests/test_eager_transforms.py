"""Transforms from outside jit: nothing is planned or compiled twice."""

import jax
import jax.numpy as jnp
import pytest
from rewritten import always, assert_equal_trees
from test_manual import ints
from test_share import put, wsc


def block(x, w, w2):
    h = wsc(x @ w, "data", None, "tp")
    return wsc(jnp.maximum(h, 0) @ w2, "data", "tp", None)


def arguments():
    x = put(ints(0, 4, 16, 8), "data", "tp", None)
    return x, put(ints(1, 8, 16), None, "tp"), put(ints(2, 16, 8), "tp", None)


def compilations(fn, *args):
    """Return how many programs jax compiles while ``fn`` runs."""
    events = []

    def listen(name, *rest, **kwargs):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(fn(*args))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(events)


@pytest.mark.parametrize("name", ["grad", "vmap", "jvp"])
def test_a_second_call_compiles_nothing(name):
    o, plain = always(jax.jit(block)), jax.jit(block)

    def transformed(f):
        if name == "grad":
            return jax.grad(lambda *a: (f(*a) * 2).sum(), argnums=(0, 1, 2))
        if name == "jvp":
            return lambda *a: jax.jvp(f, a, a)
        return lambda x, w, w2: jax.vmap(f, in_axes=(0, None, None))(jnp.stack([x, x]), w, w2)

    args = arguments()
    assert_equal_trees(transformed(o)(*args), transformed(plain)(*args))
    assert compilations(transformed(o), *args) == 0


def test_a_random_key_is_an_argument_like_any_other():
    def noisy(x, w, key):
        return wsc(x @ w, "data", None, "tp") * jax.random.randint(key, (), 1, 4)

    o = always(jax.jit(noisy))
    x, w, _ = arguments()
    key = jax.random.key(0)
    want = jax.jit(noisy)(x, w, key)
    assert_equal_trees(o(x, w, key), want)
    assert_equal_trees(jax.jit(lambda *a: o(*a))(x, w, key), want)
