"""A planned program: from a traced jit and its arguments' shardings to a plan and a new jit.

This is the one place where the stages meet: capture, partition, gate, plan, rewrite.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from collmm import _jax, constraints, plan_file
from collmm.budget import within_permutes
from collmm.capture import Captured, capture
from collmm.cost.estimate import Estimate, estimate
from collmm.cost.figures import Chip
from collmm.cost.hardware import chip, profile_rows
from collmm.cost.nested import Inside
from collmm.devices import DEFAULT_CHIP, row_of
from collmm.errors import OverrideWarning, PlanMismatch, PlanMismatchWarning, Reason
from collmm.gate import make_site
from collmm.options import Options
from collmm.partition import DotSharding, partition, tagged_shardings
from collmm.pinning import pin_plan
from collmm.plan import Decision, Plan, make_plan
from collmm.plan_file import PlanFile
from collmm.residuals import SAVED_KEY, save_as_computed
from collmm.rewrite import MeshOf, rewrite
from collmm.scatter_sums import next_sums, pin_results, plain_sums, scatter_sums
from collmm.schedule import Schedule
from collmm.sites import Collective, EinsumSite
from collmm.subaxes import AxisSizes, share_splits, whole_axes
from collmm.together import whole_sums
from collmm.topology import RingPlaces


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan of one program and its jaxpr after the rewrite.

    Attributes:
      plan: every decision.
      closed: the closed jaxpr with the plan carried out; the original when nothing is rewritten.
      notices: what the user should be warned of.
    """

    plan: Plan
    closed: Any
    notices: tuple[Warning, ...] = ()

    def warn(self, stacklevel: int) -> None:
        """Give the notices as warnings of the caller's caller at ``stacklevel``."""
        for notice in self.notices:
            warnings.warn(notice, stacklevel=stacklevel + 1)


def plan_program(
    closed: Any,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    options: Options,
    *,
    name: str = "",
    mesh: Any = None,
    keep_results: bool = True,
    pinned: PlanFile | None = None,
) -> Planned:
    """Plan and rewrite one closed jaxpr.

    Args:
      closed: the traced program.
      in_shardings: a sharding or None (not specified) per flat argument.
      out_shardings: the same per flat result.
      options: policy, hardware, constraints and the plan file to follow.
      name: of the function, for the plan.
      mesh: a further mesh that the program may be on, such as that of the context.
      keep_results: pin the shardings of the results to what they were; False where the program
        stands inside another one, which has its own use for them.
      pinned: what to follow instead of the plan file of ``options``.

    Raises:
      PlanFileError: the plan file cannot be read.
      PlanMismatch: it does not fit, and ``options`` say to stop.
    """
    if pinned is None and options.plan is not None:
        pinned = plan_file.read(options.plan)

    def planned(pins: PlanFile | None) -> Planned:
        return _plan_program(
            closed, in_shardings, out_shardings, options, name, mesh, keep_results, pins
        )

    if pinned is None:
        return _with_unmatched(planned(None), options)
    made = planned(pinned)
    found = plan_file.differences(pinned, made.plan)
    if not found:
        return made
    if options.on_mismatch == "stop":
        advice = 'make it anew, or set Options(on_mismatch="replan")'
        raise PlanMismatch(plan_file.message(pinned, found, advice), found)
    notice = PlanMismatchWarning(plan_file.message(pinned, found, "planned anew"))
    made = _with_unmatched(planned(None), options)
    return dataclasses.replace(made, notices=(notice, *made.notices))


def _with_unmatched(made: Planned, options: Options) -> Planned:
    """Add a notice for every override that names no einsum of the program."""
    sites = [d.site for d in made.plan.decisions]
    name = f" of {made.plan.program}" if made.plan.program else ""
    overrides = constraints.read_overrides(options.overrides)
    lines = constraints.unmatched(overrides, sites, name)
    return dataclasses.replace(made, notices=tuple(map(OverrideWarning, lines)))


def _plan_program(
    closed: Any,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    options: Options,
    name: str,
    mesh: Any,
    keep_results: bool,
    pinned: PlanFile | None,
) -> Planned:
    captured = capture(closed)
    meshes = find_meshes(captured, [*in_shardings, *out_shardings], mesh)
    row, note = hardware(options, meshes.values())

    def made(sites: Sequence[EinsumSite]) -> Plan:
        plan = make_plan(sites, options, row, note=note, program=name, places=places)
        plan = dataclasses.replace(plan, jax=jax.__version__)
        if pinned is not None:
            return whole_sums(pin_plan(plan, pinned, price))
        return whole_sums(within_permutes(plan, options, done))

    def planned(found: dict[int, DotSharding]) -> Plan:
        sites = share_splits([make_site(d, found.get(d.index)) for d in dots])
        return made([_on_known_mesh(site, meshes) for site in sites])

    def tagged(program: Captured) -> Any:
        return tagged_shardings(program, in_shardings, out_shardings, SAVED_KEY)

    def asked(program: Captured) -> Plan:
        if done:
            decision = next(iter(done.values()))
            program = with_results(program, meshes[whole_axes(decision.site.axis_sizes)])
            program = dataclasses.replace(program, closed=plain_sums(program.closed))
        found, _ = partition(program, in_shardings, out_shardings)
        return _with_decisions(planned(found), done)

    def with_results(program: Captured, mesh: Any) -> Captured:
        others = [m for m in meshes.values() if isinstance(m, jax.sharding.Mesh)]
        pinned = pin_results(program.closed, results, out_shardings, [mesh, *others])
        return dataclasses.replace(program, closed=pinned)

    def price(site: EinsumSite, collective: Collective, schedule: Schedule) -> Estimate:
        ring = places(site, collective.axes).ring
        rings = {c.axes: places(site, c.axes).ring for c in site.loopable}
        inside = Inside(tuple((axes, ring) for axes, ring in rings.items() if ring is not None))
        return estimate(site, collective, schedule, row, ring, inside=inside)

    done: dict[int, Decision] = {}
    dots = captured.dots
    places = RingPlaces(meshes, row).place
    if not any(m.size > 1 for m in meshes.values()):
        return Planned(made([_alone(make_site(d, None)) for d in dots]), closed)
    found, results = partition(captured, in_shardings, out_shardings)
    plan = planned(found)
    captured, plan = save_as_computed(captured, plan, meshes, tagged, asked)
    while sums := next_sums(plan, done):
        done.update((i, plan.decisions[i]) for i in sums)
        captured = dataclasses.replace(captured, closed=scatter_sums(captured, plan, sums, meshes))
        # What follows a scattered sum lies on shards now: ask again where the gathers are.
        plan = asked(captured)
        captured, plan = save_as_computed(captured, plan, meshes, tagged, asked)
    whole = _whole(plan, meshes) if options.keep_whole else set()
    if not plan.rewritten and not whole:
        return Planned(plan, closed)
    rewritten = [whole_axes(d.site.axis_sizes) for d in plan.rewritten]
    first = [meshes[axis_sizes] for axis_sizes in rewritten if axis_sizes in meshes]
    if done or (keep_results and first and isinstance(first[0], jax.sharding.Mesh)):
        captured = with_results(captured, first[0])
    refused: dict[int, str] = {}
    chains = options.chains and options.max_permutes is None
    new = rewrite(captured, plan, meshes, refused, whole=whole, chains=chains)
    return Planned(_with_decisions(plan, _refused(plan, refused)), new)


def _whole(plan: Plan, meshes: MeshOf) -> set[int]:
    """Return the einsums that a TPU's compiler is told to leave whole: those the model declined."""

    def on_tpu(site: EinsumSite) -> bool:
        mesh = meshes.get(whole_axes(site.axis_sizes))
        return isinstance(mesh, jax.sharding.Mesh) and mesh.devices.flat[0].platform == "tpu"

    return {d.site.index for d in plan.decisions if d.judged and on_tpu(d.site)}


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


def find_meshes(captured: Captured, shardings: Sequence[Any], mesh: Any) -> dict[AxisSizes, Any]:
    """Return every mesh that the program names, by its axes and their sizes."""
    candidates = [getattr(s, "mesh", None) for s in shardings]
    candidates += [getattr(s, "mesh", None) for s in _jax.constraint_shardings(captured.closed)]
    candidates.append(mesh)
    found: dict[AxisSizes, Any] = {}
    # A mesh with devices before one without: the same axes, but it can name its hardware.
    for kind in (jax.sharding.Mesh, jax.sharding.AbstractMesh):
        for m in candidates:
            if isinstance(m, kind) and not m.empty:
                found.setdefault(tuple(m.shape.items()), m)
    return found


def hardware(options: Options, meshes: Any) -> tuple[Chip, str]:
    """Return the hardware row to plan for, and a line that says so when it was assumed."""
    table = options.table()
    measured = profile_rows(options.profile) if options.profile is not None else ()
    name, note = (options.chip, "") if options.chip is not None else _detected(meshes)
    if options.chip is None and len(measured) == 1 and name not in measured:
        name = measured[0]
        note = f"planned for {name}, the one row of {options.profile}"
    elif name in measured:
        note = "; ".join(filter(None, (note, f"{name} is that of {options.profile}")))
    return chip(name, table).per_device(), note


def _detected(meshes: Any) -> tuple[str, str]:
    """The name of the row of the devices, and a line that says so when it was assumed."""
    for mesh in meshes:
        if isinstance(mesh, jax.sharding.Mesh):
            return row_of(mesh.devices.flat[0])
    return DEFAULT_CHIP, f"no devices are known yet; planned for {DEFAULT_CHIP}"


def _on_known_mesh(site: EinsumSite, meshes: dict[AxisSizes, Any]) -> EinsumSite:
    """Refuse a site on a mesh that nobody named; add the split mesh of one that names sub-axes."""
    if site.refusal is not None or site.manual or site.axis_sizes in meshes:
        return site
    whole = meshes.get(whole_axes(site.axis_sizes))
    if whole is None:
        return dataclasses.replace(site, refusal=Reason.UNKNOWN_MESH, detail=str(site.axis_sizes))
    meshes[site.axis_sizes] = _split_mesh(whole, site.axis_sizes)
    return site


def _split_mesh(mesh: Any, axis_sizes: AxisSizes) -> Any:
    """Return the devices of ``mesh`` in the same order, under axes that are parts of its own."""
    names, sizes = zip(*axis_sizes, strict=True)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    if isinstance(mesh, jax.sharding.Mesh):
        return jax.sharding.Mesh(mesh.devices.reshape(sizes), names, axis_types=auto)
    return jax.sharding.AbstractMesh(sizes, names, axis_types=auto)


def _alone(site: EinsumSite) -> EinsumSite:
    """One device, or no shardings at all: nothing to communicate."""
    if site.refusal is Reason.UNREACHED:
        return dataclasses.replace(site, refusal=Reason.NO_COLLECTIVE)
    return site
