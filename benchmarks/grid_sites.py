"""The sites of the grid on which the cost model is checked, and how each is compiled.

A site is one bf16 einsum ``[rows, depth] @ [depth, columns]`` with one collective, on a ring over
the mesh axis ``model``; the sizes are those of the whole arrays. Four kinds::

    gather    x["model", None] @ w[None, "model"]   lhs is gathered, its rows are free
    weights   x["model", None] @ w["model", None]   rhs is gathered, its rows are summed over
    columns   x["model", None] @ w[None, "model"]   rhs is gathered, its columns are free
    scatter   x[None, "model"] @ w["model", None]   the sum is scattered by rows

On a mesh with an axis ``data`` the rows of x and of the result are sharded over that as well. Half
of the sizes are powers of two, half are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

KINDS = ("gather", "weights", "columns", "scatter")

# Target: the meshes that give its rings; every other axis is named data.
MESHES: dict[str, tuple[dict[str, int], ...]] = {
    "tpu:v5e:2x2": ({"model": 4},),
    "tpu:v5e:2x4": ({"model": 8},),
    "tpu:v5e:4x4": ({"model": 16}, {"data": 4, "model": 4}),
    "tpu:v5e:4x8": ({"model": 32},),
    "tpu:v5e:8x8": ({"model": 64}, {"data": 8, "model": 8}),
    "tpu:v5e:16x16": ({"data": 16, "model": 16},),
    "tpu:v6e:2x2": ({"model": 4},),
    "tpu:v6e:2x4": ({"model": 8},),
    "tpu:v6e:4x4": ({"model": 16},),
    "tpu:v6e:8x8": ({"model": 64}, {"data": 8, "model": 8}),
    "tpu:v6e:16x16": ({"data": 16, "model": 16},),
    "tpu:v5p:2x2x1": ({"model": 4},),
    "tpu:v5p:2x2x2": ({"model": 8},),
    "tpu:v5p:2x2x4": ({"model": 16},),
    "tpu:v5p:4x4x4": ({"model": 64}, {"data": 4, "model": 16}, {"data": 16, "model": 4}),
    "tpu:v4:2x2x1": ({"model": 4},),
    "tpu:v4:2x2x2": ({"model": 8},),
    "tpu:v4:2x2x4": ({"model": 16},),
    "tpu:v4:4x4x4": ({"model": 64}, {"data": 4, "model": 16}, {"data": 16, "model": 4}),
    "tpu:v4:4x4x8": ({"data": 16, "model": 8},),
    "gpu:h100:4": ({"model": 4},),
    "gpu:h100:8": ({"model": 8},),
    "gpu:h100:2x8": ({"model": 16}, {"data": 2, "model": 8}),
    "gpu:h100:4x8": ({"model": 32},),
    "gpu:h100:8x8": ({"model": 64},),
    "tpu:v4:2x2x3": ({"model": 12},),
    "tpu:v4:2x4x4": ({"model": 32},),
    "tpu:v5p:2x2x3": ({"model": 12},),
    "tpu:v5p:4x4x8": ({"data": 4, "model": 32},),
    "tpu:v6e:4x8": ({"model": 32},),
    "gpu:h100:6": ({"model": 6},),
    "gpu:h100:3x8": ({"model": 24},),
    "tpu:v5e:4x2": ({"data": 4, "model": 2},),
}

# From latency- to compute-bound. Gather and scatter: rows of the whole array, width, and columns or
# depth that one device has. Weights and columns: rows that one device has, width, columns of the
# whole array.
ACTIVATIONS = (
    (256, 1024, 512),
    (1024, 1024, 2048),
    (1024, 2048, 1024),
    (2048, 1024, 4096),
    (512, 2048, 512),
    (2048, 2048, 2048),
    (4096, 1024, 1024),
    (2048, 2048, 8192),
)
WEIGHTS = ((256, 1024, 2048), (1024, 2048, 1024), (2048, 1024, 2048), (4096, 1024, 4096))
COLUMNS = ((512, 1024, 2048), (2048, 1024, 4096), (4096, 2048, 8192), (8192, 4096, 4096))
# The same with sizes that are no powers of two, a few of them no multiple of a tile either.
ODD_ACTIVATIONS = (
    (768, 1280, 640),
    (2816, 1536, 3072),
    (1280, 5120, 1536),
    (2304, 1000, 1500),
    (3328, 3584, 1792),
    (1792, 7168, 896),
    (5120, 2560, 5120),
    (6144, 3072, 2304),
)
ODD_WEIGHTS = ((640, 1536, 1280), (1536, 5120, 1792), (3000, 2816, 1000), (6144, 2304, 3072))
# Reduce-scatters on TPU rings of up to 16 whose einsums take longer than their transfers.
LARGE_SUMS = ((8192, 8192, 8192), (6144, 5120, 6912), (8192, 4096, 4096), (16384, 8192, 2048))
ODD_COLUMNS = ((640, 1536, 1280), (1536, 5120, 1792), (3000, 2816, 1000), (6144, 2304, 3072))


@dataclasses.dataclass(frozen=True)
class GridSite:
    """One site; ``mesh`` names the axes and their sizes, ``model`` last."""

    target: str
    mesh: tuple[tuple[str, int], ...]
    kind: str
    rows: int
    depth: int
    columns: int

    @property
    def ring(self) -> int:
        """Members of the ring."""
        return dict(self.mesh)["model"]

    @property
    def name(self) -> str:
        """Such as ``tpu:v5e:2x4 model=8 gather 16384x8192x32768``; the key of its results."""
        axes = ",".join(f"{name}={size}" for name, size in self.mesh)
        return f"{self.target} {axes} {self.kind} {self.rows}x{self.depth}x{self.columns}"


def sites() -> Iterator[GridSite]:
    """Every site of the grid, one target after the other."""
    turn = 0
    for target, meshes in MESHES.items():
        for mesh in meshes:
            turn += 1
            yield from _of_mesh(target, mesh, turn, ACTIVATIONS, WEIGHTS)
            yield from _of_mesh(target, mesh, turn, ODD_ACTIVATIONS, ODD_WEIGHTS)
            if target.startswith("tpu") and mesh["model"] <= 16 and len(mesh) == 1:
                yield from _large_sums(target, mesh, turn)
            yield from _of_columns(target, mesh, turn)


def _of_mesh(
    target: str,
    mesh: dict[str, int],
    turn: int,
    activations: tuple[tuple[int, int, int], ...],
    weights: tuple[tuple[int, int, int], ...],
) -> Iterator[GridSite]:
    """Every other size for each mesh, the other half for the next one."""
    axes, ring = tuple(mesh.items()), mesh["model"]
    copies = mesh.get("data", 1)
    for index, (rows, width, own) in enumerate(activations):
        # Every member has a block of the rows, in up to four parts.
        rows = copies * _multiple(rows, 4 * ring)
        if (index + turn) % 2 == 0:
            yield GridSite(target, axes, "gather", rows, width, own * ring)
        if (index + turn // 2) % 2 == 0:
            yield GridSite(target, axes, "scatter", rows, own * ring, width)
    for index, (own, width, columns) in enumerate(weights):
        if (index + turn) % 2 == 0:
            rows, width = own * ring * copies, _multiple(width, ring)
            yield GridSite(target, axes, "weights", rows, width, columns)


def _large_sums(target: str, mesh: dict[str, int], turn: int) -> Iterator[GridSite]:
    axes, ring = tuple(mesh.items()), mesh["model"]
    for index, (rows, width, own) in enumerate(LARGE_SUMS):
        if (index + turn) % 2 == 0:
            rows = mesh.get("data", 1) * _multiple(rows, 4 * ring)
            yield GridSite(target, axes, "scatter", rows, own * ring, width)


def _of_columns(target: str, mesh: dict[str, int], turn: int) -> Iterator[GridSite]:
    """Every other size for each mesh, the other half for the next one."""
    ring, copies = mesh["model"], mesh.get("data", 1)
    for index, (own, width, columns) in enumerate((*COLUMNS, *ODD_COLUMNS)):
        if (index + turn) % 2:
            rows = own * ring * copies
            yield GridSite(
                target, tuple(mesh.items()), "columns", rows, width, _multiple(columns, ring)
            )


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
