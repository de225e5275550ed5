"""What an einsum's shape costs: known figures are found again, and what is told is what is read."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from collmm.calibration import Calibration
from collmm.cost.einsum import Product
from collmm.cost.figures import EinsumTable, Figure
from collmm.cost.fit import COMPILED, OF_A_SUM, Sample, predicted, split
from collmm.cost.hardware import chip, load_profile
from collmm.cost.shape_fit import FITTED, fit_shape, fit_table, usual_shape, with_shape
from collmm.estimating import Wanted, sizes, tpu_samples
from collmm.targets import parse_target

ODD = {"matrix_share": 0.71, "result": 14e-12, "start": 4.2e-6, "memory_share": 0.44}
OTHERS = ("kept", "summed", "arrived_start", "onchip", "onchip_fits", "result_fits", "late")


def einsums(row, noise=0.0):
    """What the kernels of single einsums and of sums would be estimated to take on ``row``."""
    random = np.random.default_rng(0)
    blank = []
    for shape in sizes(40, (64, 512, 512), (8192, 8192, 8192), 64):
        p = Product(1, *shape)
        fetched = min(p.lhs_bytes, p.rhs_bytes)
        moved = p.lhs_bytes + p.rhs_bytes + p.out_bytes - fetched
        blank.append(Sample(COMPILED, 1.0, p.flops, p, moved=moved, onchip=fetched))
    for shape in sizes(20, (256, 512, 512), (8192, 8192, 8192), 128):
        p = Product(1, *shape, (2, 2, 4))
        blank.append(
            Sample(OF_A_SUM, 1.0, p.flops, p, moved=p.lhs_bytes, onchip=p.rhs_bytes, result="chip")
        )
    times = (predicted(s, row, None) * random.uniform(1 - noise, 1 + noise) for s in blank)
    return [dataclasses.replace(s, seconds=t) for s, t in zip(blank, times, strict=True)]


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e"])
def test_the_shape_of_a_machine_is_found_again(name):
    base = chip(name)
    found = fit_shape(einsums(with_shape(base, ODD, "x")), base, "here", "lab")
    for field, want in ODD.items():
        got = getattr(found.chip.shape, field)
        # Each figure is drawn a little to that of the table.
        assert got.value == pytest.approx(want, rel=0.1), field
        assert got.source == "here"
    for field in OTHERS:
        assert getattr(found.chip.shape, field) == getattr(base.shape, field)
    assert (found.chip.name, found.fields) == ("lab", ("shape",))
    assert dataclasses.replace(found.chip, name=name, shape=base.shape) == base
    for error in found.errors:
        assert error.held_out >= 9
        assert error.worst < 0.05
        assert error.base_median > 0.2  # the table's figures are not those of this machine


def test_noise_is_told_and_does_not_move_the_shape_far():
    base = chip("v5e")
    found = fit_shape(einsums(with_shape(base, ODD, "x"), 0.15), base, "here", "lab")
    assert found.chip.shape.matrix_share.value == pytest.approx(ODD["matrix_share"], rel=0.15)
    assert found.chip.shape.start.value == pytest.approx(ODD["start"], rel=0.3)
    for error in found.errors:
        assert 0.01 < error.median < 0.15
        assert error.worst < 0.35


def test_what_was_held_out_does_not_move_the_fit():
    samples = einsums(chip("v5e"))
    _, held_out = split(samples)
    spoilt = [
        dataclasses.replace(s, seconds=3 * s.seconds) if s in held_out else s for s in samples
    ]
    kept, found = (fit_shape(s, chip("v5e"), "here", "v5e") for s in (samples, spoilt))
    assert found.chip == kept.chip
    assert all(e.median == pytest.approx(2 / 3, abs=0.05) for e in found.errors)


def test_what_no_sample_tells_stays_where_the_fit_starts():
    """Large square einsums say nothing of the memory, nor of the start."""
    base = chip("v5e")
    squares = [Product(1, n, n, n) for n in (4096, 5120, 6144, 7168, 8192)]
    row = with_shape(base, {"matrix_share": 0.8}, "x")
    samples = [Sample(COMPILED, 1.0, p.flops, p) for p in squares]
    samples = [dataclasses.replace(s, seconds=predicted(s, row, None)) for s in samples]
    shape = fit_shape(samples, base, "here", "lab").chip.shape
    assert shape.matrix_share.value == pytest.approx(0.8, rel=0.02)
    for field in ("memory_share", "start", "result"):
        known = getattr(base.shape, field).value
        assert getattr(shape, field).value == pytest.approx(known, rel=0.1), field


def test_a_chip_without_a_shape_starts_from_what_is_usual():
    base = chip("tpu7x").per_device()
    assert base.shape is None
    shape = usual_shape(base)
    assert shape.late == Figure(1.0, "1", "assumed: as v6e, not known of tpu7x")
    # Half as long per element as on a chip of half the peak.
    half = dataclasses.replace(base, bf16=base.bf16.scaled(0.5, "x"))
    assert usual_shape(half).result.value == pytest.approx(2 * shape.result.value)
    real = with_shape(dataclasses.replace(base, shape=shape), ODD, "x")
    found = fit_shape(einsums(real), base, "here", "tpu7x")
    for field in FITTED:
        assert getattr(found.chip.shape, field).value == pytest.approx(ODD[field], rel=0.05)
    assert found.chip.shape.kept.source == "assumed: usual for the rates of tpu7x"
    assert usual_shape(chip("v3").per_device()).late.source.startswith("assumed: as v5e")


# --- a GPU's table ---

SHORT, DEPTH, LONG = (64, 512, 4096), (256, 2048), (512, 4096)


def share(a, k, b):
    """Smooth, and not the same both ways round."""
    return 0.9 * (1 - math.exp(-min(a, b) / 900)) * k / (k + 300) * (1.0 if a <= b else 0.96)


def timed(row, a, k, b):
    p = Product(1, a, k, b)
    return Sample(COMPILED, p.flops / row.bf16.value() / share(a, k, b), p.flops, p)


def test_a_table_has_what_was_sampled_at_its_points_and_is_judged_between_them():
    base = dataclasses.replace(chip("b200"), hbm=chip("b200").hbm.scaled(1e3, "no limit"))
    assert base.table is None
    ways = [
        way
        for a, k, b in itertools.product(SHORT, DEPTH, LONG)
        for way in dict.fromkeys(((a, k, b), (b, k, a)))
    ]
    points = [timed(base, *way) for way in ways]
    between = [timed(base, *way) for way in ((128, 1024, 1024), (2048, 512, 1024))]
    found = fit_table(points, between, base, "here", "lab")
    table = found.chip.table
    assert (table.short, table.depth, table.long) == (SHORT, DEPTH, LONG)
    mean = (share(64, 256, 512) + share(512, 256, 64)) / 2
    assert table.share(64, 256, 512) == pytest.approx(mean, rel=1e-3)
    assert table.share(512, 256, 64) == table.share(64, 256, 512)
    (error,) = found.errors
    assert (error.fitted, error.held_out) == (len(points), 2)
    off = [abs(predicted(s, found.chip, None) / s.seconds - 1) for s in between]
    assert error.worst == pytest.approx(max(off))
    assert 0 < error.worst < 0.5 < error.base_median
    assert found.fields == ("table",)


# --- profiles ---


@pytest.mark.parametrize("name", ["v5e", "tpu7x"])
def test_a_fitted_shape_is_read_again_as_it_was(tmp_path, name):
    base = chip(name).per_device()
    start = dataclasses.replace(base, shape=base.shape or usual_shape(base))
    fitted = fit_shape(einsums(with_shape(start, ODD, "x")), base, "here", "lab")
    done = Calibration("lab", name, "here", fitted, ())
    path = tmp_path / "profile.json"
    done.save(path)
    again = load_profile(path)["lab"]
    assert again.per_device() == dataclasses.replace(fitted.chip, name="lab")
    assert again.devices_per_chip == chip(name).devices_per_chip
    assert set(done.row()) == {"base", "shape"}


def test_a_fitted_table_is_read_again_as_it_was(tmp_path):
    base = chip("h100")
    points = [timed(base, *way) for way in itertools.product(SHORT, DEPTH, LONG)]
    points += [timed(base, b, k, a) for a, k, b in itertools.product(SHORT, DEPTH, LONG)]
    done = Calibration("lab", "h100", "x", fit_table(points, (), base, "here", "lab"), ())
    path = tmp_path / "profile.json"
    done.save(path)
    assert load_profile(path)["lab"] == done.fit.chip
    assert isinstance(done.fit.chip.table, EinsumTable)
    # Lists of numbers are written in a line: a profile can be looked through.
    assert len(path.read_text().splitlines()) < 40
    assert '"short": [64, 512, 4096],' in path.read_text()
    # A curve that nothing was held out of has no error, and the document is JSON.
    text = json.dumps(done.to_json(), allow_nan=False)
    assert json.loads(text)["errors"][0]["median"] is None
    assert "shares at 3 x 2 x 2 points" in str(done)


# --- what a compiler's text says ---

KERNEL = """\
HloModule one, is_scheduled=true

%product (p0: bf16[64,512], p1: bf16[512,256]) -> bf16[64,256] {{
  %p0 = bf16[64,512]{{1,0}} parameter(0)
  %p1 = bf16[512,256]{{1,0}} parameter(1)
  ROOT %dot = bf16[64,256]{{1,0}} dot(%p0, %p1), \
lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (a: bf16[64,512], b: bf16[512,256]) -> bf16[64,256] {{
  %a = bf16[64,512]{{1,0}} parameter(0)
  %b = bf16[512,256]{{1,0{space}}} parameter(1)
  ROOT %fusion = bf16[64,256]{{1,0}} fusion(%a, %b), kind=kOutput, calls=%product, \
backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}
}}
"""


@pytest.mark.parametrize(("space", "fetched"), [("", False), (":S(1)", True), (":S(3)", True)])
def test_a_sample_has_what_the_text_says_of_its_operands(monkeypatch, space, fetched):
    text = KERNEL.format(space=space, cycles=2100)
    monkeypatch.setattr("collmm.estimating._compiled", lambda *_: text)
    monkeypatch.setattr("collmm.estimating.sizes", lambda count, *_: [(64, 512, 256)] * count)
    (sample,) = tpu_samples(parse_target("tpu:v4:2x2x1"), Wanted(alone=1, sums=0))
    assert sample.seconds == pytest.approx(2e-6)  # 2100 cycles at 1.05 GHz
    assert sample.product == Product(1, 64, 512, 256)
    lhs, rhs, out = 64 * 512 * 2, 512 * 256 * 2, 64 * 256 * 2
    assert sample.onchip == (rhs if fetched else 0)
    assert sample.moved == lhs + out + (0 if fetched else rhs)
    assert sample.result == "memory"


def test_a_program_of_other_kernels_than_expected_tells_nothing(monkeypatch):
    monkeypatch.setattr("collmm.estimating._compiled", lambda *_: KERNEL.format(space="", cycles=0))
    assert not list(tpu_samples(parse_target("tpu:v5e:2x4"), Wanted(alone=2, sums=1)))


# --- sizes ---


def test_sizes_are_drawn_the_same_every_time_and_are_not_only_powers_of_two():
    found = sizes(30, (64, 512, 512), (8192, 4096, 8192), 64)
    assert found == sizes(30, (64, 512, 512), (8192, 4096, 8192), 64)
    assert len(set(found)) == 30
    for rows, depth, columns in found:
        assert 64 <= rows <= 8192
        assert 512 <= depth <= 4096
        assert 512 <= columns <= 8192
    powers = [all(size & (size - 1) == 0 for size in shape) for shape in found]
    assert 15 <= sum(powers) <= 20
    assert sum(depth != columns for _, depth, columns in found) > 20
    # More than there are powers of two.
    assert len(sizes(40, (64, 512, 512), (128, 1024, 1024), 64)) == 40
