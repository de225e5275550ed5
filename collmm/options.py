"""What a user can ask of the transformation."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from collmm.constraints import read_overrides, read_size
from collmm.cost.figures import Chip
from collmm.cost.hardware import CHIPS, load_profile, nearest
from collmm.errors import OptionError

POLICIES = ("auto", "always", "never")
ON_MISMATCH = ("stop", "replan")


@dataclasses.dataclass(frozen=True)
class Options:
    """How collmm decides and what it does when something goes wrong.

    Attributes:
      policy: ``"auto"`` rewrites the sites that the cost model expects to gain; ``"always"``
        every site that a loop exists for; ``"never"`` none (the plan is still made).
      chip: the hardware row the plan is made for, such as ``"v5e"`` or ``"h100"``; None takes
        that of the devices at hand, and ``v5e`` on CPU devices.
      strict: raise when the analysis fails, instead of warning and running the original.
      profile: a JSON profile of measured figures, as ``collmm calibrate`` writes it; its rows
        are added to the hardware table or override it. With one row and no ``chip``, that row.
      min_gain: the part of the predicted time of einsum and collective that a loop must save, even
        if it takes as much longer as the cost model is in doubt.
      memory_budget: bytes per device that one loop may hold besides what the einsum and its
        collective do: a whole number, or a text such as ``"2GiB"``; None is no limit.
      max_permutes: the collective-permutes that all loops of the program may have together, in
        the text of the program; None is no limit.
      overrides: what happens to single einsums whatever the cost model says, by ``file:line`` or
        by name scope: ``{"model.py:120": "never", "decoder/mlp": "two-way unrolled"}``. Kept as
        pairs; the last that matches counts. See ``collmm.constraints``.
      plan: a plan file, as ``Plan.save`` writes it, which decides alone where it fits.
      on_mismatch: what happens where the plan file does not fit: ``"stop"`` raises
        ``PlanMismatch``, ``"replan"`` warns and plans anew.
      keep_whole: whether einsums that the cost model leaves alone are marked for the TPU compiler
        to leave whole too; else it may decompose them by a rule of its own.
      chains: whether a gather and a scatter with only elementwise work between their einsums
        become one loop, in which the whole hidden value does not exist.

    Raises:
      OptionError: a value is not allowed; the message names the allowed ones.
    """

    policy: str = "auto"
    chip: str | None = None
    strict: bool = False
    profile: str | os.PathLike[str] | None = None
    min_gain: float = 0.02
    memory_budget: int | str | None = None
    max_permutes: int | None = None
    overrides: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    plan: str | os.PathLike[str] | None = None
    on_mismatch: str = "stop"
    keep_whole: bool = True
    chains: bool = True

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, POLICIES)
        _one_of("on_mismatch", self.on_mismatch, ON_MISMATCH)
        for name in ("profile", "plan"):
            object.__setattr__(self, name, _path(name, getattr(self, name)))
        table = self.table()
        if self.chip is not None and self.chip not in table:
            raise OptionError(f"chip={self.chip!r}; {nearest(str(self.chip), table)}")
        for name in ("strict", "keep_whole", "chains"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r}; use True or False")
        gain = self.min_gain
        number = isinstance(gain, (int, float)) and not isinstance(gain, bool)
        if not number or not math.isfinite(gain) or not 0 <= gain < 1:
            raise OptionError(f"min_gain={gain!r}; use a part of the time from 0 to below 1")
        if self.memory_budget is not None:
            size = read_size(self.memory_budget, "memory_budget")
            object.__setattr__(self, "memory_budget", size)
        most = self.max_permutes
        if most is not None and (type(most) is not int or most < 0):
            raise OptionError(f"max_permutes={most!r}; use None or a whole number from 0 up")
        object.__setattr__(self, "overrides", read_overrides(self.overrides))

    def fits_memory(self, memory_bytes: int) -> bool:
        """Whether a loop that holds that many bytes more is within ``memory_budget``."""
        budget = self.memory_budget
        return budget is None or memory_bytes <= read_size(budget, "memory_budget")

    def table(self) -> Mapping[str, Chip]:
        """The hardware table with the rows of the profile, which is read at every call.

        Raises OptionError when the profile cannot be read.
        """
        return CHIPS if self.profile is None else load_profile(self.profile)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name}={value!r}; use one of {', '.join(allowed)}")


def _path(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise OptionError(f"{name}={value!r}; give the path of a file")
    return os.fsdecode(value)
