"""Programs with a known right answer: what a case is, and how it is run and judged.

A case is a module ``C<number>_<name>.py`` in this folder that defines

  NAME     its name, that of the file
  WHAT     what goes wrong in it, in a sentence
  MESH     {axis: size}, eight devices in all
  build    ``build(mesh) -> (fn, args)``: a function to be jitted, and arrays placed on the mesh
  EXPECT   "rewrite": at least one einsum has a loop and is rewritten once cost is left aside;
           "leave": none has (with DECIDED_BY = "cost": the cost model leaves it);
           "either": both are right
  TOL      bound on max|out - ref| / max|ref|, per array of the result

and may define

  SOURCE         the public report that provoked it, "owner/repo#number"
  reference      the answer in numpy, of numpy arguments
  AXIS_TYPES     "explicit" for a mesh of explicit axes; "auto" otherwise
  CONTEXT_MESH   True: called under ``jax.set_mesh``
  JIT_KWARGS     keyword arguments of ``jax.jit``
  DEVICE_ORDER   the devices of the mesh, by number; DEVICE_ORDERS: several, one after the other
  RAISES         name of the error that jax raises
  KEEP_IN_JAXPR  a precision that every einsum of the jaxpr must name

Run from a shell, it prints a line per case: ``python tests/cases/runner.py [--vjp] [C01 C02 ...]``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, Mesh

from collmm import Options, Plan, overlap_collectives

HERE = pathlib.Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in HERE.glob("C[0-9][0-9]_*.py")))
DEVICES = 8

_PERMUTE = re.compile(r" collective-permute(?:-start)?\(")


@dataclasses.dataclass(frozen=True)
class Case:
    """One case; see the module docstring for the attributes."""

    id: str
    what: str
    mesh_axes: dict[str, int]
    build: Callable
    expect: str
    tol: float
    reference: Callable | None
    explicit: bool
    context_mesh: bool
    jit_kwargs: dict[str, Any]
    device_orders: tuple[Any, ...]
    raises: str | None
    keep_in_jaxpr: str | None
    decided_by_cost: bool

    def mesh(self, order: Any = None, *, one: bool = False) -> Mesh:
        """The mesh on devices in ``order``, or the same axes on ``one`` device."""
        shape = (1,) * len(self.mesh_axes) if one else tuple(self.mesh_axes.values())
        devices = np.array(jax.devices(), dtype=object)
        if order is not None:
            devices = devices[list(order)]
        kind = AxisType.Explicit if self.explicit else AxisType.Auto
        return Mesh(
            devices[: math.prod(shape)].reshape(shape),
            tuple(self.mesh_axes),
            axis_types=(kind,) * len(shape),
        )

    def context(self, mesh: Mesh) -> contextlib.AbstractContextManager:
        """What the case is built and called under."""
        if self.context_mesh or self.explicit:
            return jax.set_mesh(mesh)
        return contextlib.nullcontext()


def load(name: str) -> Case:
    """The case of the file ``<name>.py``."""
    path = HERE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = vars(module)
    assert name == f"{name[:3]}_{given['NAME']}", name
    assert given["EXPECT"] in ("rewrite", "leave", "either"), given["EXPECT"]
    assert math.prod(given["MESH"].values()) == DEVICES, given["MESH"]
    return Case(
        id=name[:3],
        what=given["WHAT"],
        mesh_axes=given["MESH"],
        build=given["build"],
        expect=given["EXPECT"],
        tol=given["TOL"],
        reference=given.get("reference"),
        explicit=given.get("AXIS_TYPES") == "explicit",
        context_mesh=given.get("CONTEXT_MESH", False),
        jit_kwargs=given.get("JIT_KWARGS", {}),
        device_orders=tuple(given.get("DEVICE_ORDERS", [given.get("DEVICE_ORDER")])),
        raises=given.get("RAISES"),
        keep_in_jaxpr=given.get("KEEP_IN_JAXPR"),
        decided_by_cost=given.get("DECIDED_BY") == "cost",
    )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What running a case through collmm on one order of devices gave.

    Attributes:
      plan: under the policy ``always``.
      auto: under the policy ``auto``.
      permutes, permutes_before: collective-permutes in the optimized HLO, with and without collmm.
      unsharded: worst error against the same function on one device.
      numpy: worst error against ``reference``, 0 without one.
      donated_left: donated arrays whose buffers were not taken.
      jaxpr, stablehlo: text of the rewritten program.
    """

    plan: Plan
    auto: Plan
    permutes: int
    permutes_before: int
    unsharded: float
    numpy: float
    donated_left: int
    jaxpr: str
    stablehlo: str


def run(case: Case) -> list[Outcome]:
    """Run a case through ``overlap_collectives``, once for each of its orders of devices."""
    reference = run_unsharded(case)
    outcomes: list[Outcome] = []
    fn, overlapped = None, None
    for order in case.device_orders:
        mesh = case.mesh(order)
        with case.context(mesh):
            built, args = case.build(mesh)
            if built is not fn:  # a module-level function is the same one on every mesh
                fn, jitted = built, jax.jit(built, **case.jit_kwargs)
                overlapped = overlap_collectives(jitted, Options(policy="always"))
            outcomes.append(_run_once(case, overlapped, args, reference))
    return outcomes


def _run_once(case: Case, overlapped: Any, args: tuple, reference: Any) -> Outcome:
    host = jax.tree.map(np.asarray, args)
    plan = overlapped.plan(*args)
    auto = overlap_collectives(overlapped.jitted, Options(policy="auto")).plan(*args)
    lowered = overlapped.lower(*args)
    compiled = lowered.compile()
    before = count_permutes(overlapped.jitted.lower(*args).compile())
    jaxpr = str(overlapped.trace(*args).jaxpr)
    out = jax.tree.map(np.asarray, compiled(*args))
    donated = [args[i] for i in case.jit_kwargs.get("donate_argnums", ())]
    return Outcome(
        plan=plan,
        auto=auto,
        permutes=count_permutes(compiled),
        permutes_before=before,
        unsharded=worst_error(out, reference),
        numpy=worst_error(out, case.reference(*host)) if case.reference is not None else 0.0,
        donated_left=sum(not a.is_deleted() for a in jax.tree.leaves(donated)),
        jaxpr=jaxpr,
        stablehlo=lowered.as_text(),
    )


def run_unsharded(case: Case) -> Any:
    """The plain function's result on one device."""
    mesh = case.mesh(one=True)
    with case.context(mesh):
        fn, args = case.build(mesh)
        return jax.tree.map(np.asarray, jax.jit(fn)(*args))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What differentiating a case from outside gave.

    Attributes:
      error: worst error of results and cotangents against the same on one device.
      bound: on that error.
      permutes: collective-permutes in the optimized HLO.
      alive: whether there is anything to differentiate, so that the einsums are not dead code.
    """

    error: float
    bound: float
    permutes: int
    alive: bool


def run_vjp(case: Case) -> Gradients:
    """Differentiate ``jax.jit`` round the overlapped function by every float argument.

    Outputs and cotangents are compared with the same on one device. They may be off by
    ``10 * TOL``, at least 1e-3, or 5e-2 where bfloat16 occurs: the cotangents of sums that were
    rounded to bfloat16 once differ by that much between two orders of additions.
    """
    mesh, one = case.mesh(case.device_orders[0]), case.mesh(one=True)
    with case.context(mesh):
        fn, args = case.build(mesh)
        lowered = _outer_vjp(overlap_collectives(jax.jit(fn), Options(policy="always"))).lower(
            *args
        )
        compiled = lowered.compile()
        out = jax.tree.map(np.asarray, compiled(*args))
    with case.context(one):
        fn, args = case.build(one)
        ref = jax.tree.map(np.asarray, _outer_vjp(jax.jit(fn))(*args))
        half = "bf16[" in str(jax.make_jaxpr(fn)(*args))
    bound = max(10 * case.tol, 5e-2 if half else 1e-3)
    return Gradients(worst_error(out, ref), bound, count_permutes(compiled), bool(out[1]))


def _outer_vjp(f: Callable) -> Any:
    """A jitted function: the float results of ``f`` and the cotangents of its float arguments."""

    def g(*args):
        leaves, tree = jax.tree.flatten(args)
        moving = [i for i, a in enumerate(leaves) if a.dtype in (jnp.float32, jnp.bfloat16)]

        def of_moving(*floats):
            new = list(leaves)
            for i, a in zip(moving, floats, strict=True):
                new[i] = a
            outs = jax.tree.leaves(f(*jax.tree.unflatten(tree, new)))
            return [o for o in outs if jnp.issubdtype(o.dtype, jnp.floating)]

        outs, pull = jax.vjp(of_moving, *[leaves[i] for i in moving])
        return outs, pull([jnp.cos(o) for o in outs])

    return jax.jit(g)


def worst_error(out: Any, ref: Any) -> float:
    """The largest of max|out - ref| / max|ref| over the arrays of a result; all must be finite."""
    worst = 0.0
    for o, r in zip(jax.tree.leaves(out), jax.tree.leaves(ref), strict=True):
        assert o.shape == r.shape, (o.shape, r.shape)
        o, r = o.astype(np.float64), r.astype(np.float64)
        assert np.isfinite(o).all()
        assert np.isfinite(r).all()
        scale = max(np.max(np.abs(r), initial=0), 1e-30)
        worst = max(worst, float(np.max(np.abs(o - r), initial=0) / scale))
    return worst


def count_permutes(compiled: Any) -> int:
    """Collective-permutes in the optimized HLO of a ``jax.stages.Compiled``."""
    return len(_PERMUTE.findall(compiled.as_text()))


def failures(case: Case, outcome: Outcome) -> list[str]:
    """What is wrong with an outcome; empty when the case is right."""
    wrong = wrong_choices(case, outcome)
    if outcome.unsharded > case.tol:
        wrong.append(f"off by {outcome.unsharded:.1e} from one device")
    if outcome.numpy > case.tol:
        wrong.append(f"off by {outcome.numpy:.1e} from numpy")
    if outcome.donated_left:
        wrong.append(f"{outcome.donated_left} donated arrays not taken")
    if case.keep_in_jaxpr:
        for where in ("jaxpr", "stablehlo"):
            dots, kept = count_kept(getattr(outcome, where), case.keep_in_jaxpr)
            if not dots or dots != kept:
                wrong.append(f"{kept} of {dots} einsums of the {where} name {case.keep_in_jaxpr}")
    return wrong


def wrong_choices(case: Case, outcome: Outcome) -> list[str]:
    """What is wrong with which einsums were rewritten, in the plan and in the optimized HLO."""
    wrong = []
    looped = len(outcome.plan.rewritten)
    added = outcome.permutes - outcome.permutes_before
    if case.expect == "rewrite" and not looped:
        wrong.append("nothing was rewritten")
    if bool(looped) != (added > 0) or added < 0:
        wrong.append(f"{looped} einsums rewritten, but {added} collective-permutes added")
    if case.expect == "leave" and outcome.auto.rewritten:
        wrong.append("rewritten under the policy 'auto'")
    if case.expect == "leave" and looped and not case.decided_by_cost:
        wrong.append("rewritten under the policy 'always'")
    return wrong


def wrong_gradients(case: Case, gradients: Gradients) -> list[str]:
    """What is wrong with the gradients; empty when the case is right."""
    wrong = []
    if gradients.error > gradients.bound:
        wrong.append(f"off by {gradients.error:.1e}, bound {gradients.bound:.0e}")
    if case.expect == "rewrite" and gradients.alive and not gradients.permutes:
        wrong.append("no collective-permutes inside the outer jit")
    return wrong


def count_kept(text: str, precision: str) -> tuple[int, int]:
    """(einsums, einsums that name ``precision``) in the text of a jaxpr or of StableHLO."""
    dots = len(re.findall(r"PartialEinsum\(|dot_general[\[ ]", text))
    return dots, len(re.findall(rf"precision ?= ?[\[(]?\w*\.?{precision}", text))


def raised(case: Case) -> str:
    """Name of the error that calling the overlapped function raises, or ''."""
    mesh = case.mesh(case.device_orders[0])
    with case.context(mesh):
        fn, args = case.build(mesh)
        try:
            overlap_collectives(jax.jit(fn, **case.jit_kwargs), Options(policy="always"))(*args)
        except Exception as e:
            return type(e).__name__
    return ""


def _main(argv: list[str]) -> None:
    vjp, as_json = flags.FLAGS.vjp, flags.FLAGS.json
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    results: dict[str, list[str]] = {}
    for name in NAMES:
        if argv[1:] and name[:3] not in argv[1:]:
            continue
        case = load(name)
        if case.raises:
            got = raised(case)
            wrong = [] if got == case.raises else [f"raised {got or 'nothing'}"]
        elif vjp:
            wrong = wrong_gradients(case, run_vjp(case))
        else:
            wrong = [text for outcome in run(case) for text in failures(case, outcome)]
        results[name] = wrong
        if not as_json:
            print("FAIL" if wrong else "ok  ", name, "; ".join(wrong), flush=True)
    if as_json:
        print(json.dumps(results, indent=1))
    sys.exit(any(results.values()))


if __name__ == "__main__":
    # Only here: as a module this one shares a process, and its flags, with other programs.
    flags.DEFINE_bool("vjp", False, "differentiate from outside instead")
    flags.DEFINE_bool("json", False, "print one JSON object instead of lines")
    app.run(_main)
