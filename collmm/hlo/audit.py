"""Which collectives of a scheduled module are hidden behind compute, and which are exposed.

What a done waits is exposed; ``walk`` has the clock, ``verdict`` the judgement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from collmm.errors import OptionError
from collmm.hlo.durations import Durations
from collmm.hlo.findings import Finding, same_links
from collmm.hlo.instruction import Instruction
from collmm.hlo.parse import Module
from collmm.hlo.walk import SharesLink, TransferTime, Walker

OpTime = Callable[[Instruction], "float | None"]


def audit(
    module: Module,
    *,
    mesh_axes: Mapping[str, int] | None = None,
    transfer_time: TransferTime | None = None,
    clock_hz: float | None = None,
    op_time: OpTime | None = None,
    shares_link: SharesLink | None = None,
) -> list[Finding]:
    """Judge every collective that the entry of ``module`` reaches, in the order they run.

    Args:
      module: a scheduled module.
      mesh_axes: the mesh's axes with their sizes, in order, to name the axes of each collective.
      transfer_time: predicted seconds of a collective alone on its links; None where it is not
        known. Without it only the structure is judged: work between start and done makes the
        verdict unknown.
      clock_hz: TensorCore clock that turns the ``estimated_cycles`` of TPU text into seconds.
      op_time: seconds of an instruction, asked where the text has no figure.
      shares_link: whether two collectives queue for the same link or stream. By default two
        permutes do when they use the same directed edge, any other two when they have a pair of
        devices in common.

    Raises HloError when the text is not scheduled or cannot be read, OptionError when
    ``mesh_axes`` cannot hold the module's devices.
    """
    check(module, mesh_axes)
    walker = Walker(
        module,
        mesh_axes=mesh_axes,
        transfer_time=transfer_time,
        durations=Durations(clock_hz=clock_hz, given=op_time),
        shares_link=shares_link or same_links,
    )
    walker.walk(module.entry_name)
    return walker.findings


def check(module: Module, mesh_axes: Mapping[str, int] | None) -> None:
    """Raise HloError when the text is not scheduled, OptionError when it is for another mesh."""
    module.require_schedule()
    if mesh_axes is None:
        return
    devices = module.num_partitions * module.replica_count
    total = math.prod(mesh_axes.values())
    if total != devices:
        raise OptionError(
            f"mesh axes {dict(mesh_axes)} make {total} devices and the module runs on "
            f"{devices}; give the mesh it was compiled for"
        )
