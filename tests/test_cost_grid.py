"""The cost model against stored timelines of compiled programs (tests/data/cost_grid.json)."""

import dataclasses
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import grid_fit  # noqa: E402
import grid_report  # noqa: E402

from collmm.cost.hardware import chip  # noqa: E402

STORED = json.loads((ROOT / "tests" / "data" / "cost_grid.json").read_text())
ENTRIES = list(grid_report.entries(STORED))
FITTED_CHIPS = ("v4", "v5e", "v5p", "v6e")


@pytest.fixture(scope="module")
def found():
    return list(grid_report.rows(STORED))


@pytest.fixture(scope="module")
def held_out(found):
    return [row for row in found if not row.fitted]


def test_the_sample_is_of_every_chip_kind_and_ring(found, held_out):
    assert len(found) >= 200
    assert len(held_out) >= 100
    for rows in (found, held_out):
        chips = {row.site.target.split(":")[1] for row in rows}
        assert chips == {"v4", "v5e", "v5p", "v6e", "h100"}
        assert {row.site.kind for row in rows} == {"gather", "weights", "columns", "scatter"}
        assert {row.site.ring for row in rows} >= {4, 6, 8, 12, 16, 24, 32, 64}
    sizes = {size for row in found for size in (row.site.rows, row.site.depth, row.site.columns)}
    assert any(size & (size - 1) for size in sizes)
    # Every choice of the model is one whose timeline is known.
    assert all(row.chosen in row.timeline for row in found)


@pytest.mark.parametrize("which", ["found", "held_out"])
def test_predicted_times_are_those_of_the_timelines(which, request):
    s = grid_report.summary(request.getfixturevalue(which))
    assert s["median"] <= 0.10
    assert s["p90"] <= 0.25


@pytest.mark.parametrize("which", ["found", "held_out"])
def test_choices_are_close_to_the_best_and_never_lose(which, request):
    s = grid_report.summary(request.getfixturevalue(which))
    assert s["close"] >= 0.95
    assert s["slower"] == 0


def test_loops_are_chosen_where_they_pay(found):
    """Leaving everything alone would never lose either."""
    made = [row for row in found if row.chosen != grid_report.WHOLE]
    assert len(made) >= 10
    assert max(-row.worse for row in made) > 0.2


def test_a_wrong_model_would_be_seen(found):
    """Were everything predicted at half its time, the figures would say so."""
    wrong = [
        dataclasses.replace(r, predicted={v: s / 2 for v, s in r.predicted.items()}) for r in found
    ]
    assert grid_report.summary(wrong)["median"] > 0.4


def test_a_model_that_favours_loops_would_be_seen(found):
    wrong = [
        dataclasses.replace(
            r,
            predicted={
                v: s * (1 if v == grid_report.WHOLE else 0.5) for v, s in r.predicted.items()
            },
        )
        for r in found
    ]
    s = grid_report.summary(wrong)
    assert s["slower"] > 20
    assert s["close"] < 0.95


def test_the_report_names_what_is_chosen_wrongly(found):
    lines = grid_report.text(found).splitlines()
    assert "median error" in lines[0]
    assert [line.split("  ")[0] for line in lines[6:9]] == ["all", "fitted to", "held out"]
    wrong = [row for row in found if row.behind > 0.03]
    assert sum("behind the best" in line for line in lines) == len(wrong)


@pytest.mark.parametrize("name", FITTED_CHIPS)
def test_the_fitted_figures_come_from_the_stored_timelines(name):
    """Fitted on from the figures of the table, they stay: nothing near fits better."""
    used = [e for e in ENTRIES if e.fitted and e.chip_name == name]
    row = chip(name).per_device()
    known = grid_fit.figures_of(row)
    again = grid_fit.fitted(used, name, known)
    assert grid_fit.loss(used, row) <= 1.01 * grid_fit.loss(used, again)
    assert grid_fit.figures_of(again) == pytest.approx(known, rel=0.05)


def test_figures_of_something_else_would_be_seen():
    used = [e for e in ENTRIES if e.fitted and e.chip_name == "v4"]
    row = chip("v4").per_device()
    best = grid_fit.loss(used, row)
    for name, value in grid_fit.figures_of(row).items():
        for factor in (0.7, 1.4):
            other = grid_fit.with_figures(row, {name: factor * value})
            assert grid_fit.loss(used, other) > 1.01 * best, name


def test_the_gpu_table_comes_from_the_stored_times():
    shares = grid_fit.shares(STORED, "h100")
    assert tuple(tuple(map(tuple, plane)) for plane in shares) == chip("h100").table.shares


def test_the_pallas_measurements_on_h100_are_met_within_a_fifth():
    import published

    table = published.pallas_h100()
    assert [row.gpus for row in table] == [2, 4, 8]
    assert max(abs(error) for row in table for error in row.errors) < 0.20
