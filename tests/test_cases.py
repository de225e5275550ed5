"""Programs with a known right answer, whole: what is rewritten, and that nothing else changes."""

import functools

import pytest
from cases import runner

CASES = {name: runner.load(name) for name in runner.NAMES}
RUNNING = [name for name, case in CASES.items() if case.raises is None]
RAISING = [name for name, case in CASES.items() if case.raises is not None]


@functools.cache
def outcomes(name):
    """Compiled and run once, judged by several tests."""
    return runner.run(CASES[name])


@pytest.mark.parametrize("name", RUNNING)
def test_case_rewrites_what_it_should(name):
    for outcome in outcomes(name):
        assert runner.wrong_choices(CASES[name], outcome) == [], str(outcome.plan)


@pytest.mark.parametrize("name", RUNNING)
def test_case_keeps_values_donation_and_precision(name):
    for outcome in outcomes(name):
        assert runner.failures(CASES[name], outcome) == []


@pytest.mark.parametrize("name", RUNNING)
def test_case_has_right_gradients_from_outside(name):
    assert runner.wrong_gradients(CASES[name], runner.run_vjp(CASES[name])) == []


@pytest.mark.parametrize("name", RAISING)
def test_case_raises_what_jax_raises(name):
    assert runner.raised(CASES[name]) == CASES[name].raises
