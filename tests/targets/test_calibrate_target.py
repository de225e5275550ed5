"""What an einsum's shape costs, fitted to the real compilers' own estimates; needs its compiler."""

import json
import pathlib
import sys

import pytest

from collmm.calibration import calibrate_target
from collmm.cost.einsum import Product, time_of
from collmm.cost.hardware import chip, load_profile
from collmm.estimating import Wanted
from collmm.targets import parse_target
from collmm.targets.installed import missing

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import grid_report  # noqa: E402

FEW = Wanted(
    alone=20,
    sums=10,
    short=(128, 256, 512, 1024, 2048, 4096),
    depth=(512, 1024, 2048, 4096),
    long=(512, 1024, 2048, 4096),
)
CASES = {"tpu": "tpu:v5e:2x4", "gpu": "gpu:h100:1x8"}
STORED = ROOT / "tests" / "data" / "cost_grid.json"


@pytest.fixture(scope="module", params=CASES)
def done(request):
    if missing(request.param) is not None:
        pytest.skip(str(missing(request.param)))
    return calibrate_target(parse_target(CASES[request.param]), wanted=FEW)


def test_it_predicts_what_the_compiler_says_of_other_sizes(done):
    table = chip(done.base)
    assert done.name == table.name
    assert done.measured.startswith("fitted to the estimates of the compiler for ")
    assert done.fit.fields == (("shape",) if table.kind == "tpu" else ("table",))
    for error in done.fit.errors:
        assert error.held_out >= 3
        assert error.median < 0.10, error
    # Rates and links are no part of it.
    assert (done.fit.chip.bf16, done.fit.chip.hbm) == (table.bf16, table.hbm)
    assert done.fit.chip.link == table.link


def test_the_samples_are_of_many_shapes_and_tell_where_operands_lie(done):
    products = [s.product for s in done.samples]
    assert sum(p.depth != p.columns for p in products) > len(products) / 2
    assert len({p.rows for p in products}) > 5
    if chip(done.base).kind == "tpu":
        fetched = [s for s in done.samples if s.onchip]
        assert len(fetched) > len(done.samples) / 2
        for s in done.samples:
            p = s.product
            assert s.onchip <= p.lhs_bytes + p.rhs_bytes
            kept = 0 if s.result == "chip" else p.out_bytes
            if not s.curve.startswith("compiled einsum of a sum"):
                assert s.moved + s.onchip == p.lhs_bytes + p.rhs_bytes + kept
        assert {s.result for s in done.samples} == {"chip", "memory"}


def test_the_profile_predicts_the_loops_of_the_stored_grid_as_the_table_does(done, tmp_path):
    path = tmp_path / "profile.json"
    done.save(path)
    row = load_profile(path)[done.name]
    assert row == done.fit.chip
    stored = json.loads(STORED.read_text())
    mine = [e for e in grid_report.entries(stored) if e.chip_name == done.base]
    calibrated, table = ([e.row(r) for e in mine] for r in (row, chip(done.base)))
    now, before = grid_report.summary(calibrated), grid_report.summary(table)
    assert now["median"] < 0.10
    assert now["p90"] < 0.25
    assert now["close"] >= before["close"] - 0.05
    same = sum(a.chosen == b.chosen for a, b in zip(calibrated, table, strict=True))
    assert same >= 0.9 * len(mine)
    # Figures of something else would be seen.
    product = Product(1, 1024, 4096, 1024)
    assert time_of(product, row).seconds != time_of(product, chip(done.base)).seconds
