"""Overlap collectives with the einsums that need them, in JAX."""

from collmm.api import OverlappedFunction, no_overlap, overlap_collectives
from collmm.errors import (
    AnalysisError,
    AnalysisWarning,
    CollmmError,
    HloError,
    OptionError,
    OverrideWarning,
    PlanMismatch,
    PlanMismatchWarning,
    ProgramError,
    Reason,
    TargetError,
)
from collmm.options import Options
from collmm.plan import Decision, Plan
from collmm.targets import Target, parse_target
from collmm.testing import assert_overlapped

__version__ = "0.1.0"

__all__ = [
    "AnalysisError",
    "AnalysisWarning",
    "CollmmError",
    "Decision",
    "HloError",
    "OptionError",
    "Options",
    "OverlappedFunction",
    "OverrideWarning",
    "Plan",
    "PlanMismatch",
    "PlanMismatchWarning",
    "ProgramError",
    "Reason",
    "Target",
    "TargetError",
    "assert_overlapped",
    "no_overlap",
    "overlap_collectives",
    "parse_target",
]
