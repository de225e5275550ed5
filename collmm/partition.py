"""Partition: ask Shardy how the program is sharded, and read off the collectives round each dot.

No sharding propagation happens here. The numbered program is lowered to StableHLO with the
arguments' shardings; Shardy's own passes propagate them, insert the reshards that the einsums
need and turn those into collectives; then each numbered ``stablehlo.dot_general`` is looked up::

    %0 = sdy.all_gather [{}, {"model"}, {}] %arg0      # -> Collective(all-gather, lhs, dim 1)
    %1 = stablehlo.dot_general %0, %arg1 {collmm_site = "0"}
    %2 = sdy.all_reduce {"data"} %1                    # with the slice: a reduce-scatter
    %3 = sdy.all_slice [{"data"}, {}, {}] %2
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager

from collmm import _jax
from collmm.capture import SITE_KEY, Captured
from collmm.errors import AnalysisError, Reason
from collmm.sites import Spec
from collmm.subaxes import is_part, join_axes, on_split, read_axes, split_axes
from collmm.sunk import MOST_EQUATIONS, STABLEHLO

# In the order in which the compiler itself runs them.
_PASSES = (
    "sdy-propagation-pipeline",
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
)
_EXCHANGE = re.compile(r"\{([^{}]*)\}: ?(\d+) ?-> ?(\d+)")
_SITE = re.compile(rf'{SITE_KEY} = "(\d+)"')
# An sdy collective's own attribute that names, per dimension, the axes it moves.
_MOVED_AXES = {
    "sdy.all_gather": "gathering_axes",
    "sdy.all_slice": "slicing_axes",
    "sdy.reduce_scatter": "reduce_scatter_axes",
}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An all-to-all: ``axes`` move from dimension ``source`` to dimension ``target``."""

    operand: int | None
    axes: tuple[str, ...]
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class DotSharding:
    """What Shardy decided for one dot, as read off the module.

    Attributes:
      lhs, rhs: shardings of the operands as the dot takes them.
      out: sharding of the dot's result, before any reduction.
      gathered: axes gathered per dimension of lhs and of rhs, just before the dot.
      early: of gathers that elementwise work separates from the dot, the bytes of an element of
        all that is gathered; 0 where the gather stands just before the dot.
      reduced: axes over which the result is summed.
      scattered: axes by which the sum is then sliced, per dimension of the result.
      shared: the sum is used in another way as well.
      exchanged: all-to-alls next to the dot.
      misfit: shards on either side of a collective are no parts of each other: the value is
        gathered whole first, and then sliced.
      others: other collectives next to the dot: (operand or None, HLO kind).
      axis_sizes: the mesh, in order.
      refusal: a reason why the shardings could not be read.
      detail: more about it.
    """

    lhs: Spec = ()
    rhs: Spec = ()
    out: Spec = ()
    gathered: tuple[Spec, Spec] = ((), ())
    early: tuple[int, int] = (0, 0)
    reduced: tuple[str, ...] = ()
    scattered: Spec = ()
    shared: bool = False
    exchanged: tuple[Exchange, ...] = ()
    misfit: bool = False
    others: tuple[tuple[int | None, str], ...] = ()
    axis_sizes: tuple[tuple[str, int], ...] = ()
    refusal: Reason | None = None
    detail: str = ""


def partition(
    captured: Captured, in_shardings: Sequence[Any], out_shardings: Sequence[Any]
) -> tuple[dict[int, DotSharding], list[Spec | None]]:
    """Return what Shardy decided for each numbered dot that reached StableHLO, and the results.

    Args:
      captured: the numbered program.
      in_shardings: a ``jax.sharding.Sharding`` or None (not specified) per flat argument.
      out_shardings: the same per flat result.

    Returns:
      Shardings by the dot's number, and the sharding of every result of the program.
    """
    module = _partitioned(captured, in_shardings, out_shardings)
    wanted = {dot.index for dot in captured.dots if dot.refusal is None}
    return _read_module(module, wanted), _result_specs(module)


def tagged_shardings(
    captured: Captured, in_shardings: Sequence[Any], out_shardings: Sequence[Any], key: str
) -> dict[int, tuple[Spec, tuple[tuple[str, int], ...]]]:
    """Return what Shardy decided for the operands of equations that carry ``key`` as metadata.

    By the number that stands there: the sharding, and the axes of its mesh and their sizes. What
    cannot be said is left out.
    """
    module = _partitioned(captured, in_shardings, out_shardings)
    meshes = read_meshes(module)
    tag = re.compile(rf'{key} = "(\d+)"')
    found = {}

    def visit(op: Any) -> Any:
        attributes = op.operation.attributes
        if "mhlo.frontend_attributes" in attributes:
            number = tag.search(str(attributes["mhlo.frontend_attributes"]))
            if number:
                reader = _Reader(meshes)
                with contextlib.suppress(AnalysisError):
                    found[int(number[1])] = reader.spec(op.operation.operands[0]), reader.axis_sizes
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def _partitioned(
    captured: Captured, in_shardings: Sequence[Any], out_shardings: Sequence[Any]
) -> Any:
    module = _lower(captured, in_shardings, out_shardings)
    with module.context:
        for pipeline in _PASSES:
            manager = passmanager.PassManager.parse(f"builtin.module({pipeline})")
            # The verifier takes two thirds of the time, and jax made the module.
            manager.enable_verifier(False)
            manager.run(module.operation)
    return module


def _lower(captured: Captured, in_shardings: Sequence[Any], out_shardings: Sequence[Any]) -> Any:
    closed = captured.closed
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
        for aval, sharding in zip(closed.in_avals, in_shardings, strict=True)
    ]
    traced = _jax.traced_program(closed, args, tuple(out_shardings))
    if _jax.names_devices(captured.closed, [*in_shardings, *out_shardings]):
        lowered = traced.lower()
    else:
        # Inside another trace the mesh may be known by its axes alone.
        lowered = traced.lower(lowering_platforms=(jax.default_backend(),))
    return _on_whole_meshes(lowered.compiler_ir("stablehlo"))


def _on_whole_meshes(module: Any) -> Any:
    """Return ``module`` with every split mesh as the mesh it was, and its axes as parts of axes."""
    split = [a for a in read_meshes(module).values() if any(is_part(axis) for axis, _ in a)]
    if not split:
        return module
    text = module.operation.get_asm(assume_verified=True)
    with module.context:
        return ir.Module.parse(join_axes(text, split))


def _read_module(module: Any, wanted: set[int]) -> dict[int, DotSharding]:
    meshes = read_meshes(module)
    dots: list[tuple[int, Any]] = []

    def visit(op: Any) -> Any:
        op = op.operation
        if op.name == "stablehlo.dot_general" and "mhlo.frontend_attributes" in op.attributes:
            site = _SITE.search(str(op.attributes["mhlo.frontend_attributes"]))
            if site and int(site[1]) in wanted:
                dots.append((int(site[1]), op))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    found: dict[int, DotSharding] = {}
    for number, op in dots:
        try:
            found[number] = _read_dot(op, meshes)
        except _OneDevice:
            detail = "an operand lies on one device, as a callback leaves it"
            found[number] = DotSharding(refusal=Reason.UNKNOWN_MESH, detail=detail)
        except AnalysisError as e:
            found[number] = DotSharding(refusal=Reason.ANALYSIS_FAILED, detail=str(e))
    return found


def _result_specs(module: Any) -> list[Spec | None]:
    main: Any = next(
        op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
        and ir.StringAttr(op.operation.attributes["sym_name"]).value == "main"
    )
    kinds = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results
    attributes = _attribute(main, "res_attrs")
    specs: list[Spec | None] = []
    for i, kind in enumerate(kinds):
        text = None
        if attributes is not None and "sdy.sharding" in attributes[i]:
            text = str(attributes[i]["sdy.sharding"])
        spec = read_spec(text, ir.RankedTensorType(kind).rank)
        named = not any(is_part(axis) for axes in spec for axis in axes)
        specs.append(spec if named else None)
    return specs


def _attribute(op: Any, name: str) -> Any:
    # The attribute map of jax 0.10 has no get().
    return op.attributes[name] if name in op.attributes else None  # noqa: SIM401


def read_meshes(module: Any) -> dict[str, tuple[tuple[str, int], ...]]:
    """Return the meshes of a module: axes and their sizes by symbol name."""
    return {
        ir.StringAttr(op.operation.attributes["sym_name"]).value: _read_mesh(
            str(op.operation.attributes["mesh"])
        )
        for op in module.body.operations
        if op.operation.name == "sdy.mesh"
    }


def read_spec(attribute: str | None, ndim: int) -> Spec:
    """Return the mesh axes per dimension that the text of an sdy sharding names."""
    if attribute is None:
        return ((),) * ndim
    # <@mesh, [{"x"}, {}], replicated={...}>: only the bracket speaks of dimensions.
    body = attribute[attribute.index("[") :]
    spec = read_axes(body[: body.index("]") + 1])
    if len(spec) != ndim:
        raise AnalysisError(f"sharding {attribute} does not fit a value of rank {ndim}")
    return spec


def _read_dot(op: Any, meshes: dict[str, tuple[tuple[str, int], ...]]) -> DotSharding:
    reader = _Reader(meshes)
    gathered: list[Spec] = []
    others: list[tuple[int | None, str]] = []
    exchanged: list[Exchange] = []
    specs: list[Spec] = []
    early: list[int] = []
    misfit = _gathered_first(op.results[0])
    for i, operand in enumerate(op.operands):
        specs.append(reader.spec(operand))
        producer = _producer(operand)
        if producer is not None and producer.name == "sdy.all_slice":
            source = _producer(producer.operands[0])
            misfit |= source is not None and source.name == "sdy.all_gather"
        moved: Spec = ((),) * len(specs[-1])
        sunk = _early_gathers(operand)
        early.append(sum(_bytes_of(op.results[0]) for op in sunk))
        if producer is not None and producer.name == "sdy.all_gather":
            moved = reader.moved(producer)
        elif sunk:
            moved = reader.moved(sunk[0])
        elif producer is not None and producer.name == "sdy.all_to_all":
            _note_exchange(producer, i, exchanged, others)
        elif producer is not None and producer.name == "sdy.collective_permute":
            others.append((i, "collective-permute"))
        gathered.append(moved)
    out = reader.spec(op.results[0])
    users = _users(op.results[0])
    if len(users) == 1 and users[0].name == "sdy.all_to_all":
        _note_exchange(users[0], None, exchanged, others)
    reduced, scattered, shared = _read_result(op.results[0], reader, len(out), others)
    return _on_split_mesh(
        DotSharding(
            lhs=specs[0],
            rhs=specs[1],
            out=out,
            gathered=(gathered[0], gathered[1]),
            early=(early[0], early[1]),
            reduced=reduced,
            scattered=scattered,
            shared=shared,
            exchanged=tuple(exchanged),
            misfit=misfit,
            others=tuple(others),
            axis_sizes=reader.axis_sizes,
        )
    )


def _on_split_mesh(dot: DotSharding) -> DotSharding:
    """Return ``dot`` with its mesh split where a sharding names a part of an axis."""
    specs = (dot.lhs, dot.rhs, dot.out, *dot.gathered, dot.scattered)
    named = [axes for spec in specs for axes in spec]
    named += [dot.reduced, *(e.axes for e in dot.exchanged)]
    if not any(is_part(axis) for axes in named for axis in axes):
        return dot
    sizes = split_axes(dot.axis_sizes, [axis for axes in named for axis in axes])
    if sizes is None:
        return DotSharding(refusal=Reason.SUB_AXIS, detail=_parts_of(named))

    def split(spec: Spec) -> Spec:
        return tuple(on_split(axes, sizes) for axes in spec)

    return dataclasses.replace(
        dot,
        lhs=split(dot.lhs),
        rhs=split(dot.rhs),
        out=split(dot.out),
        gathered=(split(dot.gathered[0]), split(dot.gathered[1])),
        reduced=on_split(dot.reduced, sizes),
        scattered=split(dot.scattered),
        exchanged=tuple(
            dataclasses.replace(e, axes=on_split(e.axes, sizes)) for e in dot.exchanged
        ),
        axis_sizes=sizes,
    )


def _parts_of(named: Sequence[tuple[str, ...]]) -> str:
    parts = sorted({axis for axes in named for axis in axes if is_part(axis)})
    return f"parts that overlap: {', '.join(parts)}"


def _read_result(
    result: Any, reader: _Reader, ndim: int, others: list[tuple[int | None, str]]
) -> tuple[tuple[str, ...], Spec, bool]:
    """Return (reduced axes, axes scattered per dimension, whether the sum is shared)."""
    nothing: Spec = ((),) * ndim
    users = _users(result)
    for user in users:
        several = len(users) > 1 and user.name == "sdy.all_to_all"
        if several or user.name in ("sdy.collective_permute", "sdy.all_gather"):
            others.append((None, user.name[len("sdy.") :].replace("_", "-")))
    if len(users) != 1:
        return (), nothing, False
    (user,) = users
    if user.name == "sdy.reduce_scatter":
        moved = reader.moved(user)
        return tuple(a for axes in moved for a in axes), moved, False
    if user.name != "sdy.all_reduce":
        return (), nothing, False
    (reduced,) = read_axes(str(user.attributes["reduction_axes"])) or ((),)
    slices = _users(user.results[0])
    if len(slices) == 1 and slices[0].name == "sdy.all_slice":
        return reduced, reader.moved(slices[0]), False
    return reduced, nothing, any(s.name == "sdy.all_slice" for s in slices)


def _early_gathers(value: Any) -> list[Any]:
    """Return the gathers that only elementwise work separates from ``value``, one per operand.

    None where one makes ``value`` itself, or where they do not all gather in one way.
    """
    shape = ir.RankedTensorType(value.type).shape
    found: dict[Any, Any] = {}
    todo, left = [value], MOST_EQUATIONS
    while todo and left:
        value = todo.pop()
        op = _producer(value)
        if op is None or ir.RankedTensorType(value.type).shape != shape:
            continue
        if op.name == "sdy.all_gather":
            found[op.operands[0]] = op
        elif op.name in STABLEHLO:
            left -= 1
            todo += list(op.operands)
    ways = {str(op.attributes[_MOVED_AXES[op.name]]) for op in found.values()}
    return list(found.values()) if len(ways) == 1 and left < MOST_EQUATIONS else []


def _bytes_of(value: Any) -> int:
    """Return the bytes of an element, at least one."""
    kind: Any = ir.RankedTensorType(value.type).element_type
    if isinstance(kind, ir.ComplexType):
        part: Any = kind.element_type
        return 2 * part.width // 8
    return max(1, kind.width // 8)


def _gathered_first(result: Any) -> bool:
    """Whether a result, reduced or not, is gathered before it is sliced."""
    for _ in range(2):
        users = _users(result)
        if len(users) != 1:
            return False
        result = users[0].results[0] if users[0].results else None
        if users[0].name == "sdy.all_gather":
            return any(user.name == "sdy.all_slice" for user in _users(result))
        if users[0].name != "sdy.all_reduce":
            return False
    return False


def _note_exchange(
    op: Any,
    operand: int | None,
    exchanged: list[Exchange],
    others: list[tuple[int | None, str]],
) -> None:
    moves = _EXCHANGE.findall(str(op.attributes["params"]))
    axes = read_axes("{" + moves[0][0] + "}")[0] if len(moves) == 1 else ()
    if axes:
        exchanged.append(Exchange(operand, axes, int(moves[0][1]), int(moves[0][2])))
    else:
        others.append((operand, "all-to-all"))


class _OneDevice(AnalysisError):
    """A value is sharded over no mesh: it lies on one device."""


class _Reader:
    """Reads shardings of MLIR values; remembers the mesh they are on."""

    def __init__(self, meshes: dict[str, tuple[tuple[str, int], ...]]) -> None:
        self._meshes = meshes
        self.axis_sizes: tuple[tuple[str, int], ...] = ()

    def moved(self, op: Any) -> Spec:
        return read_axes(str(op.attributes[_MOVED_AXES[op.name]]))

    def spec(self, value: Any) -> Spec:
        """Return the sharding of ``value``; a value without one is whole on every device."""
        ndim = ir.RankedTensorType(value.type).rank
        attribute = _sharding_attribute(value)
        if attribute is not None:
            self._remember_mesh(attribute)
        return read_spec(attribute, ndim)

    def _remember_mesh(self, attribute: str) -> None:
        name = re.match(r"(?:#sdy\.sharding)?<@([\w.]+|\"[^\"]+\")", attribute)
        if name is None:
            axis_sizes = _read_mesh(attribute)
        else:
            axis_sizes = self._meshes.get(name[1].strip('"'), ())
            if name[1].strip('"').startswith("maximal_mesh"):
                raise _OneDevice(attribute)
        if axis_sizes and self.axis_sizes and axis_sizes != self.axis_sizes:
            raise AnalysisError(f"one einsum on two meshes: {self.axis_sizes} and {axis_sizes}")
        self.axis_sizes = self.axis_sizes or axis_sizes


def _sharding_attribute(value: Any) -> str | None:
    """Return the text of the sdy sharding of ``value``, or None."""
    if isinstance(value, ir.BlockArgument):
        parent = value.owner.owner.operation
        index = value.arg_number
        if parent.name == "func.func":
            every = _attribute(parent, "arg_attrs")
            if every is None:
                return None
            attributes = every[index]
            if "sdy.sharding" not in attributes:
                return None
            return str(attributes["sdy.sharding"])
        if parent.name == "stablehlo.while":
            return _per_value(parent, index)
        raise AnalysisError(f"an operand is an argument of the region of {parent.name}")
    op = value.owner.operation
    if "out_sharding" in op.attributes:
        return str(op.attributes["out_sharding"])
    return _per_value(op, value.result_number)


def _per_value(op: Any, index: int) -> str | None:
    if "sdy.sharding" not in op.attributes:
        return None
    text = str(op.attributes["sdy.sharding"])
    if "sharding_per_value" not in text:
        return text
    # #sdy.sharding_per_value<[<@mesh, [{"x"}, {}]>, <@mesh, [{}]>]>
    inner = text[text.index("<[") + 2 : text.rindex("]>")]
    return _split_shardings(inner)[index]


def _split_shardings(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c == "<":
            if depth == 0:
                start = i
            depth += 1
        elif c == ">":
            depth -= 1
            if depth == 0:
                parts.append(text[start : i + 1])
    return parts


def _read_mesh(text: str) -> tuple[tuple[str, int], ...]:
    return tuple((name, int(size)) for name, size in re.findall(r'"([^"]+)"=(\d+)', text))


def _producer(value: Any) -> Any:
    """Return the operation that makes ``value``, or None for a block argument."""
    if isinstance(value, ir.BlockArgument):
        return None
    return value.owner.operation


def _users(value: Any) -> list[Any]:
    return [use.owner.operation for use in value.uses]
