"""Einsum figures fitted to the real compilers' own estimates; each needs its compiler."""

import pytest

from collmm.calibration import calibrate_target
from collmm.cost.hardware import chip
from collmm.targets import parse_target
from collmm.targets.installed import missing

CASES = {"tpu": "tpu:v5e:2x4", "gpu": "gpu:h100:1x8"}


@pytest.mark.parametrize("kind", CASES)
def test_the_figures_are_those_the_compiler_reckons_with(kind):
    if missing(kind) is not None:
        pytest.skip(str(missing(kind)))
    target = parse_target(CASES[kind])
    done = calibrate_target(target, rows=(256, 1024, 2048, 4096), widths=(2048, 4096))
    table = chip(target.hardware.name)
    assert done.name == table.name
    assert done.measured.startswith(f"fitted to the estimates of the compiler for {target.name}, ")
    assert len(done.samples) == 8
    (error,) = done.fit.errors
    assert (error.fitted, error.held_out) == (5, 3)
    # Near the datasheet, whatever the estimates are made of.
    assert 0.5 < done.fit.chip.bf16.value() / table.bf16.value("nominal") < 1.2
    assert done.fit.chip.link == table.link
