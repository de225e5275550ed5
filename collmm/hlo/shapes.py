"""Shapes as HLO text spells them: element type, dimensions, layout, tuples; their size in bytes.

Sizes are logical: elements times the element's storage width. Tile padding is not counted, because
what travels over a link, and what a cost model prices, is the data.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from collmm.errors import HloError

# Storage bits of one element. Sub-byte types take a byte each unless the layout says E(bits)
# (XLA, shape_util: an unpacked s4 is one byte; layouts of packed ones carry the element size).
ELEMENT_BITS = {
    "pred": 8,
    **dict.fromkeys(("s1", "s2", "s4", "u1", "u2", "u4", "f4e2m1fn"), 8),
    **dict.fromkeys(("s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
_EIGHT_BIT_FLOAT = re.compile(r"f8e\d+m\d+\w*\Z")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{(.*)\})?\Z", re.DOTALL)
_ELEMENT_SIZE = re.compile(r"E\((\d+)\)")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True, slots=True)
class Shape:
    """One HLO shape.

    ``dtype`` is the HLO element type (``"bf16"``, ``"f8e4m3fn"``, ...), or ``"tuple"``,
    ``"token"``, ``"opaque"``. ``dims`` are the logical dimensions, a dynamic one (``<=n``) by its
    bound, with ``dynamic`` true at its place. ``layout`` is the text between the braces, empty
    when there is none. ``elements`` are the members of a tuple.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    dynamic: tuple[bool, ...] = ()
    layout: str = ""
    elements: tuple[Shape, ...] = ()

    @property
    def is_tuple(self) -> bool:
        """Whether this is a tuple shape."""
        return self.dtype == "tuple"

    @property
    def bytes(self) -> int:
        """Size in bytes, without tile padding; a tuple is the sum of its members."""
        if self.is_tuple:
            return sum(e.bytes for e in self.elements)
        packed = _ELEMENT_SIZE.search(self.layout)
        bits = int(packed[1]) if packed and int(packed[1]) else element_bits(self.dtype)
        return -(-math.prod(self.dims) * bits // 8)

    @property
    def memory_space(self) -> int:
        """The ``S(n)`` of the layout; 0 (main memory) when there is none."""
        found = _MEMORY_SPACE.search(self.layout)
        return int(found[1]) if found else 0

    @property
    def minor_to_major(self) -> tuple[int, ...]:
        """Dimension order of the layout, minor first; empty when no layout is given."""
        order = self.layout.partition(":")[0]
        return tuple(int(d) for d in order.split(",")) if order else ()

    def leaves(self) -> Iterator[Shape]:
        """The array, token and opaque shapes in it, depth first."""
        if self.is_tuple:
            for e in self.elements:
                yield from e.leaves()
        else:
            yield self

    def __str__(self) -> str:
        if self.is_tuple:
            return "(" + ", ".join(map(str, self.elements)) + ")"
        dims = ",".join(
            ("<=" if dyn else "") + str(d) for d, dyn in zip(self.dims, self.dynamic, strict=True)
        )
        return f"{self.dtype}[{dims}]" + (f"{{{self.layout}}}" if self.layout else "")


def element_bits(dtype: str) -> int:
    """Storage bits of one element of the HLO type ``dtype``. Raises HloError when unknown."""
    bits = ELEMENT_BITS.get(dtype)
    if bits is None:
        if not _EIGHT_BIT_FLOAT.match(dtype):
            raise HloError(f"unknown element type {dtype!r}; expected one of HLO's, such as bf16")
        bits = 8
    return bits


def parse_shape(text: str) -> Shape:
    """Read a shape such as ``bf16[2,<=8]{1,0:T(8,128)S(1)}`` or ``(f32[2]{0}, token[])``.

    Raises HloError, without a line number (the caller knows it), when ``text`` is no shape.
    """
    if "/*" in text:
        text = _COMMENT.sub("", text)
    text = text.strip()
    if text.startswith("("):
        if not text.endswith(")"):
            raise HloError(f"expected a tuple shape to end with ')', found {_short(text)}")
        inner = text[1:-1].strip()
        members = split_top(inner) if inner else []
        return Shape("tuple", elements=tuple(parse_shape(m) for m in members))
    if text.startswith("b(") and text.endswith(")"):  # a buffer of the shape inside
        return parse_shape(text[2:-1])
    return _parse_array(text)


# Arrays repeat; tuples (a loop's state may take 50 kB of text) are not worth keeping.
@functools.lru_cache(maxsize=4096)
def _parse_array(text: str) -> Shape:
    found = _ARRAY.match(text)
    if not found:
        raise HloError(f"expected a shape such as f32[2,3]{{1,0}}, found {_short(text)}")
    dtype, dims_text, layout = found.groups()
    element_bits(dtype)
    dims, dynamic = [], []
    for d in dims_text.split(",") if dims_text else ():
        bound = d.strip()
        dynamic.append(bound.startswith("<="))
        bound = bound.removeprefix("<=")
        if not bound.isdigit():
            raise HloError(f"expected a dimension in {_short(text)}, found {bound!r}")
        dims.append(int(bound))
    return Shape(dtype, tuple(dims), tuple(dynamic), layout or "")


# Strings and @mesh<a=2,b=4> are skipped whole; the rest are brackets and commas.
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|@mesh<[^>]*>|[(\[{]|[)\]}]|,', re.DOTALL)


def split_top(text: str) -> list[str]:
    """Split at the commas that stand outside brackets and strings; parts are stripped.

    Raises HloError when brackets do not close.
    """
    parts, depth, start = [], 0, 0
    for token in _STRUCTURE.finditer(text):
        c = token[0]
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    if depth != 0:
        raise HloError(f"expected brackets that close in {_short(text)}")
    parts.append(text[start:].strip())
    return parts


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
