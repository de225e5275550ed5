"""The hardware table: figures in SI units with their sources, and profiles that extend it."""

import dataclasses
import json
import math
import pathlib

import pytest

from collmm import Options
from collmm.cost import hardware
from collmm.cost.einsum import Product, time_of
from collmm.cost.figures import EinsumShape
from collmm.cost.hardware import CHIPS, Chip, Figure, Rate, chip, load_profile, profile_row
from collmm.errors import OptionError

TPUS = ("v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
GPUS = ("a100", "h100", "h200", "b200", "gb200", "mi300x")


def figures(row: Chip) -> list[Figure]:
    found = []
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Figure):
            found.append(value)
        elif isinstance(value, Rate):
            found += [value.achievable, value.nominal]
    return found


def test_the_table_holds_these_chips():
    assert set(CHIPS) == {*TPUS, *GPUS}
    assert {name for name, row in CHIPS.items() if row.kind == "tpu"} == set(TPUS)


@pytest.mark.parametrize("name", [*TPUS, *GPUS])
def test_every_figure_is_positive_and_names_its_source(name):
    for figure in figures(chip(name)):
        assert math.isfinite(figure.value)
        assert figure.value > 0
        assert figure.source.strip()
        assert figure.unit in ("flop/s", "bytes/s", "bytes", "Hz", "s")


@pytest.mark.parametrize("name", [*TPUS, *GPUS])
def test_achievable_is_at_most_nominal(name):
    row = chip(name)
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Rate):
            assert value.achievable.value <= value.nominal.value, field.name


@pytest.mark.parametrize(
    ("name", "bf16", "hbm", "link", "nominal_link"),
    [
        ("v4", 275e12, 1.2e12, 45e9, 45e9),
        ("v5e", 197e12, 819e9, 45e9, 50e9),
        ("v5p", 459e12, 2.765e12, 90e9, 100e9),
        ("v6e", 918e12, 1.638e12, 90e9, 100e9),
        ("tpu7x", 2307e12, 7.38e12, 90e9, 100e9),
        ("h100", 795e12, 3.35e12, 360e9, 450e9),
        ("b200", 1745e12, 8e12, 720e9, 900e9),
    ],
)
def test_accessors_give_si_units(name, bf16, hbm, link, nominal_link):
    row = chip(name)
    assert row.flops_per_s("bfloat16") == bf16
    assert row.hbm_bytes_per_s() == hbm
    assert row.link_bytes_per_s() == pytest.approx(link)
    assert row.link_bytes_per_s("nominal") == nominal_link


def test_where_sources_disagree_both_figures_are_kept():
    link = chip("v5e").link
    assert (link.achievable.value, link.achievable.source) == (45e9, "book")
    assert (link.nominal.value, link.nominal.source) == (50e9, "gcp")
    assert chip("v3").flops_per_s("bfloat16", basis="nominal") == 140e12
    assert chip("v3").flops_per_s("bfloat16") == 123e12


def test_memory_capacity_in_bytes():
    assert chip("v5p").hbm_bytes() == 95 * 2**30
    assert chip("h100").hbm_bytes() == 80_000_000_000


def test_an_unknown_peak_is_none_and_never_zero():
    assert chip("tpu7x").flops_per_s("int8") is None
    assert chip("a100").flops_per_s("float8_e4m3fn") is None
    assert chip("v5e").flops_per_s("float64") is None
    assert chip("h100").clock_hz() is None


def test_float32_follows_the_passes_of_bf16_on_tpu_and_tf32_on_gpu():
    assert chip("v5e").flops_per_s("float32") == 197e12
    assert chip("v5e").flops_per_s("float32", "highest") == pytest.approx(197e12 / 6)
    assert "derived" in chip("v5e").f32_highest.nominal.source
    assert chip("h100").flops_per_s("float32", basis="nominal") == 494.7e12
    assert chip("h100").flops_per_s("float32", "highest", "nominal") == 66.9e12


def test_clocks_are_those_at_which_the_matrix_units_reach_the_peak():
    # flop per cycle: MXUs x rows x columns x 2.
    for name, flop_per_cycle in [
        ("v3", 4 * 128 * 128 * 2),
        ("v4", 8 * 128 * 128 * 2),
        ("v5e", 4 * 128 * 128 * 2),
        ("v5p", 8 * 128 * 128 * 2),
        ("v6e", 4 * 256 * 256 * 2),
        ("tpu7x", 8 * 256 * 256 * 2),
    ]:
        row = chip(name)
        assert row.clock_hz() * flop_per_cycle == pytest.approx(
            row.flops_per_s("bfloat16"), rel=2e-3
        )


@pytest.mark.parametrize(
    ("name", "size", "shape", "wraps"),
    [
        ("v4", 4, (4, 4, 4), True),
        ("v4", 8, (4, 4, 8), True),
        ("v4", 4, (2, 2, 4), False),
        ("v4", 2, None, False),
        ("v5p", 12, None, True),
        ("v5e", 16, None, True),
        ("v5e", 8, None, False),
        ("v6e", 4, (4, 16), False),
        ("v6e", 16, (4, 16), True),
        ("tpu7x", 8, None, None),
        ("v5e", 1, None, False),
    ],
)
def test_wraparound(name, size, shape, wraps):
    assert chip(name).wraps(size, shape) is wraps


def test_a_device_of_a_two_device_chip_has_half_the_compute_and_memory():
    whole, half = chip("tpu7x"), chip("tpu7x").per_device()
    assert half.flops_per_s("bfloat16") == 2307e12 / 2
    assert half.hbm_bytes_per_s() == 7.38e12 / 2
    assert half.hbm_bytes() == 96 * 2**30
    assert half.link == whole.link
    assert half.devices_per_chip == 1
    assert half.per_device() is half
    assert "one of 2 devices" in half.bf16.nominal.source


def test_an_unknown_chip_lists_the_nearest_names():
    with pytest.raises(OptionError, match=r"no chip is called 'H10'; did you mean 'h100'"):
        chip("H10")
    with pytest.raises(OptionError, match=r"'zzz'; valid: a100, b200, gb200"):
        chip("zzz")


def test_an_unknown_basis_is_refused():
    with pytest.raises(OptionError, match="'peak'; it must be 'achievable' or 'nominal'"):
        chip("v4").hbm_bytes_per_s("peak")


def write(tmp_path, content) -> str:
    path = tmp_path / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_profile_overrides_a_row_and_adds_one(tmp_path):
    path = write(
        tmp_path,
        {
            "h100": {"link": {"value": 3.1e11, "nominal": 4.5e11, "source": "rack 4"}},
            "lab": {"base": "v5e", "hbm_capacity": 1e10, "torus_dims": 3, "wrap": {"multiple": 2}},
        },
    )
    table = load_profile(path)
    assert chip("h100", table).link_bytes_per_s() == 3.1e11
    assert chip("h100", table).link.achievable.source == "rack 4"
    assert chip("h100", table).hbm == CHIPS["h100"].hbm
    lab = chip("lab", table)
    assert (lab.name, lab.hbm_bytes(), lab.torus_dims) == ("lab", 10**10, 3)
    assert lab.hbm_capacity.source == "profile"
    assert lab.wraps(6, (6, 4)) is True
    assert chip("h100").link_bytes_per_s() == pytest.approx(3.6e11)
    assert "lab" not in CHIPS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([1], "must be an object of chips, not a list"),
        ({"v4": 3}, "chip 'v4' must be an object of fields, not a number"),
        ({"new": {}}, "chip 'new' is new and needs a \"base\" row"),
        ({"new": {"base": "h10"}}, "\"base\" is 'h10'; did you mean 'h100'"),
        ({"v4": {"lnk": 3}}, "'lnk' is no field of a chip; did you mean 'link'"),
        ({"v4": {"link": "fast"}}, "'link' must be a positive number, not 'fast'"),
        ({"v4": {"link": 0}}, "'link' must be a positive number, not 0"),
        ({"v4": {"link": True}}, "'link' must be a positive number, not True"),
        ({"v4": {"link": {"source": "x"}}}, "'link' has no \"value\""),
        ({"v4": {"link": {"value": 1, "unit": "GB"}}}, "'unit' is not one of nominal, source"),
        ({"v4": {"clock": {"value": 1, "nominal": 2}}}, "'nominal' is not one of source, value"),
        ({"v4": {"domain": 1.5}}, "'domain' must be a whole number, not 1.5"),
        ({"v4": {"wrap": 16}}, "'wrap' must be"),
        ({"v4": {"wrap": {"exact": 0}}}, "whole number of at least 1, not 0"),
    ],
)
def test_a_malformed_profile_is_one_line(tmp_path, content, message):
    with pytest.raises(OptionError) as caught:
        load_profile(write(tmp_path, content))
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert "profile.json" in text


SHAPE = {f.name: getattr(CHIPS["v5e"].shape, f.name).value for f in dataclasses.fields(EinsumShape)}
TABLE = {"short": [64, 256], "depth": [512], "long": [256], "shares": [[[0.1]], [[0.2]]]}


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_a_row_that_is_written_is_read_again_as_it_was(tmp_path, name):
    """Every figure of every row, from a base whose figures are others."""
    row = dataclasses.replace(CHIPS[name], name="mine", early_gathers=not CHIPS[name].early_gathers)
    base = CHIPS["v3" if row.kind == "tpu" else "mi300x"]
    missing = {f.name: None for f in dataclasses.fields(row) if getattr(row, f.name) is None}
    kept = {f: getattr(base, f) for f in ("kind", "pod_shape", "wrap")}
    row = dataclasses.replace(row, **kept, **{k: getattr(base, k) for k in missing})
    written = profile_row(row, base)
    again = load_profile(write(tmp_path, {"mine": written}))["mine"]
    for field in dataclasses.fields(row):
        got, want = getattr(again, field.name), getattr(row, field.name)
        if isinstance(want, Rate):  # one source is written for both
            assert (got.achievable, got.nominal.value) == (want.achievable, want.nominal.value)
        else:
            assert got == want, field.name
    assert set(profile_row(base, base)) == {"base"}


def test_a_profile_gives_what_the_shape_of_an_einsum_costs(tmp_path):
    table = load_profile(
        write(
            tmp_path,
            {
                "v5e": {"shape": {"start": 3e-6, "late": {"value": 1, "source": "seen"}}},
                "new": {"base": "v3", "shape": SHAPE},
                "bare": {"base": "v6e", "shape": None},
                "lab": {"base": "a100", "table": TABLE},
                "plain": {"base": "h100", "table": None},
            },
        )
    )
    shape, known = table["v5e"].shape, CHIPS["v5e"].shape
    assert (shape.start.value, shape.late) == (3e-6, Figure(1.0, "1", "seen"))
    assert shape.result == known.result
    assert {f: getattr(table["new"].shape, f).value for f in SHAPE} == SHAPE
    assert table["bare"].shape is None
    assert table["plain"].table is None
    assert table["lab"].table.share(256, 512, 64) == pytest.approx(0.1)
    assert table["lab"].table.source == "profile"
    # What is read decides the times.
    wide = Product(1, 1024, 1024, 1024)
    slower = time_of(wide, table["v5e"]).seconds - time_of(wide, CHIPS["v5e"]).seconds
    assert slower == pytest.approx(3e-6 - known.start.value)
    fast, slow = (time_of(wide, table[name]).seconds for name in ("plain", "lab"))
    assert fast < slow


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": "v5e", "shape": 3}, "'shape' must be an object of figures or null, not 3"),
        ({"base": "v5e", "shape": {"begin": 1}}, "'begin' is not one of matrix_share, result"),
        ({"base": "v3", "shape": {"start": 1}}, "has no 'matrix_share', and the base row has no"),
        ({"base": "v5e", "shape": {"start": 0}}, "'start' must be a positive number, not 0"),
        ({"base": "v5e", "shape": {"start": "1"}}, "'start' must be a positive number, not '1'"),
        ({"base": "v5e", "shape": {"start": {}}}, "'start' has no \"value\""),
        ({"base": "v5e", "shape": {"start": {"value": 1, "x": 1}}}, "'x' is not one of source"),
        ({"base": "v5e", "shape": {"late": 2}}, "'late' must be 0 or 1, not 2"),
        ({"base": "h100", "table": 3}, "'table' must be null, or have short, depth, long, shares"),
        ({"base": "h100", "table": {**TABLE, "x": 1}}, "'table' must be null, or have short"),
        ({"base": "h100", "table": {**TABLE, "short": [256, 64]}}, "'short' must be sizes that"),
        ({"base": "h100", "table": {**TABLE, "depth": [1.5]}}, "'depth' must be sizes that grow"),
        ({"base": "h100", "table": {**TABLE, "long": []}}, "'long' must be sizes that grow"),
        ({"base": "h100", "table": {**TABLE, "shares": [[[0.1]]]}}, "one has 1 where 2 are wanted"),
        ({"base": "h100", "table": {**TABLE, "shares": [[[0.1]], [0.2]]}}, "one has 0.2 where 1"),
        (
            {"base": "h100", "table": {**TABLE, "shares": [[[0.1]], [[0]]]}},
            "'shares' must be positive numbers, not 0",
        ),
    ],
)
def test_a_malformed_shape_or_table_is_one_line(tmp_path, fields, message):
    with pytest.raises(OptionError) as caught:
        load_profile(write(tmp_path, {"mine": fields}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_profile_is_one_line(tmp_path):
    with pytest.raises(OptionError, match=r"none\.json': No such file"):
        load_profile(tmp_path / "none.json")


def test_a_profile_may_build_on_its_own_rows(tmp_path):
    table = load_profile(
        write(tmp_path, {"a": {"base": "v4", "domain": 2}, "b": {"base": "a", "clock": 1e9}})
    )
    assert (table["b"].domain, table["b"].clock_hz()) == (2, 1e9)


def test_figures_print_value_unit_and_source():
    assert str(chip("v5e").link.nominal) == "5e+10 bytes/s (gcp)"
    assert hardware.chip is chip


def test_the_rows_of_a_profile_are_named_in_order(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"lab": {"base": "h100"}, "v5e": {"link": 1e9}}))
    assert hardware.profile_rows(path) == ("lab", "v5e")
    with pytest.raises(OptionError, match="No such file"):
        hardware.profile_rows(tmp_path / "none.json")


def test_the_profile_of_the_readme_is_read(tmp_path):
    readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    example = readme.split("### Profiles")[1].split("```json")[1].split("```")[0]
    table = load_profile(write(tmp_path, example))
    assert table["h100"].link_bytes_per_s() == 3.1e11
    assert table["lab"].shape.matrix_share.value == 0.95
    assert table["lab"].shape.result == CHIPS["v5e"].shape.result
    assert table["gpus"].table.share(256, 1024, 4096) == pytest.approx(0.2)


def test_options_take_a_chip_of_their_profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"lab": {"base": "h100", "link": 1e9}}))
    options = Options(chip="lab", profile=path)
    assert options.table()["lab"].link_bytes_per_s() == 1e9
    assert options.profile == str(path)
    with pytest.raises(OptionError, match="chip='lab'; valid: a100"):
        Options(chip="lab")
    with pytest.raises(OptionError, match="profile=True; give the path of a file"):
        Options(profile=True)
