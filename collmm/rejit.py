"""A new jit that behaves to its caller as another one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from collmm import _jax


def jit_like(traced: Any, call: _jax.CallOptions, closed: Any) -> Any:
    """Return a jit of ``closed`` with the calling convention of ``traced``.

    Args:
      traced: the ``jax.stages.Traced`` of the user's jit.
      call: its options.
      closed: a closed jaxpr over the same flat arguments and results.

    Returns:
      A jitted function of the dynamic arguments only: same pytrees, donation, shardings, layouts,
      compiler options and name.
    """
    out_tree = traced.out_tree

    def rewritten(*args: Any, **kwargs: Any) -> Any:
        flat = jax.tree.leaves((args, kwargs))
        outs = _jax.eval_jaxpr(closed.jaxpr, closed.consts, *flat)
        return jax.tree.unflatten(out_tree, outs)

    rewritten.__name__ = rewritten.__qualname__ = call.name
    arg_trees, kwarg_trees = _argument_trees(traced.in_tree)
    options: dict[str, Any] = {"keep_unused": call.keep_unused, "inline": call.inline}
    donated = _donated(call.donated, arg_trees, kwarg_trees)
    options["donate_argnums"], options["donate_argnames"] = donated
    ins = _formats(call.in_shardings, call.in_formats)
    if any(s is not None for s in ins) and not kwarg_trees:
        options["in_shardings"] = jax.tree.unflatten(traced.in_tree, ins)[0]
    outs = _formats(call.out_shardings, call.out_formats)
    if any(s is not None for s in outs):
        options["out_shardings"] = jax.tree.unflatten(out_tree, outs)
    if call.compiler_options:
        options["compiler_options"] = call.compiler_options
    return jax.jit(rewritten, **options)


def _argument_trees(in_tree: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the tree of each positional argument, and of each keyword argument."""
    args_tree, kwargs_tree = in_tree.children()
    _, names = kwargs_tree.node_data() or (dict, [])
    return args_tree.children(), dict(zip(names, kwargs_tree.children(), strict=True))


def _donated(
    donated: Sequence[bool], arg_trees: list[Any], kwarg_trees: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return which arguments are donated: a jit donates an argument's leaves all or none."""
    flags = iter(donated)

    def take(tree: Any) -> bool:
        # A sum, not any(): every leaf has to be taken off.
        return sum(next(flags) for _ in range(tree.num_leaves)) > 0

    nums = tuple(i for i, tree in enumerate(arg_trees) if take(tree))
    return nums, tuple(name for name, tree in kwarg_trees.items() if take(tree))


def _formats(shardings: Sequence[Any], layouts: Sequence[Any]) -> list[Any]:
    from jax.experimental.layout import Format

    return [
        sharding if layout is None else Format(layout, sharding)
        for sharding, layout in zip(shardings, layouts, strict=True)
    ]
