"""Program files: what they may define, how they run, one line for each way to get it wrong."""

import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collmm import OptionError, Options, OverlappedFunction, ProgramError, TargetError
from collmm.program_file import literal_mesh, load
from collmm.programs import build, make_mesh, open_program
from collmm.targets import parse_target

MINIMAL = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = {"data": 2, "model": 4}

def fn(x):
    return jnp.sin(x)

def build(mesh):
    sharding = NamedSharding(mesh, P("data", "model"))
    return fn, (jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=sharding),)
"""


pytestmark = pytest.mark.usefixtures("kept_environment")


@pytest.fixture
def program(tmp_path):
    def write(text, name="program.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def with_build(body, head=""):
    """The text of a program on one axis of two devices whose build is ``body``."""
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    head = textwrap.dedent(head)
    imports = "import jax\nimport jax.numpy as jnp\n"
    return f'{imports}MESH = {{"x": 2}}\n{head}\ndef build(mesh):\n{body}\n'


# --- what a good file becomes ---


def test_a_plain_function_is_jitted_on_the_mesh_of_the_file(program):
    opened = open_program(program(MINIMAL))
    assert dict(opened.mesh.shape) == {"data": 2, "model": 4}
    assert opened.target.name == "cpu:8"
    assert opened.mesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert opened.args[0].sharding.mesh == opened.mesh
    np.testing.assert_array_equal(opened.fn(jnp.zeros((4, 8))), np.zeros((4, 8)))
    assert isinstance(opened.overlapped(), OverlappedFunction)


def test_a_path_may_be_relative_and_have_any_suffix(program, monkeypatch):
    path = program(MINIMAL, "step.txt")
    monkeypatch.chdir(path.parent)
    traced = open_program("step.txt").fn.trace(jnp.ones(3))
    (eqn,) = [e for e in traced.jaxpr.jaxpr.eqns if e.primitive.name == "sin"]
    # The plan shows users their own lines.
    assert str(path) in str(eqn.source_info.traceback)


def test_one_argument_needs_no_tuple(program):
    text = with_build("return (lambda p: p['a'] + 1), {'a': jnp.ones(3)}")
    (args,) = open_program(program(text)).args
    assert set(args) == {"a"}


def test_a_list_of_arguments_is_taken_as_a_tuple(program):
    text = with_build("return (lambda a, b: a + b), [jnp.ones(3), jnp.ones(3)]")
    assert len(open_program(program(text)).args) == 2


def test_a_jitted_function_is_kept_as_it_is(program):
    text = with_build("return f, (jnp.ones(3),)", "f = jax.jit(lambda x: x, donate_argnums=0)")
    opened = open_program(program(text))
    assert opened.overlapped().original is opened.fn


def test_a_decorated_function_keeps_its_options_unless_others_are_asked_for(program):
    head = """
    import collmm
    f = collmm.overlap_collectives(lambda x: x, collmm.Options(policy="never", strict=True))
    """
    opened = open_program(program(with_build("return f, (jnp.ones(3),)", head)))
    assert opened.overlapped().options == Options(policy="never", strict=True)
    changed = opened.overlapped(policy="always", chip="v4").options
    assert changed == Options(policy="always", chip="v4", strict=True)


def test_the_plan_is_made_for_the_chip_of_the_target_unless_another_is_asked_for(program):
    file = load(program(MINIMAL))
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    opened = build(file, parse_target("tpu:v6e:2x4"), mesh)
    assert opened.overlapped().options.chip == "v6e"
    assert opened.overlapped(chip="v5p").options.chip == "v5p"


def test_jit_kwargs_reach_the_jit_of_a_plain_function(program):
    head = "JIT_KWARGS = {'static_argnums': (1,), 'donate_argnums': (0,)}"
    text = with_build("return (lambda x, mode: x + len(mode)), (jnp.ones(3), 'abc')", head)
    opened = open_program(program(text))
    np.testing.assert_array_equal(opened.fn(*opened.args), np.full(3, 4.0))
    assert opened.args[0].is_deleted()


@pytest.mark.parametrize("head", ["AXIS_TYPES = 'explicit'", "CONTEXT_MESH = True"])
def test_the_mesh_is_the_context_of_build_and_calls(program, head):
    body = """
    assert jax.sharding.get_abstract_mesh().axis_names == ("x",)
    return f, (jnp.ones(3),)
    """
    f = "def f(x):\n    return x * jax.sharding.get_abstract_mesh().size\n"
    opened = open_program(program(with_build(body, f"{head}\n{f}")))
    explicit = jax.sharding.AxisType.Explicit
    assert (opened.mesh.axis_types[0] == explicit) == ("explicit" in head)
    with opened.context():
        np.testing.assert_array_equal(opened.fn(jnp.ones(3)), np.full(3, 2.0))


def test_without_either_there_is_no_context_mesh(program):
    body = """
    assert jax.sharding.get_abstract_mesh().empty
    return (lambda x: x), (jnp.ones(3),)
    """
    with open_program(program(with_build(body))).context():
        assert jax.sharding.get_abstract_mesh().empty


def test_device_orders_say_where_each_device_stands(program):
    text = MINIMAL + "DEVICE_ORDERS = [[3, 2, 1, 0, 7, 6, 5, 4], list(range(8))]\n"
    path = program(text)
    file, target = load(path), parse_target("cpu:8")
    ids = [
        [d.id for d in make_mesh(file, target, order).devices.flat]
        for order in (*file.device_orders, None)
    ]
    assert ids == [[3, 2, 1, 0, 7, 6, 5, 4], list(range(8)), list(range(8))]
    assert open_program(path).mesh == make_mesh(file, target, file.device_orders[0])


def test_neighbours_can_be_imported_at_once_and_in_build(program):
    program("SIZES = {'x': 2}", "a_neighbour_of_the_file.py")
    program("ONE = 1", "a_late_neighbour_of_the_file.py")
    text = """
    import jax.numpy as jnp
    from a_neighbour_of_the_file import SIZES
    MESH = SIZES
    def build(mesh):
        from a_late_neighbour_of_the_file import ONE
        return (lambda x: x + ONE), (jnp.ones(3),)
    """
    before = list(sys.path)
    opened = open_program(program(text))
    assert dict(opened.mesh.shape) == {"x": 2}
    assert sys.path == before


def test_the_file_may_define_dataclasses_and_have_the_name_of_a_module(program):
    text = """
    from __future__ import annotations
    import dataclasses
    import jax, jax.numpy as jnp
    MESH = {"x": 2}
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        w: jax.Array
    def build(mesh):
        return (lambda s: s.w * 2), State(jnp.ones(3))
    """
    (state,) = open_program(program(text, "collmm.py")).args
    assert type(state).__name__ == "State"
    assert sys.modules["collmm"].Options is Options


@pytest.mark.parametrize(
    "mesh",
    ["{'x': 6}\nassert len(jax.devices()) == 6", "{'x': 2 * 3}"],
    ids=["written-out-and-used-at-once", "computed"],
)
def test_devices_are_simulated_before_jax_looks_for_them(program, mesh):
    text = f"import jax\nMESH = {mesh}\n"
    text += "def build(mesh):\n    return (lambda x: x), (jax.numpy.ones(6),)\n"
    path = program(text)
    code = (
        "import sys\nfrom collmm.programs import open_program\n"
        "print(open_program(sys.argv[1]).mesh.size)"
    )
    variables = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    variables["PYTHONPATH"] = str(pathlib.Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=variables, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "6\n"), run.stderr


# --- one line for each way to get it wrong ---

BUILD = "\ndef build(mesh):\n    return (lambda x: x), (1.0,)\n"
WRONG_FILES = {
    "no-mesh": (BUILD, r'defines no MESH; give axes and sizes: MESH = \{"data": 2, "model": 4\}'),
    "mesh-list": ("MESH = [2, 4]" + BUILD, r"MESH is a list of 2 \(int, int\), not a dict"),
    "mesh-empty": ("MESH = {}" + BUILD, r"MESH is a dict \(\{\}\), not a dict of axis sizes"),
    "mesh-zero": ("MESH = {'a': 0}" + BUILD, r"MESH\['a'\] is 0, not a positive whole number"),
    "mesh-negative": ("MESH = {'a': -2}" + BUILD, r"MESH\['a'\] is -2, not a positive"),
    "mesh-float": ("MESH = {'a': 2.0}" + BUILD, r"MESH\['a'\] is 2\.0, not a positive whole"),
    "mesh-bool": ("MESH = {'a': True}" + BUILD, r"MESH\['a'\] is True, not a positive whole"),
    "mesh-text": ("MESH = {'a': '2'}" + BUILD, r"MESH\['a'\] is '2', not a positive whole"),
    "mesh-axis": ("MESH = {0: 2}" + BUILD, r"MESH has the axis 0, which is not a name"),
    "no-build": ("MESH = {'a': 2}", r"defines no build; give def build\(mesh\)"),
    "build-number": (
        "MESH = {'a': 2}\nbuild = 3",
        r"build is an int \(3\); give def build\(mesh\)",
    ),
    "build-none": (
        "MESH = {'a': 2}\ndef build(): pass",
        r"build\(\) cannot be called as build\(mesh\)",
    ),
    "build-two": (
        "MESH = {'a': 2}\ndef build(mesh, batch): pass",
        r"build\(mesh, batch\) cannot be called as build\(mesh\)",
    ),
    "axis-types": (
        "MESH = {'a': 2}\nAXIS_TYPES = 'manual'" + BUILD,
        r"AXIS_TYPES='manual'; use one of auto, explicit",
    ),
    "axis-types-list": (
        "MESH = {'a': 2}\nAXIS_TYPES = ['auto']" + BUILD,
        r"AXIS_TYPES=\['auto'\]; use one of auto, explicit",
    ),
    "context-mesh": (
        "MESH = {'a': 2}\nCONTEXT_MESH = 1" + BUILD,
        r"CONTEXT_MESH=1; use True or False",
    ),
    "jit-kwargs": ("MESH = {'a': 2}\nJIT_KWARGS = 3" + BUILD, r"JIT_KWARGS is an int \(3\); give"),
    "jit-kwargs-name": (
        "MESH = {'a': 2}\nJIT_KWARGS = {'donate': 0}" + BUILD,
        r"JIT_KWARGS has 'donate'; valid: .*donate_argnums",
    ),
    "order-short": (
        "MESH = {'a': 2}\nDEVICE_ORDER = [0]" + BUILD,
        r"device order \[0\] must hold each of 0 to 1 once",
    ),
    "order-twice": (
        "MESH = {'a': 2}\nDEVICE_ORDER = [0, 0]" + BUILD,
        r"device order \[0, 0\] must hold",
    ),
    "order-bool": (
        "MESH = {'a': 2}\nDEVICE_ORDER = [False, True]" + BUILD,
        r"device order \[False, True\] must hold",
    ),
    "orders": (
        "MESH = {'a': 2}\nDEVICE_ORDERS = 'ab'" + BUILD,
        r"DEVICE_ORDERS is a str \('ab'\); give a list of orders",
    ),
    "not-python": ("MESH = {'a': 2}\ndef build(mesh:", r"is not Python: .* \(line 2\)"),
    "not-a-module": ("return 3", r"is not Python: 'return' outside function \(line 1\)"),
    "null-byte": ("MESH = 1\0", r"is not Python: .*null bytes"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_file_that_breaks_the_protocol_is_one_line(program, text, expected):
    path = program(text)
    with pytest.raises(ProgramError) as e:
        open_program(path)
    message = str(e.value)
    assert re.search(expected, message), message
    assert str(path) in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["missing.py", "."], ids=["missing", "folder"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name):
    with pytest.raises(ProgramError, match=r"cannot read .*; name a program file"):
        open_program(tmp_path / name)


def test_a_file_that_is_no_text_is_one_line(tmp_path):
    path = tmp_path / "program.py"
    path.write_bytes(b"MESH = '\xff\xfe'\n")
    with pytest.raises(ProgramError, match="is not Python: "):
        open_program(path)


WRONG_BUILDS = {
    "nothing": ("pass", r"build returned None; return \(fn, args\)"),
    "function": ("return jnp.sin", r"build returned a .*; return \(fn, args\)"),
    "three": ("return jnp.sin, 1, 2", r"build returned a tuple of 3 \(.*, int, int\); return"),
    "many": ("return list(range(9))", r"a list of 9 \(int, int, int, int, \.\.\.\)"),
    "not-callable": ("return 3, (1,)", r"build returned a tuple of 2 \(int, tuple\); return"),
    "text-argument": (
        "return (lambda x, m: x), (jnp.ones(3), 'relu')",
        r"the args of build hold a str \('relu'\); give arrays or jax.ShapeDtypeStructs",
    ),
}


@pytest.mark.parametrize(("body", "expected"), WRONG_BUILDS.values(), ids=WRONG_BUILDS)
def test_a_build_that_returns_something_else_is_one_line(program, body, expected):
    path = program(with_build(body))
    with pytest.raises(ProgramError) as e:
        open_program(path)
    assert re.search(expected, str(e.value)), str(e.value)
    assert "\n" not in str(e.value)


def test_jit_kwargs_for_a_jitted_function_are_refused(program):
    text = with_build("return jax.jit(jnp.sin), (jnp.ones(3),)", "JIT_KWARGS = {'inline': True}")
    with pytest.raises(ProgramError, match="JIT_KWARGS is for a plain function"):
        open_program(program(text))


def test_a_mesh_that_the_target_cannot_hold_names_both(program):
    with pytest.raises(TargetError, match=r"data=2 x model=4 has 8 devices, cpu:4 has 4"):
        open_program(program(MINIMAL), "cpu:4")


def test_a_mesh_larger_than_the_process_has_devices_names_both(program):
    # This process has started jax with 16.
    with pytest.raises(TargetError, match=r"cpu:32 needs 32 cpu devices and this process has 16"):
        open_program(program(with_build("return 1").replace('"x": 2', '"x": 32')))


@pytest.mark.parametrize("mesh", ["{'x': 3, 'y': 683}", "dict(x=2049)"], ids=["literal", "not"])
def test_a_mesh_that_no_process_can_simulate_is_one_line(program, mesh):
    path = program(f"MESH = {mesh}\n{BUILD}")
    with pytest.raises(TargetError, match=r"cpu:2049: one process simulates at most 2048 CPU"):
        open_program(path)


def test_an_unknown_target_is_found_before_the_file_is_looked_at(tmp_path):
    with pytest.raises(TargetError, match="'tpu:v9:2x4'"):
        open_program(tmp_path / "missing.py", "tpu:v9:2x4")


def test_arrays_on_devices_that_are_not_attached_are_one_line(program):
    head = """
    def missing():
        raise jax.errors.JaxRuntimeError(
            "UNIMPLEMENTED: MakeArraysFromHostBufferShards not available with compile-only client.")
    """
    path = program(with_build("missing()", head))
    with pytest.raises(ProgramError, match=r"puts arrays on devices and cpu:2 has none attached"):
        open_program(path)


def test_wrong_options_name_the_allowed_values(program):
    opened = open_program(program(MINIMAL))
    with pytest.raises(OptionError, match="policy='sometimes'; use one of auto, always, never"):
        opened.overlapped(policy="sometimes")
    with pytest.raises(OptionError, match=r"chip='v5f'; did you mean .*'v5e'"):
        opened.overlapped(chip="v5f")


# --- what the user's own code raises ---

OWN_ERRORS = {
    "body": ("import a_module_that_nobody_has\n" + BUILD, ModuleNotFoundError),
    "neighbour": ("MESH = {'a': 2}\nimport json.nothing" + BUILD, ModuleNotFoundError),
    "build": ("MESH = {'a': 2}\ndef build(mesh):\n    return mesh.shape['b']", KeyError),
    "runtime": (
        "import jax\nMESH = {'a': 2}\n"
        "def build(mesh):\n    raise jax.errors.JaxRuntimeError('own')",
        jax.errors.JaxRuntimeError,
    ),
    "program-error": ("raise RuntimeError('own')", RuntimeError),
}


@pytest.mark.parametrize(("text", "error"), OWN_ERRORS.values(), ids=OWN_ERRORS)
def test_an_error_of_the_users_own_code_passes_through(program, text, error):
    path = program(text)
    with pytest.raises(error) as e:
        open_program(path)
    assert e.value.__cause__ is None
    assert str(path) in {str(entry.path) for entry in e.traceback}


# --- reading MESH without running the file ---

names = st.text(min_size=1, max_size=8)
meshes = st.dictionaries(names, st.integers(1, 4), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(mesh=meshes, annotated=st.booleans())
def test_a_mesh_that_is_written_out_is_read_as_it_runs(mesh, annotated):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "program.py")
        head = "MESH: dict" if annotated else "MESH"
        path.write_text(f"{head} = {mesh!r}\n{BUILD}", encoding="utf-8")
        assert literal_mesh(path) == mesh
        file = load(path)
    assert file.mesh_shape == mesh
    assert file.device_count == math.prod(mesh.values())


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 4) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=4,
)


@settings(max_examples=100, deadline=None)
@given(mesh=values)
def test_any_other_value_of_mesh_is_one_line(mesh):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "program.py")
        path.write_text(f"inf = float('inf')\nMESH = {mesh!r}\n{BUILD}", encoding="utf-8")
        read = literal_mesh(path)
        if read is not None:
            assert read == load(path).mesh_shape == mesh
            return
        with pytest.raises(ProgramError, match=r"\A[^\n]*\Z"):
            load(path)


@pytest.mark.parametrize("mesh", ["{'x': n}", "dict(x=2)", "make()", "{'x': 2, **more}"])
def test_a_mesh_that_is_computed_is_not_read_without_running(program, mesh):
    assert literal_mesh(program(f"MESH = {mesh}")) is None


def test_the_last_mesh_counts(program):
    assert literal_mesh(program("MESH = {'x': 2}\nMESH = {'x': 4}")) == {"x": 4}
    assert literal_mesh(program("MESH = {'x': 2}\nMESH = make()")) is None
