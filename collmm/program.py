"""A planned program: from a traced jit and its arguments' shardings to a plan and a new jit.

This is the one place where the stages meet: capture, partition, gate, plan, rewrite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from collmm import _jax
from collmm.capture import Captured, capture
from collmm.cost.figures import Chip
from collmm.cost.hardware import CHIPS, chip
from collmm.errors import Reason
from collmm.gate import make_site
from collmm.options import Options
from collmm.partition import DotSharding, partition
from collmm.plan import Decision, Plan, make_plan
from collmm.rewrite import rewrite
from collmm.scatter_sums import next_sums, pin_results, scatter_sums
from collmm.sites import EinsumSite
from collmm.topology import RingPlaces

DEFAULT_CHIP = "v5e"
# What the devices call themselves, as jax reports it in device_kind.
_DEVICE_KINDS = {
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
_GPU_NAMES = ("gb200", "b200", "h200", "h100", "a100", "mi300x")


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan of one program and its jaxpr after the rewrite.

    Attributes:
      plan: every decision.
      closed: the closed jaxpr with the plan carried out; the original when nothing is rewritten.
    """

    plan: Plan
    closed: Any


def plan_program(
    closed: Any,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    options: Options,
    *,
    name: str = "",
    mesh: Any = None,
    keep_results: bool = True,
) -> Planned:
    """Plan and rewrite one closed jaxpr.

    Args:
      closed: the traced program.
      in_shardings: a sharding or None (not specified) per flat argument.
      out_shardings: the same per flat result.
      options: policy and hardware.
      name: of the function, for the plan.
      mesh: a further mesh that the program may be on, such as that of the context.
      keep_results: pin the shardings of the results to what they were; False where the program
        stands inside another one, which has its own use for them.
    """
    captured = capture(closed)
    meshes = find_meshes(captured, [*in_shardings, *out_shardings], mesh)
    row, note = hardware(options, meshes.values())

    def planned(found: dict[int, DotSharding]) -> Plan:
        sites = [_on_known_mesh(make_site(d, found.get(d.index)), meshes) for d in captured.dots]
        return make_plan(sites, options, row, note=note, program=name, places=places)

    places = RingPlaces(meshes, row).place
    if not any(m.size > 1 for m in meshes.values()):
        sites = [_alone(make_site(d, None)) for d in captured.dots]
        return Planned(make_plan(sites, options, row, note=note, program=name), closed)
    found, results = partition(captured, in_shardings, out_shardings)
    plan = planned(found)
    free = captured
    done: dict[int, Decision] = {}
    while sums := next_sums(plan, done):
        done.update((i, plan.decisions[i]) for i in sums)
        free = dataclasses.replace(free, closed=scatter_sums(free, plan, sums, meshes))
        mesh = meshes[plan.decisions[min(sums)].site.axis_sizes]
        pinned = pin_results(free.closed, results, out_shardings, mesh)
        captured = dataclasses.replace(free, closed=pinned)
        # What follows a scattered sum lies on shards now: ask again where the gathers are.
        found, _ = partition(captured, in_shardings, out_shardings)
        plan = _with_decisions(planned(found), done)
    if not plan.rewritten:
        return Planned(plan, closed)
    first = [m for d in plan.rewritten if (m := meshes.get(d.site.axis_sizes)) is not None]
    if keep_results and not done and first and isinstance(first[0], jax.sharding.Mesh):
        pinned = pin_results(captured.closed, results, out_shardings, first[0])
        captured = dataclasses.replace(captured, closed=pinned)
    refused: dict[int, str] = {}
    new = rewrite(captured, plan, meshes, refused)
    return Planned(_with_decisions(plan, _refused(plan, refused)), new)


def _refused(plan: Plan, details: dict[int, str]) -> dict[int, Decision]:
    return {
        i: dataclasses.replace(
            plan.decisions[i], schedule=None, reason=Reason.ANALYSIS_FAILED, detail=detail
        )
        for i, detail in details.items()
    }


def _with_decisions(plan: Plan, known: dict[int, Decision]) -> Plan:
    decisions = tuple(known.get(d.site.index, d) for d in plan.decisions)
    return dataclasses.replace(plan, decisions=decisions)


def find_meshes(
    captured: Captured, shardings: Sequence[Any], mesh: Any
) -> dict[tuple[tuple[str, int], ...], Any]:
    """Return every mesh that the program names, by its axes and their sizes."""
    candidates = [getattr(s, "mesh", None) for s in shardings]
    candidates += [getattr(s, "mesh", None) for s in _jax.constraint_shardings(captured.closed)]
    candidates.append(mesh)
    found: dict[tuple[tuple[str, int], ...], Any] = {}
    # A mesh with devices before one without: the same axes, but it can name its hardware.
    for kind in (jax.sharding.Mesh, jax.sharding.AbstractMesh):
        for m in candidates:
            if isinstance(m, kind) and not m.empty:
                found.setdefault(tuple(m.shape.items()), m)
    return found


def hardware(options: Options, meshes: Any) -> tuple[Chip, str]:
    """Return the hardware row to plan for, and a line that says so when it was assumed."""
    if options.chip is not None:
        return chip(options.chip).per_device(), ""
    for mesh in meshes:
        if not isinstance(mesh, jax.sharding.Mesh):
            continue
        device = mesh.devices.flat[0]
        kind = device.device_kind
        if kind in _DEVICE_KINDS:
            return chip(_DEVICE_KINDS[kind]).per_device(), ""
        for gpu in _GPU_NAMES:
            if gpu in kind.lower() and gpu in CHIPS:
                return chip(gpu), ""
        if device.platform != "cpu":
            return chip(DEFAULT_CHIP), (
                f"no hardware row for {kind!r}; planned for {DEFAULT_CHIP}, set Options(chip=...)"
            )
    return chip(DEFAULT_CHIP), (
        f"CPU devices have no links to plan for; planned for {DEFAULT_CHIP}"
    )


def _on_known_mesh(site: EinsumSite, meshes: dict[tuple[tuple[str, int], ...], Any]) -> EinsumSite:
    known = site.manual or site.axis_sizes in meshes
    if site.refusal is None and not known:
        return dataclasses.replace(site, refusal=Reason.UNKNOWN_MESH, detail=str(site.axis_sizes))
    return site


def _alone(site: EinsumSite) -> EinsumSite:
    """One device, or no shardings at all: nothing to communicate."""
    if site.refusal is Reason.UNREACHED:
        return dataclasses.replace(site, refusal=Reason.NO_COLLECTIVE)
    return site
