"""In which order a ring should visit the devices of a mesh.

A mesh puts devices where the compiler's own collectives want them; on a TPU torus its order along
an axis is often no ring of neighbours, and the two directions of a ring then share links.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from collmm.cost.figures import Chip
from collmm.sites import EinsumSite
from collmm.targets import rings


class RingOrders:
    """Ring orders on the meshes of one program; asked once per mesh and axes.

    Args:
      meshes: a ``jax.sharding.Mesh`` (or an abstract one, which says nothing of links) by its axes.
      chip: the hardware row, for its wraparound rule.
    """

    def __init__(self, meshes: Mapping[tuple[tuple[str, int], ...], Any], chip: Chip) -> None:
        self._meshes = meshes
        self._chip = chip
        self._known: dict[Any, tuple[int, ...] | None] = {}

    def ring_order(self, site: EinsumSite, axes: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the members in the order to visit them; None for the mesh's own order."""
        key = site.axis_sizes, axes
        if key not in self._known:
            self._known[key] = self._ask(self._meshes.get(site.axis_sizes), axes)
        return self._known[key]

    def _ask(self, mesh: Any, axes: tuple[str, ...]) -> tuple[int, ...] | None:
        if not isinstance(mesh, jax.sharding.Mesh) or self._chip.kind != "tpu":
            return None
        coords: list[Any] = [getattr(device, "coords", None) for device in mesh.devices.flat]
        if not all(coords):
            return None  # simulated devices have no place on a torus
        dims = self._chip.torus_dims
        shape = tuple(1 + max(c[axis] for c in coords) for axis in range(dims))
        wrap = tuple(bool(self._chip.wraps(size, shape)) for size in shape)
        members = rings.groups(mesh.devices, tuple(mesh.axis_names), axes)
        order = tuple(rings.ring_order(shape, wrap, members))
        return None if order == tuple(range(len(order))) else order
