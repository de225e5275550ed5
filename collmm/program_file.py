"""Program files: the Python files that the command line works on.

A program file defines::

    MESH = {"data": 2, "model": 4}      # axis name -> number of devices, outermost first

    def build(mesh):                    # mesh: a jax.sharding.Mesh of those axes
        ...
        return fn, args

``fn`` is plain, jitted or decorated with ``overlap_collectives`` already. ``args`` is the tuple
of its arguments (anything but a tuple or list is its one argument): arrays, or
``jax.ShapeDtypeStruct``s with shardings, for which nothing is allocated. Optional names:

* ``AXIS_TYPES``: ``"auto"`` (the default) or ``"explicit"``, for every mesh axis;
* ``CONTEXT_MESH``: True builds and calls under ``jax.set_mesh(mesh)``; explicit axes always do;
* ``JIT_KWARGS``: arguments of the ``jax.jit`` that a plain ``fn`` is given;
* ``DEVICE_ORDER``: the devices of the mesh, row by row, as indices into the target's devices;
  ``DEVICE_ORDERS``: several of them, for commands that run the program.

What the file's own code raises passes through as it is.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import math
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from collmm.errors import ProgramError

AXIS_TYPES = {
    "auto": jax.sharding.AxisType.Auto,
    "explicit": jax.sharding.AxisType.Explicit,
}
_MESH_EXAMPLE = 'MESH = {"data": 2, "model": 4}'


@dataclasses.dataclass(frozen=True)
class ProgramFile:
    """A program file that was run and checked; ``build`` is not called yet.

    Attributes:
      path: of the file.
      mesh_shape: ``MESH``.
      build: ``build``.
      axis_types: ``"auto"`` or ``"explicit"``.
      context_mesh: whether the program is built and called under ``jax.set_mesh``.
      jit_kwargs: ``JIT_KWARGS``; empty without.
      device_orders: ``DEVICE_ORDERS``, or the one ``DEVICE_ORDER``; ``(None,)`` without.
    """

    path: pathlib.Path
    mesh_shape: dict[str, int]
    build: Callable
    axis_types: str = "auto"
    context_mesh: bool = False
    jit_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    device_orders: tuple[tuple[int, ...] | None, ...] = (None,)

    @property
    def device_count(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh_shape.values())

    def context(self, mesh: jax.sharding.Mesh) -> contextlib.AbstractContextManager:
        """Return the context to build, trace and call the program in."""
        if self.context_mesh or self.axis_types == "explicit":
            return jax.set_mesh(mesh)
        return contextlib.nullcontext()

    def importable(self) -> contextlib.AbstractContextManager:
        """Return a context in which the file's neighbours can be imported, as by a script."""
        return _importable(self.path)


def load(path: str | os.PathLike) -> ProgramFile:
    """Run a program file and check what it defines.

    Raises ProgramError, in one line, for a file that cannot be read, is not Python or does not
    follow the protocol.
    """
    path = pathlib.Path(path)
    module = _run(path)
    shape = _mesh(path, module)
    return ProgramFile(
        path,
        shape,
        _build(path, module),
        _axis_types(path, module),
        _context_mesh(path, module),
        _jit_kwargs(path, module),
        _orders(path, module, math.prod(shape.values())),
    )


def literal_mesh(path: str | os.PathLike) -> dict[str, int] | None:
    """Return ``MESH`` without running the file; None where the file does not write it out.

    Raises ProgramError when the file cannot be read or is not Python.
    """
    tree, _ = _compiled(pathlib.Path(path))
    found = None
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Name) and t.id == "MESH" for t in targets):
            try:
                found = ast.literal_eval(node.value)
            except ValueError:
                found = None
    return found if _mesh_problem(found) is None else None


def describe(value: Any) -> str:
    """Describe a value that should not be there, in a few words."""
    if value is None:
        return "None"
    name = type(value).__name__
    name = f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    if isinstance(value, (tuple, list)):
        kinds = [type(v).__name__ for v in value[:4]] + ["..."] * (len(value) > 4)
        return f"{name} of {len(value)} ({', '.join(kinds)})"
    text = repr(value)
    return f"{name} ({text})" if len(text) <= 40 and "\n" not in text else name


# --- reading and running ---


def _compiled(path: pathlib.Path) -> tuple[ast.Module, types.CodeType]:
    try:
        source = path.read_bytes()
    except OSError as e:
        raise ProgramError(f"cannot read {path}: {e.strerror}; name a program file") from None
    try:
        tree = ast.parse(source)
        return tree, compile(tree, str(path.absolute()), "exec", dont_inherit=True)
    except SyntaxError as e:
        where = f" (line {e.lineno})" if e.lineno else ""
        raise ProgramError(f"{path} is not Python: {e.msg}{where}") from None
    except ValueError as e:  # null bytes, on some versions
        raise ProgramError(f"{path} is not Python: {e}") from None


def _run(path: pathlib.Path) -> types.ModuleType:
    _, code = _compiled(path)
    # A name of its own: the file may be called what a module that it imports is called.
    module = types.ModuleType(f"collmm_program_{path.stem}")
    module.__file__ = str(path.absolute())
    # Dataclasses and pickle look their module up by name.
    sys.modules[module.__name__] = module
    with _importable(path):
        exec(code, module.__dict__)
    return module


@contextlib.contextmanager
def _importable(path: pathlib.Path) -> Iterator[None]:
    folder = str(path.absolute().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


# --- checking what it defines ---


def _mesh(path: pathlib.Path, module: types.ModuleType) -> dict[str, int]:
    if not hasattr(module, "MESH"):
        raise ProgramError(f"{path} defines no MESH; give axes and sizes: {_MESH_EXAMPLE}")
    problem = _mesh_problem(module.MESH)
    if problem is not None:
        raise ProgramError(f"{path}: {problem}; give axes and sizes: {_MESH_EXAMPLE}")
    return {name: int(size) for name, size in module.MESH.items()}


def _mesh_problem(mesh: Any) -> str | None:
    if not isinstance(mesh, Mapping) or not mesh:
        return f"MESH is {describe(mesh)}, not a dict of axis sizes"
    for name, size in mesh.items():
        if not isinstance(name, str) or not name:
            return f"MESH has the axis {name!r}, which is not a name"
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            return f"MESH[{name!r}] is {size!r}, not a positive whole number"
    return None


def _build(path: pathlib.Path, module: types.ModuleType) -> Callable:
    made = getattr(module, "build", None)
    if made is None:
        raise ProgramError(f"{path} defines no build; give def build(mesh) that returns (fn, args)")
    if not callable(made):
        raise ProgramError(f"{path}: build is {describe(made)}; give def build(mesh)")
    signature = inspect.signature(made)
    try:
        signature.bind(None)
    except TypeError:
        raise ProgramError(
            f"{path}: build{signature} cannot be called as build(mesh); give it one argument"
        ) from None
    return made


def _axis_types(path: pathlib.Path, module: types.ModuleType) -> str:
    kind = getattr(module, "AXIS_TYPES", "auto")
    if not isinstance(kind, str) or kind not in AXIS_TYPES:
        raise ProgramError(f"{path}: AXIS_TYPES={kind!r}; use one of {', '.join(AXIS_TYPES)}")
    return kind


def _context_mesh(path: pathlib.Path, module: types.ModuleType) -> bool:
    value = getattr(module, "CONTEXT_MESH", False)
    if not isinstance(value, bool):
        raise ProgramError(f"{path}: CONTEXT_MESH={value!r}; use True or False")
    return value


def _jit_kwargs(path: pathlib.Path, module: types.ModuleType) -> dict[str, Any]:
    kwargs = getattr(module, "JIT_KWARGS", {})
    if not isinstance(kwargs, Mapping):
        raise ProgramError(f"{path}: JIT_KWARGS is {describe(kwargs)}; give a dict for jax.jit")
    allowed = tuple(inspect.signature(jax.jit).parameters)[1:]
    for name in kwargs:
        if name not in allowed:
            raise ProgramError(f"{path}: JIT_KWARGS has {name!r}; valid: {', '.join(allowed)}")
    return dict(kwargs)


def _orders(
    path: pathlib.Path, module: types.ModuleType, count: int
) -> tuple[tuple[int, ...] | None, ...]:
    orders = getattr(module, "DEVICE_ORDERS", None)
    if orders is None:
        orders = [getattr(module, "DEVICE_ORDER", None)]
    if not isinstance(orders, (tuple, list)) or not orders:
        raise ProgramError(f"{path}: DEVICE_ORDERS is {describe(orders)}; give a list of orders")
    for order in orders:
        if order is not None and not _is_order(order, count):
            raise ProgramError(
                f"{path}: device order {order!r} must hold each of 0 to {count - 1} once"
            )
    return tuple(None if order is None else tuple(order) for order in orders)


def _is_order(order: Any, count: int) -> bool:
    if not isinstance(order, (tuple, list)):
        return False
    return all(type(i) is int for i in order) and sorted(order) == list(range(count))
