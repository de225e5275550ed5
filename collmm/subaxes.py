"""Sub-axes: parts of a mesh axis, where a reshape has split a sharded dimension.

    q[b, s, 32@m]  ->  reshape  ->  q[b, s, 4@m:(1)4, 8@m:(4)2]       # m of 8 devices

``m:(1)4`` is Shardy's name for the major 4 of the axis ``m``, ``m:(4)2`` for its minor 2: the
number in brackets is the product of the parts before it. jax has no name for a part, but a mesh
has: the same devices with the axis split, ``{"m:(1)4": 4, "m:(4)2": 2}`` for ``{"m": 8}``. A site
whose shardings name parts is described on that split mesh, and its ring runs on it.

Pure: names and numbers only.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

from collmm.sites import ALL_GATHER, EinsumSite, Spec

AxisSizes = tuple[tuple[str, int], ...]

_LIST = re.compile(r"\{([^{}]*)\}")
_AXIS = re.compile(r'"([^"]*)"(:\(\d+\)\d+)?')
_PART = re.compile(r"(.*):\((\d+)\)(\d+)")


def read_axes(text: str) -> Spec:
    """Read ``[{}, {"x", "y":(1)2}]`` as ``((), ("x", "y:(1)2"))``."""
    lists = _LIST.findall(text)
    if not lists and '"' in text:  # a flat list of axes, as a reduction has
        lists = [text]
    return tuple(tuple(name + part for name, part in _AXIS.findall(axes)) for axes in lists)


def is_part(axis: str) -> bool:
    """Whether ``axis`` names a part of a mesh axis."""
    return _PART.fullmatch(axis) is not None


def _cut(axis: str) -> tuple[str, int, int]:
    """Return (mesh axis, where the part starts, where it ends), as products of sizes."""
    match = _PART.fullmatch(axis)
    assert match is not None, axis
    before, size = int(match[2]), int(match[3])
    return match[1], before, before * size


def split_axes(axis_sizes: AxisSizes, axes: Iterable[str]) -> AxisSizes | None:
    """Return the axes of the mesh on which every one of ``axes`` is a row of whole axes.

    None when there is none: parts that overlap without one being inside the other.
    """
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in axis_sizes}
    for axis in axes:
        if axis not in cuts:
            name, start, end = _cut(axis)
            cuts[name] |= {start, end}
    split: list[tuple[str, int]] = []
    for name, size in axis_sizes:
        if len(cuts[name]) <= 2:
            split.append((name, size))
            continue
        for start, end in itertools.pairwise(sorted(cuts[name])):
            if end % start:
                return None
            split.append((f"{name}:({start}){end // start}", end // start))
    return tuple(split)


def whole_axes(axis_sizes: AxisSizes) -> AxisSizes:
    """Return the axes of the mesh that was split into ``axis_sizes``."""
    sizes: dict[str, int] = {}
    for axis, size in axis_sizes:
        name = _cut(axis)[0] if is_part(axis) else axis
        sizes[name] = sizes.get(name, 1) * size
    return tuple(sizes.items())


def on_split(axes: Sequence[str], axis_sizes: AxisSizes) -> tuple[str, ...]:
    """Return ``axes``, mesh axes or parts of them, as axes of the split mesh ``axis_sizes``."""
    named = dict(axis_sizes)
    found: list[str] = []
    for axis in axes:
        if axis in named:
            found.append(axis)
            continue
        name, start, end = _cut(axis) if is_part(axis) else (axis, 1, None)
        for other in named:
            if is_part(other):
                base, low, high = _cut(other)
                if base == name and low >= start and (end is None or high <= end):
                    found.append(other)
    return tuple(found)


def joined(axes: Sequence[str], sizes: dict[str, int]) -> tuple[str, ...]:
    """Return ``axes`` with neighbouring parts joined, and whole axes by their own names.

    ``sizes``: of the mesh axes before they were split.
    """
    runs: list[tuple[str, int, int]] = []
    for axis in axes:
        name, start, end = _cut(axis) if is_part(axis) else (axis, 1, sizes[axis])
        if runs and runs[-1][0] == name and runs[-1][2] == start:
            runs[-1] = name, runs[-1][1], end
        else:
            runs.append((name, start, end))
    return tuple(
        name if (start, end) == (1, sizes[name]) else f"{name}:({start}){end // start}"
        for name, start, end in runs
    )


def join_axes(module: str, meshes: Iterable[AxisSizes]) -> str:
    """Return the text of a module with the split ``meshes`` as what they were split from.

    Before: ``sdy.mesh @s = <["m:(1)4"=4, "m:(4)2"=2]>`` and ``<@s, [{"m:(4)2"}, {}]>``; after:
    ``sdy.mesh @s = <["m"=8]>`` and ``<@s, [{"m":(4)2}, {}]>``.
    """
    sizes: dict[str, int] = {}
    for mesh in meshes:
        whole = whole_axes(mesh)
        sizes.update(whole)
        split, found = _mesh_axes(mesh), _mesh_axes(whole)
        # A copy of the axes for other dialects goes.
        module = re.sub(re.escape(split) + r"(.*>) \{.*\}$", f"{split}\\1", module, flags=re.M)
        module = module.replace(split, found)

    def written(match: re.Match[str]) -> str:
        (axes,) = read_axes(match[0])
        if not any(is_part(axis) for axis in axes):
            return match[0]
        return "{" + ", ".join(map(_quoted, joined(axes, sizes))) + "}"

    return re.sub(r'\{"[^{}]*"(?::\(\d+\)\d+)?\}', written, module)


def _mesh_axes(axis_sizes: AxisSizes) -> str:
    return "<[" + ", ".join(f'"{name}"={size}' for name, size in axis_sizes) + "]"


def _quoted(axis: str) -> str:
    if not is_part(axis):
        return f'"{axis}"'
    name = _cut(axis)[0]
    return f'"{name}"{axis[len(name) :]}'


# --- sites ---


def split_site(site: EinsumSite, axis_sizes: AxisSizes) -> EinsumSite:
    """Return ``site`` described on the split mesh ``axis_sizes``."""

    def spec(given: Spec) -> Spec:
        return tuple(on_split(axes, axis_sizes) for axes in given)

    return dataclasses.replace(
        site,
        lhs_spec=spec(site.lhs_spec),
        rhs_spec=spec(site.rhs_spec),
        out_spec=spec(site.out_spec),
        collectives=tuple(
            dataclasses.replace(c, axes=on_split(c.axes, axis_sizes)) for c in site.collectives
        ),
        axis_sizes=axis_sizes,
    )


def share_splits(sites: Sequence[EinsumSite]) -> list[EinsumSite]:
    """Return the sites, those that gather one value on one mesh, so that they share its ring."""
    sites = list(sites)
    if not any(is_part(axis) for site in sites for axis, _ in site.axis_sizes):
        return sites
    changed = True
    while changed:
        changed = False
        for members in _gathers(sites):
            axis_sizes = whole_axes(sites[members[0]].axis_sizes)
            common = split_axes(axis_sizes, [a for i in members for a, _ in sites[i].axis_sizes])
            for i in members:
                if common is not None and sites[i].axis_sizes != common:
                    sites[i], changed = split_site(sites[i], common), True
    return sites


def _gathers(sites: Sequence[EinsumSite]) -> list[list[int]]:
    """Return the sites that gather one value in one way, by their place in ``sites``."""
    groups: dict[object, list[int]] = {}
    for i, site in enumerate(sites):
        for c in site.loopable:
            if c.kind == ALL_GATHER and c.operand is not None and not site.manual:
                whole = whole_axes(site.axis_sizes)
                key = site.sources[c.operand], c.dim, joined(c.axes, dict(whole)), whole
                groups.setdefault(key, []).append(i)
    return [group for group in groups.values() if len(group) > 1]
