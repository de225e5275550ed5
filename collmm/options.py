"""What a user can ask of the transformation."""

from __future__ import annotations

import dataclasses

from collmm.cost.hardware import CHIPS, nearest
from collmm.errors import OptionError

POLICIES = ("auto", "always", "never")


@dataclasses.dataclass(frozen=True)
class Options:
    """How collmm decides and what it does when something goes wrong.

    Attributes:
      policy: ``"auto"`` rewrites the sites that the cost model expects to gain; ``"always"``
        every site that a loop exists for; ``"never"`` none (the plan is still made).
      chip: the hardware row the plan is made for, such as ``"v5e"`` or ``"h100"``; None takes
        that of the devices at hand, and ``v5e`` on CPU devices.
      strict: raise when the analysis fails, instead of warning and running the original.

    Raises:
      OptionError: a value is not allowed; the message names the allowed ones.
    """

    policy: str = "auto"
    chip: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise OptionError(f"policy={self.policy!r}; use one of {', '.join(POLICIES)}")
        if self.chip is not None and self.chip not in CHIPS:
            raise OptionError(f"chip={self.chip!r}; {nearest(str(self.chip), CHIPS)}")
        if not isinstance(self.strict, bool):
            raise OptionError(f"strict={self.strict!r}; use True or False")
