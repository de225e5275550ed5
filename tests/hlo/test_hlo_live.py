"""The text of the installed jax, compiled here for CPU, reads as it should."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collmm.hlo.audit import audit
from collmm.hlo.collectives import summarize
from collmm.hlo.findings import Verdict
from collmm.hlo.parse import parse


@pytest.fixture(scope="module")
def mesh():
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=auto, devices=jax.devices()[:8])


def compiled(mesh, function, *arrays):
    """The optimized text of ``function`` on float32 arguments of (shape, spec)."""
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in arrays
    ]
    return parse(jax.jit(function).lower(*args).compile().as_text())


def test_a_scanned_ring(mesh):
    down = [(i, (i - 1) % 4) for i in range(4)]

    def body(x):
        turn = lambda x, _: (lax.ppermute(x, "model", down) * 2, None)  # noqa: E731  [turn]
        return lax.scan(turn, x, length=6)[0]

    ring = jax.shard_map(body, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))
    module = compiled(mesh, ring, ((16, 32), P("data", "model")))
    found = summarize(module)["collective-permute"]
    shard = 16 * 32 * 4 // 8
    assert (found.count, found.bytes, found.executed) == (1, shard, 6)
    (f,) = audit(module, mesh_axes={"data": 2, "model": 4})
    assert (f.axes, f.shift, f.verdict) == (("model",), -1, Verdict.EXPOSED)
    assert f.source.file == __file__
    with open(__file__) as source:
        assert "[turn]" in source.readlines()[f.source.line - 1]


def test_an_einsum_with_gathers_over_both_axes(mesh):
    def einsum(x, w):
        return lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", "model")))

    arrays = ((16, 32), P("data", "model")), ((32, 64), P("data", "model"))
    module = compiled(mesh, einsum, *arrays)
    findings = audit(module, mesh_axes={"data": 2, "model": 4})
    gathered = {f.axes: f for f in findings if f.kind == "all-gather"}
    assert set(gathered) == {("data",), ("model",)}
    assert gathered["model",].result_bytes == 8 * 32 * 4  # half the rows of x
    assert gathered["data",].result_bytes == 32 * 16 * 4  # a quarter of w's columns
    assert all(f.executed == 1 for f in findings)
    assert module.num_partitions == 8
