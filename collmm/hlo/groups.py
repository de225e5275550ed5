"""Who talks to whom in a collective: replica groups and permute pairs, in all their spellings.

Device ids are positions in the module's device assignment, ``replica * num_partitions +
partition``; under jax that is the position in ``mesh.devices.flat``.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from collmm.errors import HloError, OptionError
from collmm.hlo.instruction import Instruction
from collmm.hlo.shapes import split_top

Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]

_LIST = re.compile(r"\{\s*(?:\{[\d,\s]*\}\s*,?\s*)*\}\Z")
_INNER = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"\[([\d,\s]+)\](?:<=\[([\d,\s]+)\])?(?:T\(([\d,\s]+)\))?\Z")
_MESH = re.compile(
    r"@?mesh[\[<](?P<axes>[^\]>]*)[\]>]"  # mesh['a'=2,'b'=4] or @mesh<a=2,b=4>
    r"(?:,?\s*(?:device_ids=)?\((?:devices=)?(?P<ids>[^{}]*)\))?"  # a device order other than iota
    r"\s*\{(?P<over>[^}]*)\}\Z"
)
_AXIS = re.compile(r"'?([^'=]+?)'?=(\d+)\Z")
_OVER = re.compile(r"'?([^':]+?)'?(?::\((\d+)\)(\d+))?\Z")


@functools.lru_cache(maxsize=4096)
def parse_groups(text: str, devices: int) -> Groups:
    """Read ``replica_groups``; ``{}`` is one group of all ``devices``.

    Spellings: lists ``{{0,1},{2,3}}``, iota ``[4,2]<=[2,4]T(1,0)``, and mesh axes
    ``mesh['a'=4,'b'=2] {'b'}`` with a device order ``device_ids=([2,4]T(1,0))`` and sub-axes
    ``'a':(2)2``. Raises HloError, without a line number, for anything else.
    """
    text = text.strip()
    if _LIST.match(text):
        groups = tuple(_ints(g) for g in _INNER.findall(text[1:-1]))
        return tuple(g for g in groups if g) or (tuple(range(devices)),)
    if found := _IOTA.match(text):
        shape = _ints(found[1])
        if len(shape) == 2:
            return _rows(_iota(shape, found[2], found[3], text))
    if found := _MESH.match(text):
        return _mesh_groups(found, text)
    raise HloError(
        f"expected replica groups such as {{{{0,1}}}} or [1,2]<=[2], found {text[:80]!r}"
    )


@functools.lru_cache(maxsize=4096)
def parse_pairs(text: str) -> Pairs:
    """Read ``source_target_pairs={{0,1},{1,0}}``. Raises HloError for anything else."""
    pairs = tuple(_ints(g) for g in _INNER.findall(text.strip()[1:-1]))
    if not _LIST.match(text.strip()) or any(len(p) != 2 for p in pairs):
        raise HloError(f"expected source_target_pairs such as {{{{0,1}}}}, found {text[:80]!r}")
    return tuple((s, t) for s, t in pairs)


def device_groups(i: Instruction, *, replicas: int, partitions: int) -> Groups:
    """The groups of the collective ``i`` as device ids.

    What the written ids mean follows XLA's group modes: with ``use_global_device_ids`` they are
    device ids; without a channel they are replicas, each partition by itself; with a channel, they
    are replicas with all their partitions, or for all-to-all, broadcast and permute partitions,
    each replica by itself. With one replica or one partition these meet.
    """
    text = i.attrs.get("replica_groups", "{}")
    try:
        if i.attrs.get("use_global_device_ids") == "true":
            return parse_groups(text, replicas * partitions)
        has_channel = "channel_id" in i.attrs
        base = i.opcode.removesuffix("-start")
        over_partitions = base in ("all-to-all", "collective-broadcast", "ragged-all-to-all")
        if has_channel and over_partitions:
            groups = parse_groups(text, partitions)
            return tuple(
                tuple(r * partitions + p for p in g) for r in range(replicas) for g in groups
            )
        groups = parse_groups(text, replicas)
    except HloError as e:
        raise HloError(f"line {i.line}: {e}") from None
    if has_channel:
        return tuple(
            tuple(r * partitions + p for r in g for p in range(partitions)) for g in groups
        )
    return tuple(tuple(r * partitions + p for r in g) for p in range(partitions) for g in groups)


def device_pairs(i: Instruction, *, replicas: int, partitions: int) -> Pairs:
    """The pairs of the permute ``i`` as device ids; with a channel the written ids are partitions.

    Raises HloError when it has no pairs that can be read.
    """
    try:
        pairs = parse_pairs(i.attrs.get("source_target_pairs", "absent"))
    except HloError as e:
        raise HloError(f"line {i.line}: {e}") from None
    if "channel_id" in i.attrs:
        return tuple(
            (r * partitions + s, r * partitions + t) for r in range(replicas) for s, t in pairs
        )
    return tuple(
        (s * partitions + p, t * partitions + p) for p in range(partitions) for s, t in pairs
    )


def spelled_mesh(text: str) -> dict[str, int] | None:
    """The mesh axes with their sizes that ``replica_groups`` spell; None when they spell none.

    A mesh whose devices are not in order has no such axes.
    """
    found = _MESH.match(text.strip())
    if not found or found["ids"]:
        return None
    axes = [_AXIS.match(a.strip()) for a in found["axes"].split(",") if a.strip()]
    return {m[1]: int(m[2]) for m in axes if m} or None


def axes_of_groups(groups: Groups, mesh_axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes the groups run over, in mesh order; None when they are not whole axes.

    ``mesh_axes`` are the axes with their sizes, in the order of the mesh's dimensions.
    """
    ids = _device_array(mesh_axes, max((d for g in groups for d in g), default=0))
    varying = []
    first = np.array(groups[0]) if groups and groups[0] else np.array([0])
    coordinates = np.unravel_index(first, ids.shape)
    for axis, where in zip(mesh_axes, coordinates, strict=True):
        if len(set(where.tolist())) > 1:
            varying.append(axis)
    names = list(mesh_axes)
    over = [names.index(a) for a in varying]
    rest = [k for k in range(len(names)) if k not in over]
    size = math.prod(mesh_axes[a] for a in varying)
    expected = ids.transpose(rest + over).reshape(-1, size)
    want = {frozenset(row) for row in expected.tolist()}
    return tuple(varying) if want == {frozenset(g) for g in groups} else None


def axes_of_pairs(pairs: Pairs, mesh_axes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which a permute moves data, in mesh order."""
    delta = _deltas(pairs, mesh_axes)
    return tuple(a for a, d in zip(mesh_axes, delta, strict=True) if (d != 0).any())


def shift_of_pairs(pairs: Pairs, mesh_axes: Mapping[str, int]) -> int | None:
    """By how many positions a permute along one axis shifts every shard; None when it is no shift.

    Positive towards higher positions; the shorter way round, so a step of -1 on an axis of 8 is
    -1 and not 7. Exactly half way round is positive.
    """
    axes = axes_of_pairs(pairs, mesh_axes)
    if len(axes) != 1:
        return None
    size = mesh_axes[axes[0]]
    moved = _deltas(pairs, mesh_axes)[list(mesh_axes).index(axes[0])] % size
    if len(set(moved.tolist())) != 1:
        return None
    shift = int(moved[0])
    return shift if shift <= size // 2 else shift - size


def _deltas(pairs: Pairs, mesh_axes: Mapping[str, int]) -> np.ndarray:
    """Per axis and pair, target coordinate minus source coordinate: int array [axes, pairs]."""
    ids = _device_array(mesh_axes, max((max(p) for p in pairs), default=0))
    source, target = np.array(pairs, dtype=int).reshape(-1, 2).T
    return np.array(np.unravel_index(target, ids.shape)) - np.array(
        np.unravel_index(source, ids.shape)
    )


def _device_array(mesh_axes: Mapping[str, int], highest: int) -> np.ndarray:
    total = math.prod(mesh_axes.values())
    if highest >= total:
        raise OptionError(
            f"mesh axes {dict(mesh_axes)} hold {total} devices and the module names device "
            f"{highest}; give the mesh the module was compiled for"
        )
    return np.arange(total).reshape(tuple(mesh_axes.values()))


def _mesh_groups(found: re.Match[str], text: str) -> Groups:
    """Groups over the named axes of a mesh, their ids in the order the axes are named."""
    axes = [_AXIS.match(a.strip()) for a in found["axes"].split(",") if a.strip()]
    over = [_OVER.match(a.strip()) for a in found["over"].split(",") if a.strip()]
    if not axes or None in axes or None in over:
        raise HloError(f"expected mesh axes such as 'a'=2 in {text[:80]!r}")
    sizes = {m[1]: int(m[2]) for m in axes if m}
    ids = _mesh_ids(tuple(sizes.values()), found["ids"], text)
    # Split every axis at the borders of the sub-axes asked for: 'a':(2)2 of 8 is 2 x [2] x 2.
    wanted: list[tuple[str, int, int]] = []
    for m in over:
        if m is None or m[1] not in sizes:
            raise HloError(f"expected an axis of the mesh in the braces of {text[:80]!r}")
        pre, size = (int(m[2]), int(m[3])) if m[2] else (1, sizes[m[1]])
        if pre < 1 or size < 1 or sizes[m[1]] % (pre * size):
            raise HloError(f"sub-axis {m[0]!r} does not divide its axis in {text[:80]!r}")
        wanted.append((m[1], pre, size))
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for axis, size in sizes.items():
        borders = sorted({1, size} | {b for a, p, s in wanted if a == axis for b in (p, p * s)})
        for low, high in itertools.pairwise(borders):
            place[axis, low] = len(dims)
            dims.append(high // low)
        if size == 1:
            place[axis, 1] = len(dims)
            dims.append(1)
    grouped = [place[a, p] for a, p, _ in wanted]
    rest = [k for k in range(len(dims)) if k not in grouped]
    per_group = math.prod(s for _, _, s in wanted)
    if math.prod(dims[k] for k in grouped) != per_group:
        raise HloError(f"sub-axes overlap in {text[:80]!r}")
    return _rows(ids.reshape(dims).transpose(rest + grouped).reshape(-1, per_group))


def _mesh_ids(dims: tuple[int, ...], order: str | None, text: str) -> np.ndarray:
    if not order:
        return np.arange(math.prod(dims)).reshape(dims)
    if found := _IOTA.match(order.strip()):
        source = found[2] or found[1]  # [4,16]T(1,0) and [2,4,4,2]<=[4,16]T(1,0) are both written
        return _iota(dims, source, found[3], text)
    listed = re.sub(r"^\[[\d,]*\]", "", order.strip())
    try:
        ids = np.array([int(d) for d in split_top(listed)])
        return ids.reshape(dims)
    except ValueError:
        raise HloError(f"expected a device order that fills the mesh in {text[:80]!r}") from None


def _iota(shape: tuple[int, ...], source: str | None, order: str | None, text: str) -> np.ndarray:
    """``arange`` in the shape ``source``, transposed by ``order``, reshaped to ``shape``."""
    dims = _ints(source) if source else shape
    perm = _ints(order) if order else tuple(range(len(dims)))
    if math.prod(dims) != math.prod(shape) or sorted(perm) != list(range(len(dims))):
        raise HloError(f"sizes or transpose do not fit in {text[:80]!r}")
    return np.arange(math.prod(dims)).reshape(dims).transpose(perm).reshape(shape)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(t) for t in text.split(",") if t.strip())


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())
