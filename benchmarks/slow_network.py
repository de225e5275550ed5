"""Overlap in wall-clock: four processes joined by links that are slow enough to see it.

    python benchmarks/slow_network.py [--check] [--json] [--repetitions=25] [--rate=300mbit] ...

Simulated devices share memory and have nothing to hide. So this makes a network of its own: each
process in a network namespace, one rate-limited link away from a switch (``network.py``; needs
root). One einsum is measured with its all-gather and one with its reduce-scatter, f32, as the
compiler makes it, through ``overlap_collectives``, and through a control that sends the same
messages but never while it multiplies (``slow_network_rank.py``). The programs take turns; a time
is that of the slowest process, and medians are over the repetitions.

The ring is one-way and unrolled, asked for by ``Options.overrides``: the cost model has no row for
this network, on which both ways of a ring share one link, and XLA's CPU runtime overlaps unrolled
loops only. ``PJRT_NPROC`` bounds the threads of a process: few enough that the einsums of a ring
run one after the other, and one more for its permutes.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
from absl import app, flags
from network import Network, NetworkError, why_not

RANKS = 4
PORT = 7711
RANK_PROGRAM = pathlib.Path(__file__).with_name("slow_network_rank.py")
# What --check asks for: how many times faster than the compiler, and which part of the control.
LEAST_RATIO, MOST_OF_CONTROL = 1.3, 0.9
NAMES = ("einsum", "collective", "permutes", "plain", "control", "overlapped")

_JSON = flags.DEFINE_bool("json", False, "print one JSON object instead of a table")
_CHECK = flags.DEFINE_bool(
    "check",
    False,
    f"exit 1 unless at least {LEAST_RATIO} times as fast as the compiler and at most "
    f"{MOST_OF_CONTROL} of the control; measured once more before it says so",
)
_REPETITIONS = flags.DEFINE_integer("repetitions", 25, "medians are over this many", lower_bound=1)
_SIZE = flags.DEFINE_integer("size", 2048, "rows and columns that a process multiplies")
_RATE = flags.DEFINE_string("rate", "300mbit", "what each process can send, as tc writes it")
_SCHEDULE = flags.DEFINE_string("schedule", "one-way unrolled", "of the ring, as in an override")
_KINDS = flags.DEFINE_multi_enum("kind", ["gather", "scatter"], ["gather", "scatter"], "which")
_THREADS = flags.DEFINE_integer(
    "nproc",
    1 if jax.__version_info__ >= (0, 11) else 2,
    "PJRT_NPROC of each process; the default is the better one of this jax version",
    lower_bound=1,
)
_FIRST = flags.DEFINE_bool("first_in_line", False, "run before whatever else the machine does")
_TIMEOUT = flags.DEFINE_integer("timeout", 900, "seconds after which it is given up")


@flags.validator(_SIZE.name, "a multiple of the 4 processes, at least 64")
def _good_size(size: int) -> bool:
    return size >= 64 and size % RANKS == 0


class RankError(Exception):
    """A process of the measurement failed or did not come to an end."""


# --- running ---


def measure() -> list[dict[str, Any]]:
    """Start the processes on a network of their own; return what each of them measured."""
    with tempfile.TemporaryDirectory() as folder, Network(RANKS, _RATE.value) as network:
        ranks = [_start(network, rank, pathlib.Path(folder)) for rank in range(RANKS)]
        _wait(ranks, pathlib.Path(folder))
        outs = [(pathlib.Path(folder) / f"{r}.out").read_text() for r in range(RANKS)]
    return [json.loads(out.splitlines()[-1]) for out in outs]


def _start(network: Network, rank: int, folder: pathlib.Path) -> subprocess.Popen:
    config = {
        "rank": rank,
        "ranks": RANKS,
        "coordinator": f"{network.address(0)}:{PORT}",
        "size": _SIZE.value,
        "repetitions": _REPETITIONS.value,
        "kinds": _KINDS.value,
        "schedule": _SCHEDULE.value,
        "first_in_line": _FIRST.value,
    }
    # Two processes on each of two cores: with one on each, nothing of the network would be seen.
    cores = sorted(os.sched_getaffinity(0))[:2]
    core = cores[rank * len(cores) // RANKS]
    command = [*network.enter(rank), "taskset", "-c", str(core), sys.executable]
    command += [str(RANK_PROGRAM), json.dumps(config)]
    # XLA_FLAGS could bring further devices; the default scheduler is the one that overlaps.
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    with open(folder / f"{rank}.out", "w") as out, open(folder / f"{rank}.err", "w") as err:
        return subprocess.Popen(
            command,
            env={**kept, "PJRT_NPROC": str(_THREADS.value)},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _wait(ranks: list[subprocess.Popen], folder: pathlib.Path) -> None:
    """Wait for all; raise as soon as one fails. The network's end ends the others."""
    deadline = time.monotonic() + _TIMEOUT.value
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            raise RankError(f"not done after {_TIMEOUT.value} s; give more with --timeout")
        if any(rank.poll() for rank in ranks):
            break
        time.sleep(0.1)
    for i, rank in enumerate(ranks):
        if rank.poll():
            lines = (folder / f"{i}.err").read_text().strip().splitlines() or ["no message"]
            raise RankError(f"process {i} ended with status {rank.returncode}: {lines[-1]}")


# --- results ---


def summary(results: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the medians of one kind in seconds, and what follows from them.

    ``ratio``: plain to overlapped. ``of_control``: overlapped to control. ``bound``: the ratio
    that no order of these einsums and permutes can pass.
    """
    ranks = [r[kind] for r in results]
    slowest = {
        name: [max(times) for times in zip(*(r["times"][name] for r in ranks), strict=True)]
        for name in NAMES
    }
    median = {name: statistics.median(times) for name, times in slowest.items()}
    return {
        "kind": kind,
        "schedule": ranks[0]["plan"],
        "differing": sorted({name for r in ranks for name in r["differing"]}),
        "median_s": median,
        "ratio": median["plain"] / median["overlapped"],
        "of_control": median["overlapped"] / median["control"],
        "bound": median["plain"] / max(median["einsum"], median["permutes"]),
    }


def failures(found: list[dict[str, Any]]) -> list[str]:
    """Return what ``--check`` does not accept, a line each."""
    problems = []
    for s in found:
        if s["ratio"] < LEAST_RATIO:
            problems.append(
                f"{s['kind']}: {s['ratio']:.2f} times the compiler's, not {LEAST_RATIO}"
            )
        if s["of_control"] > MOST_OF_CONTROL:
            problems.append(
                f"{s['kind']}: {s['of_control']:.2f} of the control, not {MOST_OF_CONTROL}"
            )
    return problems


def show(found: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"jax {jax.__version__}, {RANKS} processes, links of {_RATE.value}, f32 {_SIZE.value}, "
        f"PJRT_NPROC={_THREADS.value}; medians of {_REPETITIONS.value}, slowest process, ms"
    )
    print("kind     " + "".join(f"{name:>12}" for name in NAMES) + "   ratio  of control  bound")
    for s in found:
        times = "".join(f"{1e3 * s['median_s'][name]:12.1f}" for name in NAMES)
        print(
            f"{s['kind']:<9}{times}{s['ratio']:8.2f}{s['of_control']:12.2f}{s['bound']:7.2f}"
            f"   {', '.join(map(str, s['schedule']))}"
        )


def once() -> list[dict[str, Any]]:
    """Measure, print, and return the summaries; raise if a result is not the compiler's."""
    results = measure()
    found = [summary(results, kind) for kind in results[0]]
    if _JSON.value:
        print(json.dumps({"jax": jax.__version__, "rate": _RATE.value, "kinds": found}))
    else:
        show(found)
    for s in found:
        if s["differing"]:
            raise RankError(f"{s['kind']}: {', '.join(s['differing'])} differs from plain")
    return found


def main(argv: list[str]) -> int:
    """Measure and print; 0, or 1 where a result is wrong or ``--check`` is not met."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    problem = why_not()
    if problem:
        print(problem, file=sys.stderr)
        return 2
    # SIGINT as well: a process started in the background of a shell ignores it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        problems = failures(once())
        if _CHECK.value and problems:
            problems = failures(once())  # a busy spell of the machine?
    except (RankError, NetworkError) as e:
        print(e, file=sys.stderr)
        return 1
    if not _CHECK.value:
        return 0
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    app.run(main)
