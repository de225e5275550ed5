"""``collmm tune``: time the candidates of a program on the devices at hand, and save the plan."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence

from absl import flags

from collmm import tuning
from collmm.cli.command import Command
from collmm.errors import OptionError


def define(values: flags.FlagValues) -> None:
    """Define the command's flags."""
    flags.DEFINE_string(
        "target",
        None,
        "cpu:N: simulated devices. Without one: the attached devices, simulated ones where none "
        "are.",
        flag_values=values,
    )
    flags.DEFINE_string("save", None, "Plan file to write, such as plan.json.", flag_values=values)
    flags.DEFINE_integer("rounds", 5, "How often each variant runs.", 1, flag_values=values)
    flags.DEFINE_integer("most", 4, "Candidates to time per einsum.", 1, flag_values=values)
    flags.DEFINE_boolean("json", False, "Print one JSON document.", flag_values=values)


def main(arguments: Sequence[str], values: flags.FlagValues) -> int:
    """Time, print what was tried, write the plan to ``--save``."""
    if len(arguments) != 1:
        raise OptionError(f"{len(arguments)} program files; give one, see collmm tune --help")
    # A program that prints must not break the document.
    with contextlib.redirect_stdout(sys.stderr) if values.json else contextlib.nullcontext():
        program = tuning.open_runnable(arguments[0], values.target)
        with program.context():
            tuned = tuning.tune(program, rounds=values.rounds, most=values.most)
    if values.save is not None:
        tuned.plan.save(values.save)
    if values.json:
        print(json.dumps(tuned.to_json(), indent=1))
        return 0
    print(tuned)
    if values.save is not None:
        print(f'wrote the plan to {values.save}; follow it: Options(plan="{values.save}")')
    return 0


COMMAND = Command(
    "tune",
    "PROGRAM",
    "time the candidates of every einsum on the devices at hand, and save the plan",
    """PROGRAM is a program file, see collmm dump --help; jax.ShapeDtypeStructs are filled. For each
    kind of einsum the whole program runs with it left alone and with each of its candidates, in
    turns; medians are compared, and a loop stays where it is faster by more than min_gain of the
    program. Times on simulated devices say nothing of an accelerator.""",
    define,
    main,
)
