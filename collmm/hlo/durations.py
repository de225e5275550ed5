"""How long the instructions of a schedule take: the compiler's own figure, else a stated estimate.

A time always comes with its origin. Where neither the text nor the given figures tell, there is no
time: an unknown is never zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from collmm.hlo import cost
from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.parse import Module
from collmm.hlo.traffic import (
    copied_bytes,
    matrix_flops,
    product_operand,
    traffic_bytes,
)

CYCLES = "estimated_cycles"
EXEC_TIME = "exec_time_us"
MEMORY = "bytes over memory bandwidth"
PRODUCT = "flops over matrix peak"
CORRECTED = "bytes or flops instead of an implausible exec_time_us"
GIVEN = "given"

# XLA's GPU table of matrix products has no row for half-precision operands with a float32 result:
# it then states the time of the same product without tensor cores, tens of times too long.
_WIDENING = {"bf16", "f16"}
_IMPLAUSIBLE = 4.0


@dataclass(frozen=True, slots=True)
class Duration:
    """Predicted seconds of one run, and where the figure comes from."""

    seconds: float
    origin: str


class Durations:
    """Times of the instructions of a module.

    Args:
      clock_hz: TensorCore clock for the ``estimated_cycles`` of TPU text.
      peak: (HLO element type of the operands, ``"default"`` or ``"highest"``) to flop/s of matrix
        products; None where it is not known.
      memory: bandwidth of the device memory, bytes/s.
      share: (rows, depth, columns) of a matrix product to the part of the peak that it reaches; all
        of it without.
      given: seconds of an instruction, asked where the text has no figure.
    """

    def __init__(
        self,
        *,
        clock_hz: float | None = None,
        peak: Callable[[str, str], float | None] | None = None,
        memory: float | None = None,
        share: Callable[[int, int, int], float] | None = None,
        given: Callable[[Instruction], float | None] | None = None,
    ):
        self.clock_hz = clock_hz
        self.peak = peak
        self.memory = memory
        self.share = share
        self.given = given

    def of(self, module: Module, computation: Computation, i: Instruction) -> Duration | None:
        """The time of one run of ``i``; None when it is not known."""
        stated = cost.seconds(i, self.clock_hz)
        if stated is not None:
            own = self._widening_product(module, computation, i)
            if own is not None and stated > _IMPLAUSIBLE * own.seconds:
                return Duration(own.seconds, CORRECTED)
            return Duration(stated, EXEC_TIME if cost.exec_time_us(i) is not None else CYCLES)
        if self.given is not None and (seconds := self.given(i)) is not None:
            return Duration(seconds, GIVEN)
        return self._estimate(module, computation, i)

    def copy(self, module: Module, computation: Computation, start: Instruction) -> Duration | None:
        """The time of the asynchronous copy that ``start`` begins; None when it begins none."""
        if self.memory is None:
            return None
        size = copied_bytes(module, computation, start)
        return None if size is None else Duration(size / self.memory, MEMORY)

    def _widening_product(
        self, module: Module, computation: Computation, i: Instruction
    ) -> Duration | None:
        shape = i.shape.elements[0] if i.shape.is_tuple and i.shape.elements else i.shape
        if cost.exec_time_us(i) is None or shape.dtype != "f32":
            return None
        operand = product_operand(module, computation, i)
        if operand is None or operand[0] not in _WIDENING:
            return None
        return self._estimate(module, computation, i)

    def _estimate(
        self, module: Module, computation: Computation, i: Instruction
    ) -> Duration | None:
        """The longer of its products at peak and its traffic at full bandwidth."""
        if self.memory is None:
            return None
        size = traffic_bytes(module, computation, i)
        flops = matrix_flops(module, computation, i)
        if size is None or flops is None:
            return None
        by_memory = size / self.memory
        if not flops:
            return Duration(by_memory, MEMORY)
        operand = product_operand(module, computation, i)
        peak = self.peak(*operand) if self.peak and operand else None
        if peak is None:
            return None
        by_product = flops / peak / self._share(i, flops)
        if by_product >= by_memory:
            return Duration(by_product, PRODUCT)
        return Duration(by_memory, MEMORY)

    def _share(self, i: Instruction, flops: int) -> float:
        shape = i.shape.elements[0] if i.shape.is_tuple and i.shape.elements else i.shape
        if self.share is None or len(shape.dims) < 2:
            return 1.0
        rows, columns = shape.dims[-2:]
        return self.share(rows, max(1, flops // (2 * math.prod(shape.dims))), columns)
