"""How values are sharded in a module that is still being written.

While an enclosing program is lowered, what stands before our call is in the MLIR module already,
arguments' shardings included. A copy that ends at our operands is given to Shardy, which says how
it would shard them. What comes after the call is not known at that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import func
from jax.sharding import NamedSharding, PartitionSpec

from collmm import _jax
from collmm.partition import read_meshes, read_spec
from collmm.subaxes import is_part, joined, whole_axes


def operand_shardings(
    ctx: Any, operands: Sequence[Any], avals: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Return the sharding of each operand of the equation being lowered, and the mesh.

    None stands for what cannot be told: inside the body of a loop or a nested function, on one
    device, or with several meshes in one program.
    """
    nothing = [None] * len(operands)
    if any(_jax.typed_sharding(aval) is not None for aval in avals):
        return [aval.sharding for aval in avals], avals[0].sharding.mesh
    block = ir.InsertionPoint.current.block
    if block.owner.operation.name != "func.func":
        return nothing, None
    module = _jax.lowering_module(ctx)
    try:
        copy = ir.Module.parse(_module_ending_at(module, block, operands), context=module.context)
    except ir.MLIRError:
        # Inside a nested function: those that call it are not finished either.
        return nothing, None
    with module.context:
        for pipeline in ("sdy-lift-inlined-meshes", "sdy-propagation-pipeline"):
            passmanager.PassManager.parse(f"builtin.module({pipeline})").run(copy.operation)
    # A ring on a part of an axis, lowered before, has left its split mesh behind.
    meshes = list(dict.fromkeys(whole_axes(axes) for axes in read_meshes(copy).values() if axes))
    if len(meshes) != 1:
        return nothing, None
    mesh = _abstract_mesh(meshes[0])
    name = ir.StringAttr(block.owner.operation.attributes["sym_name"]).value
    found = []
    for attribute, operand, aval in zip(_results(copy, name), operands, avals, strict=True):
        # A random key has one dimension more in MLIR than in its type.
        rank = ir.RankedTensorType(operand.type).rank
        found.append(_sharding(attribute, mesh, rank, aval.ndim))
    return found, mesh


def _abstract_mesh(axes: tuple[tuple[str, int], ...]) -> Any:
    """Return the mesh by its axes alone: which devices it has is settled after lowering."""
    names, sizes = zip(*axes, strict=True)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.AbstractMesh(sizes, names, axis_types=auto)


def _module_ending_at(module: Any, block: Any, operands: Sequence[Any]) -> str:
    """Return the module's text with the current function cut off and returning ``operands``."""
    function = block.owner.operation
    old = {
        k: function.attributes[k]
        for k in ("function_type", "res_attrs")
        if k in function.attributes
    }
    inputs = ir.FunctionType(ir.TypeAttr(old["function_type"]).value).inputs
    with module.context, ir.Location.unknown():
        end = func.ReturnOp(list(operands), ip=ir.InsertionPoint(block))
        kind = ir.FunctionType.get(inputs, [v.type for v in operands])
        function.attributes["function_type"] = ir.TypeAttr.get(kind)
        if "res_attrs" in old:
            del function.attributes["res_attrs"]
        try:
            return module.operation.get_asm(assume_verified=True)
        finally:
            end.operation.erase()
            for key, value in old.items():
                function.attributes[key] = value


def _results(module: Any, name: str) -> list[str | None]:
    for op in module.body.operations:
        op = op.operation
        if op.name != "func.func" or ir.StringAttr(op.attributes["sym_name"]).value != name:
            continue
        count = len(ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value).results)
        if "res_attrs" not in op.attributes:
            return [None] * count
        attributes = op.attributes["res_attrs"]
        return [
            str(a["sdy.sharding"]) if "sdy.sharding" in a else None
            for a in (attributes[i] for i in range(count))
        ]
    raise AssertionError(f"function {name} vanished from its own module")


def _sharding(attribute: str | None, mesh: Any, rank: int, ndim: int) -> Any:
    sizes = dict(mesh.shape)
    spec = [joined(axes, sizes) for axes in read_spec(attribute, rank)[:ndim]]
    if any(is_part(axis) for axes in spec for axis in axes):
        return None  # no sharding of jax names a part of an axis
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
