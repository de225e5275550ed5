"""What an einsum's shape costs on each chip, fitted to the compilers' own estimates.

TPU: a few figures per chip (``EinsumShape``), fitted to the timelines of single sites that libtpu
0.0.50 compiled, whole and as loops. GPU: the share of the matrix peak (that which ``h100``
achieves) that XLA's ``exec_time_us`` gives cuBLAS, jax 0.12. Both are what
``benchmarks/cost_grid.py fit`` prints; a test compares.
"""

from __future__ import annotations

from collmm.cost.figures import EinsumShape, EinsumTable, Figure

_MIB = 2**20


_FITTED = {
    "v4": (0.907, 6.52, 3.19, 6.03, 1.78, 2.69, 0.667, 4.8, 0.998, 0.632),
    "v5e": (0.96, 8.26, 4.42, 3.85, 1.46, 1.13, 0.867, 4.2, 0.953, 0.871),
    "v5p": (0.939, 4.03, 1.88, 3.58, 3.09, 2.16, 0.66, 10.3, 1.4, 0.559),
    "v6e": (0.979, 4.38, 0.951, 0.92, 0.847, 1.19, 0.766, 5.54, 0.997, 0.858),
}
"""Share of the matrix peak; picoseconds per element of a result, of one that stays on the chip and
of a sum there; microseconds to start, and where a sum has
arrived; share of the memory bandwidth; TB/s on the chip; and of an
elementwise kernel microseconds to start and share of the bandwidth."""

# MiB of a result that stays on the chip; whether permutes are started late; MiB of float32 that a
# reduce-scatter sums at a time.
_SEEN = {"v4": (64, 1, 12.4), "v5e": (64, 0, 12.4), "v5p": (8, 1, 12.4), "v6e": (48, 1, 24.8)}


def _shape(name: str) -> EinsumShape:
    share, result_ps, kept_ps, summed_ps, start_us, arrived_us, *rates = _FITTED[name]
    memory, onchip_tb, pass_us, passes = rates
    results_mib, late, span_mib = _SEEN[name]
    source = f"fitted: timelines of libtpu 0.0.50 for {name} (benchmarks/cost_grid.py fit)"
    seen = f"seen: schedules of libtpu 0.0.50 for {name}"
    return EinsumShape(
        matrix_share=Figure(share, "1", source),
        result=Figure(result_ps * 1e-12, "s", source),
        kept=Figure(kept_ps * 1e-12, "s", source),
        summed=Figure(summed_ps * 1e-12, "s", source),
        start=Figure(start_us * 1e-6, "s", source),
        arrived_start=Figure(arrived_us * 1e-6, "s", source),
        memory_share=Figure(memory, "1", source),
        onchip=Figure(onchip_tb * 1e12, "bytes/s", source),
        onchip_fits=Figure(64 * _MIB, "bytes", seen),
        result_fits=Figure(results_mib * _MIB, "bytes", seen),
        pass_start=Figure(pass_us * 1e-6, "s", source),
        pass_share=Figure(passes, "1", source),
        late=Figure(late, "1", seen),
        span_fits=Figure(span_mib * _MIB, "bytes", seen),
    )


SHAPES = {name: _shape(name) for name in _FITTED}

_HOPPER = EinsumTable(
    short=(256, 512, 1024, 2048, 4096),
    depth=(256, 1024, 4096),
    long=(256, 1024, 4096),
    shares=(
        ((0.00845, 0.0297, 0.105), (0.0238, 0.0911, 0.293), (0.114, 0.229, 0.514)),
        ((0.0155, 0.0573, 0.178), (0.052, 0.183, 0.477), (0.117, 0.386, 0.832)),
        ((0.0297, 0.102, 0.278), (0.0911, 0.318, 0.624), (0.229, 0.594, 0.946)),
        ((0.0561, 0.182, 0.385), (0.179, 0.485, 0.755), (0.396, 0.836, 0.951)),
        ((0.105, 0.278, 0.501), (0.293, 0.624, 0.862), (0.514, 0.946, 0.981)),
    ),
    source="XLA's exec_time_us of cuBLAS on h100, jax 0.12",
)
TABLES = {"h100": _HOPPER, "h200": _HOPPER}
