"""Meshes whose axes are explicit: shardings are types, and stay what they were."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives
from test_manual import ints, mesh_of

AUTO = mesh_of((2, 4), ("data", "tp"))
MESH = Mesh(AUTO.devices, AUTO.axis_names, axis_types=(AxisType.Explicit,) * 2)


@pytest.fixture
def args():
    with jax.set_mesh(MESH):
        yield tuple(
            jax.device_put(ints(i, *shape), NamedSharding(MESH, P(*spec)))
            for i, (shape, spec) in enumerate(
                [
                    ((4, 16, 8), ("data", "tp", None)),
                    ((8, 16), (None, "tp")),
                    ((16, 8), ("tp", None)),
                ]
            )
        )


def mlp(x, w, w2):
    h = jnp.einsum("bsd,df->bsf", reshard(x, P("data", None, None)), w)
    return jnp.einsum("bsf,fd->bsd", jnp.maximum(h, 0), w2, out_sharding=P("data", "tp", None))


def mlp_with_reshard(x, w, w2):
    h = jnp.einsum("bsd,df->bsf", reshard(x, P("data", None, None)), w)
    y = jnp.einsum("bsf,fd->bsd", jnp.maximum(h, 0), w2, out_sharding=P("data", None, None))
    return reshard(y, P("data", "tp", None))


def left_unreduced(x, w, w2):
    h = jnp.einsum("bsd,df->bsf", reshard(x, P("data", None, None)), w)
    y = jnp.einsum("bsf,fd->bsd", h, w2, out_sharding=P("data", None, None, unreduced={"tp"}))
    return reshard(y, P("data", "tp", None))


@pytest.mark.parametrize("fn", [mlp, mlp_with_reshard])
def test_gather_and_scatter(fn, args):
    plain = jax.jit(fn)
    o = always(plain)
    assert len(o.plan(*args).rewritten) == 2
    assert_equal_trees(o(*args), plain(*args))
    assert jax.typeof(o(*args)) == jax.typeof(plain(*args))
    for rewritten in (o, jax.jit(lambda *a: o(*a))):
        found = collectives(rewritten, *args)
        assert found["all-gather"] == found["reduce-scatter"] == found["all-reduce"] == 0
        assert found["collective-permute"] > 0


@pytest.mark.parametrize("fn", [mlp, mlp_with_reshard, left_unreduced])
def test_gradients_inside_and_outside(fn, args):
    def gradient(f):
        return jax.jit(jax.grad(lambda *a: (f(*a) * 2).sum(), argnums=(0, 1, 2)))

    want = gradient(jax.jit(fn))(*args)
    assert_equal_trees(always(gradient(fn))(*args), want)
    assert_equal_trees(gradient(always(jax.jit(fn)))(*args), want)


def test_what_the_program_leaves_unreduced_is_left_alone(args):
    plain = jax.jit(left_unreduced)
    o = always(plain)
    gather, scatter = o.plan(*args).decisions
    assert gather.rewritten
    assert scatter.reason.code == "unreduced"
    assert_equal_trees(o(*args), plain(*args))
