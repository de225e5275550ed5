"""Where the rings of a mesh lie: their links, and in which order to visit the members.

A mesh puts devices where the compiler's own collectives want them; on a TPU torus its order along
an axis is often no ring of neighbours, and the two directions of a ring then share links. How many
torus axes a ring spans tells how much faster the original collective is than a ring of permutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from collmm.cost.candidates import RingPlace
from collmm.cost.figures import Chip
from collmm.errors import TargetError
from collmm.sites import EinsumSite
from collmm.targets import rings


class RingPlaces:
    """Rings on the meshes of one program; asked once per mesh and axes.

    Args:
      meshes: a ``jax.sharding.Mesh`` (or an abstract one, which says nothing of links) by its axes.
      chip: the hardware row.
    """

    def __init__(self, meshes: Mapping[tuple[tuple[str, int], ...], Any], chip: Chip) -> None:
        self._meshes = meshes
        self._chip = chip
        self._known: dict[Any, RingPlace] = {}

    def place(self, site: EinsumSite, axes: tuple[str, ...]) -> RingPlace:
        """Return where the ring over ``axes`` of the site's mesh lies, as far as that is known."""
        key = site.axis_sizes, axes
        if key not in self._known:
            self._known[key] = self.ask(self._meshes.get(site.axis_sizes), axes)
        return self._known[key]

    def ask(self, mesh: Any, axes: tuple[str, ...]) -> RingPlace:
        """Return where the ring over ``axes`` of ``mesh`` lies, as far as that is known."""
        if not isinstance(mesh, jax.sharding.Mesh):
            return RingPlace()
        members = rings.groups(mesh.devices, tuple(mesh.axis_names), axes)
        if mesh.devices.flat[0].platform == "cpu":
            return RingPlace()  # simulated devices have no place on a torus or in a host
        if self._chip.kind == "gpu":
            return self._switched(members)
        coords: list[Any] = [getattr(device, "coords", None) for device in mesh.devices.flat]
        if not all(coords):
            return RingPlace()
        dims = self._chip.torus_dims
        shape = tuple(1 + max(c[axis] for c in coords) for axis in range(dims))
        wrap = tuple(bool(self._chip.wraps(size, shape)) for size in shape)
        order = tuple(rings.ring_order(shape, wrap, members))
        ring = rings.tpu_ring_of(self._chip, shape, wrap, members[:, list(order)], "achievable")
        return RingPlace(ring, None if order == tuple(range(len(order))) else order)

    def _switched(self, members: np.ndarray) -> RingPlace:
        try:
            return RingPlace(rings.gpu_ring_of(self._chip, members, "achievable"))
        except TargetError:
            return RingPlace()  # unequal numbers of GPUs per host
