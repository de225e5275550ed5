"""What the tests of the loops share: meshes, exact data, and counts over a jaxpr."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collmm.einsum import Einsum
from collmm.loops import PartialEinsum
from collmm.schedule import Schedule

FORMS = [(two_way, unroll) for two_way in (False, True) for unroll in (False, True)]


def mesh_of(**axes):
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def schedule_of(mesh, axes, two_way, unroll, **kwargs):
    size = math.prod(mesh.shape[axis] for axis in axes)
    return Schedule(tuple(axes), size, two_way, unroll, **kwargs)


def partial_of(equation, out_dtype=jnp.int32, preferred=None, precision=None):
    operands, out = equation.split("->")
    einsum = Einsum(*(tuple(map(ord, part)) for part in (*operands.split(","), out)))
    return PartialEinsum(einsum, precision, preferred, jnp.dtype(out_dtype))


def integers(rng, shape, dtype):
    """Small whole numbers, exact in every dtype used here."""
    return jnp.asarray(rng.integers(-4, 5, shape), dtype)


def every_device(mesh, fn, in_specs, check_vma=False):
    """``fn`` under shard_map and jit; each result gets one row per device, in mesh order."""

    def rows(*args):
        return jax.tree.map(lambda x: x[None], fn(*args))

    out = P(mesh.axis_names)
    mapped = jax.shard_map(rows, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=check_vma)
    return jax.jit(mapped)


def is_jaxpr(x):
    return hasattr(x, "eqns")


def walk(jaxpr, times=1):
    """Every equation with the number of times it runs, scans unfolded."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from walk(value, inner)


def runs(jaxpr, name):
    """How many times primitives of this name run."""
    return sum(times for eqn, times in walk(jaxpr) if eqn.primitive.name == name)


def size(jaxpr):
    """Equations in the program, each counted once however often it runs."""
    return sum(1 for _ in walk(jaxpr))


def ancestors(jaxpr, eqn):
    """The equations of one flat jaxpr that ``eqn`` depends on."""
    made_by = {out: e for e in jaxpr.eqns for out in e.outvars}
    found, todo = {}, [eqn]
    while todo:
        for var in todo.pop().invars:
            source = None if hasattr(var, "val") else made_by.get(var)
            if source is not None and id(source) not in found:
                found[id(source)] = source
                todo.append(source)
    return list(found.values())


def ring_body(jaxpr):
    """The flat jaxpr that holds the ring: the one inside the shard_map."""
    for eqn, _ in walk(jaxpr):
        if eqn.primitive.name == "shard_map":
            body = eqn.params["jaxpr"]
            return getattr(body, "jaxpr", body)
    raise AssertionError("no shard_map in this program")
