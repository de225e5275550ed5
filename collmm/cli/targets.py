"""``collmm targets``: what can be compiled for, with figures and where they come from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from absl import flags

from collmm import report
from collmm.cli.command import Command
from collmm.cost.figures import Chip, Figure, Rate
from collmm.errors import OptionError
from collmm.targets import TargetRow, list_targets


def define(values: flags.FlagValues) -> None:
    """Define the command's flags."""
    flags.DEFINE_boolean(
        "sources", False, "Print every figure with its source.", flag_values=values
    )
    flags.DEFINE_boolean("json", False, "Print one JSON document.", flag_values=values)


def main(arguments: Sequence[str], values: flags.FlagValues) -> int:
    """Print the table of targets."""
    if arguments:
        raise OptionError(f"targets takes no arguments, and got {arguments[0]!r}")
    rows = list_targets()
    if values.json:
        print(json.dumps([_json(row) for row in rows], indent=1))
        return 0
    headers = ("target", "example", "bf16 TFLOP/s", "HBM", "HBM GB/s", "link GB/s", "compiler")
    print(report.table(headers, [_cells(row) for row in rows]))
    print(
        "\nper chip or GPU, nominal; link: one way, of one ICI link or of a GPU's NVLink together"
    )
    if values.sources:
        for row in rows:
            if row.hardware is not None:
                print(f"\n{row.hardware.name}:")
                print("\n".join(f"  {line}" for line in _sources(row.hardware)))
    return 0


def _cells(row: TargetRow) -> tuple[str, ...]:
    compiler = row.missing or "installed"
    chip = row.hardware
    if chip is None:
        return (row.pattern, row.example, "-", "-", "-", "-", compiler)
    return (
        row.pattern,
        row.example,
        f"{chip.bf16.value('nominal') / 1e12:.0f}",
        report.human_bytes(chip.hbm_bytes()),
        f"{chip.hbm_bytes_per_s('nominal') / 1e9:.0f}",
        f"{chip.link_bytes_per_s('nominal') / 1e9:.0f}",
        compiler,
    )


def _figures(chip: Chip) -> Iterator[tuple[str, Rate | Figure]]:
    for field in dataclasses.fields(chip):
        value = getattr(chip, field.name)
        if isinstance(value, (Rate, Figure)):
            yield field.name, value


def _sources(chip: Chip) -> Iterator[str]:
    for name, figure in _figures(chip):
        if isinstance(figure, Rate) and figure.achievable != figure.nominal:
            yield f"{name}: {figure.nominal}; achievable {figure.achievable}"
        else:
            yield f"{name}: {figure.nominal if isinstance(figure, Rate) else figure}"
    yield f"wraparound: {chip.wrap.source}"


def _json(row: TargetRow) -> dict[str, object]:
    chip = row.hardware
    return {
        "pattern": row.pattern,
        "example": row.example,
        "kind": row.kind,
        "missing": row.missing,
        "chip": None if chip is None else chip.name,
        "figures": {}
        if chip is None
        else {name: dataclasses.asdict(figure) for name, figure in _figures(chip)},
    }


COMMAND = Command(
    "targets",
    "",
    "list what can be compiled for, with its figures",
    """A TPU or GPU program compiles without the hardware, for the names below; what is missing for
    that is named with the command that installs it. --sources prints every figure that
    predictions are made with, and where it comes from.""",
    define,
    main,
)
