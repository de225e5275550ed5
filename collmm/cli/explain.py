"""``collmm explain``: why every einsum is decided as it is, and what would change that."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence

from absl import flags

from collmm.cli import planning
from collmm.cli.command import Command
from collmm.errors import OptionError
from collmm.programs import open_program


def define(values: flags.FlagValues) -> None:
    """Define the command's flags."""
    flags.DEFINE_string("target", None, planning.TARGET, flag_values=values)
    planning.define(values)
    flags.DEFINE_string("save", None, "Plan file to write, such as plan.json.", flag_values=values)
    flags.DEFINE_boolean("json", False, "Print one JSON document.", flag_values=values)


def main(arguments: Sequence[str], values: flags.FlagValues) -> int:
    """Print the explanation; write the plan to ``--save``."""
    if len(arguments) != 1:
        raise OptionError(f"{len(arguments)} program files; give one, see collmm explain --help")
    # A program that prints must not break the document.
    with contextlib.redirect_stdout(sys.stderr) if values.json else contextlib.nullcontext():
        program = open_program(arguments[0], values.target)
        with program.context():
            plan = program.overlapped(**planning.options(values)).plan(*program.args)
    explanation = plan.explain()
    if values.save is not None:
        plan.save(values.save)
    if values.json:
        print(json.dumps(explanation.to_json(), indent=1))
        return 0
    print(explanation)
    if values.save is not None:
        print(f'\nwrote the plan to {values.save}; follow it: Options(plan="{values.save}")')
    return 0


COMMAND = Command(
    "explain",
    "PROGRAM",
    "say why every einsum is decided as it is, and what would change that",
    """PROGRAM is a program file, see collmm dump --help. For every einsum: what it takes as it is,
    every way to loop it with what that would take, the winner, and in words why, with the sizes and
    link speeds at which the decision would turn.

    Of a candidate: loss is what smaller einsums take beyond the whole one, traffic slices and
    accumulators that pass through memory, launch the start of every step, exposed transfer that
    nothing hides, and rest the collectives that stay. --save writes a plan file. Nothing is
    compiled or run. All times are predicted.""",
    define,
    main,
)
