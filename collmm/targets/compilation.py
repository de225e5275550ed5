"""Compile a lowered program in a process of its own, and keep what can be read of the result.

    jax.stages.Lowered  ->  StableHLO and compile options, as bytes  ->  the worker process
    Compilation         <-  optimized HLO text, memory figures       <-

A TPU or GPU program compiled here is never run here, so the executable itself is of no use; and a
compiler that crashes must not end the process that asked. Importing this never imports jax.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from collmm.targets.environment import unattached
from collmm.targets.guard import Worker

if TYPE_CHECKING:
    import jax

# One for the process: the compilers take a second to load and need it once.
_worker = Worker(unattached())


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What a compiler made of a program; it is read as a ``jax.stages.Compiled`` is.

    Attributes:
      text: the optimized, scheduled HLO.
      memory: the fields of the compiler's memory figures; None where it gives none.
    """

    text: str
    memory: Mapping[str, int] | None

    def as_text(self) -> str:
        """The optimized, scheduled HLO."""
        return self.text

    def memory_analysis(self) -> Any:
        """The compiler's memory figures as attributes, in bytes; None where it gives none."""
        return None if self.memory is None else types.SimpleNamespace(**self.memory)


def start() -> None:
    """Start the process, so that it loads while this one lowers the program."""
    _worker.start()


def compile_apart(
    lowered: jax.stages.Lowered, topology: Mapping[str, Any], options: Mapping[str, Any], name: str
) -> Compilation:
    """Compile a program that was lowered on devices of ``topology``.

    Args:
      lowered: the program.
      topology: the arguments of ``topologies.get_topology_desc`` that describe the devices.
      options: XLA options, added to those that the program was jitted with.
      name: of the target, for the error.

    Raises CrashError, in one line, when the compiler ends its process. What it says about the
    program is raised as it is.
    """
    from collmm import _jax

    request = _jax.compile_request(lowered, options)
    what = f"{name}: the compiler of {request.name}"
    return _worker.call(_compile, tuple(topology.items()), request, what=what)


def _compile(topology: tuple[tuple[str, Any], ...], request: Any) -> Compilation:
    """The other side."""
    from collmm import _jax

    return Compilation(*_jax.compile_requested(request, _devices(topology)))


@functools.cache
def _devices(topology: tuple[tuple[str, Any], ...]) -> dict[int, Any]:
    from jax.experimental import topologies

    devices: Any = topologies.get_topology_desc(**dict(topology)).devices
    return {d.id: d for d in devices}
