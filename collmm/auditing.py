"""Audit a program, original and overlapped, or a file of HLO text: compile, read, predict."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gzip
import os
import pathlib
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import logging

from collmm.audit_report import Audited
from collmm.errors import CrashError, HloError, TargetError
from collmm.hlo.collectives import written_mesh
from collmm.hlo.parse import Module, parse
from collmm.memory import compiled_or_overflow, memory_of, with_memory
from collmm.plan import Plan
from collmm.prediction import predict
from collmm.programs import Program
from collmm.targets import CompilerOption, Target, apply_environment
from collmm.targets.options import baseline_for

ORIGINAL, UNDECOMPOSED, OVERLAPPED = "original", "original, own decomposition off", "overlapped"
_IMPORTS = (ast.Import, ast.ImportFrom)
_WHEN = {ORIGINAL: "before", OVERLAPPED: "after"}


@dataclasses.dataclass(frozen=True)
class ProgramAudit:
    """The audits of one program.

    Attributes:
      programs: one per way to compile it.
      texts: title to the optimized HLO; a program that does not fit has none.
      plan: what was rewritten, with the memory it takes; None where only the original was asked
        for.
    """

    programs: tuple[Audited, ...]
    texts: Mapping[str, str]
    plan: Plan | None


def audit_program(
    program: Program,
    *,
    policy: str | None = None,
    chip: str | None = None,
    original_only: bool = False,
    **others: Any,
) -> ProgramAudit:
    """Compile a program as it is and overlapped, for its target, and predict both schedules.

    On a TPU the original is compiled twice: as the compiler ships, and with its own decomposition
    of collectives and einsums off. A program that the compiler refuses because it does not fit the
    memory is no error: its audit says so. So it does where the overlapped one, and only that, fails
    to compile or crashes the compiler. ``others`` are further ``Options``. Run this in
    ``program.context()``.
    """
    program.target.start_compiler()
    overlapped = program.overlapped(policy, chip, **others)
    plan = None if original_only else overlapped.plan(*program.args)
    audited: list[Audited] = []
    texts: dict[str, str] = {}
    for title, fn, decomposition in _variants(program, overlapped, plan):
        made, text = _audit_one(program, title, fn, decomposition)
        audited.append(made)
        if text is not None:
            texts[title] = text
    if plan is not None:
        rows = {_WHEN[a.title]: a.memory for a in audited if a.memory and a.title in _WHEN}
        plan = with_memory(plan, rows)
    return ProgramAudit(tuple(audited), texts, plan)


def _variants(
    program: Program, overlapped: Any, plan: Plan | None
) -> Iterator[tuple[str, Any, str | None]]:
    """(title, function, the compiler's own decomposition); None for a program that is rewritten."""
    if program.target.kind == "tpu":
        yield UNDECOMPOSED, overlapped.jitted, "off"
    yield ORIGINAL, overlapped.jitted, "default"
    if plan is not None and plan.rewritten:
        yield OVERLAPPED, overlapped, None


def _audit_one(
    program: Program, title: str, fn: Any, decomposition: str | None
) -> tuple[Audited, str | None]:
    target = program.target
    options = options_of(target, decomposition)
    logging.info("compiling %s for %s", title, target.name)
    values = {o.name: o.value for o in options}
    lowered = fn.lower(*program.args)
    shown = tuple((f"{o.name}={_spelled(o.value)}", o.reason) for o in options)
    brief = decomposition == "off"
    try:
        compiled, overflow = compiled_or_overflow(lambda: target.compile(lowered, values))
    except (jax.errors.JaxRuntimeError, CrashError) as e:
        if title != OVERLAPPED:  # against the user's own program: for the user to see whole
            raise
        return Audited(title, None, None, shown, failure=str(e).splitlines()[0]), None
    if compiled is None:
        return Audited(title, None, overflow, shown, brief), None
    text = compiled.as_text()
    module = parse(text)
    chip = target.hardware.per_device() if target.hardware else None
    logging.info("reading %s, %d characters", title, len(text))
    prediction = predict(
        module,
        target,
        devices=list(program.mesh.devices.flat),
        mesh_axes=dict(program.mesh.shape),
    )
    return Audited(title, prediction, memory_of(compiled, module, chip), shown, brief), text


def options_of(target: Target, decomposition: str | None) -> tuple[CompilerOption, ...]:
    """The compiler options of an original program, or with None of one that was rewritten."""
    if decomposition is None:
        return target.options
    return baseline_for(target.kind, target.timed, decomposition)


def audit_file(
    path: str | os.PathLike[str],
    target: Target | None = None,
    mesh_axes: Mapping[str, int] | None = None,
) -> tuple[Audited, Module]:
    """Audit a file of optimized HLO text, whoever made it.

    Args:
      path: the text, gzip allowed.
      target: what it was compiled for; without one there are no times.
      mesh_axes: the mesh it was compiled for; without one, that which the text itself spells, if
        it does.

    Raises HloError for a text that cannot be read or is not scheduled, TargetError or OptionError
    where the target or mesh does not hold its devices or another kind of compiler wrote the text.
    """
    module = parse(path)
    module.require_schedule()
    count = module.num_partitions * module.replica_count
    if target is not None and module.compiler not in (None, target.kind):
        raise TargetError(
            f"{os.fspath(path)} was compiled for a {module.compiler.upper()} and {target.name} is "
            "another kind of target; give the one it was compiled for"
        )
    if target is not None and target.device_count != count:
        raise TargetError(
            f"{target.name} has {target.device_count} devices and {os.fspath(path)} was compiled "
            f"for {count}; give the target it was compiled for"
        )
    spelled = None if mesh_axes is not None else written_mesh(module, count)
    axes = mesh_axes if mesh_axes is not None else spelled
    devices = _devices(target, axes)
    prediction = predict(module, target, devices=devices, mesh_axes=axes)
    notes = list(prediction.notes)
    if target is None:
        notes.append("without a target there are no link times: name one, such as tpu:v5e:2x4")
    elif target.kind != "cpu" and module.compiler is None:
        notes.append(
            f"nothing in the text says that it was compiled for a {target.kind.upper()}; if it was "
            "not, that compiler's schedule is another one"
        )
    line = prediction.timeline
    if module.compiler == "tpu" and line is not None and not line.complete:
        notes.append(
            "the TPU compiler writes the last of its figures when it makes code: where this is the "
            "*after_optimizations.txt of a dump, take the *after_codegen.txt beside it"
        )
    if target is not None and target.kind == "tpu" and axes is None:
        notes.append(
            "the text does not spell its mesh: its devices are taken in the order of the target; "
            f"where a mesh lays them otherwise, as rings do, name it, such as --mesh=x={count}"
        )
    if spelled is not None:
        shown = " x ".join(f"{name}={size}" for name, size in spelled.items())
        notes.append(f"the mesh is taken to be {shown}, as the text spells it")
    prediction = dataclasses.replace(prediction, notes=tuple(notes))
    return Audited(pathlib.Path(path).name, prediction), module


def _devices(target: Target | None, axes: Mapping[str, int] | None) -> list[Any] | None:
    """The devices in the order of a mesh of these axes; None where that cannot be told."""
    if target is None or target.kind == "cpu":
        return None
    apply_environment(target.name)
    with contextlib.suppress(TargetError):  # its compiler, which knows the topology, is missing
        if axes is not None:
            return list(target.mesh(axes).devices.flat)
        return list(target.devices())
    return None


def is_program(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a program file and not a compiler's text; by its name, else its content.

    Raises HloError when it cannot be read, or is a folder.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        # A TPU's dump has both, and all of the figures in the former only.
        kinds = ("*after_codegen.txt", "*after_optimizations.txt")
        inside = [name for kind in kinds for name in sorted(p.name for p in path.glob(kind))]
        hint = f"such as {inside[0]}" if inside else "such as *after_optimizations.txt"
        raise HloError(f"{path} is a folder; name a program file or a text in it, {hint}")
    if path.suffix == ".py":
        return True
    try:
        raw = path.read_bytes() if path.stat().st_size < 1_000_000 else b""
    except OSError as e:
        raise HloError(f"cannot read {path}: {e.strerror}; name a program file or HLO") from None
    if raw.startswith(b"\x1f\x8b"):
        with contextlib.suppress(OSError, EOFError, zlib.error):
            raw = gzip.decompress(raw)
    if raw.lstrip().startswith(b"HloModule"):
        return False
    try:
        with warnings.catch_warnings(action="ignore"):  # of what is not Python
            tree = ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    # A list of options, as compilers write them, is Python by its grammar too, and not to be run.
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= {a.asname or a.name for n in tree.body if isinstance(n, _IMPORTS) for a in n.names}
    names |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    return bool(names & {"build", "MESH"})


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
