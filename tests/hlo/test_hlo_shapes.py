import pytest
from hypothesis import given
from hypothesis import strategies as st

from collmm.errors import HloError
from collmm.hlo.shapes import ELEMENT_BITS, Shape, parse_shape, split_top

SIZES = [
    ("f32[]", 4),
    ("bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)}", 8192 * 2048 * 2),
    ("f8e4m3fn[16,16]{1,0}", 256),
    ("f8e5m2fnuz[3]{0}", 3),
    ("f8e8m0fnu[3]{0}", 3),
    ("pred[7]{0}", 7),
    ("s4[5]{0}", 5),
    ("s4[5]{0:E(4)}", 3),
    ("u2[8]{0:T(8)E(2)S(1)}", 2),
    ("c64[2]{0}", 16),
    ("c128[2]", 32),
    ("token[]", 0),
    ("opaque[]", 0),
    ("()", 0),
    ("(f32[2]{0}, (bf16[4]{0}, token[]), /*index=2*/u32[]{:S(2)})", 8 + 8 + 4),
    ("((bf16[1024,2048]{1,0:T(8,128)(2,1)}), bf16[256,2048]{1,0}, s32[]{:S(2)})", 5242884),
    ("b(f32[2])", 8),
]


@pytest.mark.parametrize(("text", "size"), SIZES)
def test_bytes(text, size):
    assert parse_shape(text).bytes == size


def test_parts_of_an_array():
    shape = parse_shape("bf16[2,<=8,4]{2,1,0:T(8,128)(2,1)S(3)}")
    assert (shape.dtype, shape.dims) == ("bf16", (2, 8, 4))
    assert shape.dynamic == (False, True, False)
    assert shape.minor_to_major == (2, 1, 0)
    assert shape.memory_space == 3


def test_scalar_memory_space_and_no_layout():
    assert parse_shape("s32[]{:T(128)S(6)}").memory_space == 6
    assert parse_shape("s32[]").memory_space == 0
    assert parse_shape("s32[]").minor_to_major == ()


def test_leaves_of_a_tuple_in_order():
    shape = parse_shape("(f32[2]{0}, (bf16[4]{0}, token[]), pred[])")
    assert [leaf.dtype for leaf in shape.leaves()] == ["f32", "bf16", "token", "pred"]


@pytest.mark.parametrize(
    "text",
    ["", "f32", "f32[2", "f32[a]", "f32[?]", "q7[2]", "(f32[2]", "f32[2]{1,0", "f32[2] f32[3]"],
)
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(HloError, match=r"expected|unknown element type"):
        parse_shape(text)


def shapes():
    dims = st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=4)
    array = st.builds(
        lambda dtype, dims, layout: Shape(
            dtype, tuple(d for d, _ in dims), tuple(b for _, b in dims), layout
        ),
        st.sampled_from([*sorted(set(ELEMENT_BITS) - {"token", "opaque"}), "f8e4m3b11fnuz"]),
        dims,
        st.sampled_from(["", "1,0", "1,0:T(8,128)(2,1)S(1)", ":T(128)", "0:T(1024)E(4)"]),
    )
    return st.recursive(
        array,
        lambda inner: st.lists(inner, max_size=3).map(
            lambda members: Shape("tuple", elements=tuple(members))
        ),
        max_leaves=6,
    )


@given(shapes())
def test_printed_shapes_read_back(shape):
    assert parse_shape(str(shape)) == shape


def test_split_keeps_brackets_and_strings_whole():
    text = (
        "a={x, y}, b=\"1, {2\", c=[0:1], d=(p, q), e=mesh['a'=2,'b'=4] {'a'}, f=@mesh<a=2,b=4> {a}"
    )
    assert split_top(text) == [
        "a={x, y}",
        'b="1, {2"',
        "c=[0:1]",
        "d=(p, q)",
        "e=mesh['a'=2,'b'=4] {'a'}",
        "f=@mesh<a=2,b=4> {a}",
    ]
