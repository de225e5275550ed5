"""Imports point one way: pure modules below jax, one file on jax's internals, no cycles."""

import ast
import fnmatch
import functools
import graphlib
import pathlib
import subprocess
import sys

import pytest

import collmm

PACKAGE = pathlib.Path(collmm.__file__).parent

# From the bottom up. A module imports from layers below its own and, without a cycle, from its
# own. Every module has one place: a new one is added here.
LAYERS = (
    ("errors",),
    (
        "einsum",
        "ring",
        "cutting",
        "schedule",
        "sites",
        "nesting",
        "subaxes",
        "options",
        "constraints",
        "cost",
        "cost.*",
        "hlo",
        "hlo.*",
    ),
    ("report", "plan", "plan_file", "pinning", "budget", "together", "breakeven", "explanation"),
    ("_jax",),
    ("targets", "targets.*"),
    ("topology", "devices"),
    (
        "loops",
        "loops.*",
        "blocks",
        "manual",
        "dependence",
        "invariance",
        "prologue",
        "sunk",
        "uneven",
    ),
    ("capture", "primitives"),
    ("partition", "gate", "surroundings"),
    (
        "share",
        "hand_out",
        "residuals",
        "narrow",
        "exchange",
        "chained",
        "chaining",
        "rewrite",
        "rewrite_manual",
        "scatter_sums",
    ),
    ("program", "rejit", "dump", "deferred"),
    ("api",),
    ("timing", "measuring"),
    (
        "memory",
        "prediction",
        "estimating",
        "calibration",
        "audit_report",
        "auditing",
        "program_file",
        "programs",
    ),
    ("tuning",),
    ("testing", "verify", "verifying", "workloads", "workloads.*", "bench", "benching"),
    ("",),
    ("cli", "cli.*", "__main__"),
)

# Neither these nor anything they import imports jax.
PURE = (
    "errors", "einsum", "ring", "schedule", "sites", "nesting", "subaxes", "options",
    "constraints", "report", "plan", "plan_file", "pinning", "budget", "together", "breakeven",
    "explanation",
    "cost", "cost.*", "hlo", "hlo.*",
)  # fmt: skip


def relative(path):
    """``collmm/hlo/parse.py`` is ``hlo.parse``; the package itself is ''."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {relative(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def nodes(tree):
    """Every node that runs: what stands under ``if TYPE_CHECKING`` does not."""
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            continue
        yield child
        yield from nodes(child)


@functools.cache
def imported(module):
    """Full names of what a module imports, anywhere in it."""
    found = set()
    for node in nodes(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            # "from collmm import ring" imports a module, "from collmm import Options" a name.
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if own(full) in MODULES else node.module)
    return frozenset(found)


def own(full):
    """The relative name of a module of ours, None for another's."""
    if full == "collmm":
        return ""
    return full.removeprefix("collmm.") if full.startswith("collmm.") else None


def own_imports(module):
    return {own(full) for full in imported(module)} - {None, module}


def matches(module, patterns):
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


def layers_of(module):
    return [i for i, patterns in enumerate(LAYERS) if matches(module, patterns)]


def closure(module):
    """The modules of ours that a module imports, directly or not."""
    seen, todo = set(), [module]
    while todo:
        for other in own_imports(todo.pop()) - seen:
            seen.add(other)
            todo.append(other)
    return seen


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_one_layer(module):
    assert len(layers_of(module)) == 1, f"give collmm/{module} its one place in LAYERS"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    up = [other for other in own_imports(module) if layers_of(other) > layers_of(module)]
    assert up == []


def test_there_is_no_cycle():
    # Raises CycleError, which names the cycle.
    list(graphlib.TopologicalSorter({m: own_imports(m) for m in MODULES}).static_order())


@pytest.mark.parametrize("module", [m for m in MODULES if matches(m, PURE)])
def test_pure_modules_do_not_import_jax(module):
    for reached in {module, *closure(module)}:
        jax = [full for full in imported(reached) if full.split(".")[0] in ("jax", "jaxlib")]
        assert jax == [], f"{module} reaches {reached}"
        assert reached != "_jax"


def test_pure_modules_load_where_there_is_no_jax():
    names = [f"collmm.{m}" for m in MODULES if matches(m, PURE)]
    program = f"""
import importlib, sys, types
for name in ("jax", "jaxlib"):
    sys.modules[name] = None  # an import of it fails
package = types.ModuleType("collmm")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["collmm"] = package
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [m for m in MODULES if matches(m, ("hlo", "hlo.*"))])
def test_hlo_knows_nothing_but_text(module):
    others = {m for m in own_imports(module) if not matches(m, ("hlo", "hlo.*"))}
    assert others <= {"errors"}


@pytest.mark.parametrize("module", [m for m in MODULES if m != "_jax"])
def test_internals_of_jax_are_touched_in_one_file_only(module):
    tree = ast.parse(MODULES[module].read_text())
    internal = [full for full in imported(module) if "_src" in full.split(".")]
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "_src"]
    strings = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and "jax._src" in n.value
    ]
    assert (internal, attributes, strings) == ([], [], [])


def test_the_walk_sees_what_it_should():
    """The helpers above, against files that are known to import these."""
    assert "jax._src.interpreters.mlir" not in imported("api")
    assert {"_jax", "capture", "program"} <= own_imports("api")
    assert "jax" in imported("api")
    assert any(full.startswith("jax._src") for full in imported("_jax"))
    assert "plan" not in own_imports("report")  # only under TYPE_CHECKING
    assert "errors" in closure("api")
