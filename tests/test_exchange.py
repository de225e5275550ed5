"""All-to-all and einsum, split by peer: exact, one permute per peer, no all-to-all left."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives
from test_manual import ints, mesh_of

from collmm.sites import ALL_TO_ALL


def check(fn, *args, sites, permutes):
    o = always(fn)
    kinds = [d.collective.kind for d in o.plan(*args).rewritten]
    assert kinds == [ALL_TO_ALL] * sites
    assert_equal_trees(o(*args), fn(*args))
    after = collectives(o, *args)
    assert after["all-to-all"] == 0
    assert after["collective-permute"] == permutes


# The exchanged operand is [expert, token, feature]: it arrives in blocks of tokens.
EQUATIONS = {
    "free": "ecd,edf->ecf",
    "contracting": "ecd,ecf->edf",
    "batch": "ecd,ecdf->ecf",
}


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("case", ["free", "contracting", "batch"])
@pytest.mark.parametrize("side", [0, 1])
def test_an_exchanged_operand(n, case, side):
    mesh = mesh_of((n,), ("ep",))
    e, c, d, f = 2 * n, 3 * n, 5, 4
    equation = EQUATIONS[case]
    shape = {"free": (e, d, f), "contracting": (e, c, f), "batch": (e, c, d, f)}[case]
    lhs, rest = equation.split(",")
    rhs, out = rest.split("->")

    def body(x, w):
        x = lax.all_to_all(x, "ep", 0, 1, tiled=True)
        if side:
            return jnp.einsum(f"{rhs},{lhs}->{out}", w, x)
        return jnp.einsum(equation, x, w)

    fn = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P(None, "ep"), P("ep")), out_specs=P("ep"))
    )
    check(fn, ints(0, e, c, d), ints(1, *shape), sites=1, permutes=n - 1)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("split", [1, 2])
def test_an_exchanged_result(n, split):
    mesh = mesh_of((n,), ("ep",))

    def body(h, w):
        y = jnp.einsum("ecf,efd->ecd", h, w)
        return lax.all_to_all(y, "ep", split, 0, tiled=True)

    out = P(None, "ep") if split == 1 else P(None, None, "ep")
    fn = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("ep"), P("ep")), out_specs=out))
    check(fn, ints(0, 2 * n, 3 * n, 4), ints(1, 2 * n, 4, 2 * n), sites=1, permutes=n - 1)


MESH = mesh_of((2, 4), ("data", "ep"))


def put(a, *spec):
    return jax.device_put(a, NamedSharding(MESH, P(*spec)))


def experts(x, w1, w2):
    h = jnp.maximum(jnp.einsum("ecd,edf->ecf", x, w1), 0)
    y = jnp.einsum("ecf,efd->ecd", h, w2)
    return lax.with_sharding_constraint(y, NamedSharding(MESH, P(None, "ep", None)))


def arguments(dtype=jnp.float32):
    return (
        put(ints(0, 8, 16, 8, dtype=dtype), None, "ep", None),
        put(ints(1, 8, 8, 32, dtype=dtype), "ep", None, None),
        put(ints(2, 8, 32, 8, dtype=dtype), "ep", None, None),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bfloat16])
def test_expert_parallel_layers_by_sharding_alone(dtype):
    check(jax.jit(experts), *arguments(dtype), sites=2, permutes=6)


def test_their_gradients():
    fn = jax.jit(jax.grad(lambda *a: (experts(*a) * 2).sum(), argnums=(0, 1, 2)))
    o = always(fn)
    args = arguments()
    assert [d.collective.kind for d in o.plan(*args).rewritten] == [ALL_TO_ALL] * 4
    assert collectives(o, *args)["all-to-all"] == 0
    assert_equal_trees(o(*args), fn(*args))
    outside = jax.grad(lambda *a: (always(jax.jit(experts))(*a) * 2).sum(), argnums=(0, 1, 2))
    assert_equal_trees(outside(*args), fn(*args))


def test_a_form_that_is_not_split_by_peer_is_left_with_its_reason():
    def body(x, w):
        x = lax.all_to_all(x, "ep", 0, 1, tiled=True)
        return jnp.einsum("edc,edf->ecf", x.transpose(0, 2, 1), w)

    fn = jax.jit(
        jax.shard_map(body, mesh=MESH, in_specs=(P(None, "ep"), P("ep")), out_specs=P("ep"))
    )
    args = ints(0, 8, 16, 5), ints(1, 8, 5, 4)
    o = always(fn)
    assert [d.reason.code for d in o.plan(*args).decisions] == ["all-to-all"]
    assert_equal_trees(o(*args), fn(*args))
