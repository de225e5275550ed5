"""What programs are compiled for: cpu, TPU and GPU targets. Importing this never imports jax."""

from collmm.targets.environment import apply_environment, environment
from collmm.targets.guard import guarded
from collmm.targets.listing import TargetRow, list_targets
from collmm.targets.names import TargetName, parse_name
from collmm.targets.options import CompilerOption
from collmm.targets.target import Target, parse_target

__all__ = [
    "CompilerOption",
    "Target",
    "TargetName",
    "TargetRow",
    "apply_environment",
    "environment",
    "guarded",
    "list_targets",
    "parse_name",
    "parse_target",
]
