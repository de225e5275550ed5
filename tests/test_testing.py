"""assert_overlapped: what passes, and what each failure says."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import Options, assert_overlapped, overlap_collectives
from collmm.errors import OptionError, TargetError
from collmm.hlo.findings import Finding, Verdict
from collmm.hlo.metadata import SourceLine
from collmm.hlo.timeline import Timeline
from collmm.prediction import Prediction
from collmm.targets.installed import missing
from collmm.testing import _missing_in_schedule, _too_exposed

tpu = pytest.mark.skipif(missing("tpu") is not None, reason=str(missing("tpu")))
ALWAYS = Options(policy="always")
ROWS, WIDTH, HIDDEN = 64, 32, 128


@pytest.fixture(scope="module")
def mesh():
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((4,), ("model",), axis_types=auto, devices=jax.devices()[:4])


def arrays(mesh):
    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return (
        array(("model",), ROWS, WIDTH),
        array((None, "model"), WIDTH, HIDDEN),
        array(("model",), HIDDEN, WIDTH),
    )


def gathered_only(x, w, v):
    return jnp.tanh(x @ w)


def on(mesh, options=ALWAYS):
    def forward(x, w, v):
        y = jnp.tanh(x @ w) @ v
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("model")))

    return overlap_collectives(forward, options)


def test_rings_in_plan_and_program_pass(mesh):
    args = arrays(mesh)
    assert_overlapped(on(mesh), *args)
    assert_overlapped(on(mesh), *args, all_gather=1, reduce_scatter=1)
    assert_overlapped(on(mesh), *args, all_gather=0, reduce_scatter=1)


def test_real_arrays_are_neither_run_nor_donated(mesh):
    args = [jax.device_put(jnp.zeros(a.shape, a.dtype), a.sharding) for a in arrays(mesh)]
    step = overlap_collectives(jax.jit(gathered_only, donate_argnums=0), ALWAYS)
    assert_overlapped(step, *args, all_gather=1)
    assert not args[0].is_deleted()


def test_keyword_arguments_reach_the_function(mesh):
    x, w, v = arrays(mesh)
    assert_overlapped(on(mesh), x, w=w, v=v, all_gather=1)


def test_too_few_loops_name_both_numbers_and_show_the_plan(mesh):
    with pytest.raises(AssertionError) as caught:
        assert_overlapped(on(mesh), *arrays(mesh), all_gather=2, reduce_scatter=3)
    first, second, _, *rest = str(caught.value).splitlines()
    assert first == "expected at least 2 looped all-gather einsums, the plan has 1"
    assert second == "expected at least 3 looped reduce-scatter einsums, the plan has 1"
    assert rest[0] == "the plan:"
    assert "test_testing.py" in str(caught.value)


def test_a_plan_without_loops_fails_with_its_reasons(mesh):
    with pytest.raises(AssertionError) as caught:
        assert_overlapped(on(mesh, Options(policy="never")), *arrays(mesh))
    assert "expected a looped einsum, the plan has none" in str(caught.value)
    assert "leave: policy-never" in str(caught.value)
    assert_overlapped(on(mesh, Options(policy="never")), *arrays(mesh), all_gather=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"all_gather": -1}, r"all_gather=-1; give a whole number of einsums, or None"),
        ({"all_gather": True}, r"all_gather=True; give a whole number"),
        ({"reduce_scatter": 1.5}, r"reduce_scatter=1.5; give a whole number"),
        ({"max_exposed": 2, "target": "tpu:v5e:2x4"}, r"max_exposed=2; give a share"),
        ({"max_exposed": "0"}, r"max_exposed='0'; give a share"),
        ({"max_exposed": 0.1}, r"max_exposed needs times; give a target"),
        ({"max_exposed": 0.1, "target": "cpu:4"}, r"max_exposed needs times; give a target"),
    ],
)
def test_arguments_that_are_not_allowed(mesh, given, message):
    with pytest.raises(OptionError, match=message):
        assert_overlapped(on(mesh), *arrays(mesh), **given)


def test_an_undecorated_function_is_refused(mesh):
    with pytest.raises(OptionError, match=r"is not decorated; pass the result of overlap_coll"):
        assert_overlapped(jax.jit(gathered_only), *arrays(mesh))


def test_a_target_that_is_unknown_or_too_small(mesh):
    with pytest.raises(TargetError, match=r"is not one of cpu:N"):
        assert_overlapped(on(mesh), *arrays(mesh), target="v5e")
    with pytest.raises(TargetError, match=r"has 4 devices, tpu:v5e:2x4 has 8|is not installed"):
        assert_overlapped(on(mesh), *arrays(mesh), target="tpu:v5e:2x4")


def test_without_a_sharded_argument_a_target_has_no_mesh(mesh):
    plain = [jnp.zeros(a.shape) for a in arrays(mesh)]
    with pytest.raises(OptionError, match=r"no argument has a NamedSharding"):
        assert_overlapped(on(mesh), *plain, target="tpu:v5e:2x2")


# --- what a schedule lacks, on findings made by hand ---


def permute(verdict, executed=1, axes=("model",)):
    return Finding(
        *("collective-permute", "p", "main", 1, None, "", 64, 64, True, executed),
        axes=axes,
        pairs=((0, 1), (1, 0)),
        verdict=verdict,
        transfer=1.0,
        exposed=0.0 if verdict is Verdict.HIDDEN else 1.0,
    )


def schedule(*findings, exposed=0.0, compute=1.0):
    line = Timeline(tuple(findings), compute, exposed, 0.0)
    return Prediction(tuple(findings), line, ())


def test_rings_that_the_compiler_removed(mesh):
    plan = on(mesh).plan(*arrays(mesh))
    problem = "expected at least 3 permutes over model, the compiled program runs "
    assert _missing_in_schedule(plan, schedule()) == [f"{problem}0"]
    assert _missing_in_schedule(plan, schedule(permute(Verdict.HIDDEN, 2))) == [f"{problem}2"]
    other = permute(Verdict.HIDDEN, 9, axes=("data",))
    assert _missing_in_schedule(plan, schedule(other)) == [f"{problem}0"]
    assert _missing_in_schedule(plan, schedule(permute(Verdict.HIDDEN, 3))) == []
    assert _missing_in_schedule(plan, schedule(permute(Verdict.HIDDEN, None))) == []


def test_rings_that_hide_behind_nothing(mesh):
    plan = on(mesh).plan(*arrays(mesh))
    problem = ["no permute over model is hidden behind anything"]
    exposed, serialised = permute(Verdict.EXPOSED, 3), permute(Verdict.SERIALISED, 3)
    assert _missing_in_schedule(plan, schedule(exposed, serialised)) == problem
    partly = permute(Verdict.PARTLY_EXPOSED, 3)
    assert _missing_in_schedule(plan, schedule(exposed, partly)) == []


def test_a_collective_that_is_still_there_is_named(mesh):
    plan = on(mesh).plan(*arrays(mesh))
    site = plan.decisions[0].site
    gather = Finding(
        *("all-gather", "ag.1", "main", 1),
        *(SourceLine(site.location.file, site.location.line), ""),
        *(ROWS * WIDTH, ROWS * WIDTH * 4, False, 1),
        axes=("model",),
    )
    found = _missing_in_schedule(plan, schedule(permute(Verdict.HIDDEN, 3), gather))
    assert found == [f"the all-gather of {site.location} is still there, as ag.1"]


def test_too_much_exposed_names_the_shares():
    found = _too_exposed(schedule(exposed=1e-3, compute=3e-3), 0.1)
    assert found == [
        "expected at most 10.0% of the predicted step exposed, it is 25.0%: 1 ms of 4 ms"
    ]
    assert _too_exposed(schedule(exposed=1e-3, compute=3e-3), 0.25) == []
    assert _too_exposed(schedule(exposed=1e-3, compute=3e-3), None) == []


def test_an_unknown_exposure_is_no_zero():
    unknown = dataclasses.replace(permute(Verdict.UNKNOWN), exposed=None)
    assert _too_exposed(schedule(unknown), 0.5) == ["how much is exposed is not known: p"]


# --- on a target ---


@tpu
def test_cpu_arguments_are_moved_to_the_target(mesh):
    auto = (jax.sharding.AxisType.Auto,)
    cpu = jax.make_mesh((8,), ("model",), axis_types=auto, devices=jax.devices()[:8])

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(cpu, P(*spec)))

    args = array(("model",), 4096, 2048), array((None, "model"), 2048, 16384), 0
    step = overlap_collectives(jax.jit(gathered_only, static_argnums=2), ALWAYS)
    assert_overlapped(step, *args, all_gather=1, target="tpu:v5e:2x4")
    with pytest.raises(AssertionError) as caught:
        assert_overlapped(step, *args, max_exposed=0.0, target="tpu:v5e:2x4")
    assert "expected at most 0.0% of the predicted step exposed, it is " in str(caught.value)
    assert "times predicted" in str(caught.value)
    assert "for v5e" in str(caught.value)


@tpu
def test_a_function_that_names_its_own_devices_is_told_what_to_do():
    auto = (jax.sharding.AxisType.Auto,)
    cpu = jax.make_mesh((8,), ("model",), axis_types=auto, devices=jax.devices()[:8])
    with pytest.raises(OptionError, match=r"build it on parse_target\('tpu:v5e:2x4'\)\.mesh"):
        assert_overlapped(on(cpu), *arrays(cpu), target="tpu:v5e:2x4")
