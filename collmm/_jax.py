"""The only file that touches unstable JAX internals.

Everything here was checked on jax 0.10.2 and jax 0.12.0. The rest of the package reaches jaxprs,
the MLIR passes and the C++ dispatch path through these names.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info
from jax._src import tree_util as _tree_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import parallel as _parallel
from jax._src.lib import _jax as _xla
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.mlir import ir

# Whether the compilers take a sharding constraint of what no turn changes out of a loop, as those
# of jax 0.12 do and those of jax 0.10 do not.
COMPILER_HOISTS_CONSTRAINTS = jax.__version_info__ >= (0, 12)

Jaxpr: Any = _core.Jaxpr
# jax 0.12 has one class for jaxprs with and without constants.
ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", _core.Jaxpr)
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
    if eqn.primitive.name == "overlap_call":
        return True  # an overlapped function inside another one: the outer one plans it
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


def hidden_jaxprs(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    """Return the jaxprs that an equation's primitive keeps to itself, as jax 0.12's roots do."""
    params = getattr(eqn.params.get("_prim"), "params", {})
    return [value for value in params.values() if isinstance(value, (Jaxpr, ClosedJaxpr))]


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


def readers_of(jaxpr: Any) -> dict[Any, list[Any]]:
    """Return the equations that read each value; None reads what the jaxpr returns."""
    readers: dict[Any, list[Any]] = {}
    for reader, atoms in (*((e, e.invars) for e in jaxpr.eqns), (None, jaxpr.outvars)):
        for v in atoms:
            if not isinstance(v, Literal):
                readers.setdefault(v, []).append(reader)
    return readers


def drop_dead(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return ``closed`` without the equations whose results nobody reads."""
    jaxpr, _ = _pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


eval_jaxpr = _core.eval_jaxpr


def has_side_effects(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` does more than give its results; to name a mesh axis is no more."""
    return any(not isinstance(e, _core.NamedAxisEffect) for e in eqn.effects)


def replay_eqn(eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> Any:
    """Do an equation of one result on other operands, some of its parameters changed.

    In the caller's mesh context: inside a ``shard_map`` that is not the equation's own.
    """
    stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=stack):
        return eqn.primitive.bind(*args, **{**eqn.params, **changed})


def plain_jaxpr(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """Return a jaxpr of equations without effects and constants."""
    info = _core.DebugInfo("collmm", "elementwise", None, None)
    return Jaxpr((), list(invars), list(outvars), list(eqns), debug_info=info)


# --- primitives ---


def define_primitive(
    name: str,
    *,
    impl: Callable,
    abstract: Callable,
    jvp: Callable,
    transpose: Callable,
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
    rule = _mlir.lower_fun(impl, multiple_results=True)

    def lower(ctx, *operands, **params):
        if params["mesh"] is not None:
            return rule(ctx, *operands, **params)
        # Inside a shard_map: types were checked when the equation was made, and the loop's
        # buffers start out the same on every device.
        plain = [_core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
        with without_vma_checks():
            return rule(ctx.replace(avals_in=plain), *operands, **params)

    _mlir.register_lowering(primitive, lower)
    return primitive


Zero = _ad.Zero
is_undefined_primal = _ad.is_undefined_primal
add_tangents = _ad.add_tangents
not_mapped = None  # how both versions spell "has no batch dimension"


def zero_like(primal: Any) -> Any:
    """Return the symbolic zero tangent of ``primal``."""
    return Zero(jax.typeof(primal).to_tangent_aval())


def resharded_like(x: Any, aval: Any) -> Any:
    """Return ``x`` sharded as the type ``aval`` says, where its type says anything."""
    if typed_sharding(aval) is None or jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)


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
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def run(*operands):
        with _mesh.use_abstract_mesh(mesh.abstract_mesh):
            return mapped(*operands)

    return run


# --- rewriting ---


def is_resharding(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` changes nothing of a value but how it is sharded."""
    if eqn.primitive.name not in ("sharding_constraint", "reshard"):
        return False
    return not any(is_unreduced(v.aval) for v in (*eqn.invars, *eqn.outvars))


def is_unreduced(aval: Any) -> bool:
    """Whether a value of this type is a sum that is still to be taken over some mesh axes."""
    spec = aval.sharding.spec
    return bool(getattr(spec, "unreduced", None) or getattr(spec, "reduced", None))


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


def is_open(eqn: JaxprEqn, dim: int) -> bool:
    """Whether a resharding says nothing of a dimension."""
    spec = getattr(eqn.params.get("sharding"), "spec", ())
    return dim < len(spec) and spec[dim] is jax.sharding.PartitionSpec.UNCONSTRAINED


def constraint_eqn(var: Var, sharding: Any) -> JaxprEqn:
    """Return a new equation that constrains ``var`` to ``sharding``."""
    return _unary_eqn(lambda x: jax.lax.with_sharding_constraint(x, sharding), var)


def _unary_eqn(fn: Callable, var: Var) -> JaxprEqn:
    aval: Any = var.aval
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    (eqn,) = jax.make_jaxpr(fn)(struct).jaxpr.eqns
    return eqn.replace(invars=[var], outvars=[Var(aval)])


def barrier_eqn(variables: Sequence[Any]) -> JaxprEqn:
    """Return a new equation that hands on ``variables`` as they are, all at once."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
    (eqn,) = jax.make_jaxpr(jax.lax.optimization_barrier)(structs).jaxpr.eqns
    return eqn.replace(invars=list(variables), outvars=[Var(v.aval) for v in variables])


def zeros_eqn(var: Var) -> JaxprEqn:
    """Return a new equation that makes zeros of the type of ``var``."""
    aval: Any = var.aval
    traced = jax.make_jaxpr(lambda: jax.lax.full(aval.shape, 0, aval.dtype))()
    (eqn,) = traced.jaxpr.eqns
    return eqn.replace(outvars=[Var(aval)])


def is_plain_array(aval: Any) -> bool:
    """Whether values of this type are numbers, and their sharding is no part of the type."""
    extended = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    return not extended and typed_sharding(aval) is None


def inlined(fn: Callable, like: JaxprEqn) -> list[JaxprEqn]:
    """Return the equations of ``fn`` on the operands of ``like``, making its one result."""
    avals: list[Any] = [v.aval for v in like.invars]
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    jaxpr = open_jaxpr(closed)
    assert not closed.consts
    env = dict(zip(jaxpr.invars, like.invars, strict=True))
    env.update(zip(jaxpr.outvars, like.outvars, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            env.setdefault(var, fresh_like(var))
        invars = [v if isinstance(v, Literal) else env[v] for v in eqn.invars]
        eqns.append(eqn.replace(invars=invars, outvars=[env[v] for v in eqn.outvars]))
    return eqns


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many are carried."""
    p = eqn.params
    if "num_consts" in p:
        return p["num_consts"], p["num_carry"]
    # jax 0.12 keeps a tree of (constants, carry, xs) instead.
    consts, carry, _ = p["ft_in"].update(list(range(len(eqn.invars)))).unpack()
    return len(list(consts)), len(list(carry))


def result_types(eqn: Any) -> Sequence[Any]:
    """Return the types that the primitive of ``eqn`` gives its results."""
    avals, _ = eqn.primitive.abstract_eval(*(v.aval for v in eqn.invars), **eqn.params)
    return avals


def result_type(eqn: Any) -> Any:
    """Return the type of the one result of ``eqn``, of a primitive that has one result."""
    aval, _ = eqn.primitive.abstract_eval(*(v.aval for v in eqn.invars), **eqn.params)
    return aval


def typed_sharding(aval: Any) -> Any:
    """Return the sharding that is part of the type ``aval``, None where it has none."""
    mesh = aval.sharding.mesh
    if mesh.empty or not mesh._any_axis_explicit:
        return None
    return aval.sharding.spec


def traced_program(closed: ClosedJaxpr, args: Sequence[Any], out_shardings: tuple) -> Any:
    """Return the ``jax.stages.Traced`` of a program as it stands: nothing is traced again."""

    def stand_in(*_):
        return tuple(jax.lax.empty(a.shape, a.dtype) for a in closed.out_avals)

    jitted = jax.jit(stand_in, out_shardings=out_shardings, keep_unused=True)
    traced = copy.copy(jitted.trace(*args))
    traced._params = dict(traced._params, jaxpr=closed)
    traced._lojax = None  # jax 0.10 and 0.12 keep here what they lowered to last
    return traced


# --- calling ---


def at_top_level() -> bool:
    """Whether no transformation is tracing the caller."""
    clean = getattr(_core, "trace_state_clean", None)
    return clean() if clean is not None else _core.trace_ctx.is_top_level()


def fast_dispatch(jitted: Any, on_miss: Callable) -> Callable:
    """Return jax's own C++ dispatcher with the signature of ``jitted`` and another slow path.

    The dispatcher keys on the tree, types, shardings and static values of the arguments and on
    jax's configuration. On a new key it calls ``on_miss(*args, **kwargs)``, which returns what
    ``miss`` returns; later calls with that key never leave C++.
    """
    info = jitted._jit_info
    return _xla.pjit(
        _jit_name(jitted),
        jitted._fun,
        on_miss,
        info.static_argnums,
        info.static_argnames,
        _pxla.JitGlobalCppCacheKeys(),
        _tree_util.dispatch_registry,
        _pxla.cc_shard_arg,
        _xla.PjitFunctionCache(),
    )


def _jit_name(jitted: Any) -> str:
    return getattr(jitted._fun, "__name__", "fn")


def miss(jitted: Any, args: tuple, kwargs: dict) -> tuple[Any, Any, bool]:
    """Call ``jitted`` by its slow path: (results, what the dispatcher remembers, rebuild)."""
    return jitted._cache_miss(*args, **kwargs)


def is_jitted(fn: Any) -> bool:
    """Whether ``fn`` is the result of ``jax.jit``."""
    return hasattr(fn, "_jit_info") and hasattr(fn, "_cache_miss") and hasattr(fn, "trace")


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """What a traced jit says of itself, per flat argument and result; None is unspecified."""

    name: str
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    in_formats: tuple[Any, ...]
    out_formats: tuple[Any, ...]
    donated: tuple[bool, ...]
    compiler_options: dict[str, Any]
    keep_unused: bool
    inline: bool


def call_options(traced: Any) -> CallOptions:
    """Return the options of a ``jax.stages.Traced``."""
    p = traced._params

    def given(shardings):
        return tuple(None if is_unspecified(s) else s for s in shardings)

    return CallOptions(
        name=p["name"],
        in_shardings=given(p["in_shardings"]),
        out_shardings=given(p["out_shardings"]),
        in_formats=tuple(p["in_layouts"]),
        out_formats=tuple(p["out_layouts"]),
        donated=tuple(p["donated_invars"]),
        compiler_options=dict(p["compiler_options_kvs"]),
        keep_unused=p["keep_unused"],
        inline=bool(p["inline"]),
    )


def captured_tracers(traced: Any, arguments: int) -> list[Any]:
    """Return the tracers of an outer trace that the program closes over.

    They are operands of ``traced.jaxpr``, in front of its ``arguments``.
    """
    count = len(traced.jaxpr.in_avals) - arguments
    return list(traced._consts)[:count] if count else []


def dynamic_args(jitted: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments without those that ``jitted`` declares static."""
    info = jitted._jit_info
    static = {n % len(args) if n < 0 else n for n in info.static_argnums if -len(args) <= n}
    return (
        tuple(a for i, a in enumerate(args) if i not in static),
        {k: v for k, v in kwargs.items() if k not in info.static_argnames},
    )


def argument_sharding(leaf: Any) -> Any:
    """Return the sharding that an argument insists on, or None."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, _core.Tracer):
        return leaf.sharding if leaf.committed else None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    return None


def sharding_key(sharding: Any) -> Any:
    """Return what tells ``sharding`` from others: ``P("x", None)`` and ``P("x")`` are one."""
    if not isinstance(sharding, jax.NamedSharding):
        return sharding
    spec = list(sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return sharding.mesh, tuple(spec), sharding.memory_kind


def context_mesh() -> Any:
    """Return the mesh of ``jax.set_mesh`` or ``with mesh:``, None without one."""
    mesh = _mesh.get_concrete_mesh()
    if mesh is None or mesh.empty:
        mesh = _mesh.thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def constraint_shardings(closed: ClosedJaxpr) -> list[Any]:
    """Return the shardings of every constraint in a program, and the meshes of its shard_maps."""
    found: list[Any] = []

    def walk(jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "sharding_constraint":
                found.append(eqn.params["sharding"])
            elif is_call(eqn):
                found.extend(eqn.params["in_shardings"])
            elif eqn.primitive.name == "shard_map":
                found.append(_MeshOnly(eqn.params["mesh"]))
            for _, _, sub in jaxprs_in(eqn):
                walk(open_jaxpr(sub))

    walk(closed.jaxpr)
    return found


def names_devices(closed: ClosedJaxpr, shardings: Sequence[Any]) -> bool:
    """Whether a program says which devices it runs on: by a sharding, a mesh or a constant."""
    if any(isinstance(c, jax.Array) for c in closed.consts) or context_mesh() is not None:
        return True
    every = [*shardings, *constraint_shardings(closed)]
    return any(
        s is not None
        and not is_unspecified(s)
        and not isinstance(getattr(s, "mesh", None), jax.sharding.AbstractMesh)
        for s in every
    )


@dataclasses.dataclass(frozen=True)
class _MeshOnly:
    mesh: Any


# --- a call that is planned late ---


def constrain(x: Any, sharding: Any) -> Any:
    """Return ``x`` with a sharding constraint."""
    return jax.lax.with_sharding_constraint(x, sharding)


def bind_call(primitive: Any, closed: ClosedJaxpr, operands: Sequence[Any], **params) -> list[Any]:
    """Bind a call primitive on a program; constants, which may be tracers, become operands."""
    return primitive.bind(*closed.consts, *operands, jaxpr=_without_consts(closed), **params)


@functools.lru_cache(maxsize=1024)
def _without_consts(closed: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr = _pe.convert_constvars_jaxpr(closed.jaxpr) if closed.consts else closed.jaxpr
    return ClosedJaxpr(jaxpr, ())


@functools.lru_cache(maxsize=1024)
def _remembered(key: Any, context: Any) -> list[ClosedJaxpr]:
    """Return the box in which one traced transform is kept; it is empty at first."""
    del key, context
    return []


def _traced_call(fn: Callable, operands: Sequence[Any], *key: Any) -> ClosedJaxpr:
    """Trace ``fn`` of flat operands, which may be tracers or types, to a closed jaxpr.

    ``fn`` must depend on nothing but ``key``: the same key and types give the same jaxpr, so that
    what is compiled for it is found again.
    """
    types = tuple(jax.typeof(x) for x in operands)
    box = _remembered((key, types), _config.trace_context())
    if not box:
        box.append(jax.make_jaxpr(lambda *xs: tuple(fn(*xs)))(*operands))
    return box[0]


@functools.lru_cache(maxsize=1024)
def _split_known(jaxpr: ClosedJaxpr, unknown: tuple[bool, ...]) -> Any:
    return _pe.partial_eval_jaxpr_nounits(jaxpr, list(unknown), instantiate=False)


def define_call(name: str, plan: Callable, surroundings: Callable) -> Any:
    """Make a call primitive with parameters ``jaxpr``, ``name`` and ``options``.

    ``plan(closed, in_shardings, name, options, mesh)`` returns the program that runs in its place;
    ``surroundings(ctx, operands, avals)`` the operands' shardings and the mesh while lowering.
    Every transform is that of the program itself, traced again and bound as a call again.
    """
    primitive = _core.Primitive(name)
    primitive.multiple_results = True

    def bind(closed, operands, **params):
        return bind_call(primitive, closed, operands, **params)

    def abstract(*avals, jaxpr, **_):
        return jaxpr.out_avals, _core.positional_effects(jaxpr) if hasattr(
            _core, "positional_effects"
        ) else jaxpr.effects

    def as_function(jaxpr):
        return functools.partial(eval_jaxpr, jaxpr.jaxpr, jaxpr.consts)

    def jvp(primals, tangents, *, jaxpr, **params):
        moving = [type(t) is not Zero for t in tangents]
        f = as_function(jaxpr)
        floating = [_has_tangent(aval) for aval in jaxpr.out_avals]

        def jvp_fun(*flat):
            xs, ts = flat[: len(primals)], flat[len(primals) :]

            def of_moving(*ms):
                it = iter(ms)
                return f(*(next(it) if m else x for x, m in zip(xs, moving, strict=True)))

            outs, dots = jax.jvp(
                of_moving, [x for x, m in zip(xs, moving, strict=True) if m], list(ts)
            )
            return [*outs, *(d for d, fl in zip(dots, floating, strict=True) if fl)]

        nonzero = [t for t, m in zip(tangents, moving, strict=True) if m]
        closed = _traced_call(jvp_fun, [*primals, *nonzero], "jvp", jaxpr, tuple(moving))
        flat = bind(closed, [*primals, *nonzero], **params)
        outs, dots = flat[: len(floating)], iter(flat[len(floating) :])
        return outs, [
            next(dots) if fl else Zero(aval.to_tangent_aval())
            for fl, aval in zip(floating, jaxpr.out_avals, strict=True)
        ]

    def transpose(cts, *operands, jaxpr, **params):
        linear = [is_undefined_primal(x) for x in operands]
        live = [i for i, ct in enumerate(cts) if type(ct) is not Zero]
        known = [x for x, lin in zip(operands, linear, strict=True) if not lin]
        avals = [x.aval for x in operands if is_undefined_primal(x)]
        f = as_function(jaxpr)

        def pulled(*flat):
            knowns, given = flat[: len(known)], flat[len(known) :]

            def of_linear(*ls):
                it_l, it_k = iter(ls), iter(knowns)
                outs = f(*(next(it_l) if lin else next(it_k) for lin in linear))
                return [outs[i] for i in live]

            return jax.linear_transpose(of_linear, *map(_struct, avals))(list(given))

        given = [cts[i] for i in live]
        flat = [*known, *given]
        key = ("transpose", jaxpr, tuple(linear), tuple(live), tuple(avals))
        grads = iter(bind(_traced_call(pulled, flat, *key), flat, **params))
        return [next(grads) if lin else None for lin in linear]

    def batch(axis_data, operands, dims, *, jaxpr, **params):
        out_dims = [
            0 if mapped else None for mapped in _depends(jaxpr, [d is not None for d in dims])
        ]
        mapped = jax.vmap(
            lambda *xs: tuple(as_function(jaxpr)(*xs)),
            in_axes=tuple(dims),
            out_axes=tuple(out_dims),
            axis_name=axis_data.name if isinstance(axis_data.name, str) else None,
            axis_size=axis_data.size,
            spmd_axis_name=axis_data.spmd_name,
        )
        key = ("vmap", jaxpr, tuple(dims), axis_data.name, axis_data.size, axis_data.spmd_name)
        return bind(_traced_call(mapped, operands, *key), operands, **params), out_dims

    def partial_eval(trace, *tracers, jaxpr, **params):
        return _partial_eval_call(primitive, bind, trace, tracers, jaxpr, params)

    def impl(*operands, jaxpr, name, options):
        # The call inside one more jit: there it is lowered with the operands' shardings known.
        return _call_jit(primitive, jaxpr, name, options)(*operands)

    def lower(ctx, *operands, jaxpr, name, options):
        try:
            shardings, mesh = surroundings(ctx, operands, jaxpr.in_avals)
        except Exception:
            # Not to know the surroundings is no reason to fail: the program names its own.
            if options.strict:
                raise
            shardings, mesh = [None] * len(operands), None
        new = plan(jaxpr, shardings, name, options, mesh)
        rule = _mlir.lower_fun(as_function(new), multiple_results=True)
        return rule(ctx, *operands)

    primitive.def_effectful_abstract_eval(abstract)
    primitive.def_impl(impl)
    _ad.primitive_jvps[primitive] = jvp
    _ad.primitive_transposes[primitive] = transpose
    _batching.fancy_primitive_batchers[primitive] = batch
    _pe.custom_partial_eval_rules[primitive] = partial_eval
    # For jax.checkpoint: what is known goes into a call of its own, with the same parameters.
    _pe.partial_eval_jaxpr_custom_rules[primitive] = functools.partial(
        _pe.closed_call_partial_eval_custom_rule, "jaxpr", lambda *args: args[-2:]
    )
    # Not cacheable: the rule looks at the program round it, so it must be written in place.
    _mlir.register_lowering(primitive, lower, cacheable=False)
    return primitive


@functools.lru_cache(maxsize=256)
def _call_jit(primitive, jaxpr, name, options):
    def call(*operands):
        return primitive.bind(*operands, jaxpr=jaxpr, name=name, options=options)

    call.__name__ = name
    return jax.jit(call)


def _depends(closed: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return which results may depend on the marked inputs; an equation mixes all it reads."""
    jaxpr = closed.jaxpr
    marked = {v for v, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in marked for v in eqn.invars):
            marked.update(eqn.outvars)
    return [not isinstance(v, Literal) and v in marked for v in jaxpr.outvars]


def _has_tangent(aval: Any) -> bool:
    return aval.to_tangent_aval().dtype != jax.dtypes.float0


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    sharding = aval.sharding if typed_sharding(aval) is not None else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _partial_eval_call(primitive, bind, trace, tracers, jaxpr, params):
    """Split a call into what is known now and what waits, as ``jax.linearize`` asks."""
    unknown = [not t.pval.is_known() for t in tracers]
    known_jaxpr, late_jaxpr, out_unknown, residuals = _split_known(jaxpr, tuple(unknown))
    known_in = [t.pval.get_known() for t in tracers if t.pval.is_known()]
    known_out = bind(known_jaxpr, known_in, **params)
    n = len(known_out) - len(residuals)
    saved = [trace.new_instantiated_const(x) for x in known_out[n:]]
    late_in = [*saved, *(t for t, u in zip(tracers, unknown, strict=True) if u)]
    late_out = [
        _pe.JaxprTracer(trace, _pe.PartialVal.unknown(aval), None) for aval in late_jaxpr.out_avals
    ]
    eqn = _pe.new_eqn_recipe(
        trace,
        late_in,
        late_out,
        primitive,
        dict(params, jaxpr=late_jaxpr),
        late_jaxpr.effects,
        _source_info.current(),
    )
    for t in late_out:
        t.recipe = eqn
    known_it, late_it = iter(known_out[:n]), iter(late_out)
    return [next(late_it) if u else next(known_it) for u in out_unknown]


def lowering_module(ctx: Any) -> Any:
    """Return the MLIR module that a lowering rule is writing."""
    return ctx.module_context.module


def var_like(var: Any, shape: tuple[int, ...]) -> Var:
    """Return a new variable of another shape, otherwise of the type of ``var``."""
    aval = var.aval
    spec = jax.sharding.PartitionSpec(*(None,) * len(shape))
    sharding = jax.NamedSharding(aval.sharding.mesh, spec)
    return Var(aval.update(shape=shape, sharding=sharding))


def reshape_eqn(like: JaxprEqn, operand: Atom, outvar: Any) -> JaxprEqn:
    """Return the equation that reshapes ``operand`` into ``outvar``, in the context of ``like``."""
    params = {"new_sizes": outvar.aval.shape, "dimensions": None, "sharding": None}
    return like.replace(
        primitive=jax.lax.reshape_p,
        invars=[operand],
        outvars=[outvar],
        params=params,
        effects=_core.no_effects,
    )


def add_eqn(like: JaxprEqn, operands: Sequence[Atom], outvar: Any) -> JaxprEqn:
    """Return the equation that adds two values of one type, in the context of ``like``."""
    return like.replace(
        primitive=jax.lax.add_p,
        invars=list(operands),
        outvars=[outvar],
        params={},
        effects=_core.no_effects,
    )


def manual_aval(avals: Sequence[Any], shape: tuple[int, ...], dtype: Any, axes: Any) -> Any:
    """Return the type of a result inside a ``shard_map``: it varies where its operands do."""
    varying = frozenset().union(*(a.mat.varying for a in avals))
    if not varying:
        return _core.ShapedArray(shape, dtype)
    mesh = next(a.sharding.mesh for a in avals if a.mat.varying)
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*(None,) * len(shape)))
    mat = _core.ManualAxisType(varying=varying | frozenset(axes))
    return _core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=mat)


def varies_over(var: Atom, axes: Sequence[str]) -> bool:
    """Whether a value inside a ``shard_map`` is typed as different along all of ``axes``."""
    return frozenset(axes) <= var.aval.mat.varying


def pvary_eqn(like: JaxprEqn, operand: Atom, axes: tuple[str, ...]) -> JaxprEqn:
    """Return the equation that makes ``operand`` vary over ``axes``; ``like`` is a ``pvary``."""
    mat = operand.aval.mat
    out = Var(operand.aval.update(manual_axis_type=mat.update(varying=mat.varying | set(axes))))
    return like.replace(invars=[operand], outvars=[out], params={"axes": axes})


def gather_eqn(like: JaxprEqn, operand: Atom, outvar: Any, axes: tuple[str, ...], dim: int) -> Any:
    """Return the equation that gathers blocks of a sum: the second half of the sum ``like``.

    Its result does not vary over ``axes`` where the sum's does not.
    """
    size = outvar.aval.shape[dim] // operand.aval.shape[dim]
    params = {
        "all_gather_dimension": dim,
        "axis_name": axes,
        "axis_size": size,
        "tiled": True,
    }
    if like.primitive.name == "psum_invariant":
        primitive = _parallel.all_gather_invariant_p
    else:
        primitive, params["axis_index_groups"] = _parallel.all_gather_p, None
    return like.replace(primitive=primitive, invars=[operand], outvars=[outvar], params=params)


def without_vma_checks() -> Any:
    """Return a context in which values may vary over manual axes without saying so."""
    return _config._check_vma(False)


# --- compiling in another process ---


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """What a backend needs to compile a program, as plain values.

    Attributes:
      name: of the program.
      module: StableHLO bytecode.
      options: serialized ``CompileOptions``: XLA options, partitioning, device assignment.
      device_ids: the devices it is compiled for, in order.
    """

    name: str
    module: bytes
    options: bytes
    device_ids: tuple[int, ...]


def compile_request(lowered: Any, compiler_options: Any) -> CompileRequest:
    """Return what ``lowered.compile(compiler_options)`` would give to the backend."""
    lowering = lowered._lowering
    args, devices = lowering.compile_args, lowering._device_list
    ins, outs = (
        tuple(_pxla.maybe_concretize_mesh(s, devices) for s in args[key])
        for key in ("in_shardings", "out_shardings")
    )
    to_inputs, to_outputs = _pxla.get_prop_to_input_output(ins, outs, len(args["ordered_effects"]))
    assignment = np.empty(len(devices), object)
    assignment[:] = list(devices)
    options = _pxla.create_compile_options(
        lowering._hlo,
        args["tuple_args"],
        to_inputs,
        to_outputs,
        args["backend"],
        assignment,
        {**dict(lowering._compiler_options_kvs), **compiler_options},
    )
    return CompileRequest(
        lowering._name,
        _mlir.module_to_bytecode(lowering._hlo),
        options.SerializeAsString(),
        tuple(d.id for d in devices),
    )


def compile_requested(
    request: CompileRequest, devices: Mapping[int, Any]
) -> tuple[str, dict[str, int] | None]:
    """Compile for described devices, id to device: (optimized HLO, memory figures or None)."""
    assigned = tuple(devices[i] for i in request.device_ids)
    with _mlir.make_ir_context():
        executable = _compiler.backend_compile_and_load(
            assigned[0].client,
            ir.Module.parse(request.module),
            _xla.DeviceList(assigned),
            _xla.CompileOptions.ParseFromString(request.options),
            [],
        )
    text = "\n\n".join(module.to_string() for module in executable.hlo_modules())
    try:
        stats = executable.get_compiled_memory_stats()
    except jax.errors.JaxRuntimeError as e:
        if "UNIMPLEMENTED" not in str(e):
            raise
        return text, None
    fields = {name: getattr(stats, name) for name in dir(stats) if name.endswith("_bytes")}
    return text, fields
