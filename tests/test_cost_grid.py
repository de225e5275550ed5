"""The cost model against stored timelines of compiled programs (tests/data/cost_grid.json)."""

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import grid_report  # noqa: E402

STORED = json.loads((ROOT / "tests" / "data" / "cost_grid.json").read_text())


@pytest.fixture(scope="module")
def found():
    return list(grid_report.rows(STORED))


def test_the_sample_is_of_every_chip_kind_and_ring(found):
    assert len(found) >= 140
    chips = {row.site.target.split(":")[1] for row in found}
    assert chips == {"v4", "v5e", "v5p", "v6e", "h100"}
    assert {row.site.kind for row in found} == {"gather", "weights", "scatter"}
    assert {row.site.ring for row in found} == {4, 8, 16, 32, 64}
    # Every choice of the model is one whose timeline is known.
    assert all(row.chosen in row.timeline for row in found)


def test_predicted_times_are_those_of_the_timelines(found):
    s = grid_report.summary(found)
    assert s["median"] <= 0.10
    assert s["p90"] <= 0.25


def test_choices_are_close_to_the_best_and_hardly_ever_lose(found):
    s = grid_report.summary(found)
    assert s["close"] >= 0.95
    # Two of the sample, by 8 % and 5 %: a known limit, named in the build notes.
    assert s["slower"] <= 2


def test_a_wrong_model_would_be_seen(found):
    """Were everything predicted at half its time, the figures would say so."""
    wrong = [
        grid_report.Row(r.site, {v: s / 2 for v, s in r.predicted.items()}, r.timeline)
        for r in found
    ]
    assert grid_report.summary(wrong)["median"] > 0.4


def test_the_report_names_what_is_chosen_wrongly(found):
    lines = grid_report.text(found).splitlines()
    assert lines[0].startswith("chip   sites")
    wrong = [row for row in found if row.behind > 0.03]
    assert sum("behind the best" in line for line in lines) == len(wrong)


def test_the_pallas_measurements_on_h100_are_met_within_a_fifth():
    import published

    table = published.pallas_h100()
    assert [row.gpus for row in table] == [2, 4, 8]
    assert max(abs(error) for row in table for error in row.errors) < 0.20
