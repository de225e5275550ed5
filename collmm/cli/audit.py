"""``collmm audit``: which collectives of a compiled program are overlapped, and what is exposed."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags, logging

from collmm import audit_report, auditing, dump
from collmm.audit_report import Audited
from collmm.cli import planning
from collmm.cli.command import Command
from collmm.errors import OptionError
from collmm.hlo.plot import plot
from collmm.hlo.trace import trace_events
from collmm.plan import Plan
from collmm.programs import open_program
from collmm.targets import parse_target

_NARROWEST, _WIDEST = 40, 120


def define(values: flags.FlagValues) -> None:
    """Define the command's flags."""
    flags.DEFINE_string(
        "target",
        None,
        "What to compile for, or what FILE was compiled for: tpu:v5e:2x4, gpu:h100:8, cpu:8, ... "
        "Times are predicted for tpu and gpu targets.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "mesh",
        None,
        "Of a FILE: the mesh it was compiled for, such as data=16,model=4. Without it: the one "
        "that the text spells.",
        flag_values=values,
    )
    planning.define(values)
    flags.DEFINE_boolean("original", False, "Audit the original program only.", flag_values=values)
    flags.DEFINE_string(
        "out", None, "Folder for the audit, the HLO texts and the trace.", flag_values=values
    )
    flags.DEFINE_string(
        "plot",
        None,
        "Picture of the schedules to draw, such as step.png or step.svg; needs matplotlib.",
        flag_values=values,
    )
    flags.DEFINE_boolean("json", False, "Print one JSON document.", flag_values=values)


def main(arguments: Sequence[str], values: flags.FlagValues) -> int:
    """Print the audit; write it, the texts and a trace file to ``--out``."""
    if len(arguments) != 1:
        raise OptionError(f"{len(arguments)} files; give one PROGRAM or FILE, see audit --help")
    folder = None if values.out is None else pathlib.Path(values.out)
    if folder is not None:
        dump.make_folder(folder)
    # A program that prints must not break the document.
    with contextlib.redirect_stdout(sys.stderr) if values.json else contextlib.nullcontext():
        heading, programs, texts, plan = _audits(arguments[0], values)
    document: dict[str, Any] = {"heading": heading, "programs": audit_report.to_json(programs)}
    if plan is not None:
        document["plan"] = plan.to_json()
    shown = f"{heading}\n\n{audit_report.text(programs, _width())}"
    print(json.dumps(document, indent=1) if values.json else shown)
    timelines = audit_report.timelines(programs)
    if values.plot is not None:
        if not timelines:
            raise OptionError("--plot: there is no schedule with times; give a tpu or gpu --target")
        plot(timelines, values.plot)
        if not values.json:
            print(f"\ndrew {values.plot}")
    if folder is not None:
        files = {f"{_file_name(title)}.hlo.txt": text for title, text in texts.items()}
        files |= {"audit.txt": f"{shown}\n", "audit.json": json.dumps(document, indent=1) + "\n"}
        if plan is not None:
            files |= dict(dump.plan_texts(plan))
        if timelines:
            files["trace.json"] = json.dumps(trace_events(timelines, heading)) + "\n"
        dump.write(folder, iter(files.items()))
        logging.info("wrote %d files to %s", len(files), folder)
        if not values.json:
            print(f"\nwrote {len(files)} files to {folder}: {', '.join(files)}")
            if timelines:
                print(f"open {folder / 'trace.json'} at ui.perfetto.dev")
    return 1 if any(p.failure for p in programs) else 0


def _audits(
    path: str, values: flags.FlagValues
) -> tuple[str, Sequence[Audited], Mapping[str, str], Plan | None]:
    if not auditing.is_program(path):
        for name in (*planning.options(values), "original"):
            if values[name].present:
                raise OptionError(f"--{name} is for a program file; {path} is a compiled text")
        target = None if values.target is None else parse_target(values.target)
        audited, module = auditing.audit_file(path, target, _mesh(values.mesh))
        where = "no target" if target is None else target.name
        return f"{path}: module {module.name}, {where}", [audited], {}, None
    if values.mesh is not None:
        raise OptionError("--mesh is for a compiled text; a program file has its own MESH")
    program = open_program(path, values.target)
    with program.context():
        asked = planning.options(values)
        done = auditing.audit_program(program, original_only=values.original, **asked)
    heading = f"{path} for {program.target.name}"
    if done.plan is not None:
        plan = done.plan
        heading += f": {len(plan.rewritten)} of {len(plan.decisions)} einsums rewritten"
    return heading, done.programs, done.texts, done.plan


def _mesh(text: str | None) -> dict[str, int] | None:
    """Read ``data=16,model=4``."""
    if text is None:
        return None
    axes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip() or not size.strip().isdigit() or int(size) < 1:
            raise OptionError(f"--mesh={text}: {part!r} is no axis; write data=16,model=4")
        axes[name.strip()] = int(size)
    return axes


def _width() -> int:
    """Cells of the schedule: the terminal's width, less the names of the lanes."""
    columns = shutil.get_terminal_size((100, 20)).columns
    return max(_NARROWEST, min(_WIDEST, columns - 20))


def _file_name(title: str) -> str:
    return {
        auditing.ORIGINAL: "original",
        auditing.UNDECOMPOSED: "original-undecomposed",
        auditing.OVERLAPPED: "overlapped",
    }[title]


COMMAND = Command(
    "audit",
    "PROGRAM|FILE",
    "show which collectives of a compiled schedule are hidden, and which exposed",
    """PROGRAM is a program file, see collmm dump --help: the original program and the overlapped
    one are compiled for the target and both schedules read. On a TPU the original is compiled a
    second time, with the compiler's own decomposition of collectives and einsums off.

    FILE is optimized HLO text, from collmm dump or from anybody's --xla_dump_to
    (*after_optimizations.txt; of a TPU *after_codegen.txt, which has all of the compiler's
    figures). Exposed collectives that stand next to an einsum are listed with
    what overlapping them would save.

    For each collective: its bytes per device, its ring or groups, the line it comes from, what
    computes between its start and its done, how long it takes, what of that is exposed in all its
    runs, and the verdict. Nothing is run: all times are predicted, from the compiler's own figures
    and the links of the target; where each comes from stands below the tables.""",
    define,
    main,
)
