"""Chains: gather, einsum, elementwise, einsum, scatter on one ring, equal to the plain program."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import Options, overlap_collectives
from collmm.chained import chained_einsums_p
from collmm.chaining import chain_rings
from collmm.loops.chained import ChainLoop
from collmm.primitives import all_gather_einsum_p, einsum_reduce_scatter_p

ALWAYS = Options(policy="always", strict=True)
RINGS = (2, 3, 4, 5, 8)


def mesh_of(n, **others):
    size = int(np.prod(list(others.values()), dtype=int)) * n
    shape = (*others.values(), n)
    return Mesh(np.array(jax.devices()[:size]).reshape(shape), (*others, "model"))


def arrays(mesh, dtype, *shapes):
    rng = np.random.default_rng(7)
    return [
        jax.device_put(
            jnp.asarray(rng.integers(-3, 4, shape), dtype), NamedSharding(mesh, P(*spec))
        )
        for shape, spec in shapes
    ]


def count(jaxpr, primitive):
    found = sum(e.primitive is primitive for e in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(sub, "jaxpr", sub)
            found += count(inner, primitive) if hasattr(inner, "eqns") else 0
    return found


def rings_in(fn, *args):
    jaxpr = fn.trace(*args).jaxpr.jaxpr
    kinds = (chained_einsums_p, all_gather_einsum_p, einsum_reduce_scatter_p)
    return tuple(count(jaxpr, kind) for kind in kinds)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def mlp(mesh, act, batch=None):
    """act(x @ w + b) @ v with the sequence dimension scattered before and after."""

    def keep(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def fn(x, w, b, v):
        x = keep(x, batch)
        h = keep(jnp.einsum("bsd,df->bsf", x, w), batch, None, "model") + b
        a = keep(act(h), batch, None, "model")
        return keep(jnp.einsum("bsf,fd->bsd", a, v), batch, "model")

    return fn


def mlp_args(mesh, n, dtype, batch=None, rows=2, shard=3):
    return arrays(
        mesh,
        dtype,
        ((rows, shard * n, 6), (batch, "model")),
        ((6, 16 * n), (None, "model")),
        ((16 * n,), ("model",)),
        ((16 * n, 6), ("model",)),
    )


def square_plus(h):
    return jnp.maximum(h, -2) * h + 1


@pytest.mark.parametrize("chip", ["v5e", "h100"])
@pytest.mark.parametrize("n", RINGS)
def test_a_chain_gives_the_integers_of_the_plain_program(n, chip):
    mesh = mesh_of(n)
    args = mlp_args(mesh, n, jnp.int32)
    plain = jax.jit(mlp(mesh, square_plus))
    ours = overlap_collectives(plain, Options(policy="always", strict=True, chip=chip))
    assert rings_in(ours, *args) == (1, 0, 0)
    same(ours(*args), plain(*args))


@pytest.mark.parametrize("n", RINGS)
def test_gradients_chain_too_and_are_exact(n):
    mesh = mesh_of(n)
    args = mlp_args(mesh, n, jnp.float32)
    fn = mlp(mesh, lambda h: jax.nn.relu(jnp.clip(h, -3, 3)) * h)
    plain = jax.jit(jax.grad(lambda *a: (fn(*a) * a[0]).sum(), argnums=(0, 1, 2, 3)))
    ours = overlap_collectives(plain, ALWAYS)
    # Forward; backward with dw2 on its ring; dw1 gathers x once more.
    assert rings_in(ours, *args) == (2, 1, 0)
    same(ours(*args), plain(*args))


def test_the_saved_residual_is_one_hidden_value_and_no_gathered_one():
    mesh = mesh_of(4)
    args = mlp_args(mesh, 4, jnp.float32)
    fn = mlp(mesh, jax.nn.gelu)
    ours = overlap_collectives(jax.jit(jax.grad(lambda *a: (fn(*a) ** 2).sum(), (1, 3))), ALWAYS)
    jaxpr = ours.trace(*args).jaxpr.jaxpr
    first = next(e for e in jaxpr.eqns if e.primitive is chained_einsums_p)
    assert [v.aval.shape for v in first.outvars] == [(2, 12, 6), (2, 12, 64)]
    assert "all-gather" not in ours.lower(*args).compile().as_text()


def test_nothing_of_the_hidden_size_exists_where_nobody_reads_it():
    n = 4
    mesh = mesh_of(n)
    args = mlp_args(mesh, n, jnp.float32, rows=1, shard=8)
    text = overlap_collectives(jax.jit(mlp(mesh, jax.nn.gelu)), ALWAYS).lower(*args)
    text = text.compile().as_text()
    assert "f32[1,32,16]" not in text  # one device's share of the hidden value
    assert "f32[1,32,6]" not in text  # the gathered operand
    # Three sends of each of four parts, for the shards and for the sums.
    assert text.count(" collective-permute(") + text.count(" collective-permute-start(") == 24


@pytest.mark.parametrize("forms", list(itertools.product(("one-way", "two-way"), repeat=2)))
def test_rings_that_were_planned_in_different_directions_are_chained(forms):
    mesh = mesh_of(4)
    args = mlp_args(mesh, 4, jnp.int32)

    def keep(a, *spec):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*spec)))

    def fn(x, w, b, v):
        x = keep(x)
        with jax.named_scope("up"):
            h = keep(jnp.einsum("bsd,df->bsf", x, w), None, None, "model") + b
        with jax.named_scope("down"):
            y = jnp.einsum("bsf,fd->bsd", keep(square_plus(h), None, None, "model"), v)
        return keep(y, None, "model")

    plain = jax.jit(fn)
    overrides = dict(zip(("up", "down"), forms, strict=True))
    ours = overlap_collectives(plain, Options("always", strict=True, overrides=overrides))
    assert rings_in(ours, *args) == (1, 0, 0)
    same(ours(*args), plain(*args))


def test_two_einsums_into_one_elementwise_part():
    n = 4
    mesh = mesh_of(n, data=2)
    x, w, _, v = mlp_args(mesh, n, jnp.int32, batch="data")

    def keep(a, *spec):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P("data", *spec)))

    def fn(x, gate, up, v):
        x = keep(x)
        g = keep(jnp.einsum("bsd,df->bsf", x, gate), None, "model")
        u = keep(jnp.einsum("bsd,df->bsf", x, up), None, "model")
        a = keep(jnp.maximum(g, 0) * u, None, "model")
        return keep(jnp.einsum("bsf,fd->bsd", a, v), "model")

    plain = jax.jit(fn)
    ours = overlap_collectives(plain, ALWAYS)
    assert rings_in(ours, x, w, w + 1, v) == (1, 0, 0)
    same(ours(x, w, w + 1, v), plain(x, w, w + 1, v))


def test_chains_in_a_scan_over_layers_and_its_gradient():
    n = 4
    mesh = mesh_of(n)
    x, w, b, v = mlp_args(mesh, n, jnp.float32)
    layers = [jnp.stack([a, a - 1]) for a in (w, b, v)]
    fn = mlp(mesh, lambda h: jnp.clip(h, -2, 2))

    def loss(x, *layers):
        def body(x, layer):
            return jnp.clip(fn(x, *layer), -2, 2), None

        return jax.lax.scan(body, x, layers)[0].sum()

    plain = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    ours = overlap_collectives(plain, ALWAYS)
    assert rings_in(ours, x, *layers)[0] == 2
    same(ours(x, *layers), plain(x, *layers))


def test_a_hand_written_chain_inside_shard_map():
    n = 4
    mesh = mesh_of(n)
    x, w, _, v = mlp_args(mesh, n, jnp.int32)

    @jax.jit
    def plain(x, w, v):
        def body(x, w, v):
            h = jnp.einsum("bsd,df->bsf", jax.lax.all_gather(x, "model", axis=1, tiled=True), w)
            y = jnp.einsum("bsf,fd->bsd", square_plus(h), v)
            return jax.lax.psum_scatter(y, "model", scatter_dimension=1, tiled=True)

        specs = (P(None, "model"), P(None, "model"), P("model"))
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(None, "model"))(x, w, v)

    ours = overlap_collectives(plain, ALWAYS)
    assert rings_in(ours, x, w, v) == (1, 0, 0)
    same(ours(x, w, v), plain(x, w, v))


def test_half_precision_sums_are_rounded_once():
    n = 8
    mesh = mesh_of(n)
    args = mlp_args(mesh, n, jnp.bfloat16)
    fn = mlp(mesh, lambda h: jnp.clip(h, -4, 4))
    exact = jax.jit(fn)(*(a.astype(jnp.float32) for a in args))
    ours = overlap_collectives(jax.jit(fn), ALWAYS)
    assert rings_in(ours, *args) == (1, 0, 0)
    same(ours(*args), exact.astype(jnp.bfloat16))


def reduced(h):
    return h - h.max(axis=1, keepdims=True)


def shifted(h):
    return jnp.roll(h, 1, axis=1)


@pytest.mark.parametrize("act", [reduced, shifted, lambda h: jnp.flip(h, 1)])
def test_what_is_not_elementwise_is_not_chained(act):
    mesh = mesh_of(4)
    args = mlp_args(mesh, 4, jnp.int32)
    plain = jax.jit(mlp(mesh, act))
    ours = overlap_collectives(plain, ALWAYS)
    assert rings_in(ours, *args) == (0, 1, 1)
    same(ours(*args), plain(*args))


def test_row_scales_masks_and_residuals_are_cut_with_the_shards():
    n = 4
    mesh = mesh_of(n)
    x, w, b, v = mlp_args(mesh, n, jnp.int32)
    scale, mask = arrays(
        mesh, jnp.int32, ((2, 3 * n, 1), ()), ((2, 3 * n, 16 * n), (None, None, "model"))
    )

    def fn(x, w, b, v, scale, mask):
        return mlp(mesh, lambda h: jnp.where(mask > 0, h * scale, mask) - h.astype(jnp.int32))(
            x, w, b, v
        )

    plain = jax.jit(fn)
    ours = overlap_collectives(plain, ALWAYS)
    assert rings_in(ours, x, w, b, v, scale, mask) == (1, 0, 0)
    same(ours(x, w, b, v, scale, mask), plain(x, w, b, v, scale, mask))


def test_a_chain_is_not_made_of_what_waits_for_itself():
    """The second weight depends on the first einsum, so the rings cannot be one."""
    n = 4
    mesh = mesh_of(n)
    x, w, b, v = mlp_args(mesh, n, jnp.int32)

    def keep(a, *spec):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*spec)))

    def fn(x, w, b, v):
        h = keep(jnp.einsum("bsd,df->bsf", keep(x), w), None, None, "model") + b
        v = v * jnp.max(h)
        return keep(jnp.einsum("bsf,fd->bsd", keep(h, None, None, "model"), v), None, "model")

    plain = jax.jit(fn)
    ours = overlap_collectives(plain, ALWAYS)
    assert rings_in(ours, x, w, b, v) == (0, 1, 1)
    same(ours(x, w, b, v), plain(x, w, b, v))


def test_chains_can_be_switched_off_and_done_twice_change_nothing():
    mesh = mesh_of(4)
    args = mlp_args(mesh, 4, jnp.int32)
    plain = jax.jit(mlp(mesh, square_plus))
    apart = overlap_collectives(plain, Options(policy="always", chains=False))
    assert rings_in(apart, *args) == (0, 1, 1)
    once = overlap_collectives(plain, ALWAYS).trace(*args).jaxpr.jaxpr
    assert str(chain_rings(once)) == str(once)
    same(apart(*args), plain(*args))


def test_the_source_line_survives():
    mesh = mesh_of(4)
    args = mlp_args(mesh, 4, jnp.int32)
    text = overlap_collectives(jax.jit(mlp(mesh, square_plus)), ALWAYS).lower(*args).compile()
    permutes = [x for x in text.as_text().splitlines() if " collective-permute" in x]
    assert permutes
    assert all("test_chaining.py" in x or "stack_frame_id" in x for x in permutes)


@pytest.mark.parametrize(
    ("n", "two_way", "unroll"), list(itertools.product(RINGS, *[(True, False)] * 2))
)
def test_the_loop_alone_every_way(n, two_way, unroll):
    """The loop itself, its kept results and a contracting consumer, against numpy."""
    from collmm.einsum import Einsum
    from collmm.loops import Consumer, PartialEinsum
    from collmm.schedule import Schedule

    mesh = mesh_of(n)
    rng = np.random.default_rng(n)
    x = rng.integers(-3, 4, (5 * n, 4)).astype(np.int32)
    w = rng.integers(-3, 4, (4, 2 * n)).astype(np.int32)
    z = rng.integers(-3, 4, (5 * n, 3 * n)).astype(np.int32)
    v = rng.integers(-3, 4, (2 * n, 4)).astype(np.int32)

    def partial(lhs, rhs, out):
        return PartialEinsum(Einsum(lhs, rhs, out), None, None, jnp.int32)

    def body(x, w, z, v):
        return ChainLoop(
            schedule=Schedule(("model",), n, two_way and n > 2, unroll),
            shard=x,
            dim=0,
            locals_=(w, z),
            consumers=(
                Consumer(partial((0, 1), (1, 2), (0, 2)), 0),
                Consumer(partial((0, 1), (0, 3), (1, 3)), 0),
            ),
            takes=(0,),
            middle=lambda h: [h * h - 1, h + 2],
            middle_dim=0,
            extras=(),
            operands=((0, v),),
            terms=(partial((0, 1), (1, 2), (0, 2)),),
            out_dim=0,
            kept_consumers=(0, 1),
            kept_middle=(1,),
            keep_gathered=True,
        ).run()

    specs = (P("model"), P(None, "model"), P(None, "model"), P("model"))
    outs = (P("model"), P(None, "model"), P(None, "model"), P(None, "model"), P())
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=list(outs), check_vma=False)
    got = jax.jit(run)(x, w, z, v)
    h = x @ w
    same(got, [(h * h - 1) @ v, h, x.T @ z, h + 2, x])
