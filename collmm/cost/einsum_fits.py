"""What an einsum's shape costs on each chip, fitted to the compilers' own estimates.

TPU: a few figures per chip (``EinsumShape``), fitted to the ``estimated_cycles`` of libtpu 0.0.50
for single einsums and for the partial einsums of rings. GPU: the share of the matrix peak (that
which ``h100`` achieves) that XLA's ``exec_time_us`` gives cuBLAS, jax 0.12.
"""

from __future__ import annotations

from collmm.cost.figures import EinsumShape, EinsumTable, Figure

_MIB = 2**20


def _shape(
    chip: str, share, result_ps, kept_ps, start_us, memory, onchip_tb, fits_mib, passes
) -> EinsumShape:
    source = f"fitted: estimated_cycles of libtpu 0.0.50 for {chip}"
    return EinsumShape(
        matrix_share=Figure(share, "1", source),
        result=Figure(result_ps * 1e-12, "s", source),
        kept=Figure(kept_ps * 1e-12, "s", source),
        start=Figure(start_us * 1e-6, "s", source),
        memory_share=Figure(memory, "1", source),
        onchip=Figure(onchip_tb * 1e12, "bytes/s", source),
        onchip_fits=Figure(fits_mib * _MIB, "bytes", source),
        pass_start=Figure(1.2e-6, "s", source),
        pass_share=Figure(passes, "1", source),
    )


SHAPES = {
    "v4": _shape("v4", 0.84, 7.1, 3.0, 1.6, 0.64, 4.1, 64, 0.6),
    "v5e": _shape("v5e", 0.95, 9.0, 3.0, 2.5, 0.65, 6.0, 64, 0.7),
    "v5p": _shape("v5p", 0.955, 3.4, 1.5, 2.6, 0.76, 6.0, 64, 0.4),
    "v6e": _shape("v6e", 0.85, 4.2, 1.0, 2.2, 0.70, 10.0, 64, 0.6),
}

_HOPPER = EinsumTable(
    short=(256, 512, 1024, 2048, 4096),
    depth=(256, 1024, 4096),
    long=(256, 1024, 4096),
    shares=(
        ((0.00845, 0.0297, 0.105), (0.0238, 0.091, 0.293), (0.114, 0.229, 0.514)),
        ((0.0155, 0.0575, 0.178), (0.052, 0.183, 0.48), (0.117, 0.379, 0.832)),
        ((0.0297, 0.102, 0.278), (0.091, 0.318, 0.624), (0.229, 0.594, 0.946)),
        ((0.057, 0.182, 0.382), (0.179, 0.487, 0.755), (0.42, 0.835, 0.946)),
        ((0.105, 0.278, 0.501), (0.293, 0.624, 0.862), (0.514, 0.946, 0.981)),
    ),
    source="XLA's exec_time_us of cuBLAS on h100, jax 0.12",
)
TABLES = {"h100": _HOPPER, "h200": _HOPPER}
