"""Errors a user can meet, and the closed list of reasons for leaving an einsum alone.

Pure: imports nothing of jax. Every error message is one line that names what came, what was
wanted and what to do; the command line prints it and exits with status 2.
"""

from __future__ import annotations

import enum


class CollmmError(Exception):
    """Base class of every error collmm raises on purpose."""


class OptionError(CollmmError, ValueError):
    """An argument or option has a value that is not allowed."""


class ProgramError(CollmmError):
    """A program file cannot be loaded or does not follow the protocol."""


class TargetError(CollmmError):
    """A target is unknown, cannot hold the mesh, or its compiler is not installed."""


class CrashError(TargetError):
    """A process of its own, such as a compiler's, crashed; the message names how it ended."""


class HloError(CollmmError):
    """A text is not the HLO this reader knows; the message names the line, and is cut if long."""

    def __init__(self, message: str):
        longest = 400  # a line of HLO may have megabytes
        super().__init__(message if len(message) <= longest else f"{message[:longest]}...")


class PlanFileError(OptionError):
    """A plan file cannot be read, or is none."""


class PlanMismatch(CollmmError):
    """A plan file does not fit the program, the jax version, the mesh or the chip.

    Attributes:
      differences: one line for each thing that differs; the message shows the first few.
    """

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class PlanMismatchWarning(UserWarning):
    """A plan file does not fit, and the program was planned anew, as ``Options`` asked for."""


class OverrideWarning(UserWarning):
    """An override in ``Options`` matches no einsum of the program."""


class AnalysisError(CollmmError):
    """The analysis met something it does not understand.

    Callers of a decorated function never see it unless ``Options(strict=True)``: the original
    function runs and a warning names the site.
    """


class AnalysisWarning(UserWarning):
    """The analysis failed; the original function runs."""


class Reason(enum.Enum):
    """Why a ``dot_general`` is left as it was. The list is closed; each value is documented.

    The enum value is the code that plans, JSON and documentation use; ``meaning`` is the sentence.
    """

    NO_COLLECTIVE = ("no-collective", "neither operand is gathered and the result is not reduced")
    ALL_REDUCE = ("all-reduce", "the result is summed over the ring but wanted whole everywhere")
    ALL_TO_ALL = (
        "all-to-all",
        "the all-to-all next to the einsum has too many peers, or a form that is not split by peer",
    )
    PERMUTE = ("collective-permute", "the collective next to the einsum is a permute")
    NOT_WORTH = ("not-worth", "the cost model expects no gain")
    ALREADY_HIDDEN = (
        "already-hidden",
        "the compiler hides the collective, or others over its links, behind einsums as it is",
    )
    GATHERED_ONCE = (
        "gathered-once",
        "the value is the same in every turn of a loop; the compiler gathers it once, before it",
    )
    POLICY_NEVER = ("policy-never", "the policy is 'never'")
    OVERRIDE = ("override", "an override in Options says 'never'")
    PLAN_FILE = ("plan-file", "the plan file leaves it as it is")
    MEMORY_BUDGET = ("memory-budget", "every loop for it needs more memory than memory_budget")
    PERMUTE_BUDGET = ("permute-budget", "its permutes would exceed max_permutes")
    NO_OVERLAP = ("no-overlap", "the einsum was traced under collmm.no_overlap()")
    INSIDE_SHARD_MAP = (
        "inside-shard-map",
        "the einsum is inside a shard_map and no collective of the user's stands next to it",
    )
    AXIS_GROUPS = (
        "axis-groups",
        "the collective next to the einsum runs over groups of a mesh axis",
    )
    UNEVEN_SHARDS = (
        "uneven-shards",
        "the shards fit no ring: a dimension is empty, shards before and after the collective do "
        "not nest, or their axes stand against the order of the mesh",
    )
    SUB_AXIS = ("sub-axis", "the shardings split a mesh axis into sub-axes that overlap")
    MIXED_SLICE = (
        "mixed-slice",
        "the reduced result is sliced over axes that were not reduced too",
    )
    SHARED_RESULT = ("shared-result", "the summed result is also needed whole by something else")
    UNREDUCED = ("unreduced", "the program itself leaves an operand or the result unreduced")
    UNSUPPORTED_DTYPE = ("unsupported-dtype", "no loop exists for these element types")
    UNKNOWN_MESH = (
        "unknown-mesh",
        "the mesh of the sharding could not be identified, or a value lies on one device",
    )
    OPAQUE = ("opaque", "the einsum is in a kernel or another body that is not entered")
    UNREACHED = ("unreached", "the einsum did not reach the compiler: dead, or rewritten by jax")
    ANALYSIS_FAILED = ("analysis-failed", "the analysis met something it does not understand")

    def __init__(self, code: str, meaning: str):
        self.code = code
        self.meaning = meaning
