"""The ring a mesh axis makes on a target: which links its devices span, and in what order. No jax.

Devices are anything with ``coords`` and ``core_on_chip`` (TPU) or ``process_index`` (GPU).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from collmm.cost.collectives import Ring, gpu_ring, torus_ring
from collmm.cost.figures import Basis, Chip
from collmm.errors import TargetError

Coords = tuple[int, ...]


def groups(devices: np.ndarray, names: Sequence[str], axes: Sequence[str]) -> np.ndarray:
    """The devices of a mesh as [groups, members], members in ring order along ``axes``."""
    if unknown := [axis for axis in axes if axis not in names]:
        raise TargetError(f"the mesh has no axis {unknown[0]!r}; its axes are {', '.join(names)}")
    order = [names.index(axis) for axis in axes]
    rest = [i for i in range(devices.ndim) if i not in order]
    members = int(np.prod([devices.shape[i] for i in order], dtype=int))
    return devices.transpose([*rest, *order]).reshape(-1, members)


def tpu_ring_of(
    chip: Chip, shape: tuple[int, ...], wrap: tuple[bool, ...], members: np.ndarray, basis: Basis
) -> Ring:
    """The ring of ``members`` ([groups, members] of TPU devices) on a slice of ``shape``.

    The load of the permute ring is counted over all groups at once, each step routed one torus axis
    after the other, the shorter way round.
    """
    places = [[_place(device, len(shape)) for device in group] for group in members]
    spans = [len({place[axis] for place in places[0]}) for axis in range(len(shape))]
    wraps = [wrap[axis] and spans[axis] == shape[axis] for axis in range(len(shape))]
    per_chip = members.shape[1] // len(set(places[0]))
    ring = torus_ring(chip, spans, shape, wraps, basis)
    kept = [axis for axis in range(len(shape)) if spans[axis] > 1]
    unknown = [axis for axis in kept if chip.wraps(shape[axis], shape) is None]
    forward, longest = _load(places, shape, wrap, ways=(1,))
    both, _ = _load(places, shape, wrap, ways=(1, -1))
    return dataclasses.replace(
        ring,
        permute_load=(max(forward, 1), max(both, 1)),
        neighbour_hops=max(longest, 1),
        per_chip=per_chip,
        note=f"{chip.name}: {chip.wrap.source}; taken not to wrap" if unknown else "",
    )


def ring_order(shape: tuple[int, ...], wrap: tuple[bool, ...], members: np.ndarray) -> list[int]:
    """An order of the members in which a permute ring loads the links least.

    A mesh puts devices where the compiler's own collectives want them, which is often not a ring:
    on a v5e 2x4 slice half of the steps of an axis of 8 take two hops. A grid with an even number
    of chips has a cycle of single hops. Where there is none, as on an axis without wraparound,
    every other chip is visited on the way out and the rest on the way back, in steps of two hops:
    libtpu runs a permute that goes the whole length of an axis of 8 back synchronously. The one
    that loads the links least comes back, the mesh order ``0, 1, 2, ...`` where that is no worse.
    One order serves all groups.
    """
    places = [[_place(device, len(shape)) for device in group] for group in members]
    plain = list(range(members.shape[1]))
    values = [sorted({place[axis] for place in places[0]}) for axis in range(len(shape))]

    def in_order(path: list[Coords]) -> list[int]:
        at = {place: [i for i in plain if places[0][i] == place] for place in path}
        order = [i for place in path for i in at[place]]
        return order[order.index(0) :] + order[: order.index(0)]

    def cost(candidate: list[int]) -> tuple[int, int]:
        moved = [[group[i] for i in candidate] for group in places]
        both, longest = _load(moved, shape, wrap, ways=(1, -1))
        return both, longest

    cycle, path = _cycle(values), _path(values)
    if {*cycle} != {*places[0]}:
        return plain
    folded = [*path[::2], *path[1::2][::-1]]
    return min(plain, in_order(cycle), in_order(folded), key=cost)


def _path(values: Sequence[Sequence[int]]) -> list[Coords]:
    """A path of single hops through a grid, to and fro, ``values[axis]`` its coordinates."""
    path: list[Coords] = [()]
    for coords in values:
        path = [(*p, c) for i, p in enumerate(path) for c in (coords, coords[::-1])[i % 2]]
    return path


def _cycle(values: Sequence[Sequence[int]]) -> list[Coords]:
    """A cycle through a grid, ``values[axis]`` its coordinates; single hops if its size is even.

    Two axes: out along the rows without their first column, back along the first column. More: all
    but the longest are first laid end to end, to and fro, into one.
    """
    longest = max(range(len(values)), key=lambda axis: len(values[axis]))
    lane: list[Coords] = [()]
    for axis, coords in enumerate(values):
        choices = [coords[:1]] * len(lane) if axis == longest else [coords, coords[::-1]]
        lane = [(*p, c) for i, p in enumerate(lane) for c in choices[i % len(choices)]]
    rows, columns = lane, list(values[longest])
    if len(rows) == 1:
        return [_put(rows[0], longest, c) for c in columns]
    if len(rows) % 2:  # then the columns are even in number: swap their roles
        first = [_put(rows[0], longest, c) for c in reversed(columns)]
        rest = [
            _put(row, longest, c)
            for i, c in enumerate(columns)
            for row in (rows[1:] if i % 2 == 0 else rows[:0:-1])
        ]
        return [*rest, *first]
    first = [_put(row, longest, columns[0]) for row in reversed(rows)]
    rest = [
        _put(row, longest, c)
        for i, row in enumerate(rows)
        for c in (columns[1:] if i % 2 == 0 else columns[:0:-1])
    ]
    return [*rest, *first]


def _put(place: Coords, axis: int, value: int) -> Coords:
    return (*place[:axis], value, *place[axis + 1 :])


def gpu_ring_of(chip: Chip, members: np.ndarray, basis: Basis) -> Ring:
    """The ring of ``members`` ([groups, members] of GPU devices), by the host of each."""
    hosts = Counter(device.process_index for device in members[0])
    if len(set(hosts.values())) != 1:
        raise TargetError(f"the ring has unequal numbers of GPUs per host: {dict(hosts)}")
    return gpu_ring(chip, next(iter(hosts.values())), len(hosts), basis)


def _place(device: Any, dims: int) -> Coords:
    return tuple(device.coords[:dims])


def _load(
    places: Sequence[Sequence[Coords]],
    shape: tuple[int, ...],
    wrap: tuple[bool, ...],
    ways: tuple[int, ...],
) -> tuple[int, int]:
    """(most transfers on one directed link, hops of the longest) in one step of every ring."""
    links: Counter[tuple[Coords, int, int]] = Counter()
    longest = 0
    for ring in places:
        for way in ways:
            for index, start in enumerate(ring):
                steps = list(route(start, ring[(index + way) % len(ring)], shape, wrap))
                longest = max(longest, len(steps))
                links.update(steps)
    return max(links.values(), default=0), longest


def route(
    start: Coords, end: Coords, shape: tuple[int, ...], wrap: tuple[bool, ...]
) -> Iterator[tuple[Coords, int, int]]:
    """The directed links (from, axis, +1 or -1) of a route, one torus axis after the other."""
    here = list(start)
    for axis, size in enumerate(shape):
        ahead = (end[axis] - here[axis]) % size
        step = 1 if end[axis] > here[axis] else -1
        if wrap[axis]:
            step = 1 if ahead <= size - ahead else -1
        while here[axis] != end[axis]:
            yield tuple(here), axis, step
            here[axis] = (here[axis] + step) % size
