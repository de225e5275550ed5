"""Rings in the bodies of scans, forward and backward: shared, and fed by shards that were saved."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives, rings

from collmm import Options, overlap_collectives
from collmm.ring import scatter_permutes

B, S, D, K, F, LAYERS = 4, 30, 8, 4, 30, 2
WEIGHTS = {
    "q": ((D, "h", K), (None, "tp", None)),
    "k": ((D, "h", K), (None, "tp", None)),
    "v": ((D, "h", K), (None, "tp", None)),
    "o": (("h", K, D), ("tp", None, None)),
    "gate": ((D, F), (None, "tp")),
    "up": ((D, F), (None, "tp")),
    "down": ((F, D), ("tp", None)),
}


class Model:
    """Attention-like and MLP-like halves with whole numbers, tensor and sequence parallel."""

    def __init__(self, n, written):
        """``n``: length of the tensor axis; ``written``: the gathers are written as constraints."""
        self.mesh = Mesh(np.array(jax.devices()[: 2 * n]).reshape(2, n), ("data", "tp"))
        self.n, self.written = n, written
        self.s = S if S % n == 0 else 4 * n
        self.f = F if F % n == 0 else 4 * n

    def wsc(self, x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def gathered(self, x):
        return self.wsc(x, "data", None, None) if self.written else x

    def layer(self, x, w):
        with jax.named_scope("attention"):
            g = self.gathered(x)
            q, k, v = (
                self.wsc(jnp.einsum("bsd,dhk->bshk", g, w[name]), "data", None, "tp", None)
                for name in "qkv"
            )
            y = jnp.einsum("bshk,hkd->bsd", q * k - v, w["o"])
            x = small(self.wsc(x + self.wsc(y, "data", "tp", None), "data", "tp", None))
        with jax.named_scope("mlp"):
            g = self.gathered(x)
            gate, up = (self.wsc(g @ w[name], "data", None, "tp") for name in ("gate", "up"))
            y = self.wsc((gate * up) @ w["down"], "data", "tp", None)
            return small(self.wsc(x + y, "data", "tp", None)), None

    def arguments(self):
        def put(a, *spec):
            return jax.device_put(a, NamedSharding(self.mesh, P(*spec)))

        rng = np.random.default_rng(0)

        def ints(*shape):
            return rng.integers(-2, 3, shape).astype(np.float64)

        sizes = {"h": self.n, F: self.f}
        ws = {
            name: put(ints(LAYERS, *(sizes.get(d, d) for d in shape)), None, *spec)
            for name, (shape, spec) in WEIGHTS.items()
        }
        return put(ints(B, self.s, D), "data", "tp", None), ws

    def gradients(self, body):
        def loss(x, ws):
            return (lax.scan(body, x, ws)[0] ** 2).sum()

        def step(x, ws):
            dx, dws = jax.grad(loss, argnums=(0, 1))(x, ws)
            dws = {k: self.wsc(w, None, *WEIGHTS[k][1]) for k, w in dws.items()}
            return self.wsc(dx, "data", "tp", None), dws

        return jax.jit(step)


def small(x):
    """Whole numbers below five, with the gradient of the identity."""
    return x - 5 * jnp.floor(x / 5)


def sent(model, o, args):
    """Permutes of the program if every ring is one: those of the sums as they are planned."""
    schedules = {
        d.site.location.line: d.schedule
        for d in o.plan(*args).rewritten
        if d.collective.kind == "reduce-scatter"
    }
    assert schedules
    counts = {
        scatter_permutes(model.n, model.s // model.n, s.accumulators) for s in schedules.values()
    }
    assert len(counts) == 1
    (each,) = counts
    found = [kind for kind, _ in rings(o, *args)]
    return found.count("gather") * (model.n - 1) + found.count("scatter") * each


FORWARD = [("gather", 3), ("scatter", 1), ("gather", 2), ("scatter", 1)]
# dY for dH and dW of down; x for dW of gate and up; both parts of dX. The same for attention.
BACKWARD = sorted(
    [("gather", 2), ("gather", 2), ("scatter", 2), ("gather", 2), ("gather", 3), ("scatter", 3)]
)
RECOMPUTED = sorted([("gather", 3), ("scatter", 1), ("gather", 2)])


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_forward_body(n):
    with jax.enable_x64(True):
        model = Model(n, written=True)
        args = model.arguments()
        fn = jax.jit(lambda x, ws: lax.scan(model.layer, x, ws)[0])
        o = always(fn)
        assert rings(o, *args) == FORWARD
        after = collectives(o, *args)
        assert after.pop("collective-permute") == sent(model, o, args)
        assert set(after.values()) == {0}
        assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("written", [False, True], ids=["implied", "written"])
@pytest.mark.parametrize("checkpoint", ["no", "yes", "dots"])
def test_forward_and_backward_bodies(checkpoint, written):
    check_gradients(4, checkpoint, written)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_rings_of_other_lengths(n):
    check_gradients(n, "no", True)


def check_gradients(n, checkpoint, written):
    with jax.enable_x64(True):
        model = Model(n, written)
        args = model.arguments()
        body = model.layer
        if checkpoint != "no":
            policies = {"yes": None, "dots": jax.checkpoint_policies.dots_saveable}
            body = jax.checkpoint(body, policy=policies[checkpoint])
        fn = model.gradients(body)
        o = always(fn)
        found = rings(o, *args)
        assert found[:4] == FORWARD
        again = RECOMPUTED if checkpoint == "yes" else []
        assert sorted(found[4:]) == sorted(BACKWARD + again)
        after = collectives(o, *args)
        # Recomputed einsums and dW gather one value on two rings, as dW needs what is recomputed.
        # Their permutes are equal, and the compiler keeps one of each.
        twice = 2 * (n - 1) if checkpoint == "yes" else 0
        assert after["collective-permute"] == sent(model, o, args) - twice
        assert after["all-gather"] == after["reduce-scatter"] == after["all-to-all"] == 0
        assert after["all-reduce"] <= 1  # the gradients of the weights, over data
        want = fn(*args)
        assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want)) < 2**53
        assert_equal_trees(o(*args), want)


def shapes_in(fn, *args):
    return set(re.findall(r"f64\[([\d,]+)\]", fn.lower(*args).compile().as_text()))


def test_what_is_saved_for_the_backward_body_is_a_shard():
    with jax.enable_x64(True):
        model = Model(4, written=True)
        args = model.arguments()
        fn = model.gradients(model.layer)
        whole = f"{LAYERS},{B // 2},{model.s},{D}"
        assert whole in shapes_in(fn, *args)  # as the compiler has it
        assert whole not in shapes_in(always(fn), *args)


def test_a_value_that_no_ring_gathers_again_is_saved_as_it_was():
    with jax.enable_x64(True):
        model = Model(4, written=True)
        args = model.arguments()
        fn = model.gradients(model.layer)
        o = overlap_collectives(
            fn, Options("always", strict=True, overrides={"mlp": "never"}, chains=False)
        )
        found = rings(o, *args)
        assert ("gather", 2) not in found[:2]
        assert sorted(found) == sorted(
            [("gather", 3), ("scatter", 1), ("gather", 2), ("gather", 3), ("scatter", 3)]
        )
        # The input of the MLP is still saved whole, that of attention is not.
        before = fn.lower(*args).compile().as_text()
        after = o.lower(*args).compile().as_text()
        whole = f"f64[{LAYERS},{B // 2},{model.s},{D}]"
        assert 0 < after.count(whole) < before.count(whole)
        assert_equal_trees(o(*args), fn(*args))


def test_a_saved_value_that_the_user_reads_too_is_left():
    with jax.enable_x64(True):
        model = Model(4, written=True)
        args = model.arguments()

        def layer(x, w):
            y, _ = model.layer(x, w)
            return y, model.gathered(x)

        def loss(x, ws):
            y, every = lax.scan(layer, x, ws)
            return (y**2).sum() + every.sum(), every

        fn = jax.jit(jax.grad(loss, argnums=1, has_aux=True))
        o = always(fn)
        assert_equal_trees(o(*args), fn(*args))
        assert o(*args)[1].sharding.is_equivalent_to(fn(*args)[1].sharding, 4)


def test_accumulated_gradients_have_their_loops_in_a_loop():
    with jax.enable_x64(True):
        model = Model(4, written=True)
        x, ws = model.arguments()
        step = model.gradients(model.layer)

        def accumulated(xs, ws):
            def turn(total, x):
                return jax.tree.map(jnp.add, total, step(x, ws)[1]), None

            return lax.scan(turn, jax.tree.map(jnp.zeros_like, ws), xs)[0]

        fn = jax.jit(accumulated)
        xs = jnp.stack([x, x + 1, x * 2])
        xs = jax.device_put(xs, NamedSharding(model.mesh, P(None, "data", "tp", None)))
        o = always(fn)
        found = rings(o, xs, ws)
        assert found[:4] == FORWARD
        assert sorted(found[4:]) == BACKWARD
        assert_equal_trees(o(xs, ws), fn(xs, ws))
