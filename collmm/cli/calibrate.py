"""``collmm calibrate``: a profile of the hardware at hand, or of what a compiler thinks of one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from absl import flags

from collmm import calibration
from collmm.cli.command import Command
from collmm.errors import OptionError


def define(values: flags.FlagValues) -> None:
    """Define the command's flags."""
    flags.DEFINE_string(
        "target",
        None,
        "Instead of the attached devices: cpu:N measures simulated devices; a tpu or gpu target "
        "fits einsums to what its compiler estimates.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "out", None, "Profile to write the row to, such as profile.json.", flag_values=values
    )
    flags.DEFINE_string(
        "name", None, "Name of the row. Without it: that of the hardware.", flag_values=values
    )
    flags.DEFINE_boolean("quick", False, "Measure few sizes, for a first look.", flag_values=values)
    flags.DEFINE_boolean("json", False, "Print one JSON document.", flag_values=values)


def main(arguments: Sequence[str], values: flags.FlagValues) -> int:
    """Measure, print the figures and their error, write the profile."""
    if arguments:
        raise OptionError(f"calibrate takes no arguments, and got {arguments[0]!r}")
    if values.out is not None:
        calibration.profile_at(values.out)
    done = calibration.calibrate(values.target, name=values.name, quick=values.quick)
    if values.out is not None:
        done.save(values.out)
    if values.json:
        print(json.dumps(done.to_json(), indent=1))
        return 0
    print(done)
    if values.out is not None:
        # Of several rows none is planned with unless it is named.
        named = f', chip="{done.name}"' if len(calibration.profile_at(values.out)) > 1 else ""
        how = f'Options(profile="{values.out}"{named})'
        print(f"\nwrote {done.name} to {values.out}; plan with it: {how}")
    return 0


COMMAND = Command(
    "calibrate",
    "",
    "measure links and einsums, and write a profile for the cost model",
    """Without --target the attached devices are measured, in a few minutes: permutes, all-gathers,
    reduce-scatters, device memory and einsums over a range of sizes; where none are attached, eight
    simulated CPU devices. Every second size is held out of the fit, and the error on those is
    reported.

    For a tpu or gpu target nothing is run: einsums are compiled, in one to four minutes, and what
    their shapes cost is fitted to the compiler's own estimates.

    --out adds the row to a profile, which Options(profile=...) and --profile of the other commands
    read.""",
    define,
    main,
)
