"""The cost model against a published measurement: JAX's Pallas collective matmul on H100.

    python benchmarks/published.py

All-gather and matrix product in float16, 1024 rows on each GPU, width 4096, 4096 columns on each.
Assumed: the kernel writes its result in place and copies no shard, so the model's passes over
memory are left out; every round costs what that example states, about 6 us (``step_launch`` of the
row). The baseline, NCCL and cuBLAS, is the model's einsum and collective, one after the other.
"""

from __future__ import annotations

import dataclasses

from collmm.cost.estimate import estimate
from collmm.cost.hardware import chip
from collmm.einsum import Einsum
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, Collective, EinsumSite

# GPUs: microseconds measured, (NCCL and cuBLAS, overlapped kernel).
PALLAS_H100 = {2: (147, 102), 4: (290, 212), 8: (565, 436)}


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of GPUs: microseconds, predicted and measured."""

    gpus: int
    baseline: float
    measured_baseline: float
    overlapped: float
    measured_overlapped: float

    @property
    def errors(self) -> tuple[float, float]:
        """``predicted / measured - 1`` of the baseline and of the overlapped kernel."""
        return (
            self.baseline / self.measured_baseline - 1,
            self.overlapped / self.measured_overlapped - 1,
        )


def pallas_h100() -> list[Row]:
    """The table, predicted."""
    row, width, found = chip("h100"), 4096, []
    for n, (baseline, overlapped) in PALLAS_H100.items():
        rows, columns = 1024 * n, width * n
        gather = Collective(ALL_GATHER, 0, 0, ("x",), 2 * rows * width)
        site = EinsumSite(
            0,
            Einsum((0, 1), (1, 2), (0, 2)),
            ((rows, width), (width, columns), (rows, columns)),
            ("float16",) * 3,
            (2, 2, 2),
            ((), ()),
            ((), ("x",)),
            ((), ("x",)),
            (gather,),
            axis_sizes=(("x", n),),
        )
        e = estimate(site, gather, Schedule(("x",), n, two_way=False, unroll=True), row)
        loop_s = e.after_s - e.traffic_s + n * row.step_launch.value
        found.append(Row(n, 1e6 * e.before_s, baseline, 1e6 * loop_s, overlapped))
    return found


def main() -> None:
    """Print the table."""
    print("GPUs, then us predicted, measured, error: NCCL + cuBLAS; overlapped")
    for r in pallas_h100():
        before, after = r.errors
        print(
            f"{r.gpus:4d}  {r.baseline:27.0f}  {r.measured_baseline:7.0f}  {before:+5.0%}"
            f"  {r.overlapped:25.0f}  {r.measured_overlapped:7.0f}  {after:+5.0%}"
        )


if __name__ == "__main__":
    main()
