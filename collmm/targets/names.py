"""Target names: ``cpu:8``, ``tpu:v5e:2x4``, ``gpu:h100:8``, ``gpu:h100:2x8``. Never imports jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from collmm.cost.hardware import CHIPS, Chip, nearest
from collmm.errors import TargetError

TPU_MODELS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPU_MODELS = ("a100", "h100", "h200", "b200", "gb200")
_FORMS = "cpu:N, tpu:CHIP:AxB or AxBxC, gpu:MODEL:N or HOSTSxN"


@dataclasses.dataclass(frozen=True)
class TargetName:
    """A parsed target name.

    Attributes:
        kind: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
        model: row of the hardware table; empty for a cpu.
        shape: cpu (devices,); tpu chips per torus axis; gpu (hosts, GPUs per host).
    """

    kind: Literal["cpu", "tpu", "gpu"]
    model: str
    shape: tuple[int, ...]

    @property
    def text(self) -> str:
        """The name in its short form: one host is left out."""
        shape = self.shape[1:] if self.kind == "gpu" and self.shape[0] == 1 else self.shape
        size = "x".join(map(str, shape))
        return f"{self.kind}:{size}" if self.kind == "cpu" else f"{self.kind}:{self.model}:{size}"


def parse_name(text: str, table: Mapping[str, Chip] = CHIPS) -> TargetName:
    """Parse a target name; anything else raises TargetError in one line."""
    parts = text.strip().lower().split(":")
    kind = parts[0]
    if kind not in ("cpu", "tpu", "gpu"):
        raise TargetError(f"target {text!r} is not one of {_FORMS}")
    if len(parts) != (2 if kind == "cpu" else 3):
        raise TargetError(f"target {text!r} must look like {_example(kind)}")
    shape = _shape(text, parts[-1])
    if kind == "cpu":
        if len(shape) != 1:
            raise TargetError(f"target {text!r} must look like {_example(kind)}")
        return TargetName("cpu", "", shape)
    model = parts[1]
    if kind == "tpu":
        return TargetName(
            "tpu", model, _tpu_shape(text, _model(text, model, TPU_MODELS, table), shape)
        )
    return TargetName("gpu", model, _gpu_shape(text, _model(text, model, GPU_MODELS, table), shape))


def _example(kind: str) -> str:
    return {"cpu": "'cpu:8'", "tpu": "'tpu:v5e:2x4'", "gpu": "'gpu:h100:8' or 'gpu:h100:2x8'"}[kind]


def _shape(text: str, part: str) -> tuple[int, ...]:
    sizes = part.split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise TargetError(f"target {text!r}: {part!r} must be whole numbers joined by 'x'")
    return tuple(int(size) for size in sizes)


def _model(text: str, model: str, models: tuple[str, ...], table: Mapping[str, Chip]) -> Chip:
    if model not in models:
        raise TargetError(
            f"target {text!r}: no compiler for {model!r} is known; {nearest(model, models)}"
        )
    return table[model]


def _tpu_shape(text: str, chip: Chip, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != chip.torus_dims:
        example = {2: "2x4", 3: "2x2x2"}[chip.torus_dims]
        raise TargetError(
            f"target {text!r}: {chip.name} is a {chip.torus_dims}D torus; "
            f"give its shape as {example}"
        )
    if chip.pod_shape and any(
        size > most for size, most in zip(sorted(shape), sorted(chip.pod_shape), strict=True)
    ):
        most = "x".join(map(str, chip.pod_shape))
        raise TargetError(f"target {text!r}: the largest {chip.name} slice is {most}")
    if math.prod(shape) > 1 and (shape[0] % 2 or shape[1] % 2):
        raise TargetError(
            f"target {text!r}: hosts hold 2x2 chips; the first two sizes must be even"
        )
    return shape


def _gpu_shape(text: str, chip: Chip, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > 2:
        raise TargetError(f"target {text!r} must look like {_example('gpu')}")
    hosts, per_host = shape if len(shape) == 2 else (1, shape[0])
    if per_host > chip.domain:
        raise TargetError(
            f"target {text!r}: one {chip.name} host joins at most {chip.domain} GPUs; "
            f"give HOSTSx{chip.domain}"
        )
    return (hosts, per_host)
