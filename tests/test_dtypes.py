"""Element types, precision and result types of an einsum are kept in the partial einsums."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rewritten import always, assert_equal_trees
from test_manual import MESH, ints
from test_narrow import equations, put, wsc

from collmm import _jax, primitives
from collmm.einsum import Einsum
from collmm.loops import PartialEinsum
from collmm.primitives import all_gather_einsum_p, einsum_reduce_scatter_p

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BF16, F32, I8, I32 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.int32
PRODUCT = (((1,), (0,)), ((), ()))


def dots(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for _, _, sub in _jax.jaxprs_in(eqn):
            yield from dots(_jax.open_jaxpr(sub))


def partial_dots(o, *args):
    """The dot_generals inside the loops of the rewritten program, as the loops trace them."""
    loops = {all_gather_einsum_p: primitives._gather_impl}
    loops[einsum_reduce_scatter_p] = primitives._scatter_impl
    found = []
    for eqn in equations(o, *args):
        if eqn.primitive in loops:
            types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
            loop = functools.partial(loops[eqn.primitive], **eqn.params)
            found += dots(jax.make_jaxpr(loop)(*types).jaxpr)
    assert found
    return found


def gathered(**options):
    def fn(x, w):
        return wsc(lax.dot_general(x, w, PRODUCT, **options), None, "m")

    return jax.jit(fn), (("m", None), (None, "m"))


def scattered(**options):
    def fn(x, w):
        return wsc(lax.dot_general(x, w, PRODUCT, **options), "m", None)

    return jax.jit(fn), ((None, "m"), ("m", None))


def operands(specs, lhs, rhs):
    x, w = ints(0, 16, 8).astype(lhs), ints(1, 8, 12).astype(rhs)
    return put(x, *specs[0]), put(w, *specs[1])


FORMS = [
    (E4M3, E4M3, F32),
    (E5M2, E4M3, F32),
    (E4M3, E4M3, BF16),
    (E4M3, BF16, F32),
    (I8, I8, I32),
    (I32, I32, None),
    (jnp.complex64, jnp.complex64, None),
    (BF16, F32, F32),
    (BF16, BF16, F32),
    (BF16, BF16, None),
]


@pytest.mark.parametrize("make", [gathered, scattered])
@pytest.mark.parametrize(("lhs", "rhs", "preferred"), FORMS)
def test_values_and_types(make, lhs, rhs, preferred):
    fn, specs = make(preferred_element_type=preferred)
    args = operands(specs, lhs, rhs)
    o = always(fn)
    assert [d.rewritten for d in o.plan(*args).decisions] == [True]
    assert_equal_trees(o(*args), fn(*args))


@pytest.mark.parametrize(("lhs", "rhs", "preferred"), FORMS)
def test_a_gathering_loop_multiplies_what_the_user_multiplies(lhs, rhs, preferred):
    fn, specs = gathered(preferred_element_type=preferred)
    args = operands(specs, lhs, rhs)
    (whole,) = dots(jax.make_jaxpr(fn)(*args).jaxpr)
    for dot in partial_dots(always(fn), *args):
        if {v.aval.dtype for v in dot.invars} == {jnp.dtype(F32)} != {jnp.dtype(lhs)}:
            continue  # what the CPU runs for half floats into float32: the same, widened first
        assert [v.aval.dtype for v in dot.invars] == [jnp.dtype(lhs), jnp.dtype(rhs)]
        for name in ("precision", "preferred_element_type"):
            assert dot.params[name] == whole.params[name]


@pytest.mark.parametrize("make", [gathered, scattered])
@pytest.mark.parametrize(
    "precision",
    [
        "highest",
        lax.Precision.HIGH,
        ("highest", "default"),
        lax.DotAlgorithmPreset.F32_F32_F32,
        lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    ],
)
def test_precision_is_kept(make, precision):
    fn, specs = make(precision=precision)
    args = operands(specs, F32, F32)
    (whole,) = dots(jax.make_jaxpr(fn)(*args).jaxpr)
    assert whole.params["precision"] is not None
    for dot in partial_dots(always(fn), *args):
        assert dot.params["precision"] == whole.params["precision"]


def test_an_algorithm_is_kept():
    """The CPU knows none that is spelled out, so this is the partial einsum by itself."""
    algorithm = lax.DotAlgorithm(BF16, BF16, F32, 1, 1, 3, False)
    x, w = jnp.zeros((4, 8)), jnp.zeros((8, 3))
    whole = jax.make_jaxpr(lambda x, w: lax.dot_general(x, w, PRODUCT, precision=algorithm))(x, w)
    (want,) = dots(whole.jaxpr)
    einsum = Einsum.from_dot_general(PRODUCT, 2, 2)
    part = PartialEinsum(einsum, want.params["precision"], None, jnp.dtype(F32))
    for multiply in (part.dot, part.partial_sum):
        (got,) = dots(jax.make_jaxpr(multiply)(x, w).jaxpr)
        assert got.params["precision"] == want.params["precision"] == algorithm


def test_the_sharding_of_an_explicit_result_is_kept():
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.sharding.Mesh(MESH.devices, MESH.axis_names, axis_types=kinds)
    with jax.set_mesh(mesh):
        x = jax.device_put(ints(0, 16, 8), NamedSharding(mesh, P("m", None)))
        w = jax.device_put(ints(1, 8, 12), NamedSharding(mesh, P(None, "m")))

        @jax.jit
        def fn(x, w):
            whole = jax.sharding.reshard(x, P(None, None))
            return jnp.einsum("sd,df->sf", whole, w, out_sharding=P(None, "m"))

        o = always(fn)
        assert [d.rewritten for d in o.plan(x, w).decisions] == [True]
        assert jax.typeof(o(x, w)) == jax.typeof(fn(x, w))
        assert_equal_trees(o(x, w), fn(x, w))
