"""Run a function in a process of its own, so that a compiler that crashes takes only that along.

A compiler is native code: a failed check inside it ends the process with a signal no Python handler
sees. What must outlive that calls ``guarded``. This module never imports jax.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from collmm.errors import CollmmError, TargetError

# The new process first takes this one's import path, so that it finds the same modules.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from collmm.targets.guard import _serve
_serve(*sys.argv[2:])
"""


def guarded(
    function: Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """``function(*args)``, run in a new Python process; returns its result.

    ``function`` must be importable by module and name, ``args`` and the result picklable.
    ``environment`` is added to this process's variables before the new one imports anything. What
    the function prints goes where this process prints; its standard error is shown only when it
    fails. An exception of the function is raised here. TargetError, in one line, when the process
    dies by a signal, exits, or runs past ``timeout_s`` seconds.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    if "<locals>" in name or function.__module__ == "__main__":
        raise TargetError(f"{name} cannot run in a process of its own: it must be importable")
    with tempfile.TemporaryDirectory(prefix="collmm-") as folder:
        ask, answer = os.path.join(folder, "ask"), os.path.join(folder, "answer")
        with open(ask, "wb") as file:
            pickle.dump((function.__module__, function.__qualname__, args), file)
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), ask, answer]
        variables = {**os.environ, **(environment or {})}
        try:
            run = subprocess.run(
                command, env=variables, stderr=subprocess.PIPE, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise TargetError(f"{name} ran past {timeout_s:g} s and was ended") from None
        if run.returncode or not os.path.exists(answer):
            raise TargetError(f"{name} {_how(run.returncode)}{_last_line(run.stderr)}")
        with open(answer, "rb") as file:
            failed, result = pickle.load(file)
    if failed:
        raise result
    return result


def _how(code: int) -> str:
    if code < 0:
        try:
            return f"died by {signal.Signals(-code).name}"
        except ValueError:
            return f"died by signal {-code}"
    return f"exited with status {code} and no result"


def _last_line(text: str) -> str:
    """The line that tells most: the fatal one of a crash dump, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F0") or "Check failed" in line]
    line = (fatal or lines or [""])[-1]
    return f": {line[:300]}" if line else ""


def _serve(ask: str, answer: str) -> None:
    """The other side: read the question, run it, write the answer."""
    with open(ask, "rb") as file:
        module, qualname, args = pickle.load(file)
    function: Any = importlib.import_module(module)
    for part in qualname.split("."):
        function = getattr(function, part)
    try:
        reply = pickle.dumps((False, function(*args)))
    except Exception as error:
        reply = _failure(error)
    with open(answer, "wb") as file:
        file.write(reply)


def _failure(error: Exception) -> bytes:
    """The exception pickled, or what it says where it cannot be rebuilt elsewhere."""
    try:
        reply = pickle.dumps((True, error))
        pickle.loads(reply)
        return reply
    except Exception:
        return pickle.dumps((True, CollmmError(f"{type(error).__name__}: {error}")))
