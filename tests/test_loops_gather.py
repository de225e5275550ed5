"""The gather ring against numpy on whole operands: exact, on every device."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from ringtools import (
    FORMS,
    ancestors,
    every_device,
    integers,
    mesh_of,
    partial_of,
    ring_body,
    runs,
    schedule_of,
    size,
    walk,
)

from collmm.errors import OptionError
from collmm.loops import Consumer, all_gather_einsum
from collmm.ring import gather_permutes

# The gathered operand has dimensions "asd" and is gathered over s.
CASES = {
    "free-lhs": ("asd,df->asf", 0),
    "free-rhs": ("fd,asd->afs", 1),
    "contracting-lhs": ("asd,sf->adf", 0),
    "contracting-rhs": ("fs,asd->fda", 1),
    "batch-lhs": ("asd,sdf->sfa", 0),
    "batch-rhs": ("fsd,asd->saf", 1),
}
SIZES = {"a": 2, "d": 3, "f": 4}
ALL = tuple(CASES)


def build(
    mesh,
    axes,
    cases,
    block,
    form,
    dtype=jnp.int32,
    check_vma=False,
    chunks=None,
    how=None,
    **partial,
):
    """The ring of ``cases`` as a jitted function of the whole operands, and those operands."""
    schedule = schedule_of(mesh, axes, *form, chains=chunks, **(how or {}))
    sizes = {**SIZES, "s": block * schedule.ring_size}
    rng = np.random.default_rng(block)
    gathered = integers(rng, [sizes[x] for x in "asd"], dtype)
    consumers, locals_ = [], []
    for case in cases:
        equation, operand = CASES[case]
        local = equation.split("->")[0].split(",")[1 - operand]
        consumers.append(Consumer(partial_of(equation, **partial), operand))
        locals_.append(integers(rng, [sizes[x] for x in local], dtype))

    def ring(shard, *locals_):
        return all_gather_einsum(
            shard, locals_, consumers, schedule, gathered_dim=1, return_gathered=True
        )

    specs = (P(None, tuple(axes)), *(P() for _ in locals_))
    return every_device(mesh, ring, specs, check_vma), (gathered, *locals_)


def reference(case, gathered, local):
    """The einsum in numpy's widest numbers, int64 or complex128."""
    equation, operand = CASES[case]
    wide = np.complex128 if np.iscomplexobj(gathered) else np.int64
    whole, other = (np.asarray(x).astype(wide) for x in (gathered, local))
    return np.einsum(equation, *((other, whole) if operand else (whole, other)))


def check(mesh, axes, cases, block, form, dtype=jnp.int32, check_vma=False, chunks=None, **partial):
    out_dtype = np.dtype(partial.setdefault("out_dtype", dtype))
    run, args = build(mesh, axes, cases, block, form, dtype, check_vma, chunks, **partial)
    *results, gathered = run(*args)
    for case, local, result in zip(cases, args[1:], results, strict=True):
        expected = reference(case, args[0], local).astype(out_dtype)
        assert result.dtype == out_dtype
        assert result.shape == (mesh.size, *expected.shape)
        np.testing.assert_array_equal(
            np.asarray(result), np.broadcast_to(expected, result.shape), err_msg=case
        )
    np.testing.assert_array_equal(gathered, np.broadcast_to(args[0], gathered.shape))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "block"), [(2, 3), (3, 1), (4, 5), (5, 2)])
def test_all_cases_on_one_ring_are_exact(n, block, form):
    check(mesh_of(x=n), ("x",), ALL, block, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [6, 7, 8, 16])
def test_longer_rings_are_exact(n, form):
    check(mesh_of(x=n), ("x",), ("free-lhs", "contracting-rhs", "batch-lhs"), 1, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "block", "chunks"), [(2, 5, 2), (3, 1, 2), (4, 5, 3), (5, 2, 4)])
def test_all_cases_are_exact_on_a_ring_of_chunks(n, block, chunks, form):
    check(mesh_of(x=n), ("x",), ALL, block, form, chunks=chunks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "chunks"), [(2, 4), (6, 2), (7, 2), (8, 2), (8, 4), (16, 2)])
def test_longer_rings_of_chunks_are_exact(n, chunks, form):
    cases = ("free-lhs", "contracting-rhs", "batch-lhs")
    check(mesh_of(x=n), ("x",), cases, 3, form, chunks=chunks)


@pytest.mark.parametrize("form", FORMS)
def test_chunks_over_several_axes_and_where_varying_axes_are_checked(form):
    check(mesh_of(x=2, y=4), ("y", "x"), ("free-rhs", "contracting-lhs"), 3, form, chunks=2)
    check(mesh_of(x=5, y=2), ("x",), ALL, 2, form, check_vma=True, chunks=2)


GROUPS = [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "g"), GROUPS)
def test_steps_of_several_shards_are_exact(n, g, form):
    check(mesh_of(x=n), ("x",), ALL, 3, form, how={"shards_per_step": g})
    run, args = build(mesh_of(x=n), ("x",), ALL, 3, form, how={"shards_per_step": g})
    jaxpr = run.trace(*args).jaxpr
    assert runs(jaxpr, "ppermute") == gather_permutes(n, g=g) == g - 1 + n // g - 1
    assert runs(jaxpr, "dot_general") == n // g * len(ALL)


@pytest.mark.parametrize("form", FORMS)
def test_steps_of_several_shards_are_exact_in_chunks_in_orders_and_over_axes(form):
    cases = ("free-rhs", "contracting-lhs", "batch-rhs")
    check(mesh_of(x=8), ("x",), cases, 3, form, chunks=2, how={"shards_per_step": 2})
    for order, g in (((2, 3, 1, 0, 6, 7, 5, 4), 2), ((7, 5, 6, 4, 0, 1, 3, 2), 4)):
        check(mesh_of(x=8), ("x",), cases, 3, form, how={"shards_per_step": g, "order": order})
    for axes in (("x", "y"), ("y", "x"), ("y",)):
        check(mesh_of(x=2, y=4), axes, cases, 2, form, check_vma=True, how={"shards_per_step": 2})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ALL)
def test_one_consumer_alone_is_exact(case, form):
    check(mesh_of(x=4), ("x",), (case,), 3, form)


def test_a_ring_of_one_is_the_plain_einsum():
    check(mesh_of(x=1), ("x",), ALL, 3, (True, True))
    run, args = build(mesh_of(x=1), ("x",), ALL, 3, (True, True))
    assert runs(run.trace(*args).jaxpr, "ppermute") == 0


@pytest.mark.parametrize("form", [(True, True), (False, False)])
@pytest.mark.parametrize(
    ("axes", "ring"),
    [
        ({"x": 2, "y": 4}, ("x", "y")),
        ({"x": 2, "y": 4}, ("y", "x")),
        ({"x": 2, "y": 3, "z": 2}, ("y",)),
        ({"x": 2, "y": 3, "z": 2}, ("z", "x")),
    ],
)
def test_rings_over_several_axes_and_beside_others(axes, ring, form):
    check(mesh_of(**axes), ring, ("free-rhs", "contracting-lhs", "batch-rhs"), 3, form)


@pytest.mark.parametrize("form", FORMS)
def test_rings_work_where_shard_map_checks_varying_axes(form):
    check(mesh_of(x=5, y=2), ("x",), ALL, 2, form, check_vma=True)


@pytest.mark.parametrize("form", [(True, True), (True, False)])
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "preferred"),
    [
        (jnp.float32, jnp.float32, None),
        (jnp.int8, jnp.int32, jnp.int32),
        (jnp.bfloat16, jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16, None),
        (jnp.float8_e4m3fn, jnp.float32, jnp.float32),
        (jnp.complex64, jnp.complex64, None),
    ],
)
def test_dtypes_are_exact(dtype, out_dtype, preferred, form):
    check(mesh_of(x=3), ("x",), ALL, 3, form, dtype, out_dtype=out_dtype, preferred=preferred)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.int64])
def test_64_bit_dtypes_are_exact(dtype):
    with jax.enable_x64(True):
        check(mesh_of(x=4), ("x",), ALL, 2, (True, False), dtype)
        check(mesh_of(x=4), ("x",), ALL, 2, (True, True), dtype)


def sum_over_ring(values, dtype, out_dtype, form=(True, True)):
    """``sum(values)`` as a gathered contraction: one value on every device."""
    mesh = mesh_of(x=len(values))
    consumer = Consumer(partial_of("s,s->", out_dtype), 0)

    def ring(shard, ones):
        schedule = schedule_of(mesh, ("x",), *form)
        return all_gather_einsum(shard, [ones], [consumer], schedule, gathered_dim=0)[0]

    x = jnp.asarray(values, dtype)
    return np.asarray(every_device(mesh, ring, (P("x"), P()))(x, jnp.ones_like(x)))


@pytest.mark.parametrize("form", FORMS)
def test_small_floats_are_summed_in_float32_and_rounded_once(form):
    # In bfloat16 each addition of 1 to 256 is lost; in float32 the seven ones come to 263 -> 264.
    result = sum_over_ring([256, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16, jnp.bfloat16, form)
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result.astype(np.float32), 264)


def test_small_integers_wrap_as_the_whole_einsum_does():
    np.testing.assert_array_equal(sum_over_ring([100, 100, 100, 1], jnp.int8, jnp.int8), 45)


def test_booleans_are_or_ed_as_dot_general_does():
    assert np.all(sum_over_ring([False, True, False, True], jnp.bool_, jnp.bool_))
    assert not np.any(sum_over_ring([False] * 4, jnp.bool_, jnp.bool_))


def dots(jaxpr):
    """Every dot of the ring in program order, those of each platform's branch too."""
    found = [eqn for eqn, _ in walk(ring_body(jaxpr)) if eqn.primitive.name == "dot_general"]
    assert found
    return found


def test_a_local_einsum_keeps_the_users_types_and_a_sum_takes_the_accumulation_type():
    cases = ("free-lhs", "contracting-lhs")
    precision = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)
    run, args = build(
        mesh_of(x=4),
        ("x",),
        cases,
        3,
        (True, True),
        jnp.bfloat16,
        out_dtype=jnp.bfloat16,
        precision=precision,
    )
    found = dots(run.trace(*args).jaxpr)
    # The shard is "asd": the local einsum contracts d, its dimension 2, and the sum s, its 1.
    free = [dot for dot in found if dot.params["dimension_numbers"][0][0] == (2,)]
    summed = [dot for dot in found if dot.params["dimension_numbers"][0][0] == (1,)]
    assert len(free) == 4
    assert len(summed) >= 4
    assert len(free) + len(summed) == len(found)
    assert all(dot.outvars[0].aval.dtype == jnp.bfloat16 for dot in free)
    assert all(dot.outvars[0].aval.dtype == jnp.float32 for dot in summed)
    assert all(dot.params["precision"] == precision for dot in found)


@pytest.mark.parametrize(
    ("preset", "inputs", "result"),
    [
        # The algorithm sums in float32 as the ring does: its sum is handed on unrounded.
        (lax.DotAlgorithmPreset.BF16_BF16_F32, jnp.bfloat16, jnp.float32),
        # The algorithm sums in float16: the request stays as it was and the share is cast.
        (lax.DotAlgorithmPreset.F16_F16_F16, jnp.float16, jnp.float16),
    ],
)
def test_a_dot_algorithm_is_never_asked_for_a_type_it_does_not_have(preset, inputs, result):
    run, args = build(
        mesh_of(x=4),
        ("x",),
        ("contracting-lhs",),
        3,
        (False, True),
        inputs,
        out_dtype=inputs,
        precision=preset,
    )
    for dot in dots(run.trace(*args).jaxpr):
        assert dot.params["precision"] == preset
        assert dot.outvars[0].aval.dtype == result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [2, 3, 4, 8, 9, 16])
def test_any_number_of_consumers_share_the_permutes_of_one(n, form):
    mesh = mesh_of(x=n)
    for cases in (("free-lhs",), ALL):
        run, args = build(mesh, ("x",), cases, 1, form)
        jaxpr = run.trace(*args).jaxpr
        assert runs(jaxpr, "ppermute") == n - 1
        assert runs(jaxpr, "dot_general") == n * len(cases)
        for name in ("all_gather", "all_gather_invariant", "psum", "psum_invariant"):
            assert runs(jaxpr, name) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "block", "made"), [(2, 4, 4), (4, 9, 4), (5, 3, 3), (8, 1, 1)])
def test_every_chunk_is_sent_and_multiplied_by_itself(n, block, made, form):
    run, args = build(mesh_of(x=n), ("x",), ALL, block, form, chunks=4)
    jaxpr = run.trace(*args).jaxpr
    assert runs(jaxpr, "ppermute") == made * (n - 1)
    # The own shard is here as a whole.
    assert runs(jaxpr, "dot_general") == (1 + made * (n - 1)) * len(ALL)


@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize(("short", "long_"), [(7, 15), (8, 16)])
@pytest.mark.parametrize("two_way", [False, True])
def test_a_rolled_program_does_not_grow_with_the_ring(two_way, short, long_, chunks):
    def program(n):
        run, args = build(mesh_of(x=n), ("x",), ALL, 2, (two_way, False), chunks=chunks)
        return size(run.trace(*args).jaxpr)

    assert program(short) == program(long_)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("two_way", [False, True])
def test_no_permute_waits_for_an_einsum(two_way, chunks):
    given = None if chunks == 1 else chunks
    # Barriers make them wait on a GPU, and say so in every jaxpr.
    how = {"barrier": False}
    run, args = build(mesh_of(x=8), ("x",), ALL, 2, (two_way, True), chunks=given, how=how)
    body = ring_body(run.trace(*args).jaxpr)
    permutes = [eqn for eqn in body.eqns if eqn.primitive.name == "ppermute"]
    assert len(permutes) == 7 * chunks

    def before(eqn):
        return [e for e in ancestors(body, eqn) if e.primitive.name == "ppermute"]

    for eqn in permutes:
        # A piece is cut off its shard before the first send.
        names = {e.primitive.name for e in ancestors(body, eqn)}
        assert names <= {"ppermute", *(("slice",) if chunks > 1 else ())}
    # The longest chain of sends bounds the time: 7 one way, and of halves both ways; 4 of whole.
    depth = max(len(before(eqn)) + 1 for eqn in permutes)
    assert depth == (4 if two_way and chunks == 1 else 7)


@pytest.mark.parametrize(("platform", "waits"), [("cuda", 3), ("tpu", 0), ("cpu", 0)])
def test_the_steps_of_an_unrolled_ring_wait_for_each_other_on_a_gpu_alone(platform, waits):
    """XLA keeps one permute in flight there, and starts it before the einsums if it can."""
    run, args = build(mesh_of(x=4), ("x",), ("free-lhs",), 3, (False, True))
    text = run.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.collective_permute") == 3
    assert text.count("stablehlo.optimization_barrier") == waits


@pytest.mark.parametrize("form", FORMS)
def test_compiled_rings_hold_permutes_and_no_other_collective(form):
    run, args = build(mesh_of(x=4), ("x",), ("free-lhs", "contracting-lhs"), 3, form)
    text = run.lower(*args).compile().as_text()
    assert "collective-permute" in text
    for other in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all"):
        assert other not in text


def test_operands_that_do_not_fit_are_refused():
    mesh = mesh_of(x=4)
    consumer = Consumer(partial_of("sd,sf->df"), 0)
    shard = jnp.zeros((8, 3), jnp.int32)

    def trace(locals_, ring_size=4, dim=0):
        schedule = schedule_of(mesh, ("x",), True, True)
        if ring_size != 4:
            schedule = type(schedule)(("x",), ring_size, True, True)

        def ring(shard, *locals_):
            return all_gather_einsum(shard, locals_, [consumer], schedule, gathered_dim=dim)

        specs = (P("x"), *(P() for _ in locals_))
        jax.eval_shape(every_device(mesh, ring, specs), shard, *locals_)

    trace([jnp.zeros((8, 5), jnp.int32)])
    with pytest.raises(OptionError, match="size 8 in lhs and 7 in rhs"):
        trace([jnp.zeros((7, 5), jnp.int32)])
    with pytest.raises(OptionError, match="2 local operands for 1 consumers"):
        trace([jnp.zeros((8, 5), jnp.int32)] * 2)
    with pytest.raises(OptionError, match="not a dimension of the shard"):
        trace([jnp.zeros((8, 5), jnp.int32)], dim=2)
    with pytest.raises(OptionError, match="ring of 2, but the mesh axes"):
        trace([jnp.zeros((4, 5), jnp.int32)], ring_size=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "block", "form"), list(itertools.product([2, 3, 4, 5, 6, 7, 8, 9, 16], [1, 3, 5], FORMS))
)
def test_every_ring_and_shard_size(n, block, form):
    check(mesh_of(x=n), ("x",), ALL, block, form)


@pytest.mark.long
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(
    ("n", "block", "form"), list(itertools.product([2, 3, 4, 5, 6, 7, 8, 9, 16], [1, 3, 5], FORMS))
)
def test_every_ring_shard_and_chunk_size(n, block, form, chunks):
    check(mesh_of(x=n), ("x",), ALL, block, form, chunks=chunks)
