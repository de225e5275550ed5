"""Meshes and compiled programs of targets; TPU and GPU tests need the wheels of their extras."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collmm.errors import TargetError
from collmm.targets import parse_target
from collmm.targets.installed import missing

tpu = pytest.mark.skipif(missing("tpu") is not None, reason=str(missing("tpu")))
gpu = pytest.mark.skipif(missing("gpu") is not None, reason=str(missing("gpu")))


def lowered(mesh, axis):
    """gelu(x @ w) with x sharded by rows over ``axis`` and wanted whole."""
    rows = 128 * mesh.shape[axis]
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P(axis)))
    w = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def layer(x, w):
        return jax.nn.gelu(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())) @ w)

    return jax.jit(layer).lower(x, w)


def compiled_text(name, sizes, options=None):
    target = parse_target(name)
    mesh = target.mesh(sizes)
    assert dict(mesh.shape) == sizes
    text = target.compile(lowered(mesh, list(sizes)[-1]), options).as_text()
    assert "is_scheduled=true" in text
    return text


def test_a_cpu_mesh_and_program():
    target = parse_target("cpu:8")
    mesh = target.mesh({"data": 2, "model": 4})
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert mesh.devices.flat[0].platform == "cpu"
    assert "all-gather" in target.compile(lowered(mesh, "model")).as_text()
    ring = target.ring(mesh, "model")
    assert (ring.kind, ring.axes, ring.link) == ("torus", (4,), 45e9)
    assert target.ring_order(mesh, ("data", "model")) == list(range(8))


def test_axis_types_reach_the_mesh():
    types = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = parse_target("cpu:4").mesh({"a": 2, "b": 2}, types)
    assert mesh.axis_types == types
    with pytest.raises(TargetError, match="1 axis types for the 2 axes of mesh a=2 x b=2"):
        parse_target("cpu:4").mesh({"a": 2, "b": 2}, types[:1])


def test_a_mesh_of_the_wrong_size_names_those_that_fit():
    with pytest.raises(TargetError) as caught:
        parse_target("cpu:8").mesh({"a": 2, "b": 8})
    assert str(caught.value) == "mesh a=2 x b=8 has 16 devices, cpu:8 has 8; 2 axes can be 2x4, 4x2"
    with pytest.raises(TargetError, match="cpu:8 has 8; 1 axis can be 8"):
        parse_target("cpu:8").mesh({"a": 4})
    with pytest.raises(TargetError, match="each axis needs a size of at least 1"):
        parse_target("cpu:8").mesh({"a": 8, "b": 0})
    with pytest.raises(TargetError, match="each axis needs a size of at least 1"):
        parse_target("cpu:8").mesh({})


def test_too_few_cpu_devices_name_the_flag():
    with pytest.raises(TargetError, match=r"device_count=4096 before jax starts"):
        parse_target("cpu:4096").mesh({"a": 4096})


@tpu
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tpu:v5e:2x4", {"data": 2, "model": 4}),
        ("tpu:v4:2x2x2", {"model": 8}),
        ("tpu:v6e:2x4", {"model": 8}),
        ("tpu:v5p:2x2x2", {"model": 8}),
        ("tpu:tpu7x:2x2x1", {"model": 8}),
        ("tpu:v5e:1x1", {"model": 1}),
    ],
)
def test_tpu_programs_compile_without_a_tpu(name, sizes):
    text = compiled_text(name, sizes)
    assert int(re.search(r'"estimated_cycles":"(\d+)"', text)[1]) > 0


@tpu
def test_the_compilers_own_decomposition_can_be_turned_off():
    target = parse_target("tpu:v5e:2x4")
    mesh = target.mesh({"model": 8})
    rows, columns = NamedSharding(mesh, P("model")), NamedSharding(mesh, P(None, "model"))
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16, sharding=rows)
    w = jax.ShapeDtypeStruct((4096, 16384), jnp.bfloat16, sharding=columns)
    program = jax.jit(jnp.dot, out_shardings=columns).lower(x, w)
    default = target.compile(program, target.baseline_options("default")).as_text()
    off = target.compile(program, target.baseline_options("off")).as_text()
    assert ("collective-permute" in default, "all-gather(" in default) == (True, False)
    assert "collective-permute" not in off
    assert "all-gather" in off


@tpu
def test_a_pod_of_1024_chips_has_its_mesh_and_its_torus():
    target = parse_target("tpu:v4:8x8x16")
    mesh = target.mesh({"data": 64, "model": 16})
    ring = target.ring(mesh, "model")
    assert (ring.axes, ring.wraps, ring.permute_load) == ((16,), (True,), (1, 1))
    assert target.ring(mesh, "data").axes == (8, 8)


@tpu
def test_the_compiler_is_told_of_the_wraparound():
    # Over a torus of 4x4x4 chips it gathers along three axes at once, over a mesh it does not.
    assert "3DAllGather" in compiled_text("tpu:v4:4x4x4", {"model": 64})


@tpu
def test_the_best_ring_order_on_a_real_mesh():
    target = parse_target("tpu:v5e:2x4")
    mesh = target.mesh({"model": 8})
    order = target.ring_order(mesh, "model")
    assert target.ring(mesh, "model").neighbour_hops == 2
    assert target.ring(mesh, "model", order).neighbour_hops == 1


@tpu
def test_a_mesh_that_is_not_made_of_torus_axes_names_those_that_are():
    with pytest.raises(TargetError) as caught:
        parse_target("tpu:v4:4x4x4").mesh({"a": 8, "b": 8})
    assert str(caught.value) == (
        "mesh a=8 x b=8 is not made of whole torus axes of tpu:v4:4x4x4; 2 axes can be 4x16, 16x4"
    )


@tpu
def test_an_option_the_compiler_lacks_is_one_line():
    with pytest.raises(TargetError, match="this compiler lacks an option") as caught:
        compiled_text("tpu:v5e:2x2", {"a": 4}, {"xla_tpu_no_such_option": True})
    assert "xla_tpu_no_such_option" in str(caught.value)
    assert "\n" not in str(caught.value)


@gpu
@pytest.mark.parametrize("model", ["a100", "h100", "h200", "b200", "gb200"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_gpu_programs_compile_without_a_gpu(model, hosts):
    name = f"gpu:{model}:{hosts}x8"
    text = compiled_text(name, {"data": hosts, "model": 8} if hosts > 1 else {"model": 8})
    assert "__cublas" in text
    assert ("exec_time_us" in text) is parse_target(name).timed


@gpu
def test_gpu_rings_know_their_hosts():
    target = parse_target("gpu:h100:2x8")
    mesh = target.mesh({"data": 2, "model": 8})
    assert target.ring(mesh, "model").kind == "switch"
    assert target.ring(mesh, "data").axes == (2, 1)
    assert target.ring(mesh, ("data", "model")).axes == (2, 8)
