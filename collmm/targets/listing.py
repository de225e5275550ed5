"""The targets there are, for a table. Never imports jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from collmm.cost.hardware import CHIPS, Chip
from collmm.targets.cuda_config import DEVICES
from collmm.targets.installed import missing
from collmm.targets.names import GPU_MODELS, TPU_MODELS


@dataclasses.dataclass(frozen=True)
class TargetRow:
    """One line of the table of targets.

    Attributes:
        pattern: form of the names, such as ``"tpu:v5e:AxB"``.
        example: a name that works.
        kind: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
        hardware: the row of the hardware table, None for a cpu.
        missing: what to install before programs can be compiled for it; None if nothing.
    """

    pattern: str
    example: str
    kind: str
    hardware: Chip | None
    missing: str | None


def list_targets(table: Mapping[str, Chip] = CHIPS) -> list[TargetRow]:
    """A row for the cpu, each TPU chip and each GPU that can be compiled for."""
    rows = [TargetRow("cpu:N", "cpu:8", "cpu", None, missing("cpu"))]
    for model in TPU_MODELS:
        chip = table[model]
        form, size = ("AxB", "2x4") if chip.torus_dims == 2 else ("AxBxC", "2x2x2")
        rows.append(
            TargetRow(f"tpu:{model}:{form}", f"tpu:{model}:{size}", "tpu", chip, missing("tpu"))
        )
    for model in GPU_MODELS:
        lacks = missing("gpu", DEVICES[model].sm)
        rows.append(TargetRow(f"gpu:{model}:HOSTSxN", f"gpu:{model}:8", "gpu", table[model], lacks))
    return rows
