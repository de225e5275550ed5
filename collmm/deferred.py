"""A program inside another trace: bound as one call and planned when that trace is lowered.

Inside ``jax.jit``, ``grad``, ``vmap`` or ``scan`` the arguments are tracers, and how they are
sharded is not known yet. So the whole program becomes one equation, ``overlap_call``, that
autodiff and batching transform like a nested jit, and that is planned either when it is evaluated
on arrays or when the enclosing program is lowered and the shardings around it can be asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from collmm import _jax
from collmm.dump import dump_deferred
from collmm.errors import AnalysisWarning, PlanFileError, PlanMismatch
from collmm.options import Options
from collmm.program import plan_program
from collmm.surroundings import operand_shardings


def overlap_call(
    closed: Any,
    operands: Sequence[Any],
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    name: str,
    options: Options,
) -> list[Any]:
    """Bind ``closed`` as one call; ``operands`` are its flat arguments, in any trace."""
    operands = [
        _jax.constrain(x, s) if s is not None else x
        for x, s in zip(operands, in_shardings, strict=True)
    ]
    outs = _jax.bind_call(overlap_call_p, closed, operands, name=name, options=options)
    return [
        _jax.constrain(x, s) if s is not None else x
        for x, s in zip(outs, out_shardings, strict=True)
    ]


def _plan(closed: Any, shardings: Sequence[Any], name: str, options: Options, mesh: Any) -> Any:
    """Return the rewritten program; the original one where the analysis fails."""
    nothing = [None] * len(closed.out_avals)
    try:
        planned = plan_program(
            closed, shardings, nothing, options, name=name, mesh=mesh, keep_results=False
        )
    except (PlanFileError, PlanMismatch):
        raise
    except Exception as e:
        # As for a call of its own: whatever the analysis meets, the user's program runs.
        if options.strict:
            raise
        warnings.warn(
            f"collmm left {name} as it is: {type(e).__name__}: {e}", AnalysisWarning, stacklevel=2
        )
        return closed
    planned.warn(2)
    dump_deferred(planned.plan, closed, planned.closed)
    return planned.closed


overlap_call_p = _jax.define_call("overlap_call", _plan, operand_shardings)
