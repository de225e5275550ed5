"""Rings whose steps take several shards, through the decorator; exact, and with the permutes."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from rewritten import assert_equal_trees, collectives
from steptools import placer
from test_manual import ints, mesh_of

from collmm import Options, overlap_collectives

FORMS = ["one-way unrolled", "two-way unrolled", "one-way rolled", "two-way rolled"]
# What an override takes: the fewest shards per step that divide the ring.
LEAST = {4: 2, 6: 2, 8: 2, 9: 3}


def grouped(fn, form="", **options):
    """``fn`` with every ring under the scope ``ring`` forced to take several shards per step."""
    options = {"strict": True, **options}
    return overlap_collectives(
        fn, Options(overrides={"ring": f"{form} grouped".strip()}, **options)
    )


def steps_of(o, *args):
    """The shards per step of every einsum that is looped."""
    return [d.schedule.shards_per_step for d in o.plan(*args).rewritten]


def program(mesh, case):
    """(a function of two operands, those operands); the gathered or scattered label is s or k."""
    put, at = placer(mesh)
    n = mesh.size
    equation, x, w, out = {
        "free": ("sk,kf->sf", ("m", None), (None, "m"), (None, "m")),
        "free-rhs": ("kf,sk->fs", (None, "m"), ("m", None), ("m", None)),
        "contracting": ("sk,kf->sf", ("m", None), ("m", None), ("m", None)),
        "batch": ("bsk,bkf->bsf", ("m", None, None), (None, None, "m"), (None, None, "m")),
        "scatter": ("sk,kf->sf", (None, "m"), ("m", None), ("m", None)),
        "scatter-rhs": ("sk,kf->sf", (None, "m"), ("m", None), (None, "m")),
    }[case]
    sizes = {"s": 3 * n, "k": 5 * n, "f": 2 * n, "b": 5 * n}
    lhs, rhs = ([sizes[label] for label in labels] for labels in equation.split("->")[0].split(","))

    def fn(x, w):
        with jax.named_scope("ring"):
            return at(jnp.einsum(equation, x, w), *out)

    return fn, (put(ints(0, *lhs), *x), put(ints(1, *rhs), *w))


def with_gradients(fn):
    def loss(x, w):
        return jnp.sum(fn(x, w) ** 2)

    return lambda x, w: (fn(x, w), jax.grad(loss, (0, 1))(x, w))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["free", "contracting", "scatter"])
@pytest.mark.parametrize("n", LEAST)
def test_values_and_gradients(n, case, form):
    mesh = mesh_of((n,), ("m",))
    fn, args = program(mesh, case)
    o = grouped(jax.jit(with_gradients(fn)), form)
    assert set(steps_of(o, *args)) == {LEAST[n]}
    assert_equal_trees(o(*args), with_gradients(fn)(*args))


@pytest.mark.parametrize("case", ["free-rhs", "batch", "scatter-rhs"])
@pytest.mark.parametrize("n", [4, 6])
def test_other_places_of_the_ring_s_dimension(n, case):
    fn, args = program(mesh_of((n,), ("m",)), case)
    o = grouped(jax.jit(fn))
    assert set(steps_of(o, *args)) == {2}
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("case", ["free", "scatter"])
@pytest.mark.parametrize(("n", "permutes"), [(4, 2), (6, 3), (8, 4), (9, 4)])
def test_a_permute_within_the_group_and_one_per_further_group(n, permutes, case):
    fn, args = program(mesh_of((n,), ("m",)), case)
    found = collectives(grouped(jax.jit(fn), "one-way unrolled"), *args)
    assert found["collective-permute"] == permutes
    assert found["all-gather"] == found["reduce-scatter"] == found["all-reduce"] == 0


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_ring_that_has_no_groups_stays_as_it_is(n):
    fn, args = program(mesh_of((n,), ("m",)), "free")
    o = grouped(jax.jit(fn))
    assert steps_of(o, *args) == [1]
    assert_equal_trees(o(*args), fn(*args))


def test_einsums_of_one_value_share_the_groups_and_hand_it_out():
    put, at = placer(mesh_of((4,), ("m",)))

    def fn(x, q, k, v):
        with jax.named_scope("ring"):
            outs = [at(x @ w, None, "m") for w in (q, k, v)]
        whole = at(x, None, None)
        return *outs, jnp.sum(whole * whole[::-1])

    w = [put(ints(i, 8, 12), None, "m") for i in (1, 2, 3)]
    args = put(ints(0, 20, 8), "m", None), *w
    o = grouped(jax.jit(fn))
    assert steps_of(o, *args) == [2, 2, 2]
    found = collectives(o, *args)
    assert (found["collective-permute"], found["all-gather"]) == (2, 0)
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_value_travels_with_its_scales(form):
    put, at = placer(mesh_of((8,), ("m",)))

    def fn(x8, rows, columns, w):
        x = x8.astype(jnp.float32) * rows * columns
        with jax.named_scope("ring"):
            return at(x @ w, None, "m")

    x8, rows = ints(0, 24, 16).astype(jnp.int8), 2.0 ** ints(1, 24, 1)
    args = put(x8, "m", None), put(rows, "m", None), 2.0 ** ints(2, 1, 16), ints(3, 16, 24)
    o = grouped(jax.jit(fn), form)
    sent = [line for line in o.lower(*args).as_text().splitlines() if "collective_permute" in line]
    # First the rows of a shard and their scales, then those of two.
    assert sum("tensor<3x" in line for line in sent) == 2
    assert sum("tensor<3x" in line or "tensor<6x" in line for line in sent) == len(sent)
    assert sum("i8>" in line for line in sent) * 2 == len(sent)
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("rows", [3, 13])
@pytest.mark.parametrize("specs", [("m", None, None, "m"), (None, "m", "m", None)])
def test_shards_that_do_not_divide(rows, specs):
    put, at = placer(mesh_of((4,), ("m",)))
    a, b, c, d = specs

    def fn(x, w):
        with jax.named_scope("ring"):
            return at(at(x, a, b) @ w, c, d)

    args = ints(0, rows, 8), put(ints(1, 8, 12), b, None if b else "m")
    o = grouped(jax.jit(with_gradients(fn)))
    assert set(steps_of(o, *args)) == {2}
    assert_equal_trees(o(*args), jax.jit(with_gradients(fn))(*args))


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_gather_and_a_scatter_by_hand(check_vma):
    mesh = mesh_of((4,), ("m",))

    def body(x, w):
        with jax.named_scope("ring"):
            y = jax.lax.all_gather(x, "m", axis=0, tiled=True) @ w
            z = jax.lax.psum_scatter(y @ w.T, "m", scatter_dimension=0, tiled=True)
        return y, z

    out = P(None, "m"), P("m")
    specs = (P("m"), P(None, "m"))
    fn = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
    args = ints(0, 20, 8), ints(1, 8, 12)
    o = grouped(jax.jit(fn))
    assert steps_of(o, *args) == [2, 2]
    assert collectives(o, *args)["collective-permute"] >= 4
    assert_equal_trees(o(*args), fn(*args))


def test_a_ring_over_two_axes_beside_a_third():
    mesh = mesh_of((2, 2, 2), ("a", "b", "c"))
    put, at = placer(mesh)

    def fn(x, w, v):
        with jax.named_scope("ring"):
            return at(at(x @ w, "c", ("a", "b")) @ v, ("c", "a", "b"), None)

    args = put(ints(0, 16, 8), ("c", "a", "b"), None), put(ints(1, 8, 12), None, ("a", "b"))
    args = *args, put(ints(2, 12, 6), ("a", "b"), None)
    o = grouped(jax.jit(fn))
    assert steps_of(o, *args) == [2, 2]
    assert_equal_trees(o(*args), fn(*args))


def test_under_vmap_and_in_a_scan():
    put, at = placer(mesh_of((4,), ("m",)))

    def one(x, w):
        with jax.named_scope("ring"):
            return at(x @ w, None, "m")

    args = put(ints(0, 20, 8), "m", None), put(ints(1, 8, 12), None, "m")

    def scanned(x, w):
        return jax.lax.scan(lambda c, _: (c + 1, one(x * c, w)), 1.0, None, length=3)[1]

    o = grouped(jax.jit(scanned))
    assert steps_of(o, *args) == [2]
    assert_equal_trees(o(*args), scanned(*args))
    xs = jnp.stack([args[0], 2 * args[0]])
    mapped = jax.vmap(grouped(jax.jit(one)), in_axes=(0, None))
    assert_equal_trees(mapped(xs, args[1]), jnp.stack([x @ args[1] for x in xs]))


def test_rings_that_were_forced_into_groups_are_not_chained():
    put, at = placer(mesh_of((4,), ("m",)))

    def fn(x, w, v):
        with jax.named_scope("ring"):
            return at(jnp.maximum(at(x @ w, None, "m"), 0) @ v, "m", None)

    args = put(ints(0, 16, 6), "m", None), put(ints(1, 6, 16), None, "m")
    args = *args, put(ints(2, 16, 6), "m", None)
    assert "chained_einsums" in str(
        overlap_collectives(jax.jit(fn), Options("always")).trace(*args).jaxpr
    )
    o = grouped(jax.jit(fn))
    assert steps_of(o, *args) == [2, 2]
    assert "chained_einsums" not in str(o.trace(*args).jaxpr)
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("case", ["free", "scatter"])
def test_a_plan_file_keeps_the_groups_and_an_old_one_has_none(tmp_path, case):
    fn, args = program(mesh_of((8,), ("m",)), case)
    o = grouped(jax.jit(fn), "one-way unrolled")
    plan = o.plan(*args)
    assert "one-way x8 unrolled, 2 shards a step" in str(plan)
    path = tmp_path / "plan.json"
    plan.save(str(path))
    written = json.loads(path.read_text())
    (site,) = written["sites"]
    assert site["schedule"]["shards_per_step"] == 2
    for g in (2, 4, None):
        if g is None:
            del site["schedule"]["shards_per_step"]
        else:
            site["schedule"]["shards_per_step"] = g
        path.write_text(json.dumps(written))
        pinned = overlap_collectives(jax.jit(fn), Options(plan=str(path), strict=True))
        assert steps_of(pinned, *args) == [g or 1]
        assert_equal_trees(pinned(*args), fn(*args))
