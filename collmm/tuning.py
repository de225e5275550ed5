"""Tune: time the candidates of every einsum on the devices at hand, and keep the fastest.

    the plan of the cost model  ->  for each kind of site: the whole program once per candidate,
                                    in turns; the fastest stays  ->  the tuned plan

Sites that are the same einsum with the same collectives, and sites on one ring, are decided
together. A site is left alone unless a loop is faster by more than ``min_gain`` of the program.
What is timed is the whole program, so that what else it does counts; each variant is an ordinary
plan file that the program follows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from collmm import _jax, plan_file, report
from collmm.api import OverlappedFunction, overlap_collectives
from collmm.cost.candidates import Candidate
from collmm.devices import SIMULATED, attached, describe
from collmm.errors import OptionError, PlanMismatch, Reason
from collmm.plan import Decision, Plan
from collmm.program_file import AXIS_TYPES, load
from collmm.programs import Program, build, open_program
from collmm.targets import parse_target
from collmm.targets.options import options_for
from collmm.timing import Call, medians

# Times calls in turns: (calls, rounds) to the median seconds of each.
Measure = Callable[[Sequence[Call], int], list[float]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way to do a group of sites: what it is, and the seconds of the whole program with it."""

    name: str
    seconds: float
    chosen: bool


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A tuned plan.

    Attributes:
      plan: the decisions that were fastest.
      trials: (numbers of the sites, what was tried), one per group that was timed.
      original_s, tuned_s: the program as it is and under the plan, timed in turns at the end.
      where: the devices.
    """

    plan: Plan
    trials: tuple[tuple[tuple[int, ...], tuple[Trial, ...]], ...]
    original_s: float
    tuned_s: float
    where: str

    def __str__(self) -> str:
        rows = [
            (
                ",".join(map(str, sites)),
                t.name,
                report.seconds(t.seconds),
                "<-" if t.chosen else "",
            )
            for sites, trials in self.trials
            for t in trials
        ]
        lines = [f"timed on {self.where}"]
        if rows:
            lines.append(report.table(("sites", "candidate", "program", ""), rows))
        lines.append(
            f"the program as it is: {report.seconds(self.original_s)}, tuned: "
            f"{report.seconds(self.tuned_s)}; {len(self.plan.rewritten)} of "
            f"{len(self.plan.decisions)} einsums rewritten"
        )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the plan's candidates."""
        return {
            "devices": self.where,
            "original_s": self.original_s,
            "tuned_s": self.tuned_s,
            "groups": [
                {"sites": list(sites), "trials": [dataclasses.asdict(t) for t in trials]}
                for sites, trials in self.trials
            ],
            "plan": self.plan.to_json(),
        }


def open_runnable(path: str | os.PathLike[str], target: str | None = None) -> Program:
    """Open a program file on devices that can run it.

    Without a target those that are attached, or simulated ones where none are. Raises OptionError
    for a target that is only compiled for.
    """
    if target is not None and parse_target(target).kind != "cpu":
        raise OptionError(f"tune runs the program and {target} is only compiled for; use cpu:N")
    if target is not None or attached() == SIMULATED:
        return open_program(path, target)
    from jax.experimental import mesh_utils

    file = load(path)
    devices = jax.devices()
    if len(devices) < file.device_count:
        raise OptionError(f"{path}: MESH has {file.device_count} devices, here are {len(devices)}")
    sizes = tuple(file.mesh_shape.values())
    placed = mesh_utils.create_device_mesh(sizes, devices[: file.device_count])
    types = (AXIS_TYPES[file.axis_types],) * len(sizes)
    mesh = jax.sharding.Mesh(placed, tuple(file.mesh_shape), axis_types=types)
    return build(file, parse_target(f"{SIMULATED}:{file.device_count}"), mesh)


def tune(
    program: Program,
    *,
    rounds: int = 5,
    most: int = 4,
    measure: Measure = medians,
    **options: Any,
) -> Tuned:
    """Time the candidates of ``program``'s sites; run this in ``program.context()``.

    Args:
      program: on devices that can run it.
      rounds: how often each variant runs; medians are compared.
      most: candidates to time per site, those that the cost model finds fastest.
      measure: times calls.
      options: further ``Options``; a plan file is not followed.
    """
    overlapped = program.overlapped(**options)
    free = dataclasses.replace(overlapped.options, plan=None, on_mismatch="stop")
    overlapped = overlap_collectives(program.fn, free)
    args = jax.tree.map(_filled, program.args)
    plan = overlapped.plan(*args)
    trials = []
    for group in _groups(plan):
        variants = _variants(plan, group, most)
        runs = [(name, v, run) for name, v in variants if (run := _run(overlapped, v, args))]
        if len(runs) < 2:
            continue
        times = measure([run for _, _, run in runs], rounds)
        best = _fastest(times, free.min_gain)
        logging.info("sites %s: %s", group, runs[best][0])
        plan = runs[best][1]
        told = zip(runs, times, range(len(runs)), strict=True)
        trials.append((group, tuple(Trial(r[0], t, i == best) for r, t, i in told)))
    original: Call = _Run(overlapped.jitted, args)
    final = _run(overlapped, plan, args) or original
    before, after = measure([original, final], rounds)
    where = describe(list(program.mesh.devices.flat))
    note = f"tuned on {where}"
    plan = dataclasses.replace(plan, note="; ".join(filter(None, (plan.note, note))))
    return Tuned(plan, tuple(trials), before, after, where)


def _groups(plan: Plan) -> list[tuple[int, ...]]:
    """The sites that are decided together: of one ring, or the same einsum."""
    groups: dict[str, list[int]] = {}
    for d in plan.decisions:
        if not d.candidates:
            continue
        ring = [plan.decisions[i].site for i in d.group] or [d.site]
        key = json.dumps([plan_file.identity(s) for s in ring])
        groups.setdefault(key, []).append(d.site.index)
    return [tuple(group) for group in groups.values()]


def _variants(plan: Plan, group: Sequence[int], most: int) -> list[tuple[str, Plan]]:
    """(name, plan) for a group left alone, and for each of its fastest candidates."""
    first = plan.decisions[group[0]]
    found = [("left alone", _with(plan, group, None))]
    for rank, c in enumerate(first.candidates[:most]):
        found.append((f"{c.collective.kind} {c.schedule.describe()}", _with(plan, group, rank)))
    return found


def _with(plan: Plan, group: Sequence[int], rank: int | None) -> Plan:
    def decided(d: Decision) -> Decision:
        if d.site.index not in group:
            return d
        if rank is None:
            return dataclasses.replace(d, schedule=None, reason=Reason.NOT_WORTH, detail="timed")
        c: Candidate = d.candidates[min(rank, len(d.candidates) - 1)]
        return dataclasses.replace(
            d,
            collective=c.collective,
            schedule=c.schedule,
            estimate=c.estimate,
            reason=None,
            detail="timed",
        )

    return dataclasses.replace(plan, decisions=tuple(map(decided, plan.decisions)))


def _run(overlapped: OverlappedFunction, plan: Plan, args: tuple) -> _Run | None:
    """The program under ``plan``; None where it cannot follow it.

    What a scattered sum does to later einsums makes some variants no plan of the program.
    """
    with tempfile.TemporaryDirectory(prefix="collmm-") as folder:
        path = pathlib.Path(folder) / "plan.json"
        plan.save(path)
        options = dataclasses.replace(overlapped.options, plan=path)
        variant = overlap_collectives(overlapped, options)
        try:
            return _Run(variant, args)
        except PlanMismatch as e:
            logging.info("not tried: %s", e)
            return None


class _Run:
    """A compiled program with its arguments; what it donates is copied before every run."""

    def __init__(self, fn: Any, args: tuple) -> None:
        jitted = fn.jitted if isinstance(fn, OverlappedFunction) else fn
        lowered = fn.lower(*args)
        platform = jax.devices()[0].platform
        chosen = options_for(platform, False) if platform in ("tpu", "gpu") else ()
        compiler = {o.name: o.value for o in chosen if not o.without_hardware}
        self._compiled = lowered.compile(compiler_options=compiler or None)
        self._kept, _ = _jax.dynamic_args(jitted, args, {})
        self._donates = any(info.donated for info in jax.tree.leaves(lowered.args_info))
        self._args = self._kept

    def prepare(self) -> None:
        """Copy what the next run donates."""
        if self._donates:
            self._args = jax.block_until_ready(jax.tree.map(jnp.copy, self._kept))

    def __call__(self) -> Any:
        return self._compiled(*self._args)


def _fastest(times: Sequence[float], min_gain: float) -> int:
    """The fastest; the first, which leaves the sites alone, unless that is slower by the margin."""
    best = min(range(len(times)), key=lambda i: times[i])
    return best if times[best] < (1 - min_gain) * times[0] else 0


def _filled(leaf: Any) -> Any:
    """An array for a ``jax.ShapeDtypeStruct``: small numbers, or ones for whole numbers."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        values = np.random.default_rng(0).standard_normal(leaf.shape, np.float32)
    else:
        values = np.ones(leaf.shape)
    return jax.device_put(values.astype(leaf.dtype), leaf.sharding)
