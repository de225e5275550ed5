"""The cost model against the published MFU of large decoder models; it needs libtpu."""

import importlib.util
import sys
from pathlib import Path

import pytest

from collmm.targets.installed import missing

pytestmark = pytest.mark.skipif(missing("tpu") is not None, reason=str(missing("tpu")))


@pytest.fixture(scope="module")
def rows():
    path = Path(__file__).parents[2] / "benchmarks" / "decoder_models.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {row.model.name: row for row in module.rows()}


def test_four_models_are_within_eight_points(rows):
    near = {name for name, row in rows.items() if row.error is not None and abs(row.error) <= 8}
    assert near == {"128B", "256B", "512B", "1024B"}


def test_the_miss_is_the_model_with_the_shortest_step(rows):
    """Published 42.3 %; what is left out of the time weighs most there."""
    assert rows["32B"].error > 8
    assert rows["32B"].step_s == min(row.step_s for row in rows.values())


def test_the_times_add_up(rows):
    for row in rows.values():
        assert row.ideal_s < row.einsums_s < row.layer_s
        assert 0 < row.scores_s < 0.1 * row.layer_s
        assert 0 < row.rewritten < row.einsums
