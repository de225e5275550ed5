"""``collmm dump``: what a program is and what it becomes."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags, logging

from collmm import dump, memory, report
from collmm.cli import planning
from collmm.cli.command import Command
from collmm.errors import OptionError
from collmm.hlo.collectives import summarize
from collmm.hlo.parse import Module, parse
from collmm.plan import Plan
from collmm.programs import Program, open_program
from collmm.targets import Target


def define(values: flags.FlagValues) -> None:
    """Define the command's flags."""
    flags.DEFINE_string("target", None, planning.TARGET, flag_values=values)
    flags.DEFINE_string("out", None, "Folder to write every text to.", flag_values=values)
    planning.define(values)
    flags.DEFINE_boolean("json", False, "Print one JSON document.", flag_values=values)


def main(arguments: Sequence[str], values: flags.FlagValues) -> int:
    """Print the plan and the collectives before and after; write the texts to ``--out``."""
    if len(arguments) != 1:
        raise OptionError(f"{len(arguments)} program files; give one, see collmm dump --help")
    folder = None if values.out is None else pathlib.Path(values.out)
    if folder is not None:
        dump.make_folder(folder)
    # A program that prints must not break the document.
    with contextlib.redirect_stdout(sys.stderr) if values.json else contextlib.nullcontext():
        program = open_program(arguments[0], values.target)
        with program.context():
            plan, texts, compilers = _texts(program, planning.options(values), folder)
    # A program that its compiler refused for its memory has no text.
    modules = {
        when: parse(text) if (text := texts[f"{when}.hlo.txt"]) else None
        for when in ("before", "after")
    }
    before, after = ({} if m is None else summarize(m) for m in modules.values())
    memories = {when: c.memory(modules[when]) for when, c in compilers.items()}
    known = {when: m for when, m in memories.items() if m is not None}
    plan = memory.with_memory(plan, known)
    if folder is not None:
        dump.write(folder, dump.plan_texts(plan))
    files = [] if folder is None else [str(folder / name) for name in texts]
    if values.json:
        collectives = {
            "before": report.collectives_json(before),
            "after": report.collectives_json(after),
        }
        document = {
            "plan": plan.to_json(),
            "collectives": collectives,
            "memory": {when: m.to_json() for when, m in known.items()},
            "compiler_options": program.target.compiler_options,
            "files": files,
        }
        print(json.dumps(document, indent=1))
        return 0
    print(plan)
    if program.target.hardware is not None and program.target.note:
        print(f"note: {program.target.note}")
    print()
    print(f"collectives of the optimized program for {program.target.name}, per device:")
    print(report.collectives_table(before, after))
    for when in (when for when, m in modules.items() if m is None):
        print(f"not counted {when}: the compiler refused that program for its memory")
    if known:
        print(f"\n{memory.table(known)}")
    if plan.rewritten:
        for option in program.target.options:
            print(f"after is compiled with {option.name}={option.value}: {option.reason}")
    if folder is not None:
        print(f"\nwrote {len(files)} files to {folder}: {', '.join(texts)}")
    return 0


class _Compiler:
    """Compiles one program and keeps what is needed to tell its memory."""

    def __init__(self, target: Target, options: Mapping[str, Any]):
        self.target = target
        self.options = options
        self.compiled: Any = None
        self.overflow: memory.Memory | None = None

    def __call__(self, lowered: Any) -> _Compiler:
        self.compiled, self.overflow = memory.compiled_or_overflow(
            lambda: self.target.compile(lowered, self.options)
        )
        return self

    def as_text(self) -> str:
        """The optimized HLO; empty when the program was refused for its memory."""
        return "" if self.compiled is None else self.compiled.as_text() or ""

    def memory(self, module: Module | None) -> memory.Memory | None:
        """The memory of the program, whose text ``module`` is."""
        if self.compiled is None:
            return self.overflow
        hardware = self.target.hardware
        chip = hardware.per_device() if hardware else None
        return memory.memory_of(self.compiled, module, chip)


def _texts(
    program: Program, asked: Mapping[str, Any], folder: pathlib.Path | None
) -> tuple[Plan, dict[str, str], dict[str, _Compiler]]:
    target = program.target
    target.start_compiler()
    overlapped = program.overlapped(**asked)
    logging.info("planning %s on %s", program.file.path, target.name)
    plan = overlapped.plan(*program.args)
    compilers = {"before": _Compiler(target, target.baseline_options())}
    if plan.rewritten:
        compilers["after"] = _Compiler(target, target.compiler_options)
    named = dump.texts(
        plan,
        overlapped,
        program.args,
        {},
        compilers["before"],
        compilers.get("after", compilers["before"]),
    )
    texts = dict(_logged(named)) if folder is None else dump.write(folder, _logged(named))
    return plan, texts, compilers


def _logged(named):
    for name, text in named:
        logging.info("made %s, %d characters", name, len(text))
        yield name, text


COMMAND = Command(
    "dump",
    "PROGRAM",
    "print the plan, and the collectives before and after; write every text",
    """PROGRAM is a Python file that defines MESH = {"data": 2, "model": 4}, the mesh axes and
    their sizes, and build(mesh) -> (fn, args): the function, plain, jitted or decorated, and its
    arguments, arrays or jax.ShapeDtypeStructs with shardings.

    --out gets the plan (plan.txt, and plan.json, a plan file) and, before and after, the jaxpr,
    the StableHLO and the optimized HLO. Nothing is run. All times are predicted.""",
    define,
    main,
)
