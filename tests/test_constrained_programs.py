"""Constraints on whole programs: what they force, forbid and warn of; numbers stay exact."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from steptools import ALWAYS, arguments, make_mesh, make_step, same, whole_numbers

from collmm import Options, OverrideWarning, Reason, overlap_collectives
from collmm.budget import permutes
from collmm.constraints import form_for, read_overrides


@pytest.fixture
def mesh():
    return make_mesh()


def named_step(mesh):
    """The step of ``steptools`` with a name scope round each einsum."""

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    def step(x, up, down):
        with jax.named_scope("mlp"):
            with jax.named_scope("up"):
                h = jnp.einsum("bsk,kf->bsf", x, up)
            h = jax.lax.with_sharding_constraint(jnp.maximum(h, 0), on("d", None, "m"))
            with jax.named_scope("down"):
                y = jnp.einsum("bsf,fk->bsk", h, down)
            return jax.lax.with_sharding_constraint(y, on("d", "m", None))

    return step


def answer(x, up, down):
    return np.maximum(np.asarray(x) @ np.asarray(up), 0) @ np.asarray(down)


def planned(mesh, step=None, **options):
    return overlap_collectives(step or named_step(mesh), Options(**options)).plan(*arguments(mesh))


# --- overrides ---


def test_never_by_scope_and_by_line(mesh):
    first, second = planned(mesh, policy="always", overrides={"mlp/up": "never"}).decisions
    assert (first.reason, first.schedule) == (Reason.OVERRIDE, None)
    assert second.rewritten
    at = second.site.location
    overrides = {f"{at.file}:{at.line}": "never"}
    first, second = planned(mesh, policy="always", overrides=overrides).decisions
    assert first.rewritten
    assert second.reason is Reason.OVERRIDE


def test_always_whatever_the_policy_is(mesh):
    for policy in ("auto", "never"):
        step = overlap_collectives(
            named_step(mesh), Options(policy=policy, overrides={"down": "always"})
        )
        args = arguments(mesh)
        first, second = step.plan(*args).decisions
        assert not first.rewritten
        assert second.rewritten
        assert second.detail == "override 'always'"
        same(step(*args), answer(*args))


FORMS = [
    " ".join(words)
    for words in itertools.product(("one-way", "two-way", ""), ("rolled", "unrolled", ""))
    if any(words)
]


@pytest.mark.parametrize("form", [" ".join(f.split()) for f in FORMS])
@pytest.mark.parametrize("chip", ["v5e", "h100"])
def test_a_form_is_made_as_asked_for(mesh, form, chip):
    options = Options(chip=chip, overrides={"mlp": form})
    step = overlap_collectives(named_step(mesh), options)
    args = arguments(mesh, dtype=np.int32)
    for d in step.plan(*args).decisions:
        assert form_for(d.site, read_overrides({"mlp": form})).admits(d.schedule)
    same(step(*args), answer(*args))


def test_a_form_on_a_ring_of_two(mesh):
    def step(x, w):
        return x @ w

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    x, w = whole_numbers(8, 8, seed=1), whole_numbers(8, 8, seed=2)
    args = put(x, "d", None), put(w, None, "d")
    for form in ("two-way unrolled", "two-way rolled", "one-way rolled"):
        overlapped = overlap_collectives(step, Options(overrides={"step": form}))
        # A function that is not nested in another has no scope of its own: name its line.
        at = overlapped.original.__code__.co_firstlineno + 1
        overlapped = overlap_collectives(step, Options(overrides={f"{__file__}:{at}": form}))
        (d,) = overlapped.plan(*args).decisions
        assert d.schedule.ring_size == 2
        same(overlapped(*args), x @ w)


def test_scopes_count_in_the_backward_pass_and_in_bodies(mesh):
    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    def layer(x, w):
        with jax.named_scope("block"):
            y = jax.checkpoint(lambda x: jnp.einsum("bsk,kf->bsf", x, w))(x)
        return jax.lax.with_sharding_constraint(jnp.einsum("bsf,kf->bsk", y, w), on("d", "m")), 0

    def loss(x, ws):
        out, _ = jax.lax.scan(layer, x, ws)
        return jnp.sum(out)

    args = (
        jax.ShapeDtypeStruct((4, 8, 8), jnp.float32, sharding=on("d", "m")),
        jax.ShapeDtypeStruct((3, 8, 16), jnp.float32, sharding=on(None, None, "m")),
    )
    options = Options(policy="always", overrides={"block": "never"})
    plan = overlap_collectives(jax.grad(loss, (0, 1)), options).plan(*args)
    line = layer.__code__.co_firstlineno + 2
    named = [d for d in plan.decisions if d.site.location.line == line]
    assert {d.site.scope[0] for d in named} == {"scan"}
    assert len({d.site.scope for d in named}) > 1  # some in the checkpoint's own body
    assert len(named) > 2
    assert {d.reason for d in named} <= {Reason.OVERRIDE, Reason.NO_COLLECTIVE}
    assert Reason.OVERRIDE in {d.reason for d in named}
    assert any(d.rewritten for d in plan.decisions)


def test_an_override_without_a_match_warns_once_and_names_the_nearest(mesh):
    step = overlap_collectives(named_step(mesh), Options(overrides={"mpl/up": "never"}))
    args = arguments(mesh)
    with pytest.warns(OverrideWarning) as caught:
        step.plan(*args)
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("overrides: 'mpl/up' matches no einsum of step; nearest: mlp/up")
    assert warning.filename == __file__
    same(step(*args), answer(*args))  # planned already: warned already
    with pytest.warns(OverrideWarning, match="matches no einsum of step"):
        jax.jit(overlap_collectives(named_step(mesh), step.options)).lower(*args)


# --- budgets ---


def test_the_margin_is_that_of_the_options(mesh):
    def step(x, up):
        return jnp.einsum("bsk,kf->bsf", x, up)

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    args = array(8, 4096, 4096, spec=("d", "m")), array(4096, 16384, spec=(None, "m"))
    (d,) = overlap_collectives(step).plan(*args).decisions
    gain = d.estimate.sure_gain
    assert gain > 0.02
    assert d.rewritten
    for least, rewritten in ((gain - 0.01, True), (gain + 0.01, False)):
        (d,) = overlap_collectives(step, Options(min_gain=least)).plan(*args).decisions
        assert d.rewritten is rewritten
    assert d.reason is Reason.NOT_WORTH


def ring_of(size):
    devices = np.array(jax.devices()[:size])
    return jax.sharding.Mesh(devices, ("m",), axis_types=(jax.sharding.AxisType.Auto,))


def test_a_candidate_that_needs_less_memory_is_taken_instead():
    """On a ring of three, two ways hold four shards where the gathered value has three.

    The einsum is narrow, so that its transfer is what takes the time and two ways are the faster.
    """
    mesh = ring_of(3)
    rows, contracted, columns = 3000, 12000, 240

    def plan(**options):
        def step(x, w):
            return x @ w

        def array(shape, *spec):
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

        (d,) = (
            overlap_collectives(step, Options(policy="always", **options))
            .plan(array((rows, contracted), "m", None), array((contracted, columns), None, "m"))
            .decisions
        )
        return d

    gathered_shard = contracted * columns // 3 * 4  # w's, the smaller
    free = plan()
    assert free.schedule.two_way
    assert free.estimate.memory_bytes == gathered_shard
    tight = plan(memory_budget=gathered_shard - 1)
    assert not tight.schedule.two_way
    assert tight.estimate.memory_bytes <= 0
    assert plan(memory_budget="1GiB").schedule == free.schedule


def test_a_loop_that_needs_more_memory_is_not_made():
    """On a ring of two a scattered sum holds three blocks where the whole has two."""
    mesh = ring_of(2)

    def step(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("m")))

    def array(*spec):
        return jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    args = array(None, "m"), array("m", None)
    for budget, reason in ((128, None), (127, Reason.MEMORY_BUDGET)):
        options = Options(policy="always", memory_budget=budget)
        (d,) = overlap_collectives(step, options).plan(*args).decisions
        assert d.reason is reason
    assert d.detail == "it takes 128 B or more"
    forced = Options(memory_budget=0, overrides={f"{__file__}:{d.site.location.line}": "always"})
    (d,) = overlap_collectives(step, forced).plan(*args).decisions
    assert d.rewritten


@pytest.mark.parametrize("more", ["", " chunked", " grouped", " chunked grouped"])
@pytest.mark.parametrize("form", ["one-way", "two-way", "one-way rolled", "two-way rolled"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8])
def test_permutes_are_counted_as_the_loops_write_them(form, size, more):
    mesh = ring_of(size)

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    def gather(x, w):
        return x @ w

    def scatter(x, w):
        return jax.lax.with_sharding_constraint(x @ w, on("m"))

    def array(*spec):
        return jax.ShapeDtypeStruct((size * 6, size * 6), jnp.float32, sharding=on(*spec))

    text = f"{form} unrolled" if "rolled" not in form else form
    for step, specs in ((gather, (("m",), (None, "m"))), (scatter, ((None, "m"), ("m",)))):
        at = step.__code__.co_firstlineno + 1
        options = Options(overrides={f"{__file__}:{at}": text + more})
        overlapped = overlap_collectives(step, options)
        args = [array(*spec) for spec in specs]
        (d,) = overlapped.plan(*args).decisions
        if step is gather:
            assert d.schedule.chunked is ("chunked" in more)
        assert d.schedule.grouped is ("grouped" in more and size in (4, 6, 8))
        written = overlapped.lower(*args).as_text()
        found = len(re.findall(r"stablehlo\.collective_permute", written))
        assert found == permutes(d.site, d.collective, d.schedule), d.schedule.describe()


def test_the_budget_of_permutes_goes_to_the_loops_that_save_most(mesh):
    always = planned(mesh, policy="always")
    costs = [permutes(d.site, d.collective, d.schedule) for d in always.decisions]
    saved = [d.estimate.before_s - d.estimate.after_s for d in always.decisions]
    assert sum(costs) > 0
    for most in range(sum(costs) + 1):
        plan = planned(mesh, policy="always", max_permutes=most)
        made = sum(permutes(d.site, d.collective, d.schedule) for d in plan.rewritten)
        assert made <= most
        for d in plan.decisions:
            assert d.rewritten or d.reason is Reason.PERMUTE_BUDGET
    assert len(plan.rewritten) == 2
    best = saved.index(max(saved))
    first = planned(mesh, policy="always", max_permutes=costs[best])
    assert first.decisions[best].rewritten
    assert not first.decisions[1 - best].rewritten
    left = first.decisions[1 - best]
    told = f"max_permutes={costs[best]} with {costs[best]} in other loops"
    assert left.detail == f"{told}, and this loop has {costs[1 - best]}"


def test_einsums_on_one_ring_are_counted_once_and_decided_together(mesh):
    def qkv(x, q, k, v):
        return x @ q, x @ k, x @ v

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w = array(8, 256, spec=(None, "m"))
    args = array(16, 8, spec=("m", None)), w, w, w
    plan = overlap_collectives(qkv, Options(policy="always", max_permutes=3)).plan(*args)
    assert len(plan.rewritten) == 3
    none = overlap_collectives(qkv, Options(policy="always", max_permutes=2)).plan(*args)
    assert [d.reason for d in none.decisions] == [Reason.PERMUTE_BUDGET] * 3


def test_what_is_forced_is_counted_and_kept(mesh):
    plan = planned(mesh, policy="always", max_permutes=0, overrides={"up": "always"})
    first, second = plan.decisions
    assert first.rewritten
    assert second.reason is Reason.PERMUTE_BUDGET


def test_constraints_are_part_of_the_step_that_runs(mesh):
    args = arguments(mesh)
    step = overlap_collectives(make_step(mesh), Options(policy="always", max_permutes=4))
    assert 0 < len(re.findall("collective_permute", step.lower(*args).as_text())) <= 4
    same(step(*args), overlap_collectives(make_step(mesh), ALWAYS)(*args))
