"""Flags that say how a program is planned, the same for every command that plans."""

from __future__ import annotations

from typing import Any

from absl import flags

from collmm.options import POLICIES

TARGET = (
    "What to compile for: cpu:8, tpu:v5e:2x4, gpu:h100:8, gpu:h100:2x8, ... Without one: as many "
    "simulated CPU devices as MESH asks for."
)
_NAMES = ("policy", "chip", "profile", "plan")


def define(values: flags.FlagValues) -> None:
    """Define ``--policy``, ``--chip``, ``--profile`` and ``--plan``."""
    flags.DEFINE_string(
        "policy",
        None,
        f"Which einsums to rewrite: {', '.join(POLICIES)}. Without one: what the program's own "
        "Options say, else auto.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "chip",
        None,
        "Hardware to plan for, such as v5e, h100 or a row of the profile. Without one: that of "
        "the target, and v5e for CPU devices.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "profile",
        None,
        "Measured figures to plan with, from collmm calibrate.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "plan",
        None,
        "Plan file to follow instead of the cost model. Where it does not fit: what the program's "
        "own Options say, else stop.",
        flag_values=values,
    )


def options(values: flags.FlagValues) -> dict[str, Any]:
    """What the flags ask of ``Program.overlapped``; None where a flag was not given."""
    return {name: values[name].value for name in _NAMES}
