"""Run functions in a process of their own, so that a compiler that crashes takes only that along.

A compiler is native code: a failed check inside it ends the process with a signal no Python handler
sees. What must outlive that asks a ``Worker``. This module never imports jax.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from collmm.errors import CollmmError, CrashError, TargetError

# The new process first takes this one's import path, so that it finds the same modules.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from collmm.targets.guard import _serve
_serve(*map(int, sys.argv[2:]))
"""
_GRACE_S = 5.0
_FATAL = re.compile(r"F\d{4} ")  # as absl logs it, with month and day


def guarded(
    function: Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """``function(*args)``, run in a new Python process that ends with it; see ``Worker.call``."""
    with contextlib.closing(Worker(environment)) as worker:
        return worker.call(function, *args, timeout_s=timeout_s)


class Worker:
    """A Python process that runs one function after another.

    The first call starts it, and so does the first after a crash. It ends with this process, or
    with ``close``. ``environment`` is added to this process's variables before it imports anything.
    What it prints is not shown; when it fails, the line that tells most becomes part of the error.
    Threads may share a worker: they take turns.
    """

    def __init__(self, environment: Mapping[str, str] | None = None):
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        """Start the process, if there is none, without waiting for it."""
        with self._lock:
            self._running()

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        what: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """``function(*args)``, run in the process; returns its result.

        ``function`` must be importable by module and name, ``args`` and the result picklable. An
        exception of the function is raised here. CrashError, in one line that begins with
        ``what``, when the process dies by a signal, exits, or runs past ``timeout_s`` seconds.
        """
        name = f"{function.__module__}.{function.__qualname__}"
        if "<locals>" in name or function.__module__ == "__main__":
            raise TargetError(f"{name} cannot run in a process of its own: it must be importable")
        question = pickle.dumps((function.__module__, function.__qualname__, args))
        with self._lock:
            process = self._running()
            try:
                failed, result = process.ask(question, timeout_s)
            except _EndedError as ended:
                self._end()
                raise CrashError(f"{what or name} {ended}") from None
            except BaseException:  # an answer that nobody reads would be taken for the next one
                self._end()
                raise
        if failed:
            raise result
        return result

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self._lock:
            self._end()

    def _running(self) -> _Process:
        # After a fork the process is the parent's.
        if self._process is None or self._process.owner != os.getpid():
            self._process = _Process(self._environment)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _EndedError(Exception):
    """The process has no answer; the message says how it ended."""


class _Process:
    """A running process: asked through one pipe, it answers through another."""

    def __init__(self, environment: Mapping[str, str]):
        self.owner = os.getpid()
        with contextlib.ExitStack() as files:
            self.said = files.enter_context(tempfile.TemporaryFile("a+b"))
            ask_there, ask = os.pipe()
            answer, answer_there = os.pipe()
            self.asks = files.enter_context(os.fdopen(ask, "wb"))
            self.answers = files.enter_context(os.fdopen(answer, "rb"))
            command = [sys.executable, "-c", _BOOT, json.dumps(sys.path)]
            try:
                self.process = subprocess.Popen(
                    [*command, *map(str, (ask_there, answer_there, self.owner))],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=self.said,
                    stderr=subprocess.STDOUT,
                    pass_fds=(ask_there, answer_there),
                )
            finally:
                os.close(ask_there)
                os.close(answer_there)
            self.end = weakref.finalize(self, _end, self.owner, self.process, files.pop_all())

    def ask(self, question: bytes, timeout_s: float | None) -> tuple[bool, Any]:
        """Return (whether the function failed, its result or exception)."""
        self.said.truncate(0)
        try:
            self.asks.write(question)
            self.asks.flush()
            ready, _, _ = select.select([self.answers], [], [], timeout_s)
            if not ready:
                raise _EndedError(f"ran past {timeout_s:g} s and was ended")
            return pickle.load(self.answers)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            raise _EndedError(self._epitaph()) from None

    def _epitaph(self) -> str:
        """How the process ended, and why: the line of a failed check, or the last of an exit."""
        try:
            code = self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "gave no answer"
        self.said.seek(0)
        said = self.said.read().decode("utf-8", "replace").splitlines()
        lines = [line.strip() for line in said if line.strip()]
        fatal = [line for line in lines if _FATAL.match(line) or "Check failed" in line]
        # After a signal a compiler prints its stack, the last line of which tells nothing.
        telling = fatal or (lines if code >= 0 else [])
        return _how(code) + (f": {telling[-1][:300]}" if telling else "")


def _end(owner: int, process: subprocess.Popen, files: contextlib.ExitStack) -> None:
    """Close the pipes, and end the process if it is this one's."""
    if owner == os.getpid():
        if process.poll() is None:
            process.kill()
        process.wait()
    with contextlib.suppress(OSError):  # what was written last had no reader
        files.close()


def _how(code: int) -> str:
    if code < 0:
        try:
            return f"died by {signal.Signals(-code).name}"
        except ValueError:
            return f"died by signal {-code}"
    return f"exited with status {code} and no result"


def _serve(ask: int, answer: int, parent: int) -> None:
    """The other side: read each question, run it, write the answer."""
    for pipe in (ask, answer):
        os.set_inheritable(pipe, False)  # a compiler starts processes too, which may outlive it
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with open(ask, "rb") as asks, open(answer, "wb") as answers:
        while True:
            try:
                module, qualname, args = pickle.load(asks)
            except EOFError:
                break
            answers.write(_reply(module, qualname, args))
            answers.flush()
    os._exit(0)  # at once: a compiler may take long to say goodbye


def _end_with(parent: int) -> None:
    """End this process when ``parent`` ends in whatever way: a compiler may be busy for hours."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _reply(module: str, qualname: str, args: tuple) -> bytes:
    try:
        function: Any = importlib.import_module(module)
        for part in qualname.split("."):
            function = getattr(function, part)
        return pickle.dumps((False, function(*args)))
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> bytes:
    """The exception pickled, or what it says where it cannot be rebuilt elsewhere."""
    try:
        reply = pickle.dumps((True, error))
        pickle.loads(reply)
        return reply
    except Exception:
        return pickle.dumps((True, CollmmError(f"{type(error).__name__}: {error}")))
