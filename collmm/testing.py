"""Assertions for a user's own tests: that a function's collectives are overlapped, and stay so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from collmm import audit_report, report
from collmm.api import OverlappedFunction, overlap_collectives
from collmm.errors import OptionError
from collmm.hlo.findings import Finding, Verdict
from collmm.hlo.parse import parse
from collmm.plan import Decision, Plan
from collmm.prediction import Prediction, predict
from collmm.sites import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from collmm.targets import Target, parse_target

_PLATFORMS = {"cpu": ("cpu",), "tpu": ("tpu",), "gpu": ("gpu", "cuda", "rocm")}


def assert_overlapped(
    fn: OverlappedFunction,
    *args: Any,
    all_gather: int | None = None,
    reduce_scatter: int | None = None,
    max_exposed: float | None = None,
    target: str | Target | None = None,
    **kwargs: Any,
) -> None:
    """Assert that the einsums of a decorated function are overlapped with their collectives.

    The plan must loop as many einsums as asked for, or any at all, and the rings must be there in
    the compiled program: their permutes, and with a TPU or GPU target work that runs meanwhile.
    Nothing is run.

    Args:
      fn: the decorated function.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``s.
      all_gather: at least how many einsums must gather an operand on a ring.
      reduce_scatter: at least how many must have their sum scattered on a ring.
      max_exposed: the largest share of the predicted step, from 0 to 1, in which nothing computes
        because a collective is waited for. Needs a TPU or GPU target.
      target: what to compile for, such as ``"tpu:v5e:2x4"``; without one, the devices at hand.
        Arguments on other devices are moved to the target's as shapes, on a mesh of the same axes;
        a function that names its mesh itself must be built on ``Target.mesh``.
      **kwargs: its keyword arguments.

    Raises:
      AssertionError: with the plan, and the collectives that are exposed.
      OptionError: an argument is not allowed.
      TargetError: the target is unknown, cannot hold the mesh, or its compiler is missing or
        crashes.
    """
    found = parse_target(target) if isinstance(target, str) else target
    _check(fn, all_gather, reduce_scatter, max_exposed, found)
    fn = _strict(fn, found)
    if found is not None:
        found.start_compiler()
        args, kwargs = _moved(found, args, kwargs)
    plan = _or_explain(lambda: fn.plan(*args, **kwargs), found)
    problems = _missing_in_plan(plan, all_gather, reduce_scatter)
    if problems:
        _fail(problems, plan, ())
    lowered = _or_explain(lambda: fn.lower(*args, **kwargs), found)
    compiled = lowered.compile() if found is None else found.compile(lowered)
    prediction = _predict(compiled.as_text() or "", found, args, kwargs)
    problems = _missing_in_schedule(plan, prediction)
    problems += _too_exposed(prediction, max_exposed)
    if problems:
        exposed = [f for f in prediction.findings if f.verdict is not Verdict.HIDDEN]
        if prediction.timeline is None:
            _fail(problems, plan, prediction.findings)
        _fail(problems, plan, exposed, "collectives that are not hidden, times predicted:")


def _check(fn: Any, gathers: Any, scatters: Any, exposed: Any, target: Target | None) -> None:
    if not isinstance(fn, OverlappedFunction):
        raise OptionError(f"{fn!r} is not decorated; pass the result of overlap_collectives")
    for name, value in (("all_gather", gathers), ("reduce_scatter", scatters)):
        if value is not None and (type(value) is not int or value < 0):
            raise OptionError(f"{name}={value!r}; give a whole number of einsums, or None")
    if exposed is None:
        return
    if isinstance(exposed, bool) or not isinstance(exposed, int | float) or not 0 <= exposed <= 1:
        raise OptionError(f"max_exposed={exposed!r}; give a share of the step, from 0 to 1")
    if target is None or target.hardware is None:
        raise OptionError("max_exposed needs times; give a target, such as target='tpu:v5e:2x4'")


def _strict(fn: OverlappedFunction, target: Target | None) -> OverlappedFunction:
    """The function with an analysis that raises, planned for the target's chip or its own."""
    hardware = None if target is None else target.hardware
    chip = fn.options.chip or (None if hardware is None else hardware.name)
    return overlap_collectives(fn, dataclasses.replace(fn.options, chip=chip, strict=True))


def _moved(target: Target, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments as shapes on the target's devices; as they are where they are there already."""
    mesh = _mesh((args, kwargs))
    if mesh is None:
        raise OptionError(f"no argument has a NamedSharding, so no mesh of {target.name} is known")
    if mesh.devices.flat[0].platform in _PLATFORMS[target.kind]:
        return args, kwargs
    there = target.mesh(dict(mesh.shape), mesh.axis_types)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        placed = (
            NamedSharding(there, sharding.spec) if isinstance(sharding, NamedSharding) else None
        )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    return jax.tree.map(move, (args, kwargs))


def _mesh(tree: Any) -> Mesh | None:
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _or_explain(make: Callable[[], Any], target: Target | None) -> Any:
    """``make()``; where jax meets devices of two kinds, an error that says what to do."""
    try:
        return make()
    except ValueError as e:
        if target is None or "incompatible devices" not in str(e):
            raise
        raise OptionError(
            f"the function names devices other than those of {target.name} itself; build it on "
            f"parse_target({target.name!r}).mesh(...) and pass ShapeDtypeStructs on that mesh"
        ) from e


def _predict(text: str, target: Target | None, args: tuple, kwargs: dict) -> Prediction:
    module, mesh = parse(text), _mesh((args, kwargs))
    if mesh is None or mesh.size != module.num_partitions * module.replica_count:
        return predict(module, None)
    return predict(module, target, devices=list(mesh.devices.flat), mesh_axes=dict(mesh.shape))


# --- what is wrong, in sentences ---


def _missing_in_plan(plan: Plan, gathers: int | None, scatters: int | None) -> list[str]:
    looped = [d.collective.kind for d in plan.rewritten if d.collective is not None]
    # Of an all-reduce the first half is a looped reduce-scatter.
    scattered = looped.count(REDUCE_SCATTER) + looped.count(ALL_REDUCE)
    wanted = (
        ("all-gather", gathers, looped.count(ALL_GATHER)),
        ("reduce-scatter", scatters, scattered),
    )
    problems = [
        f"expected at least {want} looped {kind} einsums, the plan has {found}"
        for kind, want, found in wanted
        if want is not None and found < want
    ]
    if gathers is None and scatters is None and not looped:
        problems.append("expected a looped einsum, the plan has none")
    return problems


def _missing_in_schedule(plan: Plan, prediction: Prediction) -> list[str]:
    problems = []
    rings = {
        d.collective.axes: d.site.ring_size(d.collective)
        for d in plan.rewritten
        if d.collective is not None
    }
    for axes, size in rings.items():
        over = ",".join(axes)
        permutes = [f for f in prediction.findings if f.pairs and _along(f, axes)]
        runs = [f.executed for f in permutes]
        if None not in runs and sum(r for r in runs if r) < size - 1:
            problems.append(
                f"expected at least {size - 1} permutes over {over}, the compiled program runs "
                f"{sum(r for r in runs if r)}"
            )
        elif prediction.timeline is not None and all(
            f.verdict in (Verdict.EXPOSED, Verdict.SERIALISED) for f in permutes
        ):
            problems.append(f"no permute over {over} is hidden behind anything")
    return problems + _undone(plan, prediction.findings)


def _along(f: Finding, axes: Sequence[str]) -> bool:
    return f.axes is None or set(f.axes) <= set(axes)


def _undone(plan: Plan, findings: Sequence[Finding]) -> list[str]:
    """Looped einsums whose collective is still there: same line, kind and axes.

    A line that has einsums left alone too may have the collective for those.
    """

    def place(d: Decision) -> tuple[str, int]:
        return d.site.location.file, d.site.location.line

    alone = {place(d) for d in plan.decisions if not d.rewritten}
    problems = []
    for d in plan.rewritten:
        c = d.collective
        if c is None or place(d) in alone:
            continue
        for f in findings:
            here = f.source is not None and (f.source.file, f.source.line) == place(d)
            if (
                here
                and f.kind == c.kind
                and f.bytes >= c.bytes
                and set(f.axes or ()) == set(c.axes)
            ):
                problems.append(f"the {c.kind} of {d.site.location} is still there, as {f.name}")
    return list(dict.fromkeys(problems))


def _too_exposed(prediction: Prediction, most: float | None) -> list[str]:
    line = prediction.timeline
    if most is None or line is None:
        return []
    unknown = [f.name for f in line.findings if f.exposed is None]
    if unknown:
        return [f"how much is exposed is not known: {', '.join(unknown)}"]
    share = line.exposed / line.step if line.step else 0.0
    if share <= most:
        return []
    return [
        f"expected at most {most:.1%} of the predicted step exposed, it is {share:.1%}: "
        f"{report.seconds(line.exposed)} of {report.seconds(line.step)}"
    ]


def _fail(
    problems: Sequence[str],
    plan: Plan,
    findings: Sequence[Finding],
    heading: str = "collectives of the compiled program:",
) -> None:
    parts = ["\n".join(problems), f"the plan:\n{plan}"]
    if findings:
        parts.append(f"{heading}\n{audit_report.findings_table(findings)}")
    raise AssertionError("\n\n".join(parts))
