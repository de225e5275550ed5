"""The sites of the grid on which the cost model is checked, and how each is compiled.

A site is one bf16 einsum ``[rows, depth] @ [depth, columns]`` with one collective, on a ring over
the mesh axis ``model``; the sizes are those of the whole arrays. Three kinds::

    gather    x["model", None] @ w[None, "model"]   lhs is gathered, its rows are free
    weights   x["model", None] @ w["model", None]   rhs is gathered, its rows are summed over
    scatter   x[None, "model"] @ w["model", None]   the sum is scattered by rows

On a mesh with an axis ``data`` the rows of x and of the result are sharded over that as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

KINDS = ("gather", "weights", "scatter")

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
}

# From latency- to compute-bound. Gather and scatter: rows of the whole array, width, and columns or
# depth that one device has. Weights: rows that one device has, width, columns of the whole array.
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
            axes, ring = tuple(mesh.items()), mesh["model"]
            copies = mesh.get("data", 1)
            for index, (rows, width, own) in enumerate(ACTIVATIONS):
                # Every other size for each mesh, the other half for the next one.
                if (index + turn) % 2 == 0:
                    yield GridSite(target, axes, "gather", rows * copies, width, own * ring)
                if (index + turn // 2) % 2 == 0:
                    yield GridSite(target, axes, "scatter", rows * copies, own * ring, width)
            for index, (own, width, columns) in enumerate(WEIGHTS):
                if (index + turn) % 2 == 0:
                    rows = own * ring * copies
                    yield GridSite(target, axes, "weights", rows, width, columns)
