"""Compiles one site of the grid in every way there is, and reads what its schedule is predicted to
take.

Nothing is run and nothing allocated: the TPU or GPU compiler compiles for its target, and the
timeline of the compiled program (``collmm.prediction``) gives the seconds.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from grid_report import planned_schedules, site_of
from grid_sites import GridSite
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collmm import loops
from collmm._jax import shard_map_all
from collmm.cost.candidates import RingPlace
from collmm.cost.hardware import chip
from collmm.hlo.parse import parse
from collmm.prediction import predict
from collmm.schedule import Schedule
from collmm.targets import Target, parse_target
from collmm.topology import RingPlaces

_BOTH = ("data", "model")
# lhs, rhs and result, on a mesh of data and model.
_SPECS = {
    "gather": (P(_BOTH, None), P(None, "model"), P("data", "model")),
    "weights": (P(_BOTH, None), P("model", None), P(_BOTH, None)),
    "columns": (P(_BOTH, None), P(None, "model"), P(_BOTH, None)),
    "scatter": (P("data", "model"), P("model", None), P(_BOTH, None)),
}


def specs_of(site: GridSite) -> tuple[P, P, P]:
    """The shardings of lhs, rhs and result."""
    names = dict(site.mesh)

    def kept(entry: Any) -> Any:
        axes = tuple(a for a in ((entry,) if isinstance(entry, str) else entry or ()) if a in names)
        return axes or None

    lhs, rhs, out = (P(*map(kept, spec)) for spec in _SPECS[site.kind])
    return lhs, rhs, out


@functools.cache
def target_of(site: GridSite) -> Target:
    """The site's target."""
    return parse_target(site.target)


@functools.cache
def _mesh(target: str, axes: tuple[tuple[str, int], ...]) -> Mesh:
    return parse_target(target).mesh(dict(axes))


def mesh_of(site: GridSite) -> Mesh:
    """The mesh of the site's target."""
    return _mesh(site.target, site.mesh)


def program(site: GridSite) -> tuple[Any, tuple[Any, Any]]:
    """(the jitted einsum, its operands as shapes)."""
    mesh = mesh_of(site)
    lhs, rhs, out = (NamedSharding(mesh, spec) for spec in specs_of(site))
    shapes = (site.rows, site.depth), (site.depth, site.columns)
    args = tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=on)
        for shape, on in zip(shapes, (lhs, rhs), strict=True)
    )
    return jax.jit(lambda x, w: jax.lax.with_sharding_constraint(x @ w, out)), args


def place_of(site: GridSite) -> RingPlace:
    """Where the site's ring lies on its target."""
    mesh = mesh_of(site)
    row = chip(site.target.split(":")[1]).per_device()
    return RingPlaces({tuple(mesh.shape.items()): mesh}, row).place(site_of(site), ("model",))


def schedules_of(site: GridSite) -> list[Schedule]:
    """Every schedule that planning weighs for the site."""
    row = chip(site.target.split(":")[1]).per_device()
    order = place_of(site).order
    found = planned_schedules(site_of(site), row)
    return [dataclasses.replace(schedule, order=order) for schedule in found]


def looped(site: GridSite, schedule: Schedule) -> Any:
    """The jitted loop of the site under ``schedule``, as the primitives lower it."""
    mesh = mesh_of(site)
    planned = site_of(site)
    (collective,) = planned.collectives
    partial = loops.PartialEinsum(planned.einsum, None, None, jnp.dtype(jnp.bfloat16))
    dim = collective.dim

    def body(x, w):
        if site.kind == "scatter":
            return loops.einsum_reduce_scatter([(x, w, partial)], dim, schedule)
        side = collective.operand or 0
        shard, local = (w, x) if side else (x, w)
        consumer = loops.Consumer(partial, side)
        (y,) = loops.all_gather_einsum(shard, [local], [consumer], schedule, gathered_dim=dim)
        return y

    lhs, rhs, out = specs_of(site)
    return jax.jit(lambda x, w: shard_map_all(body, mesh, (lhs, rhs), out)(x, w))


def timed(
    site: GridSite,
    schedule: Schedule | None,
    decomposition: str = "default",
) -> dict[str, Any]:
    """What the compiled site is predicted to take: seconds by name."""
    target, mesh = target_of(site), mesh_of(site)
    plain, args = program(site)
    if schedule is None:
        compiled = target.compile(plain.lower(*args), target.baseline_options(decomposition))
    else:
        compiled = target.compile(looped(site, schedule).lower(*args))
    return read(compiled.as_text() or "", target, mesh)


def product_seconds(target: str, rows: int, depth: int, columns: int) -> float:
    """What ``[rows, depth] @ [depth, columns]`` in bf16 takes on one device of ``target``."""
    parsed, mesh = parse_target(target), _mesh(target, (("model", 1),))
    whole = NamedSharding(mesh, P())
    args = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
        for shape in ((rows, depth), (depth, columns))
    )
    compiled = parsed.compile(jax.jit(lambda x, w: x @ w).lower(*args))
    return read(compiled.as_text() or "", parsed, mesh)["step"]


def read(text: str, target: Target, mesh: Mesh) -> dict[str, Any]:
    """The totals of the timeline of a compiled program."""
    found = predict(
        parse(text), target, devices=list(mesh.devices.flat), mesh_axes=dict(mesh.shape)
    )
    line = found.timeline
    assert line is not None
    return {
        "step": line.step,
        "compute": line.compute,
        "exposed": line.exposed,
        "copying": line.copying,
        "complete": line.complete,
    }
