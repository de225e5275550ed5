"""Seconds an einsum takes on one device: a roofline over padded tiles, and what its shape loses.

An einsum is a batch of matrix products ``[rows, depth] @ [depth, columns]``. Its time is the
longest of: the floating-point operations of the tiles it fills, over the matrix peak; the bytes it
reads and writes, over the bandwidth of the memory; and its result, element by element; and the
loading of an operand that is on the chip.
How much of each rate a shape reaches is fitted per chip (``Chip.shape``, ``Chip.table``).

>>> from collmm.cost.hardware import chip
>>> bare = dataclasses.replace(chip("v5e"), shape=None)
>>> round(1e6 * time_of(Product(1, 4096, 8192, 4096), bare).seconds)
1395
>>> time_of(Product(1, 4096, 8192, 100), bare).padding  # 128 columns are multiplied
1.28
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from collmm.cost.figures import Basis, Chip
from collmm.sites import EinsumSite

Place = Literal["memory", "chip", "sum", "arrived"]
_NONE: Mapping[int, int] = {}
_ROUNDED = 4
"""The corners of the roofline: close to one, a second leg adds to the longest."""
GPU_ALIGN = 8
"""XLA's GPU compiler pads what is no multiple of this for cuBLAS, with copies."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A batch of matrix products on one device, ``[rows, depth] @ [depth, columns]`` each.

    Attributes:
      batch, rows, depth, columns: sizes.
      itemsizes: bytes per element of lhs, rhs and result.
      dtype: element type of the operands, a numpy-style name.
      precision: ``"default"`` or ``"highest"``; matters for float32 only.
      multiplies: real products for one of the elements: 4 for complex numbers.
    """

    batch: int
    rows: int
    depth: int
    columns: int
    itemsizes: tuple[int, int, int] = (2, 2, 2)
    dtype: str = "bfloat16"
    precision: str = "default"
    multiplies: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counting two."""
        return 2 * self.multiplies * self.batch * self.rows * self.depth * self.columns

    @property
    def results(self) -> int:
        """Elements of the result."""
        return self.batch * self.rows * self.columns

    @property
    def lhs_bytes(self) -> int:
        """Bytes of the left operand."""
        return self.batch * self.rows * self.depth * self.itemsizes[0]

    @property
    def rhs_bytes(self) -> int:
        """Bytes of the right operand."""
        return self.batch * self.depth * self.columns * self.itemsizes[1]

    @property
    def out_bytes(self) -> int:
        """Bytes of the result."""
        return self.results * self.itemsizes[2]


@dataclasses.dataclass(frozen=True)
class EinsumTime:
    """Predicted seconds of one einsum on one device, and what they are made of.

    Attributes:
      seconds: all of it.
      compute_s: of the matrix unit, padding and efficiency included.
      memory_s: of the traffic with the device memory.
      bytes: of that.
      padding: operations of the tiles filled, over those asked for; 1 or more.
      note: what had to be assumed, or empty.
    """

    seconds: float
    compute_s: float
    memory_s: float
    bytes: float
    padding: float
    note: str = ""


def product_of(site: EinsumSite, parts: Mapping[int, int] = _NONE, precision: str = "") -> Product:
    """The einsum of ``site`` as one device computes it, whole after every gather.

    ``parts``: into how many parts a label is cut, for a partial einsum.
    """
    local = {
        label: -(-size // (shards * parts.get(label, 1)))
        for label, (size, shards) in site.label_shards.items()
    }

    def size_of(labels: tuple[int, ...]) -> int:
        return math.prod(local[label] for label in labels)

    einsum = site.einsum
    return Product(
        batch=size_of(einsum.batch),
        rows=size_of(einsum.lhs_free),
        depth=size_of(einsum.contracting),
        columns=size_of(einsum.rhs_free),
        itemsizes=site.itemsizes,
        dtype=site.dtypes[0],
        precision=precision or site.precision,
        multiplies=4 if site.dtypes[2].startswith("complex") else 1,
    )


def time_of(
    product: Product,
    chip: Chip,
    basis: Basis = "achievable",
    *,
    moved: float | None = None,
    onchip: float = 0.0,
    result: Place = "memory",
) -> EinsumTime:
    """The time of ``product`` on one device of ``chip``.

    Args:
      product: the einsum.
      chip: the hardware row, per device.
      basis: of the rates.
      moved: bytes that it reads from and writes to the device memory; without, both operands and
        the result once.
      onchip: bytes of an operand that it finds in the memory on the chip.
      result: where the result goes: the device memory, the chip, a float32 sum that every step
        adds to, or a sum that has just arrived.
    """
    rate = chip.peak(product.dtype, product.precision)
    note = ""
    if rate is None:
        rate = chip.bf16
        note = f"no peak known for {product.dtype} on {chip.name}; bf16 taken"
    if moved is None:
        moved = product.lhs_bytes + product.rhs_bytes + product.out_bytes
    padding = _padding(product, chip)
    compute_s = padding * product.flops / rate.value(basis)
    memory_s = moved / chip.hbm_bytes_per_s(basis)
    shape = chip.shape
    if shape is not None:
        compute_s /= shape.matrix_share.value
        memory_s /= shape.memory_share.value
        each = {"memory": shape.result, "sum": shape.summed}.get(result, shape.kept)
        result_s = product.results * each.value
        loaded_s = onchip / shape.onchip.value
        if result == "arrived":
            legs = compute_s, memory_s, result_s, loaded_s
            seconds = shape.arrived_start.value + _rounded(legs)
        else:  # the matrix unit waits while an operand that is used again is loaded into it
            seconds = shape.start.value + loaded_s + _rounded((compute_s, memory_s, result_s))
    elif chip.table is not None:
        compute_s /= chip.table.share(product.rows, product.depth, product.columns)
        copied_s = 2 * sum(copied(product)) / chip.hbm_bytes_per_s(basis)
        seconds = max(compute_s, memory_s) + copied_s
    else:
        seconds = max(compute_s, memory_s)
    return EinsumTime(seconds, compute_s, memory_s, moved, padding, note)


def copied(product: Product) -> tuple[int, int, int]:
    """Bytes of lhs, rhs and result that a GPU's compiler copies to pad them or to cut them back."""
    rows, depth, columns = (
        s % GPU_ALIGN > 0 for s in (product.rows, product.depth, product.columns)
    )
    return (
        product.lhs_bytes * (rows or depth),
        product.rhs_bytes * (depth or columns),
        product.out_bytes * (rows or columns),
    )


def _rounded(legs: Sequence[float]) -> float:
    longest = max(legs)
    if not longest:
        return 0.0
    return longest * sum((leg / longest) ** _ROUNDED for leg in legs) ** (1 / _ROUNDED)


def _padding(product: Product, chip: Chip) -> float:
    """How many times more is multiplied because tiles are filled up."""
    tile = chip.matrix_tile or 1
    factor = 1.0
    for size in (product.columns, product.depth):
        if size:
            factor *= -(-size // tile) * tile / size
    return factor
