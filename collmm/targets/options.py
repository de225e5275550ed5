"""The compiler options that belong to a kind of target, each with its reason. No jax."""

from __future__ import annotations

import dataclasses

from collmm.errors import OptionError

Value = bool | int | str


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """One XLA option, the value to give it and why.

    ``without_hardware``: only for compiling ahead of time; leave it alone on the real thing.
    """

    name: str
    value: Value
    reason: str
    without_hardware: bool = False


GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_dot_merger_threshold_mb",
        0,
        "the dot merger joins the partial einsums of an unrolled ring, which exposes its permutes",
    ),
    CompilerOption(
        "xla_gpu_enable_triton_gemm",
        False,
        "with no device to time kernels on, a Triton GEMM would get a default tile",
        without_hardware=True,
    ),
)
GPU_STATS = CompilerOption(
    "xla_gpu_collect_cost_model_stats",
    True,
    "writes exec_time_us beside each kernel; XLA has the table for it on Hopper only, and fails "
    "to compile for others with it",
    without_hardware=True,
)

_WINDOWED = "the compiler's own decomposition of this collective and its einsum is off"
TPU_UNDECOMPOSED = (
    CompilerOption("xla_tpu_enable_windowed_einsum_for_all_gather", False, _WINDOWED),
    CompilerOption("xla_tpu_enable_windowed_einsum_for_reduce_scatter", False, _WINDOWED),
)


def options_for(kind: str, timed: bool) -> tuple[CompilerOption, ...]:
    """The options to set for programs collmm rewrote. TPU: none, its compiler leaves rings be.

    ``timed``: whether XLA can estimate this GPU's kernel times.
    """
    if kind != "gpu":
        return ()
    return (*GPU_OPTIONS, GPU_STATS) if timed else GPU_OPTIONS


def baseline_for(kind: str, timed: bool, decomposition: str) -> tuple[CompilerOption, ...]:
    """The options to compile an original program with, to compare against.

    ``decomposition``: ``"off"`` turns the compiler's own decomposition off, ``"default"`` leaves it
    as the compiler ships it. Off is the default on GPU, and there is none on cpu. The options that
    compiling without the hardware needs are in both.
    """
    if decomposition not in ("off", "default"):
        raise OptionError(f"decomposition is {decomposition!r}; it must be 'off' or 'default'")
    if kind == "tpu":
        return TPU_UNDECOMPOSED if decomposition == "off" else ()
    return tuple(option for option in options_for(kind, timed) if option.without_hardware)


def as_dict(options: tuple[CompilerOption, ...]) -> dict[str, Value]:
    """``{name: value}``, as ``jax.jit(..., compiler_options=...)`` takes them."""
    return {option.name: option.value for option in options}
