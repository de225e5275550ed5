"""Gathers whose shards travel in chunks, through the decorator; exact, and with the permutes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from rewritten import assert_equal_trees, collectives
from steptools import placer
from test_manual import ints, mesh_of

from collmm import Options, overlap_collectives

FORMS = ["one-way unrolled", "two-way unrolled", "one-way rolled", "two-way rolled"]


def chunked(fn, form="", **options):
    """``fn`` with every gather under the scope ``ring`` forced into chunks."""
    options = {"strict": True, **options}
    return overlap_collectives(
        fn, Options(overrides={"ring": f"{form} chunked".strip()}, **options)
    )


def gathers(o, *args):
    """Of every gather that is looped, the pieces into which its shards are to be cut."""
    found = [d for d in o.plan(*args).rewritten if d.collective.kind == "all-gather"]
    return [d.schedule.chunks for d in found]


def program(mesh, case):
    """(a function of two operands, those operands); the result's labels are s or k first."""
    put, at = placer(mesh)
    n = mesh.size
    equation, x, w, out = {
        "free": ("sk,kf->sf", ("m", None), (None, "m"), (None, "m")),
        "free-rhs": ("kf,sk->fs", (None, "m"), ("m", None), ("m", None)),
        "contracting": ("sk,kf->sf", ("m", None), ("m", None), ("m", None)),
        "batch": ("bsk,bkf->bsf", ("m", None, None), (None, None, "m"), (None, None, "m")),
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
@pytest.mark.parametrize("case", ["free", "contracting"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_values_and_gradients(n, case, form):
    fn, args = program(mesh_of((n,), ("m",)), case)
    o = chunked(jax.jit(with_gradients(fn)), form)
    assert all(pieces > 1 for pieces in gathers(o, *args))
    assert_equal_trees(o(*args), with_gradients(fn)(*args))


@pytest.mark.parametrize("case", ["free-rhs", "batch"])
@pytest.mark.parametrize("n", [2, 4])
def test_other_places_of_the_gathered_dimension(n, case):
    fn, args = program(mesh_of((n,), ("m",)), case)
    o = chunked(jax.jit(fn))
    assert all(pieces > 1 for pieces in gathers(o, *args))
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_every_chunk_is_a_permute_and_no_gather_is_left(n):
    fn, args = program(mesh_of((n,), ("m",)), "free")
    found = collectives(chunked(jax.jit(fn), "two-way unrolled"), *args)
    assert found["collective-permute"] == 2 * (n - 1)
    assert found["all-gather"] == 0


def test_einsums_of_one_value_share_the_chunks_and_hand_it_out():
    put, at = placer(mesh_of((4,), ("m",)))

    def fn(x, q, k, v):
        with jax.named_scope("ring"):
            outs = [at(x @ w, None, "m") for w in (q, k, v)]
        whole = at(x, None, None)
        return *outs, jnp.sum(whole * whole[::-1])

    w = [put(ints(i, 8, 12), None, "m") for i in (1, 2, 3)]
    args = put(ints(0, 20, 8), "m", None), *w
    o = chunked(jax.jit(fn))
    assert gathers(o, *args) == [2, 2, 2]
    found = collectives(o, *args)
    assert (found["collective-permute"], found["all-gather"]) == (6, 0)
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [2, 4])
def test_a_quantised_value_is_cut_with_its_scales(n, form):
    put, at = placer(mesh_of((n,), ("m",)))

    def fn(x8, rows, columns, w):
        x = x8.astype(jnp.float32) * rows * columns
        with jax.named_scope("ring"):
            return at(x @ w, None, "m")

    x8 = ints(0, 5 * n, 8).astype(jnp.int8)
    rows = 2.0 ** ints(1, 5 * n, 1)
    args = put(x8, "m", None), put(rows, "m", None), 2.0 ** ints(2, 1, 8), ints(3, 8, 3 * n)
    o = chunked(jax.jit(fn), form)
    text = o.lower(*args).as_text()
    sent = [line for line in text.splitlines() if "collective_permute" in line]
    # Values and the scale of each row travel in two pieces each, of three rows and of two.
    assert all("tensor<3x" in line or "tensor<2x" in line for line in sent)
    assert sum("i8>" in line for line in sent) * 2 == len(sent)
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize("rows", [3, 13])
def test_shards_that_do_not_divide(rows):
    put, at = placer(mesh_of((4,), ("m",)))

    def fn(x, w):
        with jax.named_scope("ring"):
            return at(at(x, "m", None) @ w, None, "m")

    args = ints(0, rows, 8), put(ints(1, 8, 12), None, "m")
    o = chunked(jax.jit(with_gradients(fn)))
    assert set(gathers(o, *args)) == {2}
    assert_equal_trees(o(*args), jax.jit(with_gradients(fn))(*args))


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_gather_by_hand(check_vma):
    mesh = mesh_of((4,), ("m",))

    def body(x, w):
        with jax.named_scope("ring"):
            return jax.lax.all_gather(x, "m", axis=0, tiled=True) @ w

    specs = (P("m"), P(None, "m"))
    fn = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(None, "m"), check_vma=check_vma)
    args = ints(0, 20, 8), ints(1, 8, 12)
    o = chunked(jax.jit(fn))
    assert gathers(o, *args) == [2]
    assert collectives(o, *args)["collective-permute"] == 6
    assert_equal_trees(o(*args), fn(*args))


def test_under_vmap_and_in_a_scan():
    put, at = placer(mesh_of((4,), ("m",)))

    def one(x, w):
        with jax.named_scope("ring"):
            return at(x @ w, None, "m")

    args = put(ints(0, 20, 8), "m", None), put(ints(1, 8, 12), None, "m")

    def scanned(x, w):
        return jax.lax.scan(lambda c, _: (c + 1, one(x * c, w)), 1.0, None, length=3)[1]

    o = chunked(jax.jit(scanned))
    assert gathers(o, *args) == [2]
    assert_equal_trees(o(*args), scanned(*args))
    xs = jnp.stack([args[0], 2 * args[0]])
    mapped = jax.vmap(chunked(jax.jit(one)), in_axes=(0, None))
    assert_equal_trees(mapped(xs, args[1]), jnp.stack([x @ args[1] for x in xs]))


def mlp(mesh):
    put, at = placer(mesh)

    def fn(x, w, v):
        with jax.named_scope("ring"):
            h = at(x @ w, None, "m")
        return at(jnp.maximum(h, 0) @ v, "m", None)

    n = mesh.size
    args = put(ints(0, 4 * n, 6), "m", None), put(ints(1, 6, 4 * n), None, "m")
    return fn, (*args, put(ints(2, 4 * n, 6), "m", None))


def test_a_ring_of_chunks_that_was_forced_is_not_chained():
    fn, args = mlp(mesh_of((4,), ("m",)))
    assert "chained_einsums" in str(
        overlap_collectives(jax.jit(fn), Options("always")).trace(*args).jaxpr
    )
    o = chunked(jax.jit(fn), policy="always")
    text = str(o.trace(*args).jaxpr)
    assert "chained_einsums" not in text
    assert "all_gather_einsum" in text
    assert_equal_trees(o(*args), fn(*args))


def test_a_plan_file_keeps_the_chunks(tmp_path):
    fn, args = program(mesh_of((4,), ("m",)), "free")
    o = chunked(jax.jit(fn), "one-way unrolled")
    plan = o.plan(*args)
    assert "one-way x4 unrolled chains 2" in str(plan)
    path = str(tmp_path / "plan.json")
    plan.save(path)
    pinned = overlap_collectives(jax.jit(fn), Options(plan=path, strict=True))
    assert [d.schedule for d in pinned.plan(*args).decisions] == [
        d.schedule for d in plan.decisions
    ]
    assert_equal_trees(pinned(*args), fn(*args))
