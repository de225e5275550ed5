"""A ring that visits its members in another order than the mesh's gives the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_manual import ints, mesh_of

from collmm.einsum import Einsum
from collmm.errors import OptionError
from collmm.loops import (
    Consumer,
    PartialEinsum,
    all_gather_einsum,
    all_to_all_einsum,
    einsum_reduce_scatter,
)
from collmm.schedule import Schedule

MATMUL = PartialEinsum(Einsum((0, 1), (1, 2), (0, 2)), None, None, jnp.float32)
EXPERTS = PartialEinsum(Einsum((0, 1, 2), (0, 2, 3), (0, 1, 3)), None, None, jnp.float32)


def shuffled(n, seed):
    return tuple(int(i) for i in np.random.default_rng(seed).permutation(n))


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
@pytest.mark.parametrize(
    ("two_way", "unroll", "chains"),
    [
        (True, True, None),
        (True, False, None),
        (False, False, None),
        (True, True, 2),
        (False, False, 2),
    ],
)
def test_gather_and_scatter_on_a_shuffled_ring(n, two_way, unroll, chains):
    mesh = mesh_of((n,), ("m",))
    schedule = Schedule(("m",), n, two_way, unroll, chains=chains, order=shuffled(n, n))

    def body(x, w, w2):
        (h,) = all_gather_einsum(x, [w], [Consumer(MATMUL, 0)], schedule, gathered_dim=0)
        return einsum_reduce_scatter([(h, w2, MATMUL)], 0, schedule)

    x, w, w2 = ints(0, 3 * n, 4), ints(1, 4, 2 * n), ints(2, 2 * n, 5)
    specs = (P("m", None), P(None, "m"), P("m", None))
    fn = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("m", None), check_vma=False)
    assert (jax.jit(fn)(x, w, w2) == x @ w @ w2).all()


@pytest.mark.parametrize("n", [3, 4, 8])
def test_exchange_with_shuffled_peers(n):
    mesh = mesh_of((n,), ("m",))
    schedule = Schedule(("m",), n, False, True, order=shuffled(n, n))

    def body(x, w):
        return all_to_all_einsum(x, w, Consumer(EXPERTS, 0), schedule, split_dim=0, join_dim=1)

    x, w = ints(0, n, 2 * n, 3), ints(1, n, 3, 4)
    fn = jax.shard_map(
        body, mesh=mesh, in_specs=(P(None, "m"), P("m")), out_specs=P("m"), check_vma=False
    )
    assert (jax.jit(fn)(x, w) == jnp.einsum("ecd,edf->ecf", x, w)).all()


def test_two_axes_in_another_order_than_the_mesh():
    mesh = mesh_of((2, 4), ("a", "b"))
    schedule = Schedule(("b", "a"), 8, True, True, order=shuffled(8, 1))

    def body(x, w):
        (y,) = all_gather_einsum(x, [w], [Consumer(MATMUL, 0)], schedule, gathered_dim=0)
        return y

    x, w = ints(0, 16, 4), ints(1, 4, 5)
    fn = jax.shard_map(
        body, mesh=mesh, in_specs=(P(("b", "a")), P()), out_specs=P(), check_vma=False
    )
    assert (jax.jit(fn)(x, w) == x @ w).all()


def test_an_order_that_misses_a_member_is_refused():
    with pytest.raises(OptionError, match="each of the 4 members once"):
        Schedule(("m",), 4, True, True, order=(0, 1, 2, 2))
