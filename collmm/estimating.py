"""Ask a target's compiler what einsums take: compile them alone and in sums, read its estimates.

    x @ w                one kernel: an operand is fetched onto the chip first, on a TPU
    x0 @ w0 + x1 @ w1    two: the first leaves its sum on the chip, as a step of a loop does; the
                         last finds its operands there, and writes to the memory

Nothing is run and nothing allocated. Sizes are drawn, the same ones every time: half are powers of
two, half are not, and depth, rows and columns have nothing to do with each other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm.cost.einsum import Product
from collmm.cost.fit import COMPILED, OF_A_SUM, Sample
from collmm.hlo.cost import estimated_cycles
from collmm.hlo.instruction import Instruction
from collmm.hlo.parse import Module, parse
from collmm.hlo.shapes import Shape
from collmm.prediction import predict
from collmm.targets import Target

Sizes = tuple[int, int, int]
_ON_CHIP = (1, 3)
"""Memory spaces of HLO that are on a TPU's chip; v4 has two, and fetches operands to the second."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to compile.

    Attributes:
      alone: TPU: how many einsums alone; GPU: how many between the points of the table.
      sums: TPU: how many sums of two.
      short, depth, long: GPU: the points of the table.
    """

    alone: int = 48
    sums: int = 24
    short: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    depth: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    long: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)

    def quick(self) -> Wanted:
        """About a quarter."""
        return Wanted(
            self.alone // 4, self.sums // 4, self.short[::2], self.depth[::2], self.long[::2]
        )


def tpu_samples(target: Target, wanted: Wanted) -> Iterator[Sample]:
    """The kernels of einsums alone and in sums, on one device of a TPU ``target``."""
    # Where one of them is small the memory decides, or the result; in sums what starts a kernel,
    # on which the predictions of loops depend most.
    for shape in sizes(wanted.alone, (64, 256, 256), (16384, 16384, 16384), 64):
        yield from _kernels(target, COMPILED, shape)
    for shape in sizes(wanted.sums, (64, 256, 256), (8192, 8192, 8192), 64):
        yield from _kernels(target, OF_A_SUM, shape)


def table_samples(target: Target, wanted: Wanted) -> Iterator[Sample]:
    """The products of a GPU's table, each way round."""
    for short, depth, long in itertools.product(wanted.short, wanted.depth, wanted.long):
        if short <= long or long not in wanted.short or short not in wanted.long:
            for shape in dict.fromkeys(((short, depth, long), (long, depth, short))):
                yield _timed(target, shape)


def between_samples(target: Target, wanted: Wanted) -> Iterator[Sample]:
    """Products whose sizes lie between the points of a GPU's table, either way round."""
    sides = wanted.short, wanted.depth, wanted.long
    points = {size for side in sides for size in side}
    drawn = sizes(8 * wanted.alone, [p[0] for p in sides], [p[-1] for p in sides], 64)
    found = [shape for shape in drawn if not points.intersection(shape)]
    for turn, (short, depth, long) in enumerate(found[: wanted.alone]):
        yield _timed(target, (short, depth, long) if turn % 2 else (long, depth, short))


def sizes(count: int, least: Sequence[int], most: Sequence[int], step: int) -> list[Sizes]:
    """``count`` different shapes (rows, depth, columns) between ``least`` and ``most``.

    About every second one has powers of two, the others multiples of ``step``. The same for the
    same arguments.
    """
    random_ = random.Random(0)

    def one(low: int, high: int, power: bool) -> int:
        size = math.exp(random_.uniform(math.log(low), math.log(high)))
        return 2 ** round(math.log2(size)) if power else max(step, step * round(size / step))

    found: dict[Sizes, None] = {}
    turn = 0
    while len(found) < count:
        turn += 1  # by turns, since there may be too few powers of two
        rows, depth, columns = (
            one(low, high, turn % 2 == 1) for low, high in zip(least, most, strict=True)
        )
        found[rows, depth, columns] = None
    return list(found)


# --- one program ---


def _alone(x: Any, w: Any) -> Any:
    return x @ w


def _sum(x0: Any, w0: Any, x1: Any, w1: Any) -> Any:
    wide = [jnp.dot(x, w, preferred_element_type=jnp.float32) for x, w in ((x0, w0), (x1, w1))]
    return (wide[0] + wide[1]).astype(x0.dtype)


def _compiled(target: Target, program: Callable[..., Any], shape: Sizes, pairs: int) -> str:
    rows, depth, columns = shape
    whole = NamedSharding(_mesh(target), P())
    operands = [
        jax.ShapeDtypeStruct(of, jnp.bfloat16, sharding=whole)
        for of in ((rows, depth), (depth, columns))
    ] * pairs
    lowered = jax.jit(program).lower(*operands)
    return target.compile(lowered, target.baseline_options()).as_text() or ""


def _mesh(target: Target) -> Mesh:
    return Mesh(np.array(target.devices()[:1]), ("one",))


def _timed(target: Target, shape: Sizes) -> Sample:
    """One product on a GPU: all of its program, padding and copies too."""
    module = parse(_compiled(target, _alone, shape, 1))
    line = predict(module, target, devices=list(_mesh(target).devices.flat)).timeline
    assert line is not None
    return _told(Sample(COMPILED, line.compute, _product(shape).flops, _product(shape)))


def _kernels(target: Target, kind: str, shape: Sizes) -> Iterator[Sample]:
    """The einsums of one program on a TPU; none where the compiler made other kernels of it."""
    pairs, program = (1, _alone) if kind == COMPILED else (2, _sum)
    module = parse(_compiled(target, program, shape, pairs))
    timed = [i for i in module.entry.instructions if estimated_cycles(i)]
    if len(timed) != pairs:
        logging.info("%s: %d kernels where %d were expected", shape, len(timed), pairs)
        return
    for instruction in timed:
        yield _told(_kernel(target, module, kind, shape, instruction))


def _kernel(target: Target, module: Module, kind: str, shape: Sizes, i: Instruction) -> Sample:
    assert target.hardware is not None
    clock = target.hardware.clock_hz()
    cycles = estimated_cycles(i)
    assert clock
    assert cycles
    read = {other.name: other.shape for other in module.entry.instructions}
    operands = [read[name] for name in i.operands]
    out = i.shape
    wide = out.dtype == "f32"
    # A sum that is added to is no operand of the matrix unit.
    onchip = sum(s.bytes for s in operands if _stays(s) and s.dtype == "bf16")
    moved = sum(s.bytes for s in (*operands, out) if not _stays(s))
    product = _product(shape, 4 if wide else 2)
    return Sample(
        kind,
        cycles / clock,
        product.flops,
        product,
        moved=moved,
        onchip=onchip,
        result="chip" if _stays(out) else "memory",
    )


def _stays(shape: Shape) -> bool:
    return shape.memory_space in _ON_CHIP


def _product(shape: Sizes, itemsize: int = 2) -> Product:
    return Product(1, *shape, (2, 2, itemsize))


def _told(sample: Sample) -> Sample:
    p = sample.product
    assert p is not None
    what = f"[{p.rows}, {p.depth}] @ [{p.depth}, {p.columns}]"
    logging.info("%s %s: %.3g us", sample.curve, what, sample.seconds * 1e6)
    return sample
