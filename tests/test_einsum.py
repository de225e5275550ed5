import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collmm.einsum import Einsum
from collmm.errors import OptionError
from collmm.schedule import MAX_UNROLLED_RING, Schedule, default_schedule


def labelled(equation):
    operands, out = equation.split("->")
    lhs, rhs = operands.split(",")
    return Einsum(*(tuple(map(ord, labels)) for labels in (lhs, rhs, out)))


@st.composite
def einsums(draw):
    """Any einsum of up to six labels with sizes, every operand in any order."""
    kinds = draw(st.lists(st.sampled_from(["batch", "contracting", "lhs", "rhs"]), max_size=6))
    labels = dict(enumerate(kinds))
    lhs = [x for x, kind in labels.items() if kind != "rhs"]
    rhs = [x for x, kind in labels.items() if kind != "lhs"]
    out = [x for x, kind in labels.items() if kind != "contracting"]
    einsum = Einsum(*(tuple(draw(st.permutations(x))) for x in (lhs, rhs, out)))
    sizes = {x: draw(st.integers(1, 4)) for x in labels}
    return einsum, sizes


def numpy_dot_general(lhs, rhs, numbers):
    """``dot_general`` by its definition: batch, lhs free, rhs free, contraction by tensordot."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    lhs_free = [i for i in range(lhs.ndim) if i not in (*lhs_contract, *lhs_batch)]
    rhs_free = [i for i in range(rhs.ndim) if i not in (*rhs_contract, *rhs_batch)]
    lhs = lhs.transpose((*lhs_batch, *lhs_free, *lhs_contract))
    rhs = rhs.transpose((*rhs_batch, *rhs_free, *rhs_contract))
    n_batch, n_contract = len(lhs_batch), len(lhs_contract)
    out = np.zeros(
        lhs.shape[: lhs.ndim - n_contract] + rhs.shape[n_batch : rhs.ndim - n_contract], lhs.dtype
    )
    axes = (
        range(lhs.ndim - n_batch - n_contract, lhs.ndim - n_batch),
        range(rhs.ndim - n_batch - n_contract, rhs.ndim - n_batch),
    )
    for index in np.ndindex(*lhs.shape[:n_batch]):
        out[index] = np.tensordot(lhs[index], rhs[index], axes=axes)
    return out


def shapes(einsum, sizes):
    return tuple(sizes[x] for x in einsum.lhs), tuple(sizes[x] for x in einsum.rhs)


def reference(einsum, lhs, rhs):
    return np.einsum(lhs, einsum.lhs, rhs, einsum.rhs, einsum.out)


@given(einsums())
def test_dot_general_and_transpose_give_the_einsum(case):
    einsum, sizes = case
    lhs_shape, rhs_shape = shapes(einsum, sizes)
    lhs = np.arange(np.prod(lhs_shape, dtype=int)).reshape(lhs_shape)
    rhs = 1 + np.arange(np.prod(rhs_shape, dtype=int)).reshape(rhs_shape)
    numbers, permutation = einsum.to_dot_general()
    out = numpy_dot_general(lhs, rhs, numbers)
    if permutation is not None:
        assert permutation != tuple(range(out.ndim))
        out = out.transpose(permutation)
    np.testing.assert_array_equal(out, reference(einsum, lhs, rhs))
    assert out.shape == einsum.out_shape(lhs_shape, rhs_shape)


@given(einsums())
def test_dot_general_numbers_come_back_without_a_transpose(case):
    einsum, _ = case
    numbers, _ = einsum.to_dot_general()
    again = Einsum.from_dot_general(numbers, len(einsum.lhs), len(einsum.rhs))
    back, permutation = again.to_dot_general()
    assert permutation is None
    assert back[1] == numbers[1]
    assert set(zip(*back[0], strict=True)) == set(zip(*numbers[0], strict=True))


def test_from_dot_general_takes_dimensions_in_any_order():
    einsum = Einsum.from_dot_general((((3, 1), (0, 3)), ((2,), (1,))), 4, 4)
    assert einsum.equation() == "abcd,dceb->cae"
    assert einsum.batch == (2,)
    assert set(einsum.contracting) == {1, 3}


@given(einsums())
def test_gradients_are_those_of_the_einsum(case):
    einsum, sizes = case
    lhs_shape, rhs_shape = shapes(einsum, sizes)
    rng = np.random.default_rng(0)
    lhs, rhs = rng.integers(-9, 9, lhs_shape), rng.integers(-9, 9, rhs_shape)
    ct = rng.integers(-9, 9, einsum.out_shape(lhs_shape, rhs_shape))
    # <ct, E(lhs, rhs)> is linear in each operand, so it is <gradient, operand>.
    total = np.sum(ct * reference(einsum, lhs, rhs))
    d_lhs = reference(einsum.grad_lhs(), ct, rhs)
    d_rhs = reference(einsum.grad_rhs(), lhs, ct)
    assert d_lhs.shape == lhs_shape
    assert d_rhs.shape == rhs_shape
    assert np.sum(d_lhs * lhs) == total
    assert np.sum(d_rhs * rhs) == total


@given(einsums(), st.data())
def test_batched_is_a_loop_over_the_new_dimension(case, data):
    einsum, sizes = case
    lhs_shape, rhs_shape = shapes(einsum, sizes)
    lhs_dim = data.draw(st.none() | st.integers(0, len(lhs_shape)))
    rhs_dim = data.draw(st.none() | st.integers(0, len(rhs_shape)))
    batched = einsum.batched(lhs_dim, rhs_dim)
    if lhs_dim is None and rhs_dim is None:
        assert batched == einsum
        return
    rng = np.random.default_rng(0)
    lhs, rhs = rng.integers(-9, 9, (3, *lhs_shape)), rng.integers(-9, 9, (3, *rhs_shape))
    expected = np.stack(
        [
            reference(
                einsum,
                lhs[0 if lhs_dim is None else i],
                rhs[0 if rhs_dim is None else i],
            )
            for i in range(3)
        ]
    )
    lhs = lhs[0] if lhs_dim is None else np.moveaxis(lhs, 0, lhs_dim)
    rhs = rhs[0] if rhs_dim is None else np.moveaxis(rhs, 0, rhs_dim)
    np.testing.assert_array_equal(reference(batched, lhs, rhs), expected)


def test_labels_fall_into_batch_contracting_and_free():
    einsum = labelled("bsd,bdf->fbs")
    names = {label: chr(label) for label in (*einsum.lhs, *einsum.rhs)}
    assert einsum.equation(names) == "bsd,bdf->fbs"
    assert einsum.equation() == "abc,acd->dab"
    assert [chr(x) for x in einsum.batch] == ["b"]
    assert [chr(x) for x in einsum.contracting] == ["d"]
    assert [chr(x) for x in einsum.lhs_free] == ["s"]
    assert [chr(x) for x in einsum.rhs_free] == ["f"]


def test_flops_count_a_multiply_and_an_add():
    assert labelled("md,dn->mn").flops((3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert labelled("bmd,bdn->bmn").flops((2, 3, 5), (2, 5, 7)) == 2 * 2 * 3 * 5 * 7
    assert labelled("m,n->mn").flops((3,), (7,)) == 2 * 3 * 7


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((0, 0), (0,), (0,)), "repeats a label"),
        (((0, 1), (1,), ()), "occurs only in lhs"),
        (((0,), (0,), (0, 2)), "occurs only in out"),
        (([0], (0,), (0,)), "must be a tuple"),
    ],
)
def test_a_label_that_breaks_the_rules_is_refused(parts, message):
    with pytest.raises(OptionError, match=message):
        Einsum(*parts)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(OptionError, match="wants 2 dimensions"):
        labelled("md,dn->mn").sizes((3,), (5, 7))
    with pytest.raises(OptionError, match="size 5 in lhs and 6 in rhs"):
        labelled("md,dn->mn").sizes((3, 5), (6, 7))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"axes": ()}, "non-empty tuple"),
        ({"axes": ["x"]}, "non-empty tuple"),
        ({"axes": ("x", "x")}, "name an axis twice"),
        ({"axes": (1,)}, "must be strings"),
        ({"ring_size": 0}, "ring_size must be an int >= 1"),
        ({"ring_size": 2.0}, "ring_size must be an int >= 1"),
        ({"two_way": 1}, "two_way must be True or False"),
        ({"unroll": None}, "unroll must be True or False"),
        ({"chains": 1}, "chains must be None or an int >= 2 where two_way is True"),
        ({"chains": 0, "two_way": False}, "chains must be None or an int >= 1"),
        ({"chains": True}, "chains must be None"),
    ],
)
def test_a_schedule_refuses_values_that_are_not_allowed(kwargs, message):
    good = {"axes": ("x",), "ring_size": 4, "two_way": True, "unroll": True}
    with pytest.raises(OptionError, match=message):
        Schedule(**{**good, **kwargs})


def test_default_schedule_is_two_way_and_unrolled_on_short_rings():
    assert default_schedule(["x"], 4).describe() == "two-way x4 unrolled"
    assert default_schedule(["x"], 2).describe() == "one-way x2 unrolled"
    assert default_schedule(["x"], 4, rolled=True).describe() == "two-way x4 rolled"
    assert default_schedule(["x"], MAX_UNROLLED_RING).unroll
    assert not default_schedule(["x", "y"], MAX_UNROLLED_RING + 1).unroll
    assert default_schedule(["x", "y"], 16).axes == ("x", "y")
    cut = Schedule(("x",), 4, two_way=True, unroll=True, chains=2)
    assert (cut.describe(), cut.chunks) == ("two-way x4 unrolled chains 2", 2)
    assert default_schedule(["x"], 4).chunks == 1
    assert default_schedule(["x"], 4).accumulators == 4
    assert default_schedule(["x"], 2).accumulators == 1
    assert Schedule(("x",), 4, two_way=True, unroll=True, chains=2).accumulators == 2
