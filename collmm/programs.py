"""Programs: what a program file builds on the devices of a target, ready to be looked at.

``program_file`` has the protocol of the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from collmm import _jax
from collmm.api import OverlappedFunction, overlap_collectives
from collmm.cost.hardware import profile_rows
from collmm.errors import ProgramError, TargetError
from collmm.options import Options
from collmm.program_file import AXIS_TYPES, ProgramFile, describe, literal_mesh, load
from collmm.targets import Target, apply_environment, parse_target

# XLA's ids of CPU devices give 11 bits to the device and the others to the process.
MOST_CPU_DEVICES = 2048


@dataclasses.dataclass(frozen=True)
class Program:
    """A program on a mesh, ready to be planned, lowered or called.

    Attributes:
      file: the file it is from.
      target: what it is compiled for.
      mesh: where it runs.
      fn: the function as ``build`` returned it; a plain one under ``jax.jit``.
      args: its positional arguments.
    """

    file: ProgramFile
    target: Target
    mesh: jax.sharding.Mesh
    fn: Any
    args: tuple

    def context(self) -> contextlib.AbstractContextManager:
        """Return the context to trace and call the function in."""
        return self.file.context(self.mesh)

    def overlapped(
        self, policy: str | None = None, chip: str | None = None, **others: Any
    ) -> OverlappedFunction:
        """Return the function decorated.

        What is None is taken from the options it was decorated with already; the chip is then that
        of the target, where that has one and no profile says another. ``others`` are further
        ``Options``.

        Raises OptionError for a value that is not allowed.
        """
        options = self.fn.options if isinstance(self.fn, OverlappedFunction) else Options()
        changes = {k: v for k, v in {"policy": policy, **others}.items() if v is not None}
        if chip is None:
            chip = self._chip(changes.get("profile", options.profile))
        if chip is not None:
            changes["chip"] = chip
        return overlap_collectives(self.fn, dataclasses.replace(options, **changes))

    def _chip(self, profile: str | os.PathLike[str] | None) -> str | None:
        """The row of the target; None where the one row of a profile takes its place."""
        row = self.target.hardware
        if row is None:
            return None
        measured = () if profile is None else profile_rows(profile)
        return None if len(measured) == 1 and row.name not in measured else row.name


def open_program(path: str | os.PathLike, target: str | None = None) -> Program:
    """Load a program file and build its program on the devices of ``target``.

    Without a target those are simulated CPU devices, as many as ``MESH`` asks for. The environment
    the target needs is set first; jax must not have looked for devices before, or must have found
    enough of them. Of several device orders the first is taken.

    Raises ProgramError for a file that does not follow the protocol and TargetError for a target
    that is unknown or cannot hold the mesh. What the file's own code raises is not caught.
    """
    found = None if target is None else parse_target(target)
    shape = literal_mesh(path)
    # The file may ask jax for devices as soon as it runs; how many there are is fixed by then.
    if found is None and shape is not None:
        found = parse_target(f"cpu:{math.prod(shape.values())}")
    if found is not None:
        _prepare(found)
    file = load(path)
    if found is None:
        found = parse_target(f"cpu:{file.device_count}")
        _prepare(found)
    return build(file, found, make_mesh(file, found, file.device_orders[0]))


def _prepare(target: Target) -> None:
    """Set the environment for ``target``; TargetError when the devices cannot be simulated."""
    if target.kind == "cpu" and target.device_count > MOST_CPU_DEVICES:
        raise TargetError(
            f"{target.name}: one process simulates at most {MOST_CPU_DEVICES} CPU devices; "
            "name a tpu or gpu target, or make the mesh smaller"
        )
    apply_environment(target.name)


def make_mesh(
    file: ProgramFile, target: Target, order: tuple[int, ...] | None = None
) -> jax.sharding.Mesh:
    """Return the mesh of a program on ``target``'s devices, in ``order`` where one is given.

    Raises TargetError when the target cannot hold it.
    """
    types = (AXIS_TYPES[file.axis_types],) * len(file.mesh_shape)
    mesh = target.mesh(file.mesh_shape, types)
    if order is None:
        return mesh
    devices = np.array(target.devices())[list(order)].reshape(mesh.devices.shape)
    return jax.sharding.Mesh(devices, mesh.axis_names, axis_types=types)


def build(file: ProgramFile, target: Target, mesh: jax.sharding.Mesh) -> Program:
    """Call ``build(mesh)`` and check what it returns.

    Raises ProgramError when that is not ``(fn, args)``, or when it makes arrays on a target whose
    devices are not attached.
    """
    with file.context(mesh), file.importable():
        try:
            made = file.build(mesh)
        except jax.errors.JaxRuntimeError as e:
            if "compile-only" not in str(e):
                raise
            raise ProgramError(
                f"{file.path}: build puts arrays on devices and {target.name} has none attached; "
                "return jax.ShapeDtypeStruct(shape, dtype, sharding=...) instead"
            ) from e
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not callable(made[0]):
        raise ProgramError(f"{file.path}: build returned {describe(made)}; return (fn, args)")
    fn, args = made
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return Program(file, target, mesh, _jitted(file, fn, args), args)


def _jitted(file: ProgramFile, fn: Callable, args: tuple) -> Any:
    """Return ``fn``, under ``jax.jit`` unless it is already."""
    if isinstance(fn, OverlappedFunction) or _jax.is_jitted(fn):
        if file.jit_kwargs:
            raise ProgramError(
                f"{file.path}: JIT_KWARGS is for a plain function and build returned a jitted "
                "one; give them to its own jax.jit"
            )
        return fn
    if not {"static_argnums", "static_argnames"} & file.jit_kwargs.keys():
        for leaf in jax.tree.leaves(args):
            if not _is_array(leaf):
                raise ProgramError(
                    f"{file.path}: the args of build hold {describe(leaf)}; give arrays or "
                    'jax.ShapeDtypeStructs, or name it in JIT_KWARGS = {"static_argnums": ...}'
                )
    return jax.jit(fn, **file.jit_kwargs)


def _is_array(leaf: Any) -> bool:
    kinds = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)
    return isinstance(leaf, kinds)
