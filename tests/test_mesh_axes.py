"""Meshes of every make: axes of one device, axes that nothing names, devices in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees, collectives
from test_manual import ints

# The axes, how x's rows and w's columns are sharded, and the length of the ring.
MESHES = {
    "one-device-axis-before": ({"one": 1, "m": 4}, ("one", "m"), ("one", "m"), 4),
    "one-device-axis-after": ({"m": 4, "one": 1}, ("m", "one"), ("m", "one"), 4),
    "one-device-axis-elsewhere": ({"one": 1, "m": 4}, ("m",), ("one", "m"), 4),
    "unnamed-axis": ({"d": 2, "m": 4}, ("m",), ("m",), 4),
    "two-unnamed-axes": ({"d": 2, "m": 2, "e": 2}, ("m",), ("m",), 2),
    "outer-of-two": ({"d": 2, "m": 3}, ("d",), ("d",), 2),
    "both-of-two": ({"d": 2, "m": 3}, ("d", "m"), ("d", "m"), 6),
    "middle-of-three": ({"d": 2, "m": 2, "e": 2}, ("m", "e"), ("m", "e"), 4),
}
ORDERS = ("in-order", "reversed", "shuffled")


def mesh_of(axes, order):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))], dtype=object)
    if order == "reversed":
        devices = devices[::-1]
    elif order == "shuffled":
        devices = devices[np.random.default_rng(5).permutation(len(devices))]
    kinds = (AxisType.Auto,) * len(axes)
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=kinds)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", MESHES)
def test_gather_and_scatter_with_gradients(case, order):
    axes, rows, columns, ring = MESHES[case]
    mesh = mesh_of(axes, order)

    def at(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def loss(x, up, down):
        h = at(at(x, rows, None) @ at(up, None, columns), None, columns)
        out = at(h @ at(down, columns, None), rows, None)
        return jnp.sum(out * out), out

    args = ints(0, 12, 5), ints(1, 5, 12), ints(2, 12, 7)
    fn = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    o = always(jax.jit(fn))
    plan = o.plan(*args)
    assert len(plan.rewritten) == len(plan.decisions) == 6, plan
    assert {d.site.ring_size(d.collective) for d in plan.rewritten} == {ring}
    assert collectives(o, *args)["reduce-scatter"] == 0
    plain = jax.value_and_grad(
        lambda x, up, down: (jnp.sum((x @ up @ down) ** 2), x @ up @ down), (0, 1, 2), has_aux=True
    )
    assert_equal_trees(o(*args), plain(*args))
