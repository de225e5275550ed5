"""The public transformation: ``overlap_collectives`` and the function object it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from collmm import _jax, deferred, dump
from collmm.capture import OVERLAP_KEY
from collmm.errors import AnalysisWarning, OptionError, PlanFileError, PlanMismatch
from collmm.options import Options
from collmm.plan import Plan
from collmm.program import plan_program
from collmm.rejit import jit_like


def overlap_collectives(fn: Callable | None = None, options: Options | None = None) -> Any:
    """Overlap the collectives of a jitted function with the einsums that need them.

    Use as ``@overlap_collectives``, ``@overlap_collectives(options=Options(...))`` or
    ``overlap_collectives(fn, Options(...))``.

    Args:
      fn: a ``jax.jit``-ed function, or a plain one, which is jitted first. Its static and donated
        arguments, shardings and compiler options are kept.
      options: how to decide; see ``Options``.

    Returns:
      An ``OverlappedFunction``: called as ``fn`` is, with the same results up to the order in
      which sums across devices are added.

    Raises:
      OptionError: ``fn`` is not callable or ``options`` is not an ``Options``.
    """
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise OptionError(f"options={options!r}; pass collmm.Options(...)")
    if fn is None:
        return functools.partial(overlap_collectives, options=options)
    if isinstance(fn, OverlappedFunction):
        return OverlappedFunction(fn.original, fn.jitted, options)
    if not callable(fn):
        raise OptionError(f"cannot overlap {fn!r}: pass a function, or the result of jax.jit")
    jitted = fn if _jax.is_jitted(fn) else jax.jit(fn)
    return OverlappedFunction(fn, jitted, options)


@contextlib.contextmanager
def no_overlap() -> Iterator[None]:
    """Leave every einsum that is traced inside the ``with`` block alone."""
    with set_xla_metadata(**{OVERLAP_KEY: "none"}):
        yield


class OverlappedFunction:
    """A jitted function with its collectives overlapped.

    A new combination of argument types, shardings, static values or mesh is planned and compiled
    once; after that a call goes straight through jax's own C++ dispatch.

    Attributes:
      original: the function it was made from.
      jitted: the jit of it that is planned: ``original`` itself where that is a jit.
      options: the ``Options`` it was made with.
    """

    def __init__(self, original: Callable, jitted: Any, options: Options) -> None:
        self.original = original
        self.options = options
        self.jitted = jitted
        self._programs: dict[Any, _Program] = {}
        self._dispatch = _jax.fast_dispatch(jitted, self._miss)
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, overlapped."""
        return self._dispatch(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<overlapped {self.original!r}>"

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for these arguments; arrays or ``jax.ShapeDtypeStruct``s."""
        return self._program(args, kwargs).plan

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return the ``jax.stages.Traced`` of the rewritten program."""
        jitted, args, kwargs = self._program(args, kwargs).call(args, kwargs)
        return jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return the ``jax.stages.Lowered`` of the rewritten program."""
        jitted, args, kwargs = self._program(args, kwargs).call(args, kwargs)
        return jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the shapes and dtypes of the results, as ``jax.eval_shape`` does."""
        return self.jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget every plan and every compiled program."""
        self._programs.clear()
        self.jitted.clear_cache()
        self._dispatch = _jax.fast_dispatch(self.jitted, self._miss)

    def _miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        if not _jax.at_top_level():
            return self._under_trace(args, kwargs), None, False
        program = self._program(args, kwargs)
        dump.dump_if_asked(self, program.plan, args, kwargs)
        return _jax.miss(*program.call(args, kwargs))

    def _under_trace(self, args: tuple, kwargs: dict) -> Any:
        """Bind the program into an outer trace; it is planned when the outer one is lowered."""
        traced = self.jitted.trace(*args, **kwargs)
        call = _jax.call_options(traced)
        leaves = jax.tree.leaves(_jax.dynamic_args(self.jitted, args, kwargs))
        leaves = [*_jax.captured_tracers(traced, len(leaves)), *leaves]
        outs = deferred.overlap_call(
            traced.jaxpr, leaves, call.in_shardings, call.out_shardings, call.name, self.options
        )
        return jax.tree.unflatten(traced.out_tree, outs)

    def _program(self, args: tuple, kwargs: dict) -> _Program:
        traced = self.jitted.trace(*args, **kwargs)
        call = _jax.call_options(traced)
        leaves = jax.tree.leaves(_jax.dynamic_args(self.jitted, args, kwargs))
        shardings = tuple(
            given if given is not None else _jax.argument_sharding(leaf)
            for given, leaf in zip(call.in_shardings, leaves, strict=True)
        )
        mesh = _jax.context_mesh()
        # The jaxpr is kept in the program, so its id stays taken.
        key = (id(traced.jaxpr), tuple(map(_jax.sharding_key, shardings)), mesh)
        program = self._programs.get(key)
        if program is None:
            program = self._make_program(traced, call, shardings, mesh)
            self._programs[key] = program
        return program

    def _make_program(self, traced: Any, call: Any, shardings: tuple, mesh: Any) -> _Program:
        original = _Program(Plan((), self.options.policy, ""), traced, self.jitted, None)
        try:
            planned = plan_program(
                traced.jaxpr,
                shardings,
                call.out_shardings,
                self.options,
                name=call.name,
                mesh=mesh,
            )
        except (PlanFileError, PlanMismatch):
            raise
        except Exception as e:
            # The promise of the decorator: whatever the analysis meets, the user's step runs.
            if self.options.strict:
                raise
            warnings.warn(
                f"collmm left {call.name} as it is: {type(e).__name__}: {e}",
                AnalysisWarning,
                stacklevel=4,
            )
            return original
        planned.warn(4)
        if planned.closed is traced.jaxpr:
            return dataclasses.replace(original, plan=planned.plan)
        jitted = jit_like(traced, call, planned.closed)
        return _Program(planned.plan, traced, jitted, self.jitted)


@dataclasses.dataclass(frozen=True)
class _Program:
    """One planned combination of argument types, shardings, static values and mesh.

    Attributes:
      plan: the plan.
      traced: the user's program; it keeps the jaxpr alive whose id the cache knows.
      jitted: what runs.
      wrapped: the user's jit when ``jitted`` takes only the arguments it does not declare static;
        None when ``jitted`` is the user's own.
    """

    plan: Plan
    traced: Any
    jitted: Any
    wrapped: Any

    def call(self, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
        """Return (jitted, args, kwargs) to run the user's call with."""
        if self.wrapped is not None:
            args, kwargs = _jax.dynamic_args(self.wrapped, args, kwargs)
        return self.jitted, args, kwargs
