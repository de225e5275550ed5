"""What a program was and what it became: plan, jaxpr, StableHLO and optimized HLO, as text.

``$COLLMM_DUMP_TO`` makes any script write them for every decorated function it calls.
"""

from __future__ import annotations

import os
import pathlib
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from collmm import plan_file
from collmm.errors import OptionError
from collmm.plan import Plan

VARIABLE = "COLLMM_DUMP_TO"
# Plans that were dumped, by identity: a program can miss jax's dispatch cache more than once.
_dumped: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


class DumpWarning(UserWarning):
    """A dump that ``$COLLMM_DUMP_TO`` asks for could not be made; the program runs all the same."""


def dump_if_asked(overlapped: Any, plan: Plan, args: tuple, kwargs: dict) -> None:
    """Write a dump below ``$COLLMM_DUMP_TO`` when that variable is set, once per program.

    Every program gets a folder of its own, ``<function>.<number>``, with the lowest number that is
    free. The function is traced, lowered and compiled but not run, so the arguments stay as they
    are. Whatever goes wrong is a ``DumpWarning``.
    """
    root = os.environ.get(VARIABLE)
    if not root or _dumped.get(id(plan)) is plan:
        return
    _dumped[id(plan)] = plan
    try:
        name = re.sub(r"\W+", "_", plan.program or getattr(overlapped, "__name__", "fn"))
        folder = _new_folder(pathlib.Path(root), name)
        write(folder, texts(plan, overlapped, args, kwargs))
    except Exception as e:
        # Also what the compiler raises on the original program: the user's own call comes after.
        text = str(e) if isinstance(e, OptionError) else f"{type(e).__name__}: {e}"
        warnings.warn(f"collmm wrote no full dump: {text}", DumpWarning, stacklevel=4)


def dump_deferred(plan: Plan, before: Any, after: Any) -> None:
    """Write the plan and both jaxprs of a program that stands inside another jit.

    It has no lowering of its own: the enclosing program's HLO is its owner's to dump.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        return
    try:
        folder = _new_folder(pathlib.Path(root), re.sub(r"\W+", "_", plan.program or "fn"))
        named = {
            "plan.txt": f"{plan}\n",
            "plan.json": plan_file.text(plan),
            "before.jaxpr.txt": f"{before}\n",
            "after.jaxpr.txt": f"{after}\n",
        }
        write(folder, iter(named.items()))
    except Exception as e:
        warnings.warn(f"collmm wrote no full dump: {e}", DumpWarning, stacklevel=2)


def texts(
    plan: Plan,
    overlapped: Any,
    args: tuple,
    kwargs: dict,
    compile_before: Callable = lambda lowered: lowered.compile(),
    compile_after: Callable = lambda lowered: lowered.compile(),
) -> Iterator[tuple[str, str]]:
    """Yield (file name, text) of a program before and after, in the order they are made.

    ``plan.txt``, ``plan.json``, then for ``before`` and ``after`` each ``.jaxpr.txt``,
    ``.stablehlo.mlir`` and ``.hlo.txt``, the optimized HLO. Where nothing is rewritten ``after``
    is ``before``.

    Args:
      plan: of the program.
      overlapped: the decorated function.
      args: its arguments; arrays or ``jax.ShapeDtypeStruct``s.
      kwargs: its keyword arguments.
      compile_before, compile_after: from a ``jax.stages.Lowered`` to a ``jax.stages.Compiled``.
    """
    yield from plan_texts(plan)
    before = []
    for kind, text in _forms(overlapped.jitted, args, kwargs, compile_before):
        before.append((kind, text))
        yield f"before.{kind}", text
    forms: Any = before
    if plan.rewritten:
        forms = _forms(overlapped, args, kwargs, compile_after)
    for kind, text in forms:
        yield f"after.{kind}", text


def plan_texts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (file name, text) of a plan."""
    yield "plan.txt", f"{plan}\n"
    yield "plan.json", plan_file.text(plan)


def make_folder(folder: pathlib.Path, *, exist_ok: bool = True) -> None:
    """Make a folder for a dump; OptionError, in one line, when that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if not exist_ok and folder.is_dir():
            raise
        raise OptionError(f"cannot write a dump to {folder}: it is a file; name a folder") from None
    except OSError as e:
        raise OptionError(f"cannot write a dump to {folder}: {e.strerror}; name a folder") from e


def write(folder: pathlib.Path, named: Iterator[tuple[str, str]]) -> dict[str, str]:
    """Write each text as soon as it is made, so that what follows a failure is all that is lost.

    Returns {file name: text}. Raises OptionError when ``folder`` cannot be written to.
    """
    made = {}
    for name, text in named:
        made[name] = text
        try:
            (folder / name).write_text(text)
        except OSError as e:
            raise OptionError(f"cannot write {folder / name}: {e.strerror}") from e
    return made


def _forms(fn: Any, args: tuple, kwargs: dict, compile_: Callable) -> Iterator[tuple[str, str]]:
    traced = fn.trace(*args, **kwargs)
    yield "jaxpr.txt", f"{traced.jaxpr}\n"
    lowered = traced.lower()
    yield "stablehlo.mlir", lowered.as_text()
    yield "hlo.txt", compile_(lowered).as_text() or ""


def _new_folder(root: pathlib.Path, name: str) -> pathlib.Path:
    number = 0
    while True:
        # Not looked up first: other processes of the same program may be here at the same time.
        folder = root / f"{name}.{number}"
        try:
            make_folder(folder, exist_ok=False)
            return folder
        except FileExistsError:
            number += 1
