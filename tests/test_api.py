"""The decorator: every form, and nothing of the wrapped jit is lost."""

import dataclasses
import functools
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steptools import (
    ALWAYS,
    DOWN,
    UP,
    X,
    answer,
    arguments,
    host_arguments,
    make_mesh,
    make_step,
    permutes,
    put,
    same,
    whole_numbers,
)

import collmm
from collmm import (
    AnalysisError,
    AnalysisWarning,
    OptionError,
    Options,
    OverlappedFunction,
    Reason,
    no_overlap,
    overlap_collectives,
)


@pytest.fixture
def mesh():
    return make_mesh()


@pytest.fixture
def step(mesh):
    return make_step(mesh)


# --- forms ---


def test_bare_decorator_of_a_jit(mesh, step):
    overlapped = overlap_collectives(jax.jit(step))
    args = arguments(mesh)
    same(overlapped(*args), answer(*args))
    # These shapes are far too small to gain.
    assert overlapped.plan(*args).rewritten == ()


@pytest.mark.parametrize(
    "wrap",
    [
        overlap_collectives(options=ALWAYS),
        lambda fn: overlap_collectives(fn, ALWAYS),
        lambda fn: overlap_collectives(jax.jit(fn), options=ALWAYS),
        lambda fn: overlap_collectives(overlap_collectives(jax.jit(fn)), ALWAYS),
        lambda fn: overlap_collectives(ALWAYS and functools.partial(fn), ALWAYS),
    ],
    ids=["options", "plain", "jit", "overlapped", "partial"],
)
def test_forms_that_rewrite(mesh, step, wrap):
    overlapped = wrap(step)
    args = arguments(mesh)
    assert isinstance(overlapped, OverlappedFunction)
    assert len(overlapped.plan(*args).rewritten) == 2
    same(overlapped(*args), answer(*args))


def test_it_looks_like_the_function_it_wraps(step):
    step.__doc__ = "Take a step."
    jitted = jax.jit(step)
    overlapped = overlap_collectives(jitted)
    assert (overlapped.__name__, overlapped.__doc__) == ("step", "Take a step.")
    assert overlapped.original is jitted
    assert overlapped.jitted is jitted
    assert inspect.signature(overlapped) == inspect.signature(step)
    assert "step" in repr(overlapped)
    assert overlap_collectives(step).original is step


def test_results_are_sharded_as_the_originals_are(mesh):
    def fn(x, up):
        return {"y": x @ up, "sum": jnp.sum(x)}

    x, up, _ = arguments(mesh)
    original, overlapped = jax.jit(fn), overlap_collectives(jax.jit(fn), ALWAYS)
    assert overlapped.plan(x, up).rewritten
    got, want = overlapped(x, up), original(x, up)
    same(got, want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.sharding.is_equivalent_to(w.sharding, g.ndim), (g.sharding, w.sharding)


# --- options and errors ---


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Options(policy="sometimes"), ["'sometimes'", "auto", "always", "never"]),
        (lambda: Options(chip="v5"), ["'v5'", "v5e"]),
        (lambda: Options(strict=1), ["strict=1", "True", "False"]),
        (lambda: overlap_collectives(len, {"policy": "auto"}), ["policy", "collmm.Options"]),
        (lambda: overlap_collectives(3), ["3", "jax.jit"]),
        (lambda: overlap_collectives(options="auto"), ["'auto'", "collmm.Options"]),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it_and_what_is_allowed(make, words):
    with pytest.raises(OptionError) as e:
        make()
    message = str(e.value)
    assert "\n" not in message
    assert [w for w in words if w not in message] == []


def test_policy_never_plans_and_leaves(mesh, step):
    overlapped = overlap_collectives(jax.jit(step), Options(policy="never"))
    args = arguments(mesh)
    assert {d.reason for d in overlapped.plan(*args).decisions} == {Reason.POLICY_NEVER}
    assert permutes(overlapped.lower(*args).compile()) == 0
    same(overlapped(*args), answer(*args))


OUT = RuntimeError("Shardy is out today")


def broken(monkeypatch, error=OUT):
    def partition(*args, **kwargs):
        raise error

    monkeypatch.setattr(collmm.program, "partition", partition)


def test_broken_analysis_warns_once_and_runs_the_original(mesh, step, monkeypatch):
    broken(monkeypatch)
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    args = arguments(mesh)
    with pytest.warns(AnalysisWarning) as caught:
        same(overlapped(*args), answer(*args))
    (warning,) = caught
    for words in ("step", "RuntimeError", "Shardy is out today"):
        assert words in str(warning.message)
    same(overlapped(*args), answer(*args))
    assert overlapped.plan(*args).rewritten == ()


def test_broken_analysis_keeps_donation_and_static_arguments(mesh, monkeypatch):
    broken(monkeypatch)

    @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    def fn(x, n, up):
        return x + n, x @ up

    x, up, _ = arguments(mesh)
    want = np.asarray(x) + 3
    with pytest.warns(AnalysisWarning):
        out, _ = overlap_collectives(fn, ALWAYS)(x, 3, up)
    same(out, want)
    assert x.is_deleted()


@pytest.mark.parametrize("error", [RuntimeError("no"), AnalysisError("what is this")])
def test_strict_raises_what_the_analysis_raised(mesh, step, monkeypatch, error):
    broken(monkeypatch, error)
    overlapped = overlap_collectives(jax.jit(step), Options(policy="always", strict=True))
    with pytest.raises(type(error)) as e:
        overlapped(*arguments(mesh))
    assert e.value is error


class OwnError(Exception):
    pass


@pytest.mark.parametrize("strict", [False, True])
def test_an_error_of_the_users_passes_untouched(mesh, strict):
    def fn(x):
        raise OwnError("width must be even")

    overlapped = overlap_collectives(jax.jit(fn), Options(strict=strict))
    for call in (overlapped, overlapped.plan, overlapped.lower, overlapped.trace):
        with pytest.raises(OwnError) as e:
            call(arguments(mesh)[0])
        assert str(e.value) == "width must be even"


def messages_of(*calls):
    found = []
    for call, args, kwargs in calls:
        try:
            call(*args, **kwargs)
        except Exception as e:
            found.append((type(e), str(e)))
    return found


def test_errors_of_jax_are_those_of_the_plain_jit(mesh, step):
    jitted = jax.jit(step)
    overlapped = overlap_collectives(jitted, ALWAYS)
    x, up, down = arguments(mesh)
    wrong = [((x, down, up), {}), ((x, up), {}), ((x, up, "down"), {}), ((x, up), {"dawn": down})]
    for args, kwargs in wrong:
        got, want = messages_of((overlapped, args, kwargs), (jitted, args, kwargs))
        assert got == want


# --- arguments ---


def test_donated_arguments_are_taken_by_position_and_by_name(mesh):
    def fn(state, x, up, *, more):
        new = jax.tree.map(lambda a: a + jnp.sum(x @ up), state)
        return new, jax.tree.map(lambda a: 2 * a, more)

    def given():
        x, up, down = arguments(mesh)
        state = {"a": put(mesh, whole_numbers(8, 8), P("m")), "b": down}
        return (state, x, up), {"more": [put(mesh, whole_numbers(16, 8), P("m"))]}

    plain_args, plain_kwargs = given()
    want = jax.jit(fn)(*plain_args, **plain_kwargs)
    jitted = jax.jit(fn, donate_argnums=0, donate_argnames="more")
    overlapped = overlap_collectives(jitted, ALWAYS)
    args, kwargs = given()
    assert overlapped.plan(*args, **kwargs).rewritten
    same(overlapped(*args, **kwargs), want)
    state, x, up = args
    assert all(a.is_deleted() for a in jax.tree.leaves((state, kwargs)))
    assert not x.is_deleted()
    assert not up.is_deleted()


def test_an_argument_donated_by_name_is_taken_by_position_too(mesh):
    def fn(x, up):
        return x + jnp.sum(x @ up), up

    overlapped = overlap_collectives(jax.jit(fn, donate_argnames=("x",)), ALWAYS)
    x, up, _ = arguments(mesh)
    overlapped(x, up)
    assert x.is_deleted()
    x, up, _ = arguments(mesh)
    overlapped(up=up, x=x)
    assert x.is_deleted()
    assert not up.is_deleted()


@pytest.mark.parametrize(
    "options",
    [{"static_argnums": (1, -1)}, {"static_argnames": ("times", "name")}],
    ids=["numbers", "names"],
)
def test_static_arguments_between_the_others(mesh, options):
    def fn(x, times, up, name="up"):
        for _ in range(times):
            x = x @ up
        return {name: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("d", None, "m")))}

    x = arguments(mesh)[0]
    up = put(mesh, whole_numbers(8, 8), UP)
    jitted = jax.jit(fn, **options)
    overlapped = overlap_collectives(jitted, ALWAYS)
    for times, name in ((1, "up"), (2, "up"), (2, "left")):
        same(overlapped(x, times, up, name), jitted(x, times, up, name))
        assert len(overlapped.plan(x, times, up, name).decisions) == times
        assert overlapped.plan(x, times, up, name).rewritten
    if "static_argnames" in options:
        same(overlapped(x, up=up, times=1), jitted(x, 1, up))
        same(overlapped(name="n", x=x, up=up, times=2), jitted(x, 2, up, "n"))


def test_keyword_arguments_in_any_order(mesh, step):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    x, up, down = arguments(mesh)
    want = answer(x, up, down)
    for args, kwargs in (
        ((x, up), {"down": down}),
        ((), {"down": down, "x": x, "up": up}),
        ((x,), {"up": up, "down": down}),
    ):
        same(overlapped(*args, **kwargs), want)
        assert len(overlapped.plan(*args, **kwargs).rewritten) == 2


@functools.partial(jax.tree_util.register_dataclass, data_fields=["up", "down"], meta_fields=["n"])
@dataclasses.dataclass
class Params:
    up: jax.Array
    down: jax.Array
    n: int


def test_pytrees_of_every_kind(mesh, step):
    def fn(params, batch, nothing, empty):
        x, mask = batch["x"]
        assert mask is None
        assert (nothing, empty) == (None, {})
        y = step(x, params.up, params.down) * params.n
        return Params(params.up, y, params.n), [], {"none": None, "batch": batch}

    x, up, down = arguments(mesh)
    args = (Params(up, down, 2), {"x": (x, None)}, None, {})
    overlapped = overlap_collectives(jax.jit(fn), ALWAYS)
    assert len(overlapped.plan(*args).rewritten) == 2
    got = overlapped(*args)
    same(got, jax.jit(fn)(*args))
    same(got[0].down, 2 * answer(x, up, down))
    assert isinstance(got[0], Params)


def test_scalars_and_weak_types_stay_what_they_are(mesh):
    def fn(x, up, scale, shift):
        y = jax.lax.with_sharding_constraint(x @ up, NamedSharding(mesh, P("d", None, "m")))
        return scale * y + shift, scale, shift, scale + shift

    x, up, _ = arguments(mesh)
    original, overlapped = jax.jit(fn), overlap_collectives(jax.jit(fn), ALWAYS)
    for scale, shift in ((2, 3.0), (np.float32(2), 3), (jnp.int32(2), np.int8(3)), (True, 1j)):
        assert overlapped.plan(x, up, scale, shift).rewritten
        got, want = overlapped(x, up, scale, shift), original(x, up, scale, shift)
        same(got, want)
        for g, w in zip(got, want, strict=True):
            assert jax.typeof(g) == jax.typeof(w)  # weak types included


def test_uncommitted_arguments_follow_the_constraints(mesh):
    def fn(x, up):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, X))
        up = jax.lax.with_sharding_constraint(up, NamedSharding(mesh, UP))
        return jax.lax.with_sharding_constraint(x @ up, NamedSharding(mesh, P("d", None, "m")))

    x, up, _ = host_arguments()
    overlapped = overlap_collectives(jax.jit(fn), ALWAYS)
    assert len(overlapped.plan(x, up).rewritten) == 1
    same(overlapped(x, up), x @ up)
    same(overlapped(jnp.asarray(x), up), x @ up)


def test_closed_over_arrays_that_are_sharded(mesh):
    x, up, down = arguments(mesh)
    step = make_step(mesh)
    scale = whole_numbers(8)

    def fn(x):
        return step(x, up, down) * scale

    overlapped = overlap_collectives(jax.jit(fn), ALWAYS)
    assert len(overlapped.plan(x).rewritten) == 2
    same(overlapped(x), answer(x, up, down) * scale)
    assert permutes(overlapped.lower(x).compile())


def test_plans_of_shapes_allocate_nothing(mesh, step):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((64, 2**14, 2**13), X), ((2**13, 2**15), UP), ((2**15, 2**13), DOWN))
    ]
    before = jax.live_arrays()  # held, so that none of them goes meanwhile
    plan = overlapped.plan(*shapes)
    assert len(plan.rewritten) == 2
    assert overlapped.eval_shape(*shapes).shape == (64, 2**14, 2**13)
    known = {id(array) for array in before}
    assert [array.shape for array in jax.live_arrays() if id(array) not in known] == []


# --- what the jit says of itself ---


def test_in_and_out_shardings_are_kept(mesh):
    def fn(x, params):
        return {"y": x @ params["up"]}

    named = functools.partial(NamedSharding, mesh)
    jitted = jax.jit(
        fn,
        in_shardings=(named(X), {"up": named(UP)}),
        out_shardings={"y": named(P("d", None, "m"))},
    )
    overlapped = overlap_collectives(jitted, ALWAYS)
    x, up, _ = host_arguments()
    assert len(overlapped.plan(x, {"up": up}).rewritten) == 1
    got = overlapped(x, {"up": up})  # uncommitted: only in_shardings say where they go
    same(got, {"y": x @ up})
    assert got["y"].sharding.is_equivalent_to(named(P("d", None, "m")), 3)
    compiled = overlapped.lower(x, {"up": up}).compile()
    assert permutes(compiled)
    (x_in, params_in), _ = compiled.input_shardings
    assert x_in.is_equivalent_to(named(X), 3)
    assert params_in["up"].is_equivalent_to(named(UP), 2)
    # jax's own complaint about an argument that is committed elsewhere.
    wrong = put(mesh, x, P())
    got, want = messages_of(
        (overlapped, (wrong, {"up": up}), {}), (jitted, (wrong, {"up": up}), {})
    )
    assert got == want


def test_shardings_given_for_some_arguments_only(mesh, step):
    named = functools.partial(NamedSharding, mesh)
    jitted = jax.jit(step, in_shardings=(None, named(UP), None), out_shardings=None)
    x, up, down = arguments(mesh)
    overlapped = overlap_collectives(jitted, ALWAYS)
    host_up = np.asarray(up)
    assert len(overlapped.plan(x, host_up, down).rewritten) == 2
    same(overlapped(x, host_up, down), answer(x, up, down))


def test_compiler_options_reach_the_compiler(mesh, step):
    args = arguments(mesh)
    jitted = jax.jit(step, compiler_options={"xla_of_that_name_is_no_option": True})
    overlapped = overlap_collectives(jitted, ALWAYS)
    assert len(overlapped.plan(*args).rewritten) == 2
    got, want = messages_of((overlapped, args, {}), (jitted, args, {}))
    assert got == want
    assert "xla_of_that_name_is_no_option" in got[1]
    good = jax.jit(step, compiler_options={"xla_backend_optimization_level": 1})
    same(overlap_collectives(good, ALWAYS)(*args), answer(*args))


def test_names_of_the_program_are_kept(mesh, step):
    args = arguments(mesh)
    text = overlap_collectives(jax.jit(step), ALWAYS).lower(*args).as_text()
    assert "@jit_step" in text


# --- meshes ---


def test_explicit_axes_give_the_same_types():
    mesh = make_mesh(kind=AxisType.Explicit)

    def fn(x, up, down):
        whole = jax.sharding.reshard(x, P("d", None, None))
        h = jnp.maximum(whole @ up, 0)
        return jnp.einsum("bsf,fk->bsk", h, down, out_sharding=X)

    with jax.set_mesh(mesh):
        args = arguments(mesh)
        overlapped = overlap_collectives(jax.jit(fn), ALWAYS)
        assert len(overlapped.plan(*args).rewritten) == 2
        got = overlapped(*args)
        same(got, answer(*args))
        assert jax.typeof(got) == jax.typeof(jax.jit(fn)(*args))
        assert permutes(overlapped.lower(*args).compile())
        assert overlapped.trace(*args).jaxpr.out_avals == jax.jit(fn).trace(*args).jaxpr.out_avals


def test_one_function_on_several_meshes_of_the_context():
    step = make_step(None)
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    for order in (range(8), range(7, -1, -1), range(8)):
        mesh = make_mesh(order)
        with jax.set_mesh(mesh):
            args = arguments(mesh)
            out = overlapped(*args)
            same(out, answer(*args))
            assert out.sharding.mesh.devices.flat[0] == jax.devices()[order[0]]
            assert len(overlapped.plan(*args).rewritten) == 2


def test_no_mesh_at_all_is_left_alone():
    overlapped = overlap_collectives(jax.jit(lambda x, up, down: x @ up @ down), ALWAYS)
    args = host_arguments()
    plan = overlapped.plan(*args)
    assert [d.reason for d in plan.decisions] == [Reason.NO_COLLECTIVE] * 2
    same(overlapped(*args), args[0] @ args[1] @ args[2])


# --- what stands inside ---


@pytest.mark.parametrize("kind", ["plain", "shardings", "donated", "inlined", "static", "twice"])
def test_einsums_inside_nested_jits_are_found(mesh, step, kind):
    named = functools.partial(NamedSharding, mesh)
    options = {
        "shardings": {
            "in_shardings": (named(X), named(UP), named(DOWN)),
            "out_shardings": named(X),
        },
        "donated": {"donate_argnums": 0},
        "inlined": {"inline": True},
    }
    inner = jax.jit(step, **options.get(kind, {}))
    if kind == "static":
        with_flag = jax.jit(lambda flag, *args: step(*args) if flag else 0, static_argnums=0)
        inner = functools.partial(with_flag, True)

    def fn(x, up, down):
        y = inner(x + 0, up, down)
        return inner(y, up, down) if kind == "twice" else y

    overlapped = overlap_collectives(jax.jit(fn), ALWAYS)
    args = arguments(mesh)
    assert len(overlapped.plan(*args).rewritten) == (4 if kind == "twice" else 2)
    same(overlapped(*args), jax.jit(fn)(*args))
    assert permutes(overlapped.lower(*args).compile())


def test_compiler_options_of_a_nested_jit_give_jaxs_own_error(mesh, step):
    inner = jax.jit(step, compiler_options={"xla_backend_optimization_level": 1})
    fn = jax.jit(lambda *args: inner(*args) + 1)
    args = arguments(mesh)
    got, want = messages_of((overlap_collectives(fn, ALWAYS), args, {}), (fn, args, {}))
    assert got == want


def test_no_overlap_leaves_what_is_inside(mesh):
    def fn(x, up, other):
        with no_overlap():
            a = x @ up
        return a, x @ other

    x, up, _ = arguments(mesh)
    other = put(mesh, whole_numbers(8, 16, seed=9), UP)
    out = NamedSharding(mesh, P("d", None, "m"))
    overlapped = overlap_collectives(jax.jit(fn, out_shardings=(out, out)), ALWAYS)
    first, second = overlapped.plan(x, up, other).decisions
    assert first.reason is Reason.NO_OVERLAP
    assert second.rewritten
    same(overlapped(x, up, other), fn(*map(np.asarray, (x, up, other))))


def test_no_overlap_covers_the_gradient_too(mesh):
    def loss(x, up):
        with no_overlap():
            y = x @ up
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("d", None, "m")))
        return jnp.sum(y * y)

    x, up, _ = arguments(mesh)
    overlapped = overlap_collectives(jax.jit(jax.grad(loss, argnums=(0, 1))), ALWAYS)
    plan = overlapped.plan(x, up)
    assert len(plan.decisions) == 3
    assert {d.reason for d in plan.decisions} == {Reason.NO_OVERLAP}, str(plan)


def test_callbacks_run_as_often_and_see_the_same(mesh, step, capfd):
    seen = []

    def fn(x, up, down):
        y = step(x, up, down)
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(y))
        jax.debug.print("total {s}", s=jnp.sum(y))
        return y

    args = arguments(mesh)
    outputs = []
    for call in (jax.jit(fn), overlap_collectives(jax.jit(fn), ALWAYS)):
        seen.clear()
        same(call(*args), answer(*args))
        jax.effects_barrier()
        outputs.append((list(seen), capfd.readouterr().out))
    assert outputs[0] == outputs[1]
    assert outputs[0][0]
    assert "total" in outputs[0][1]


def test_ordered_effects_stay_in_order_on_one_device():
    seen = []

    def fn(x, w):
        for i in range(4):
            x = x @ w
            io_callback(lambda i, s: seen.append(int(i)), None, i, jnp.sum(x), ordered=True)
        return x

    x, w = whole_numbers(8, 8), whole_numbers(8, 8, seed=1)
    overlapped = overlap_collectives(jax.jit(fn), ALWAYS)
    for _ in range(2):
        same(overlapped(x, w), x @ w @ w @ w @ w)
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3] * 2


# The analysis lowers the program first, meets the error first, and says so.
@pytest.mark.filterwarnings("ignore::collmm.AnalysisWarning")
def test_ordered_effects_on_many_devices_give_jaxs_own_error(mesh, step):
    def fn(*args):
        y = step(*args)
        jax.debug.print("{s}", s=jnp.sum(y), ordered=True)
        return y

    args = arguments(mesh)
    got, want = messages_of(
        (overlap_collectives(jax.jit(fn), ALWAYS), args, {}), (jax.jit(fn), args, {})
    )
    assert got == want


# --- methods ---


class Model:
    def __init__(self, mesh):
        self.mesh = mesh
        self.step = make_step(mesh)

    @functools.partial(overlap_collectives, options=ALWAYS)
    @functools.partial(jax.jit, static_argnums=0)
    def apply(self, x, up, down):
        return self.step(x, up, down)

    @staticmethod
    @overlap_collectives(options=ALWAYS)
    def double(x):
        return 2 * x


def test_methods_are_bound(mesh):
    model, args = Model(mesh), arguments(mesh)
    same(model.apply(*args), answer(*args))
    same(Model.apply(model, *args), answer(*args))
    same(model.double(args[0]), 2 * np.asarray(args[0]))
    assert len(Model.apply.plan(model, *args).rewritten) == 2


def test_a_bound_method_has_the_attributes_that_a_jits_has(mesh):
    # jax: model.jitted_method.lower(model, ...), the attributes of the function itself.
    model, args = Model(mesh), arguments(mesh)
    assert len(model.apply.plan(model, *args).rewritten) == 2
    assert permutes(model.apply.lower(model, *args).compile())
    assert model.apply.__self__ is model


# --- jax.stages ---


def test_lower_and_compile_take_the_users_arguments(mesh):
    def fn(params, x, n, *, more=1):
        return {"out": n * (x @ params["up"]) + more}

    jitted = jax.jit(fn, static_argnums=2, donate_argnames="more")
    overlapped = overlap_collectives(jitted, ALWAYS)
    x, up, _ = arguments(mesh)
    more = put(mesh, whole_numbers(4, 8, 16), P("d", None, "m"))
    args, kwargs = ({"up": up}, x, 3), {"more": more}
    lowered, want = overlapped.lower(*args, **kwargs), jitted.lower(*args, **kwargs)
    assert overlapped.plan(*args, **kwargs).rewritten
    assert lowered.in_tree == want.in_tree
    assert lowered.out_tree == want.out_tree
    assert lowered.args_info == want.args_info
    compiled = lowered.compile()
    result = 3 * (np.asarray(x) @ np.asarray(up)) + np.asarray(more)
    same(compiled({"up": up}, x, more=more), {"out": result})
    assert more.is_deleted()


def test_trace_shows_the_primitives_and_the_same_types(mesh, step):
    jitted = jax.jit(step)
    overlapped = overlap_collectives(jitted, ALWAYS)
    args = arguments(mesh)
    traced = overlapped.trace(*args)
    text = str(traced.jaxpr)
    assert "chained_einsums[" in text
    assert "dot_general" not in text
    apart = overlap_collectives(jitted, dataclasses.replace(ALWAYS, chains=False))
    text = str(apart.trace(*args).jaxpr)
    assert "all_gather_einsum[" in text
    assert "einsum_reduce_scatter[" in text
    assert "dot_general" not in text
    assert traced.jaxpr.out_avals == jitted.trace(*args).jaxpr.out_avals
    assert traced.fun_name == jitted.trace(*args).fun_name
    assert permutes(traced.lower().compile())


def test_eval_shape_is_that_of_the_jit(mesh, step):
    args = arguments(mesh)
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    assert overlapped.eval_shape(*args) == jax.jit(step).eval_shape(*args)
    assert jax.eval_shape(overlapped, *args) == jax.eval_shape(jax.jit(step), *args)


def test_disable_jit_runs_the_users_python(mesh, step):
    seen = []

    def fn(*args):
        seen.append(isinstance(args[0], jax.core.Tracer))
        return step(*args)

    overlapped = overlap_collectives(jax.jit(fn), ALWAYS)
    args = arguments(mesh)
    with jax.disable_jit():
        same(overlapped(*args), answer(*args))
        same(overlapped(*args), answer(*args))
    assert seen == [False, False]
    same(overlapped(*args), answer(*args))
    assert True in seen


# --- caching ---

_EVENTS: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **kwargs: _EVENTS.append(event)
)


@pytest.fixture
def counts(monkeypatch):
    """What happened during a call: plans made, traces, lowerings and compilations."""
    plans = []
    plan_program = collmm.api.plan_program

    def counted(*args, **kwargs):
        plans.append(args)
        return plan_program(*args, **kwargs)

    monkeypatch.setattr(collmm.api, "plan_program", counted)

    def count(call):
        plans.clear()
        _EVENTS.clear()
        jax.block_until_ready(call())
        return {
            "plans": len(plans),
            "traces": _EVENTS.count("/jax/core/compile/jaxpr_trace_duration"),
            "lowerings": _EVENTS.count("/jax/core/compile/jaxpr_to_mlir_module_duration"),
            "compilations": _EVENTS.count("/jax/core/compile/backend_compile_duration"),
        }

    return count


NOTHING = {"plans": 0, "traces": 0, "lowerings": 0, "compilations": 0}


def test_a_known_signature_does_nothing_again(mesh, step, counts):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    args = arguments(mesh)
    first = counts(lambda: overlapped(*args))
    assert (first["plans"], first["compilations"]) == (1, 1)
    assert counts(lambda: overlapped(*args)) == NOTHING
    again = arguments(mesh)
    assert counts(lambda: overlapped(*again)) == NOTHING
    assert counts(lambda: overlapped.plan(*args)) == NOTHING
    jaxpr = overlapped.trace(*args).jaxpr
    assert counts(lambda: overlapped.trace(*args)) == NOTHING
    assert overlapped.trace(*args).jaxpr is jaxpr


def test_results_of_the_step_go_in_again_without_another_plan(mesh, step, counts):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    x, up, down = arguments(mesh)
    x = overlapped(x, up, down)
    x = overlapped(x, up, down)
    assert counts(lambda: overlapped(x, up, down)) == NOTHING


def test_whatever_changes_the_program_plans_and_compiles_once(mesh, step, counts):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    x, up, down = arguments(mesh)
    overlapped(x, up, down)
    turned = make_mesh(range(7, -1, -1))
    other_step_args = {
        "dtype": arguments(mesh, np.int32),
        "shape": arguments(mesh, batch=8),
        "sharding": [put(mesh, np.asarray(x), P("d")), up, down],
        "uncommitted": [np.asarray(x), up, down],
    }
    for what, args in other_step_args.items():
        made = counts(lambda args=args: overlapped(*args))
        assert (made["plans"], made["compilations"]) == (1, 1), what
        assert counts(lambda args=args: overlapped(*args)) == NOTHING, what
        same(overlapped(*args), answer(*args))
    context = overlap_collectives(jax.jit(make_step(None)), ALWAYS)
    for m in (mesh, turned):
        with jax.set_mesh(m):
            args = arguments(m)
            made = counts(lambda args=args: context(*args))
            assert (made["plans"], made["compilations"]) == (1, 1)
            assert counts(lambda args=args: context(*args)) == NOTHING


def test_a_call_after_plan_or_lower_does_not_plan_again(mesh, step, counts):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    args = arguments(mesh)
    assert counts(lambda: overlapped.plan(*args))["compilations"] == 0
    assert counts(lambda: overlapped.lower(*args).as_text())["plans"] == 0
    assert counts(lambda: overlapped(*args))["plans"] == 0


def test_clear_cache_forgets(mesh, step, counts):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    args = arguments(mesh)
    overlapped(*args)
    overlapped.clear_cache()
    made = counts(lambda: overlapped(*args))
    assert (made["plans"], made["compilations"]) == (1, 1)
    same(overlapped(*args), answer(*args))


def test_x64_and_default_precision_are_part_of_the_signature(mesh, step, counts):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    args = arguments(mesh)
    overlapped(*args)
    with jax.default_matmul_precision("highest"):
        assert counts(lambda: overlapped(*args))["plans"] == 1
        assert "HIGHEST" in overlapped.lower(*args).as_text()
    assert counts(lambda: overlapped(*args)) == NOTHING
    with jax.enable_x64(True):
        wide = arguments(mesh, np.float64)
        assert overlapped(*wide).dtype == np.float64
        same(overlapped(*wide), answer(*wide))


def test_threads_may_call_at_once(mesh, step):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    args = arguments(mesh)
    results = [None] * 4

    def run(i):
        results[i] = overlapped(*args)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(results))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in results:
        same(result, answer(*args))


def test_log_compiles_shows_one_compilation_of_the_step(mesh, step, caplog):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    args = arguments(mesh)
    with jax.log_compiles():
        same(overlapped(*args), answer(*args))
        overlapped(*args)
    finished = [r.getMessage() for r in caplog.records if "Finished XLA" in r.getMessage()]
    assert [m for m in finished if "jit(step)" in m] == finished[:1]
    assert len(finished) == 1


def test_no_tracer_leaks(mesh, step):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    args = arguments(mesh)
    with jax.checking_leaks():
        same(overlapped(*args), answer(*args))
        overlapped.plan(*args)
        overlapped.lower(*args)


def test_strict_dtype_promotion_is_no_obstacle(mesh, step):
    overlapped = overlap_collectives(jax.jit(step), ALWAYS)
    with jax.numpy_dtype_promotion("strict"):
        for dtype in (np.float32, np.int32, jnp.bfloat16):
            args = arguments(mesh, dtype)
            # Sums of products stay below 2**8, exact in bfloat16 as well.
            small = [jnp.sign(a) for a in args]
            same(overlapped(*small), jax.jit(step)(*small))
