"""The entry point: find the command, read its flags, run it, turn errors into one line.

Exit status: 0 ok, 1 a check failed, 2 bad input, 130 interrupted. What a user's own
program raises is not caught.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from absl import logging

import collmm
from collmm.cli import audit, calibrate, dump, explain, targets, tune
from collmm.cli.command import Command
from collmm.cost.hardware import nearest
from collmm.errors import CollmmError

COMMANDS: dict[str, Command] = {
    c.name: c
    for c in (
        dump.COMMAND,
        explain.COMMAND,
        audit.COMMAND,
        calibrate.COMMAND,
        tune.COMMAND,
        targets.COMMAND,
    )
}
OK, BAD_INPUT, INTERRUPTED = 0, 2, 130


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (``sys.argv`` without the program); return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("help", "--help", "-h"):
        print(overview())
        return OK
    if argv[0] == "--version":
        print(f"collmm {collmm.__version__}")
        return OK
    command = COMMANDS.get(argv[0])
    if command is None:
        kind = "flag" if argv[0].startswith("-") else "command"
        return _fail("collmm", f"no {kind} {argv[0]!r}; {nearest(argv[0], COMMANDS)}")
    try:
        arguments, flags = command.parse(argv[1:])
        if flags.help:
            print(command.help())
            return OK
        _set_up_logging(flags.verbose)
        with warnings.catch_warnings():
            warnings.showwarning = _log_warning
            status = command.main(arguments, flags)
        sys.stdout.flush()
        return status
    except CollmmError as e:
        return _fail(f"collmm {command.name}", str(e))
    except KeyboardInterrupt:
        print(f"collmm {command.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has enough. Nothing more can be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def overview() -> str:
    """Return the help of the whole command line."""
    width = max(len(f"{c.name} {c.arguments}") for c in COMMANDS.values())
    lines = [
        "usage: collmm COMMAND ...",
        "",
        "Overlap collectives with the einsums that need them, in JAX.",
        "",
        "commands:",
        *(f"  {f'{c.name} {c.arguments}':{width}}  {c.summary}" for c in COMMANDS.values()),
        "",
        "collmm COMMAND --help explains a command and its flags.",
    ]
    return "\n".join(lines)


def _fail(who: str, text: str) -> int:
    print(f"{who}: {' '.join(text.split())}", file=sys.stderr)
    return BAD_INPUT


def _set_up_logging(verbose: bool) -> None:
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO if verbose else logging.WARNING)


def _log_warning(message, category, filename, lineno, file=None, line=None) -> None:
    logging.warning("%s: %s", category.__name__, message)
