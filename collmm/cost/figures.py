"""The types of the hardware table: a figure with its source, and a chip made of figures.

Every number is in SI units (flop/s, bytes/s, bytes, Hz, seconds). A quantity nobody states is
``None``: an unknown is never zero.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from collmm.errors import OptionError

Basis = Literal["achievable", "nominal"]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number, its unit and where it comes from."""

    value: float
    unit: str
    source: str

    def __str__(self) -> str:
        return f"{self.value:.4g} {self.unit} ({self.source})"


@dataclasses.dataclass(frozen=True)
class Rate:
    """A rate as it is achieved and as the datasheet states it; one source gives both alike."""

    achievable: Figure
    nominal: Figure

    @property
    def unit(self) -> str:
        """Unit of both figures."""
        return self.nominal.unit

    def figure(self, basis: Basis = "achievable") -> Figure:
        """The figure on the wanted basis."""
        if basis not in ("achievable", "nominal"):
            raise OptionError(f"basis is {basis!r}; it must be 'achievable' or 'nominal'")
        return self.achievable if basis == "achievable" else self.nominal

    def value(self, basis: Basis = "achievable") -> float:
        """The number on the wanted basis, in ``unit``."""
        return self.figure(basis).value

    def scaled(self, factor: float, why: str) -> Rate:
        """This rate times ``factor``; ``why`` is added to both sources."""

        def scale(figure: Figure) -> Figure:
            return Figure(figure.value * factor, figure.unit, f"{figure.source}; {why}")

        return Rate(scale(self.achievable), scale(self.nominal))


@dataclasses.dataclass(frozen=True)
class WrapRule:
    """When a torus axis has its wraparound links.

    ``exact``: only an axis of that very size wraps. ``multiple``: an axis wraps when every axis of
    the slice is a multiple of that size (the slice is made of whole cubes). Neither: not known.
    """

    source: str
    exact: int | None = None
    multiple: int | None = None

    def wraps(self, axis_size: int, slice_shape: tuple[int, ...] | None = None) -> bool | None:
        """Whether an axis of ``axis_size`` chips wraps; None when no rule is known.

        ``slice_shape`` are the sizes of all torus axes; without it the other axes are taken to be
        whole cubes. An axis of one chip has no link, an axis of two no second one: no wraparound.
        """
        if axis_size <= 2:
            return False
        if self.exact is not None:
            return axis_size == self.exact
        if self.multiple is not None:
            return all(size % self.multiple == 0 for size in (*(slice_shape or ()), axis_size))
        return None


@dataclasses.dataclass(frozen=True)
class EinsumShape:
    """What an einsum takes beyond its roofline, by its shape; fitted to a compiler's own estimates.

    A kernel takes ``start`` (``arrived_start`` where it adds to a sum that arrived) and the longest
    of three, rounded at the corners (``cost.einsum``): its products at ``matrix_share`` of the
    peak, its result at ``result`` seconds per element (``kept`` where it stays on the chip,
    ``summed`` where it is added to a float32 sum there), its traffic with the device memory at
    ``memory_share`` of the bandwidth; and an operand that is on the chip is loaded at ``onchip``
    bytes/s before. Operands of up to ``onchip_fits`` bytes stay on the chip from one step of a loop
    to the next, results of up to ``result_fits``. An elementwise kernel takes ``pass_start`` and
    its traffic at ``pass_share`` of the bandwidth. ``late`` is 1 where the compiler starts a
    permute only after the einsum of the shard it sends, and would let a reduce-scatter's chains run
    apart; else 0. A reduce-scatter sums ``span_fits`` bytes of float32 at a time, in all members
    and the transfers between them.
    """

    matrix_share: Figure
    result: Figure
    kept: Figure
    summed: Figure
    start: Figure
    arrived_start: Figure
    memory_share: Figure
    onchip: Figure
    onchip_fits: Figure
    result_fits: Figure
    pass_start: Figure
    pass_share: Figure
    late: Figure
    span_fits: Figure


@dataclasses.dataclass(frozen=True)
class EinsumTable:
    """The share of the matrix peak that products reach, by shape, where no formula is known.

    ``shares[i][j][k]`` is that of ``[short[i], depth[j]] @ [depth[j], long[k]]`` or of its
    transpose; between the points it is interpolated in logarithms, outside them it stays.
    """

    short: tuple[int, ...]
    depth: tuple[int, ...]
    long: tuple[int, ...]
    shares: tuple[tuple[tuple[float, ...], ...], ...]
    source: str

    def share(self, rows: int, depth: int, columns: int) -> float:
        """The share of the peak that ``[rows, depth] @ [depth, columns]`` reaches."""
        short, long = sorted((rows, columns))
        places = (
            _between(self.short, short),
            _between(self.depth, depth),
            _between(self.long, long),
        )
        return math.exp(
            sum(
                a * b * c * math.log(self.shares[i][j][k])
                for (i, a), (j, b), (k, c) in itertools.product(*places)
            )
        )


def _between(points: Sequence[int], size: int) -> tuple[tuple[int, float], ...]:
    """The one or two places among ``points`` that ``size`` lies at, with weights."""
    if size <= points[0]:
        return ((0, 1.0),)
    if size >= points[-1]:
        return ((len(points) - 1, 1.0),)
    after = bisect.bisect_left(points, size)
    before = after - 1
    part = math.log(size / points[before]) / math.log(points[after] / points[before])
    return ((before, 1 - part), (after, part))


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator: a TPU chip or a GPU. All rates are per chip.

    Attributes:
        name: key in the table, such as ``"v5e"``.
        kind: ``"tpu"`` or ``"gpu"``.
        bf16, int8, fp8: matrix peak, flop/s, dense (a multiply-add is two).
        f32: matrix peak for float32 operands at JAX's default precision, flop/s.
        f32_highest: the same under ``Precision.HIGHEST``.
        hbm: bandwidth of the device memory, bytes/s.
        hbm_capacity: bytes.
        link: one-way bytes/s. TPU: one ICI link. GPU: all links of the device together.
        peer: one-way bytes/s to one neighbour; less than ``link`` only where peers are wired
            point to point.
        dcn: bytes/s per chip beyond the slice (TPU) or the node (GPU NIC).
        domain: devices joined by NVLink or xGMI; 1 for a TPU, whose ICI reaches the slice.
        torus_dims: torus axes of a TPU pod; 0 for a GPU.
        pod_shape: the largest slice, chips per torus axis; empty for a GPU.
        wrap: when a torus axis wraps.
        devices_per_chip: devices JAX shows for one chip.
        matrix_tile: an einsum dimension is padded to a multiple of this by the matrix unit.
        clock: Hz of the TensorCore, which turns ``estimated_cycles`` into seconds.
        hop_latency: seconds per hop between neighbours.
        launch: seconds to start one collective.
        step_launch: seconds one step of a permute loop costs besides its transfer.
        permute_share: the part of the links' rate that a permute achieves, where collectives
            achieve all of ``link``; None is 1.
        scatter_share: the same for a reduce-scatter.
        shape: what an einsum's shape costs beyond its roofline; None where that is not known.
        table: the share of the peak by shape, where that is known instead.
        early_gathers: whether the compiler starts an all-gather as soon as its operand is there and
            runs it behind the einsums that stand before its own; where it does not, nothing hides.
    """

    name: str
    kind: Literal["tpu", "gpu"]
    bf16: Rate
    hbm: Rate
    hbm_capacity: Figure
    link: Rate
    hop_latency: Figure
    launch: Figure
    step_launch: Figure
    wrap: WrapRule
    int8: Rate | None = None
    fp8: Rate | None = None
    f32: Rate | None = None
    f32_highest: Rate | None = None
    peer: Rate | None = None
    dcn: Rate | None = None
    domain: int = 1
    torus_dims: int = 0
    pod_shape: tuple[int, ...] = ()
    devices_per_chip: int = 1
    matrix_tile: int | None = None
    clock: Figure | None = None
    permute_share: Figure | None = None
    scatter_share: Figure | None = None
    shape: EinsumShape | None = None
    table: EinsumTable | None = None
    early_gathers: bool = True

    def share(self, name: str) -> float:
        """``permute_share`` or ``scatter_share`` as a number."""
        figure: Figure | None = getattr(self, name)
        return 1.0 if figure is None else figure.value

    def peak(self, dtype: str, precision: str = "default") -> Rate | None:
        """Matrix peak for operands of ``dtype``; None where no source states it.

        ``dtype`` is a numpy-style name such as ``"bfloat16"``, ``"float8_e4m3fn"``, ``"int8"``;
        ``precision`` is ``"default"`` or ``"highest"`` and matters for float32 only.
        """
        if dtype in ("bfloat16", "float16"):
            return self.bf16
        if dtype == "float32":
            return self.f32_highest if precision == "highest" else self.f32
        if dtype in ("int8", "uint8"):
            return self.int8
        if dtype.startswith("float8_"):
            return self.fp8
        return None

    def flops_per_s(
        self, dtype: str, precision: str = "default", basis: Basis = "achievable"
    ) -> float | None:
        """``peak`` as a number, flop/s per chip; None where it is not known."""
        rate = self.peak(dtype, precision)
        return None if rate is None else rate.value(basis)

    def hbm_bytes_per_s(self, basis: Basis = "achievable") -> float:
        """Device memory bandwidth, bytes/s per chip."""
        return self.hbm.value(basis)

    def hbm_bytes(self) -> int:
        """Device memory, bytes per chip."""
        return int(self.hbm_capacity.value)

    def link_bytes_per_s(self, basis: Basis = "achievable") -> float:
        """One-way bytes/s: of one ICI link on a TPU, of the whole device on a GPU."""
        return self.link.value(basis)

    def peer_bytes_per_s(self, basis: Basis = "achievable") -> float:
        """One-way bytes/s to one neighbour."""
        return (self.peer or self.link).value(basis)

    def dcn_bytes_per_s(self, basis: Basis = "achievable") -> float | None:
        """Bytes/s per chip beyond the slice or node; None where it is not known."""
        return None if self.dcn is None else self.dcn.value(basis)

    def clock_hz(self) -> float | None:
        """TensorCore clock in Hz; None for GPUs and where it is not known."""
        return None if self.clock is None else self.clock.value

    def wraps(self, axis_size: int, slice_shape: tuple[int, ...] | None = None) -> bool | None:
        """Whether a torus axis of that many chips wraps; None when no rule is known."""
        return self.wrap.wraps(axis_size, slice_shape)

    def per_device(self) -> Chip:
        """The share of one JAX device: compute and memory divided by ``devices_per_chip``.

        Links stay the chip's: the devices of one chip share them.
        """
        count = self.devices_per_chip
        if count == 1:
            return self
        why = f"one of {count} devices per chip"
        rates = {
            name: rate.scaled(1 / count, why)
            for name in ("bf16", "int8", "fp8", "f32", "f32_highest", "hbm")
            if (rate := getattr(self, name)) is not None
        }
        memory = self.hbm_capacity
        capacity = Figure(memory.value / count, memory.unit, f"{memory.source}; {why}")
        return dataclasses.replace(self, **rates, hbm_capacity=capacity, devices_per_chip=1)
