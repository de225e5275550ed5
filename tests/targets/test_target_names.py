"""Target names, the environment they need, and the table of targets; nothing here needs a wheel."""

import ast
import importlib.util
from pathlib import Path

import pytest

import collmm.targets
from collmm.cost.hardware import CHIPS
from collmm.errors import OptionError, TargetError
from collmm.targets import environment, list_targets, parse_name, parse_target
from collmm.targets.cuda_config import DEVICES, target_config
from collmm.targets.environment import compiler_defaults
from collmm.targets.names import GPU_MODELS, TPU_MODELS


@pytest.mark.parametrize(
    ("text", "kind", "model", "shape", "short"),
    [
        ("cpu:8", "cpu", "", (8,), "cpu:8"),
        ("tpu:v5e:2x4", "tpu", "v5e", (2, 4), "tpu:v5e:2x4"),
        ("tpu:v4:8x8x16", "tpu", "v4", (8, 8, 16), "tpu:v4:8x8x16"),
        ("tpu:v5p:16x20x28", "tpu", "v5p", (16, 20, 28), "tpu:v5p:16x20x28"),
        ("tpu:v5e:1x1", "tpu", "v5e", (1, 1), "tpu:v5e:1x1"),
        ("gpu:h100:8", "gpu", "h100", (1, 8), "gpu:h100:8"),
        ("gpu:h100:1x8", "gpu", "h100", (1, 8), "gpu:h100:8"),
        (" GPU:H100:2x8 ", "gpu", "h100", (2, 8), "gpu:h100:2x8"),
        ("gpu:gb200:72", "gpu", "gb200", (1, 72), "gpu:gb200:72"),
    ],
)
def test_names_parse(text, kind, model, shape, short):
    name = parse_name(text)
    assert (name.kind, name.model, name.shape, name.text) == (kind, model, shape, short)
    assert parse_name(name.text) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("npu:8", "is not one of cpu:N, tpu:CHIP:AxB"),
        ("", "is not one of"),
        ("cpu", "must look like 'cpu:8'"),
        ("cpu:2x4", "must look like 'cpu:8'"),
        ("cpu:0", "'0' must be whole numbers joined by 'x'"),
        ("tpu:v5e", "must look like 'tpu:v5e:2x4'"),
        ("tpu:v5e:2x", "'2x' must be whole numbers"),
        ("tpu:v5e:2*4", "'2*4' must be whole numbers"),
        ("tpu:v5:2x4", "no compiler for 'v5' is known; did you mean"),
        ("tpu:v3:2x2", "no compiler for 'v3' is known"),
        ("tpu:v5e:2x2x2", "v5e is a 2D torus; give its shape as 2x4"),
        ("tpu:v4:4x4", "v4 is a 3D torus; give its shape as 2x2x2"),
        ("tpu:v5e:16x32", "the largest v5e slice is 16x16"),
        ("tpu:v5e:3x4", "the first two sizes must be even"),
        ("gpu:mi300x:8", "no compiler for 'mi300x' is known; valid: a100"),
        ("gpu:h100:16", "one h100 host joins at most 8 GPUs; give HOSTSx8"),
        ("gpu:h100:1x2x8", "must look like 'gpu:h100:8' or 'gpu:h100:2x8'"),
    ],
)
def test_other_names_are_refused_in_one_line(text, message):
    with pytest.raises(TargetError) as caught:
        parse_name(text)
    assert message in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_environment_of_a_cpu_target_keeps_other_flags_and_replaces_the_count():
    flags = "--xla_force_host_platform_device_count=2 --xla_cpu_enable_fast_math=false"
    assert environment("cpu:8", {"XLA_FLAGS": flags, "JAX_PLATFORMS": "tpu"}) == {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=8",
    }
    assert environment("cpu:4", {})["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"


def test_environment_of_a_tpu_target_leaves_what_is_set():
    wanted = environment("tpu:v5e:2x4", {"TPU_WORKER_HOSTNAMES": "w0"})
    assert wanted["JAX_PLATFORMS"] == "cpu"
    assert wanted["TPU_SKIP_MDS_QUERY"] == "1"
    assert wanted["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert "TPU_WORKER_HOSTNAMES" not in wanted
    assert "XLA_FLAGS" not in wanted


def test_environment_of_a_gpu_target():
    assert environment("gpu:h100:8", {}) == {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    assert compiler_defaults("gpu") == {}


def test_environment_refuses_what_is_no_target():
    with pytest.raises(TargetError, match="'tpu:v9:2x2': no compiler"):
        environment("tpu:v9:2x2")


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cpu:8", 8),
        ("tpu:v5e:2x4", 8),
        ("tpu:v4:8x8x16", 1024),
        ("tpu:tpu7x:2x2x2", 16),
        ("gpu:h100:2x8", 16),
    ],
)
def test_device_count(text, devices):
    assert parse_target(text).device_count == devices


def test_a_target_carries_its_hardware_row():
    target = parse_target("tpu:v5e:2x4")
    assert target.hardware is CHIPS["v5e"]
    assert target.planning_hardware is CHIPS["v5e"]
    assert target.note == ""
    seven = parse_target("tpu:tpu7x:2x2x2")
    assert seven.planning_hardware.flops_per_s("bfloat16") == 2307e12 / 2
    assert seven.note == "tpu7x: no rule is published; taken not to wrap"


def test_a_cpu_target_is_planned_with_v5e_and_says_so():
    target = parse_target("cpu:8")
    assert target.hardware is None
    assert target.planning_hardware is CHIPS["v5e"]
    assert target.note == "cpu:8 has no figures of its own: planned with those of v5e"


@pytest.mark.parametrize(
    ("text", "wrap"),
    [
        ("tpu:v4:4x4x4", (True, True, True)),
        ("tpu:v4:2x2x4", (False, False, False)),
        ("tpu:v5e:4x4", (False, False)),
        ("tpu:v5e:8x16", (False, True)),
        ("tpu:tpu7x:4x4x4", (False, False, False)),
        ("gpu:h100:8", ()),
    ],
)
def test_a_tpu_slice_wraps_by_the_rule_of_its_chip(text, wrap):
    assert parse_target(text).wrap == wrap


def test_a_profile_changes_a_target():
    import dataclasses

    table = {**CHIPS, "h100": dataclasses.replace(CHIPS["h100"], domain=4)}
    with pytest.raises(TargetError, match="joins at most 4 GPUs"):
        parse_target("gpu:h100:8", table)
    assert parse_target("gpu:h100:4", table).hardware.domain == 4


def test_every_compiler_option_has_a_reason():
    assert parse_target("cpu:8").compiler_options == {}
    assert parse_target("tpu:v5e:2x4").compiler_options == {}
    h100 = parse_target("gpu:h100:8")
    assert h100.compiler_options == {
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_collect_cost_model_stats": True,
    }
    assert h100.hardware_options == {"xla_gpu_dot_merger_threshold_mb": 0}
    assert all(len(option.reason.split()) > 5 for option in h100.options)


def test_kernel_times_are_asked_for_only_where_the_compiler_has_them():
    for model, timed in [("a100", False), ("h100", True), ("h200", True), ("b200", False)]:
        target = parse_target(f"gpu:{model}:8")
        assert target.timed is timed
        assert ("xla_gpu_collect_cost_model_stats" in target.compiler_options) is timed
        assert ("xla_gpu_collect_cost_model_stats" in target.baseline_options()) is timed
    assert parse_target("tpu:v4:2x2x2").timed
    assert not parse_target("cpu:8").timed


def test_baseline_options():
    tpu = parse_target("tpu:v4:2x2x2")
    assert tpu.baseline_options() == tpu.baseline_options("default") == {}
    assert tpu.baseline_options("off") == {
        "xla_tpu_enable_windowed_einsum_for_all_gather": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    }
    gpu = parse_target("gpu:h100:8").baseline_options("off")
    assert gpu == {"xla_gpu_enable_triton_gemm": False, "xla_gpu_collect_cost_model_stats": True}
    with pytest.raises(OptionError, match="'on'; it must be 'off' or 'default'"):
        tpu.baseline_options("on")


def test_the_list_has_a_row_for_each_target():
    rows = list_targets()
    assert [row.kind for row in rows] == [
        "cpu",
        *["tpu"] * len(TPU_MODELS),
        *["gpu"] * len(GPU_MODELS),
    ]
    for row in rows:
        target = parse_target(row.example)
        assert (target.kind, target.hardware) == (row.kind, row.hardware)
    assert rows[0].missing is None


def test_gpu_models_have_both_a_hardware_row_and_a_device_description():
    assert set(DEVICES) == set(GPU_MODELS)
    for model, device in DEVICES.items():
        chip = CHIPS[model]
        # The device query reports a little less than the data sheet.
        assert device.hbm == pytest.approx(chip.hbm_bytes_per_s(), rel=0.05)
        assert device.memory == pytest.approx(chip.hbm_bytes(), rel=0.08)


def test_the_proto_text_of_a_device():
    text = target_config("h100")
    assert "cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }" in text
    assert "core_count: 132\n" in text
    assert "clock_rate_ghz: 1.98\n" in text
    assert text.count("{") == text.count("}")
    assert "feature_extension: NONE" in target_config("a100")
    # jax 0.10 refuses a field it does not know.
    assert "collective_memory_granularity" not in text
    assert [DEVICES[m].sm for m in ("a100", "h100", "b200")] == ["sm_80", "sm_90a", "sm_100a"]


def test_no_module_of_targets_imports_jax_before_it_is_used():
    folder = Path(importlib.util.find_spec("collmm.targets").origin).parent
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:  # top level only: not inside functions
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] in ("jax", "jaxlib")], path.name
    assert collmm.targets.parse_target is parse_target
