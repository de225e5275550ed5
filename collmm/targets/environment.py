"""The environment variables a target needs, to be set before jax is imported.

This module never imports jax, so a command line can call it first.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from collmm.targets.names import parse_name

_COUNT_FLAG = "--xla_force_host_platform_device_count"

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
"""Compilers without their hardware warn about it; errors still show."""

_TPU = {
    # Without a TPU VM there is no metadata server to ask.
    "TPU_SKIP_MDS_QUERY": "1",
    # What that server would have said. The topology we compile for is given separately.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    # libtpu lets one process of a machine hold the TPU; compiling holds none.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def environment(target: str, current: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables ``target`` needs, as ``{name: value}``; nothing is set.

    ``JAX_PLATFORMS`` is always ``cpu``: tpu and gpu targets are compiled for, not run on. For
    ``cpu:N``, ``XLA_FLAGS`` is that of ``current`` with the device count replaced. The others are
    left out where ``current`` (``os.environ`` by default) has them already.

    Raises TargetError for a name that is no target.
    """
    name = parse_name(target)
    current = os.environ if current is None else current
    result = {"JAX_PLATFORMS": "cpu"}
    if name.kind == "cpu":
        result["XLA_FLAGS"] = _with_device_count(current.get("XLA_FLAGS", ""), name.shape[0])
        return result
    wanted = {**_QUIET, **(_TPU if name.kind == "tpu" else {})}
    return {**result, **{key: value for key, value in wanted.items() if key not in current}}


def apply_environment(target: str) -> None:
    """Set what ``environment`` gives, for this process.

    Also of use when jax is imported already, as long as it has not looked for devices: its
    configuration, read from ``JAX_PLATFORMS`` at import, is then brought up to date.
    """
    os.environ.update(environment(target))
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def unattached() -> dict[str, str]:
    """The variables of a process that compiles for any target and runs nothing."""
    return {"JAX_PLATFORMS": "cpu", **_QUIET, **_TPU}


def compiler_defaults(kind: str) -> dict[str, str]:
    """The variables that the compiler itself reads when it is first loaded, after jax is."""
    return dict(_TPU) if kind == "tpu" else {}


def _with_device_count(flags: str, count: int) -> str:
    kept = re.sub(rf"{_COUNT_FLAG}=\S*", "", flags).split()
    return " ".join([*kept, f"{_COUNT_FLAG}={count}"])
