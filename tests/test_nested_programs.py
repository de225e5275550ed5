"""Two rings on one einsum, through the decorator: values, gradients, and what compiles."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import assert_equal_trees, collectives, rings
from ringtools import mesh_of

from collmm import Options, overlap_collectives
from collmm.budget import permutes, within_permutes
from collmm.errors import Reason
from collmm.nesting import inner_collective
from collmm.sites import ALL_GATHER

MESHES = {
    "2x4": {"data": 2, "model": 4},
    "4x2": {"data": 4, "model": 2},
    "2x3": {"data": 2, "model": 3},
    "2x2x2": {"pipe": 2, "data": 2, "model": 2},
}
BATCH, SEQ, WIDTH, HIDDEN = 12, 24, 24, 48
NESTED = {"here": "nested"}


def on(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def whole_numbers(mesh, shape, *spec, seed=0):
    x = np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)
    return jax.device_put(x, on(mesh, *spec))


def nested(fn, **options):
    """Every einsum that can be is two rings; a gather and the scatter after it stay apart."""
    options = {"overrides": NESTED, "strict": True, "chains": False, **options}
    return overlap_collectives(fn, Options("always", **options))


def scoped(fn):
    """``fn`` with all its einsums in one name scope, for an override to name."""
    return jax.named_scope("here")(fn)


def mlp(mesh):
    """Fully sharded and tensor parallel: weights over data and model, activations over model."""

    def up(x, w):
        h = jnp.einsum("bsd,df->bsf", x, w)
        return jax.lax.with_sharding_constraint(h, on(mesh, "data", None, "model"))

    def down(h, v):
        y = jnp.einsum("bsf,fd->bsd", h, v)
        return jax.lax.with_sharding_constraint(y, on(mesh, "data", "model", None))

    @scoped
    def fn(x, w, v):
        return down(jnp.abs(up(x, w)), v)

    args = (
        whole_numbers(mesh, (BATCH, SEQ, WIDTH), "data", "model", None),
        whole_numbers(mesh, (WIDTH, HIDDEN), "data", "model", seed=1),
        whole_numbers(mesh, (HIDDEN, WIDTH), "model", "data", seed=2),
    )
    return fn, args


def inner_of(plan):
    """The collective of every einsum's inner ring, as text; None without one."""
    found = [inner_collective(d.site, d.collective, d.schedule) for d in plan.decisions]
    return [None if c is None else c.describe() for c in found]


@pytest.mark.parametrize("name", MESHES)
def test_both_weights_are_gathered_on_rings_inside_those_of_the_activations(name):
    mesh = mesh_of(**MESHES[name])
    fn, args = mlp(mesh)
    o = nested(jax.jit(fn))
    plan = o.plan(*args)
    if name != "4x2":
        assert [d.collective.axes for d in plan.decisions] == [("model",), ("model",)]
        assert inner_of(plan) == ["all-gather rhs[0] over data", "all-gather rhs[1] over data"]
    assert all(inner_of(plan))
    assert_equal_trees(o(*args), jax.jit(fn)(*args))
    found = collectives(o, *args)
    assert found["all-gather"] == found["reduce-scatter"] == found["all-reduce"] == 0
    wanted = sum(permutes(d.site, d.collective, d.schedule) for d in plan.decisions)
    text = o.lower(*args).as_text()
    assert text.count("stablehlo.collective_permute") == wanted
    assert collectives(jax.jit(fn), *args)["all-gather"] > 0


def test_the_plan_names_both_collectives_and_both_rings():
    fn, args = mlp(mesh_of(data=2, model=4))
    plan = nested(jax.jit(fn)).plan(*args)
    first, second = (line for line in str(plan).splitlines() if line.startswith(("0 ", "1 ")))
    assert "rewrite all-gather + all-gather rhs[0] over data: two-way x4 unrolled + data" in first
    assert "rewrite reduce-scatter + all-gather rhs[1] over data: " in second
    assert "one-way x4 unrolled + data one-way x2 unrolled" in str(plan.explain())
    site = plan.to_json()["sites"][0]
    assert site["nested"] == "all-gather rhs[0] over data"
    assert site["schedule"]["inner"]["axes"] == ["data"]


@pytest.mark.parametrize(
    ("mesh", "form"),
    [("2x4", "one-way nested"), ("2x4", "two-way nested")] + [(mesh, "nested") for mesh in MESHES],
)
def test_gradients_are_those_of_the_program(mesh, form):
    mesh = mesh_of(**MESHES[mesh])
    fn, args = mlp(mesh)
    shardings = tuple(a.sharding for a in args)

    def step(*args):
        loss = lambda *args: jnp.sum(fn(*args))  # noqa: E731
        grads = jax.grad(loss, (0, 1, 2))(*args)
        return jax.lax.with_sharding_constraint(grads, shardings)

    o = nested(jax.jit(step), overrides={"here": form})
    # Forward that of the first weight; backward both.
    assert sum(c is not None for c in inner_of(o.plan(*args))) == 3
    assert_equal_trees(o(*args), jax.jit(step)(*args))
    assert collectives(o, *args)["all-gather"] < collectives(jax.jit(step), *args)["all-gather"]


def qkv(mesh):
    @scoped
    def fn(x, *ws):
        return [
            jax.lax.with_sharding_constraint(
                jnp.einsum("bsd,df->bsf", x, w), on(mesh, "data", None, "model")
            )
            for w in ws
        ]

    x = whole_numbers(mesh, (BATCH, SEQ, WIDTH), "data", "model", None)
    ws = [whole_numbers(mesh, (WIDTH, HIDDEN), "data", "model", seed=s) for s in (1, 2, 3)]
    return fn, (x, *ws)


@pytest.mark.parametrize("mesh", MESHES)
def test_q_k_and_v_share_the_outer_ring_and_have_an_inner_one_each(mesh):
    mesh = mesh_of(**MESHES[mesh])
    fn, args = qkv(mesh)
    o = nested(jax.jit(fn))
    assert inner_of(o.plan(*args)) == ["all-gather rhs[0] over data"] * 3
    assert rings(o, *args) == [("gather", 3)]
    assert_equal_trees(o(*args), jax.jit(fn)(*args))
    found = collectives(o, *args)
    assert found["all-gather"] == 0
    n, m = mesh.shape["model"], mesh.shape["data"]
    text = o.lower(*args).as_text()
    assert text.count("stablehlo.collective_permute") == (n - 1) + 3 * (m - 1)


def test_gradients_of_q_k_and_v_share_rings_too():
    mesh = mesh_of(data=2, model=4)
    fn, args = qkv(mesh)
    shardings = tuple(a.sharding for a in args)

    def step(*args):
        loss = lambda *args: sum(jnp.sum(y * y) for y in fn(*args))  # noqa: E731
        grads = jax.grad(loss, tuple(range(4)))(*args)
        return jax.lax.with_sharding_constraint(grads, shardings)

    o = nested(jax.jit(step))
    assert_equal_trees(o(*args), jax.jit(step)(*args))
    # dX is one sum of three einsums, each of which gathers its weight.
    assert ("scatter", 3) in rings(o, *args)
    assert collectives(o, *args)["all-gather"] == 0


def test_einsums_of_one_ring_need_not_all_have_an_inner_one():
    mesh = mesh_of(data=2, model=4)
    fn, (x, w, *_) = qkv(mesh)
    v = whole_numbers(mesh, (WIDTH, HIDDEN), None, "model", seed=5)
    o = nested(jax.jit(fn))
    plan = o.plan(x, w, v)
    assert inner_of(plan) == ["all-gather rhs[0] over data", None]
    assert [d.schedule.nested for d in plan.decisions] == [True, False]
    assert rings(o, x, w, v) == [("gather", 2)]
    assert_equal_trees(o(x, w, v), jax.jit(fn)(x, w, v))
    assert collectives(o, x, w, v)["all-gather"] == 0


def test_a_gather_that_the_user_writes_as_a_constraint_is_the_inner_ring():
    mesh = mesh_of(data=2, model=4)
    fn, args = mlp(mesh)

    def gathering(x, w, v):
        w = jax.lax.with_sharding_constraint(w, on(mesh, None, "model"))
        v = jax.lax.with_sharding_constraint(v, on(mesh, "model", None))
        return fn(x, w, v)

    o = nested(jax.jit(gathering))
    assert inner_of(o.plan(*args)) == ["all-gather rhs[0] over data", "all-gather rhs[1] over data"]
    assert_equal_trees(o(*args), jax.jit(fn)(*args))
    assert collectives(o, *args)["all-gather"] == 0


@pytest.mark.parametrize("wrap", ["scan", "vmap", "checkpoint", "grad of checkpoint", "jit of"])
def test_under_transformations(wrap):
    mesh = mesh_of(data=2, model=4)
    fn, (x, w, v) = mlp(mesh)
    ws, vs = (
        whole_numbers(mesh, (2, *a.shape), None, *a.sharding.spec, seed=s)
        for s, a in enumerate((w, v))
    )

    def body(x, weights):
        return jnp.sign(fn(x, *weights)), None

    programs = {
        "scan": (lambda x, ws, vs: jax.lax.scan(body, x, (ws, vs))[0], (x, ws, vs)),
        "vmap": (lambda x, ws, vs: jax.vmap(fn, (None, 0, 0))(x, ws, vs), (x, ws, vs)),
        "checkpoint": (jax.checkpoint(fn), (x, w, v)),
        "grad of checkpoint": (
            jax.grad(lambda *a: jnp.sum(jax.checkpoint(fn)(*a)), (0, 1, 2)),
            (x, w, v),
        ),
        "jit of": (fn, (x, w, v)),
    }
    program, args = programs[wrap]
    plain = jax.jit(program)
    if wrap == "jit of":
        inside = nested(jax.jit(fn))
        o = jax.jit(lambda *args: inside(*args))
    else:
        o = nested(plain)
        assert any(inner_of(o.plan(*args)))
    assert_equal_trees(o(*args), plain(*args))
    assert collectives(o, *args)["all-gather"] < collectives(plain, *args)["all-gather"]


def test_a_plan_file_keeps_both_rings(tmp_path):
    fn, args = mlp(mesh_of(data=2, model=4))
    path = tmp_path / "plan.json"
    planned = nested(jax.jit(fn)).plan(*args)
    planned.save(path)
    pinned = overlap_collectives(jax.jit(fn), Options(plan=path, strict=True, chains=False))
    again = pinned.plan(*args)
    assert [d.schedule for d in again.decisions] == [d.schedule for d in planned.decisions]
    assert collectives(pinned, *args)["all-gather"] == 0
    assert_equal_trees(pinned(*args), jax.jit(fn)(*args))
    content = json.loads(path.read_text())
    del content["sites"][0]["schedule"]["inner"]
    path.write_text(json.dumps(content))
    edited = overlap_collectives(jax.jit(fn), Options(plan=path, strict=True, chains=False))
    assert [d.schedule.nested for d in edited.plan(*args).decisions] == [False, True]
    assert collectives(edited, *args)["all-gather"] == 1


def test_inner_rings_count_against_the_permutes_that_are_allowed():
    fn, args = qkv(mesh_of(data=2, model=4))
    plan = nested(jax.jit(fn)).plan(*args)

    def nested_first(d):
        both = sorted(d.candidates, key=lambda c: not c.schedule.nested)
        return dataclasses.replace(d, candidates=tuple(both))

    free = dataclasses.replace(plan, decisions=tuple(map(nested_first, plan.decisions)))
    for allowed, kept in ((6, [True] * 3), (5, [False] * 3)):
        within = within_permutes(free, Options("always", max_permutes=allowed))
        assert [d.schedule.nested for d in within.decisions] == kept
    none = within_permutes(free, Options("always", max_permutes=2))
    assert [d.reason for d in none.decisions] == [Reason.PERMUTE_BUDGET] * 3
    assert "this loop has 6" in none.decisions[0].detail


def test_an_override_can_ask_for_one_ring_alone():
    fn, args = mlp(mesh_of(data=2, model=4))
    o = nested(jax.jit(fn), overrides={"here": "single"})
    assert inner_of(o.plan(*args)) == [None, None]
    assert collectives(o, *args)["all-gather"] > 0


def test_rings_over_the_same_axes_or_the_same_dimension_are_not_nested():
    mesh = mesh_of(data=2, model=4)
    x = whole_numbers(mesh, (BATCH, SEQ, WIDTH), "data", "model", None)
    w = whole_numbers(mesh, (WIDTH, HIDDEN), "model", None, seed=1)  # the same ring as x's

    def fn(x, w):
        h = jnp.einsum("bsd,df->bsf", x, w)
        return jax.lax.with_sharding_constraint(h, on(mesh, "data", None, None))

    plan = nested(jax.jit(fn), overrides={}).plan(x, w)
    for d in plan.decisions:
        assert all(c.kind == ALL_GATHER or c.operand is None for c in d.site.collectives)
        assert not any(c.schedule.nested for c in d.candidates)


def test_explicit_axes_keep_their_types():
    mesh = mesh_of(data=2, model=4)
    explicit = jax.sharding.AxisType.Explicit
    typed = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(explicit,) * 2)
    _, (x, w, _) = mlp(mesh)
    x, w = (jax.device_put(np.asarray(a), on(typed, *a.sharding.spec)) for a in (x, w))

    @scoped
    def fn(x, w):
        x = jax.sharding.reshard(x, P("data", None, None))
        w = jax.sharding.reshard(w, P(None, "model"))
        return jnp.einsum("bsd,df->bsf", x, w)

    with jax.set_mesh(typed):
        o = nested(jax.jit(fn))
        assert inner_of(o.plan(x, w)) == ["all-gather rhs[0] over data"]
        got, want = o(x, w), jax.jit(fn)(x, w)
        assert got.sharding == want.sharding
        assert_equal_trees(got, want)
        assert collectives(o, x, w)["all-gather"] == 0
