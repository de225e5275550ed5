"""The reduce-scatter ring against numpy on the sum of all devices: exact, on every device."""

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
from collmm.loops import einsum_reduce_scatter
from collmm.ring import scatter_permutes

# Every result has dimensions "asf" and is scattered over s.
CASES = {
    "lhs-free": "asd,df->asf",
    "rhs-free": "fd,sad->asf",
    "batch": "sad,fsd->asf",
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
    barrier=True,
    chains=None,
    how=None,
    **kw,
):
    """The ring of ``cases`` as a jitted function of all devices' operands, and those operands.

    Operands have a leading dimension over the ring: every position has values of its own.
    """
    schedule = schedule_of(mesh, axes, *form, barrier=barrier, chains=chains, **(how or {}))
    sizes = {**SIZES, "s": block * schedule.ring_size}
    rng = np.random.default_rng(block)
    partials = [partial_of(CASES[case], **kw) for case in cases]
    args = [
        integers(rng, [schedule.ring_size, *(sizes[x] for x in labels)], dtype)
        for case in cases
        for labels in CASES[case].split("->")[0].split(",")
    ]

    def ring(*args):
        own = [x[0] for x in args]
        terms = list(zip(own[::2], own[1::2], partials, strict=True))
        return einsum_reduce_scatter(terms, 1, schedule)

    return every_device(mesh, ring, (P(tuple(axes)),) * len(args), check_vma), args


def ring_positions(mesh, axes):
    """The ring position of every device, in mesh order."""
    shape = tuple(mesh.shape.values())
    names = list(mesh.axis_names)
    coordinates = np.unravel_index(np.arange(mesh.size), shape)
    return np.ravel_multi_index(
        [coordinates[names.index(axis)] for axis in axes], [mesh.shape[axis] for axis in axes]
    )


def check(mesh, axes, cases, block, form, dtype=jnp.int32, **kw):
    out_dtype = np.dtype(kw.setdefault("out_dtype", dtype))
    run, args = build(mesh, axes, cases, block, form, dtype, **kw)
    wide = np.complex128 if np.iscomplexobj(args[0]) else np.int64
    whole = [np.asarray(x).astype(wide) for x in args]
    total = sum(
        np.einsum("Z{},Z{}->{}".format(*CASES[case].replace("->", ",").split(",")), lhs, rhs)
        for case, lhs, rhs in zip(cases, whole[::2], whole[1::2], strict=True)
    )
    result = run(*args)
    assert result.dtype == out_dtype
    assert result.shape == (mesh.size, SIZES["a"], block, SIZES["f"])
    for row, p in zip(np.asarray(result), ring_positions(mesh, axes), strict=True):
        np.testing.assert_array_equal(row, total[:, p * block : (p + 1) * block].astype(out_dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "block"), [(2, 3), (3, 1), (4, 5), (5, 2)])
def test_a_sum_of_all_cases_is_exact(n, block, form):
    check(mesh_of(x=n), ("x",), ALL, block, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [6, 7, 8, 16])
def test_longer_rings_are_exact(n, form):
    check(mesh_of(x=n), ("x",), ("lhs-free", "batch"), 3, form)


GROUPS = [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "g"), GROUPS)
def test_steps_of_several_shards_are_exact(n, g, form):
    two_way, unroll = form
    chains = (4 if unroll else 2) if two_way else 1
    how = {"shards_per_step": g}
    check(mesh_of(x=n), ("x",), ALL, 3, form, how=how)
    run, args = build(mesh_of(x=n), ("x",), ALL, 3, form, how=how)
    jaxpr = run.trace(*args).jaxpr
    sends = chains * (n // g - 1) + g - 1
    assert runs(jaxpr, "ppermute") == scatter_permutes(n, 3, chains, g) == sends
    assert runs(jaxpr, "dot_general") == n // g * chains * len(ALL)


@pytest.mark.parametrize("form", FORMS)
def test_steps_of_several_shards_are_exact_in_chains_in_orders_and_over_axes(form):
    cases = ("lhs-free", "batch")
    for chains in (2, 3, 5):
        how = {"shards_per_step": 2}
        check(mesh_of(x=8), ("x",), cases, 3, form, chains=chains, how=how)
    for order, g in (((2, 3, 1, 0, 6, 7, 5, 4), 2), ((7, 5, 6, 4, 0, 1, 3, 2), 4)):
        run, args = build(
            mesh_of(x=8), ("x",), cases, 3, form, how={"shards_per_step": g, "order": order}
        )
        plain, _ = build(mesh_of(x=8), ("x",), cases, 3, form)
        np.testing.assert_array_equal(run(*args), plain(*args))
    for axes in (("x", "y"), ("y", "x"), ("y",)):
        how = {"shards_per_step": 2}
        check(mesh_of(x=2, y=4), axes, cases, 3, form, check_vma=True, how=how)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ALL)
def test_one_term_alone_is_exact(case, form):
    check(mesh_of(x=4), ("x",), (case,), 3, form)


@pytest.mark.parametrize("form", FORMS)
def test_without_the_barrier_the_values_are_the_same(form):
    check(mesh_of(x=4), ("x",), ALL, 4, form, barrier=False)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize(("two_way", "chains"), [(False, 2), (False, 3), (True, 2), (True, 5)])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_any_number_of_chains_is_exact(n, two_way, chains, unroll):
    check(mesh_of(x=n), ("x",), ("lhs-free", "batch"), 7, (two_way, unroll), chains=chains)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("chains", [2, 4])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_accumulators_that_share_out_another_dimension_are_exact(n, chains, in_step, monkeypatch):
    monkeypatch.setitem(SIZES, "f", 512)
    how = {"in_step": in_step}
    for cases in (("lhs-free",), ("rhs-free",), ("lhs-free", "batch")):
        check(mesh_of(x=n), ("x",), cases, 4, (True, True), chains=chains, how=how)
        run, args = build(mesh_of(x=n), ("x",), cases, 4, (True, True), chains=chains, how=how)
        body = ring_body(run.trace(*args).jaxpr)
        dots = [e for e in body.eqns if e.primitive.name == "dot_general"]
        # Every einsum is of a whole block of 2 x 4 rows, and of a part of the columns.
        assert {e.outvars[0].aval.size for e in dots} == {2 * 4 * 512 // chains}
        assert all(512 // chains in e.outvars[0].aval.shape for e in dots)


@pytest.mark.parametrize(("two_way", "chains"), [(False, 2), (True, 2), (True, 4)])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 16])
def test_accumulators_in_step_are_exact(n, two_way, chains):
    how = {"in_step": True}
    check(mesh_of(x=n), ("x",), ("lhs-free", "batch"), 5, (two_way, True), chains=chains, how=how)


@pytest.mark.parametrize("cases", [("batch",), ALL])
def test_a_ring_of_one_is_the_plain_einsum(cases):
    check(mesh_of(x=1), ("x",), cases, 3, (True, True))
    run, args = build(mesh_of(x=1), ("x",), cases, 3, (True, True))
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
    check(mesh_of(**axes), ring, ALL, 3, form)


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


def sum_over_ring(values, dtype, out_dtype, form=(True, True), g=1):
    """``psum_scatter`` of one value per device, times a row of ones: the sum on every device."""
    n = len(values)
    mesh = mesh_of(x=n)
    partial = partial_of("k,ks->s", out_dtype)

    def ring(own, ones):
        schedule = schedule_of(mesh, ("x",), *form, shards_per_step=g)
        return einsum_reduce_scatter([(own, ones, partial)], 0, schedule)

    args = jnp.asarray(values, dtype), jnp.ones((1, 2 * n), dtype)
    return np.asarray(every_device(mesh, ring, (P("x"), P()))(*args))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("g", [1, 2, 4])
def test_small_floats_are_summed_in_float32_and_rounded_once(form, g):
    # In bfloat16 each addition of 1 to 256 is lost; in float32 the seven ones come to 263 -> 264.
    result = sum_over_ring([256, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16, jnp.bfloat16, form, g)
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result.astype(np.float32), 264)


def test_small_integers_wrap_as_the_whole_einsum_does():
    np.testing.assert_array_equal(sum_over_ring([100, 100, 100, 1], jnp.int8, jnp.int8), 45)


def test_booleans_are_or_ed_as_dot_general_does():
    assert np.all(sum_over_ring([False, True, False, True], jnp.bool_, jnp.bool_))
    assert not np.any(sum_over_ring([False] * 4, jnp.bool_, jnp.bool_))


def test_precision_is_kept_and_shares_take_the_accumulation_type():
    precision = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)
    for form in FORMS:
        run, args = build(
            mesh_of(x=4),
            ("x",),
            ALL,
            3,
            form,
            jnp.bfloat16,
            out_dtype=jnp.bfloat16,
            precision=precision,
        )
        jaxpr = run.trace(*args).jaxpr
        assert runs(jaxpr, "dot_general") > 0
        assert runs(jaxpr, "ppermute") > 0
        for eqn, _ in walk(jaxpr):
            if eqn.primitive.name == "dot_general":
                assert eqn.params["precision"] == precision
                assert eqn.outvars[0].aval.dtype == jnp.float32
            if eqn.primitive.name == "ppermute":
                assert eqn.outvars[0].aval.dtype == jnp.float32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [2, 3, 4, 8, 9, 16])
def test_any_number_of_terms_share_the_permutes_of_one(n, form):
    for cases, block in itertools.product((("lhs-free",), ALL), (1, 4)):
        run, args = build(mesh_of(x=n), ("x",), cases, block, form)
        jaxpr = run.trace(*args).jaxpr
        two_way, unroll = form
        chains = (4 if unroll else 2) if two_way and block > 1 else 1
        assert runs(jaxpr, "ppermute") == chains * (n - 1)
        assert runs(jaxpr, "dot_general") == chains * n * len(cases)
        for name in ("psum", "psum_invariant", "reduce_scatter", "psum_scatter", "all_gather"):
            assert runs(jaxpr, name) == 0


@pytest.mark.parametrize("two_way", [False, True])
def test_a_rolled_program_does_not_grow_with_the_ring(two_way):
    def program(n):
        run, args = build(mesh_of(x=n), ("x",), ALL, 4, (two_way, False))
        return size(run.trace(*args).jaxpr)

    assert program(5) == program(8) == program(16)


def dots_and_permutes(form, chains, n=8, how=None):
    run, args = build(mesh_of(x=n), ("x",), ("lhs-free",), 4, form, chains=chains, how=how)
    body = ring_body(run.trace(*args).jaxpr)
    dots = [eqn for eqn in body.eqns if eqn.primitive.name == "dot_general"]
    permutes = [eqn for eqn in body.eqns if eqn.primitive.name == "ppermute"]
    return body, dots, permutes


def permutes_behind(body, eqn):
    return [e.params["perm"] for e in ancestors(body, eqn) if e.primitive.name == "ppermute"]


def test_one_accumulator_is_waited_for_by_no_einsum():
    body, dots, permutes = dots_and_permutes((False, True), 1)
    assert (len(dots), len(permutes)) == (8, 7)
    assert all(permutes_behind(body, eqn) == [] for eqn in dots)


@pytest.mark.parametrize(("two_way", "chains"), [(True, 4), (True, 2), (False, 2)])
def test_out_of_phase_an_einsum_waits_for_its_own_accumulator_only(two_way, chains):
    body, dots, permutes = dots_and_permutes((two_way, True), chains)
    assert (len(dots), len(permutes)) == (8 * chains, 7 * chains)
    # All but the last step, where every part also waits for the one before.
    waits = [permutes_behind(body, eqn) for eqn in dots[:-chains]]
    assert [len(found) for found in waits] == [i for i in range(7) for _ in range(chains)]
    assert all(len(set(found)) <= 1 for found in waits)
    ways = {found[0] for found in waits if found}
    assert len(ways) == 1 + two_way


@pytest.mark.parametrize(("two_way", "chains"), [(True, 4), (True, 2), (False, 2)])
def test_in_step_an_einsum_waits_for_the_one_before_and_for_no_later_permute(two_way, chains):
    body, dots, permutes = dots_and_permutes((two_way, True), chains, how={"in_step": True})
    assert (len(dots), len(permutes)) == (8 * chains, 7 * chains)
    assert len({str(eqn.params["perm"]) for eqn in permutes}) == 1 + two_way
    for k, dot in enumerate(dots):
        # Its own accumulator is the one that was sent ``chains`` einsums ago.
        assert len(permutes_behind(body, dot)) == max(0, k - chains + 1)
        if k >= chains:
            assert dots[k - 1] in ancestors(body, dot)


@pytest.mark.parametrize("form", FORMS)
def test_compiled_rings_hold_permutes_and_no_other_collective(form):
    run, args = build(mesh_of(x=4), ("x",), ("lhs-free",), 3, form)
    text = run.lower(*args).compile().as_text()
    assert "collective-permute" in text
    for other in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all"):
        assert other not in text


def test_terms_that_do_not_fit_are_refused():
    mesh = mesh_of(x=4)

    def trace(terms, dim=0, axes=("x",), ring_size=4):
        schedule = type(schedule_of(mesh, axes, True, True))(axes, ring_size, True, True)

        def ring(x):
            arrays = [
                (jnp.zeros(lhs, x.dtype), jnp.zeros(rhs, x.dtype), partial_of("sd,df->sf", dtype))
                for lhs, rhs, dtype in terms
            ]
            return einsum_reduce_scatter(arrays, dim, schedule)

        jax.eval_shape(every_device(mesh, ring, (P(),)), jnp.zeros((), jnp.int32))

    good = ((8, 3), (3, 5), jnp.int32)
    trace([good])
    with pytest.raises(OptionError, match="got no terms"):
        trace([])
    with pytest.raises(OptionError, match=r"one result type, got int32\[8, 5\], int32\[8, 6\]"):
        trace([good, ((8, 3), (3, 6), jnp.int32)])
    with pytest.raises(OptionError, match="one result type"):
        trace([good, ((8, 3), (3, 5), jnp.int16)])
    with pytest.raises(OptionError, match="does not divide into 4 blocks"):
        trace([good], dim=1)
    with pytest.raises(OptionError, match="not a dimension of the result"):
        trace([good], dim=2)
    with pytest.raises(OptionError, match="ring of 2, but the mesh axes"):
        trace([good], ring_size=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "block", "form"),
    list(itertools.product([2, 3, 4, 5, 6, 7, 8, 9, 16], [1, 3, 4, 5], FORMS)),
)
def test_every_ring_and_block_size(n, block, form):
    check(mesh_of(x=n), ("x",), ALL, block, form)
