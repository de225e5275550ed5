"""The devices at hand: which row of the hardware table they are, and whether any are attached."""

from __future__ import annotations

import os
from typing import Any

import jax

from collmm.cost.hardware import CHIPS
from collmm.targets.guard import guarded

DEFAULT_CHIP = "v5e"
SIMULATED = "cpu"
# What the devices call themselves, as jax reports it in device_kind.
_DEVICE_KINDS = {
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
_GPU_NAMES = ("gb200", "b200", "h200", "h100", "a100", "mi300x")


def row_of(device: Any) -> tuple[str, str]:
    """The name of the hardware row of a device, and a line that says so when it was assumed."""
    kind = device.device_kind
    if kind in _DEVICE_KINDS:
        return _DEVICE_KINDS[kind], ""
    for gpu in _GPU_NAMES:
        if gpu in kind.lower() and gpu in CHIPS:
            return gpu, ""
    if device.platform == SIMULATED:
        return DEFAULT_CHIP, f"CPU devices have no links to plan for; planned for {DEFAULT_CHIP}"
    return DEFAULT_CHIP, (
        f"no hardware row for {kind!r}; planned for {DEFAULT_CHIP}, set Options(chip=...)"
    )


def attached() -> str:
    """The platform of the devices of this machine: ``"tpu"``, ``"gpu"``, ..., ``"cpu"`` for none.

    Asked in a process of its own, since how many CPU devices there are can no longer be chosen
    once jax has looked.
    """
    if os.environ.get("JAX_PLATFORMS", "") == SIMULATED:
        return SIMULATED
    return guarded(_platform)


def describe(devices: Any) -> str:
    """Say what devices these are: ``8 x NVIDIA H100 80GB HBM3``."""
    device = devices[0]
    if device.platform == SIMULATED:
        return f"{len(devices)} simulated CPU devices on {os.cpu_count()} cores"
    return f"{len(devices)} x {device.device_kind}"


def _platform() -> str:
    return jax.devices()[0].platform
