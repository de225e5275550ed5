"""The only file that touches unstable JAX internals.

Everything here was checked on jax 0.10.2 and jax 0.12.0. The rest of the package reaches jaxprs,
the MLIR passes and the C++ dispatch path through these names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax.experimental.xla_metadata import set_xla_metadata

Jaxpr = _core.Jaxpr
# jax 0.12 has one class for jaxprs with and without constants.
ClosedJaxpr = getattr(_core, "ClosedJaxpr", _core.Jaxpr)
JaxprEqn = _core.JaxprEqn
Var = _core.Var
Literal = _core.Literal
Atom = Any

# --- jaxprs ---


def fresh_like(var: Var) -> Var:
    """Return a new variable of the type of ``var``; a dropped variable stays dropped."""
    return type(var)(var.aval)


def is_call(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a nested ``jax.jit``."""
    return eqn.primitive.name in ("jit", "pjit") and "jaxpr" in eqn.params


def is_plain_call(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a nested ``jax.jit`` that says nothing beyond its function."""
    if not is_call(eqn):
        return False
    p = eqn.params
    return (
        not p["jaxpr"].consts
        and not p["jaxpr"].effects
        and all(is_unspecified(s) for s in (*p["in_shardings"], *p["out_shardings"]))
        and all(layout is None for layout in (*p["in_layouts"], *p["out_layouts"]))
        and not any(p["donated_invars"])
        and not p["compiler_options_kvs"]
    )


def is_unspecified(sharding: Any) -> bool:
    """Whether ``sharding`` is jax's marker for "not specified"."""
    return type(sharding).__name__ == "UnspecifiedValue"


def jaxprs_in(eqn: JaxprEqn) -> Iterator[tuple[str, int | None, Jaxpr | ClosedJaxpr]]:
    """Yield (parameter, index or None, jaxpr) for each jaxpr an equation carries, in order."""
    for key, value in eqn.params.items():
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            yield key, None, value
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                if isinstance(item, (Jaxpr, ClosedJaxpr)):
                    yield key, i, item


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr itself, without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def with_jaxprs(eqn: JaxprEqn, new: dict[tuple[str, int | None], Jaxpr]) -> JaxprEqn:
    """Return ``eqn`` with some of its jaxprs replaced; constants are kept."""
    params = dict(eqn.params)
    for (key, index), jaxpr in new.items():
        value = params[key] if index is None else params[key][index]
        value = value.replace(jaxpr=jaxpr) if isinstance(value, ClosedJaxpr) else jaxpr
        if index is None:
            params[key] = value
        else:
            items = list(params[key])
            items[index] = value
            params[key] = type(eqn.params[key])(items)
    return eqn.replace(params=params)


def under_scope(source: Any, outer: Any, name: str) -> Any:
    """Return ``source`` with the name stack of an inlined call put in front."""
    stack = outer.name_stack.extend(f"jit({name})") + source.name_stack
    return source.replace(name_stack=stack)


def user_frame(eqn: JaxprEqn) -> tuple[str, int, str]:
    """Return (file, line, function) of the user's code that made ``eqn``."""
    frame = _source_info.user_frame(eqn.source_info.traceback)
    if frame is None:
        return "?", 0, ""
    return frame.file_name, frame.start_line, frame.function_name


def eqn_metadata(eqn: JaxprEqn) -> dict[str, Any]:
    """Return the XLA metadata that is attached to ``eqn``."""
    return dict(eqn.ctx.xla_metadata or {})


def with_metadata(eqn: JaxprEqn, **metadata: str) -> JaxprEqn:
    """Return ``eqn`` with XLA metadata added; it lowers to MLIR frontend attributes."""
    with eqn.ctx.manager, set_xla_metadata(**metadata):
        ctx = _core.JaxprEqnContext()
    return eqn.replace(ctx=ctx)


def primitive_eqn(
    like: JaxprEqn, primitive: Any, invars: Sequence[Atom], outvars: Sequence[Var], params: dict
) -> JaxprEqn:
    """Return an equation of another primitive at the place, and in the context, of ``like``."""
    return like.replace(
        primitive=primitive, invars=list(invars), outvars=list(outvars), params=params
    )


def drop_dead(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return ``closed`` without the equations whose results nobody reads."""
    jaxpr, _ = _pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


check_jaxpr = _core.check_jaxpr
jaxpr_as_fun = _core.jaxpr_as_fun
eval_jaxpr = _core.eval_jaxpr


# --- primitives ---


def define_primitive(
    name: str, *, impl: Callable, abstract: Callable, jvp: Callable, transpose: Callable,
    batch: Callable,
) -> Any:
    """Make a primitive with several results and all the rules that jax's transforms ask for.

    Args:
      name: shown in printed jaxprs.
      impl: ``(*operands, **params) -> results`` in jax operations; it is also the lowering.
      abstract: ``(*avals, **params) -> avals``.
      jvp: ``(primals, tangents, **params)``; ``ad.Zero`` tangents may come and go.
      transpose: ``(cotangents, *operands, **params)``; linear operands are ``UndefinedPrimal``.
      batch: ``(axis_size, spmd_axis, operands, dims, **params) -> (results, dims)``.
    """
    primitive = _core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(_dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract)

    def fancy_batch(axis_data, operands, dims, **params):
        spmd = axis_data.spmd_name
        spmd = () if spmd is None else spmd if isinstance(spmd, tuple) else (spmd,)
        return batch(axis_data.size, spmd, operands, dims, **params)

    _ad.primitive_jvps[primitive] = jvp
    _ad.primitive_transposes[primitive] = transpose
    _batching.fancy_primitive_batchers[primitive] = fancy_batch
    _mlir.register_lowering(primitive, _mlir.lower_fun(impl, multiple_results=True))
    return primitive


Zero = _ad.Zero
is_undefined_primal = _ad.is_undefined_primal
add_tangents = _ad.add_tangents
not_mapped = None  # how both versions spell "has no batch dimension"


def zero_like(primal: Any) -> Any:
    """Return the symbolic zero tangent of ``primal``."""
    return Zero(_core.get_aval(primal).to_tangent_aval())


def to_front(x: Any, dim: Any, size: int) -> Any:
    """Return ``x`` with its batch dimension first; broadcast when it has none."""
    return _batching.bdim_at_front(x, dim, size)


def aval_like(avals: Sequence[Any], shape: tuple[int, ...], dtype: Any, spec: Any) -> Any:
    """Return the type of a result: typed with a sharding where the operands' types have one."""
    for aval in avals:
        mesh = aval.sharding.mesh
        if not mesh.empty and mesh._any_axis_explicit:
            explicit = set(mesh.explicit_axes)
            parts = [tuple(a for a in axes if a in explicit) for axes in spec]
            p = jax.sharding.PartitionSpec(
                *(None if not q else q[0] if len(q) == 1 else q for q in parts)
            )
            return _core.ShapedArray(shape, dtype, sharding=jax.NamedSharding(mesh, p))
    return _core.ShapedArray(shape, dtype)


def auto_mesh(mesh: Any) -> Any:
    """Return ``mesh`` with every axis of type Auto."""
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, jax.sharding.Mesh):
        return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)


def shard_map_all(body: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
    """Return ``body`` under a ``shard_map`` that is manual over every axis of ``mesh``.

    The caller's mesh context and explicit axis types are set aside inside: the operands' shardings
    are those of ``in_specs`` already, or are brought there by the compiler.
    """
    mesh = auto_mesh(mesh)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

    def run(*operands):
        with _mesh.use_abstract_mesh(mesh.abstract_mesh):
            return mapped(*operands)

    return run


# --- rewriting ---


def is_resharding(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` changes nothing of a value but how it is sharded."""
    return eqn.primitive.name in ("sharding_constraint", "reshard")


def resharding_spec(eqn: JaxprEqn) -> tuple[tuple[str, ...], ...] | None:
    """Return the mesh axes per dimension that ``eqn`` asks for, trailing whole ones left out.

    None when they cannot be told: a sharding that is not named, or open dimensions.
    """
    sharding = eqn.params["sharding" if "sharding" in eqn.params else "dst_sharding"]
    spec = getattr(sharding, "spec", None)
    if spec is None or any(s is jax.sharding.PartitionSpec.UNCONSTRAINED for s in spec):
        return None
    axes = [() if s is None else s if isinstance(s, tuple) else (s,) for s in spec]
    while axes and not axes[-1]:
        axes.pop()
    return tuple(axes)


def result_types(eqn: JaxprEqn) -> Sequence[Any]:
    """Return the types that the primitive of ``eqn`` gives its results."""
    avals, _ = eqn.primitive.abstract_eval(*(v.aval for v in eqn.invars), **eqn.params)
    return avals


def typed_sharding(aval: Any) -> Any:
    """Return the sharding that is part of the type ``aval``, None where it has none."""
    mesh = aval.sharding.mesh
    if mesh.empty or not mesh._any_axis_explicit:
        return None
    return aval.sharding.spec
