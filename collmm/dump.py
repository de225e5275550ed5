"""Write what a program was and what it became: plan, jaxpr, StableHLO and optimized HLO."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
from typing import Any

from collmm.errors import OptionError
from collmm.plan import Plan

VARIABLE = "COLLMM_DUMP_TO"
_numbers = itertools.count()


def dump_if_asked(overlapped: Any, plan: Plan, args: tuple, kwargs: dict) -> None:
    """Write a dump below ``$COLLMM_DUMP_TO`` when that variable is set.

    Every new program of every decorated function gets a folder of its own,
    ``<function>.<number>``.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        return
    name = re.sub(r"\W+", "_", plan.program) or "fn"
    folder = pathlib.Path(root) / f"{name}.{next(_numbers)}"
    write(folder, plan, overlapped, args, kwargs)


def write(
    folder: pathlib.Path, plan: Plan, overlapped: Any, args: tuple, kwargs: dict
) -> dict[str, str]:
    """Write one program's dump into ``folder`` and return the two optimized HLO texts.

    Files: ``plan.txt``, ``plan.json``, and for ``before`` and ``after`` each ``.jaxpr.txt``,
    ``.stablehlo.mlir`` and ``.hlo.txt``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OptionError(f"cannot write a dump to {folder}: {e.strerror}; name a folder") from e
    (folder / "plan.txt").write_text(f"{plan}\n")
    (folder / "plan.json").write_text(json.dumps(plan.to_json(), indent=1))
    texts = {}
    for name, fn in (("before", overlapped.jitted), ("after", overlapped)):
        traced = fn.trace(*args, **kwargs)
        lowered = traced.lower()
        texts[name] = lowered.compile().as_text() or ""
        (folder / f"{name}.jaxpr.txt").write_text(f"{traced.jaxpr}\n")
        (folder / f"{name}.stablehlo.mlir").write_text(lowered.as_text())
        (folder / f"{name}.hlo.txt").write_text(texts[name])
    return texts
