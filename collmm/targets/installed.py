"""Whether the compiler of a target is there, found out without loading it. Never imports jax."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator

from collmm.errors import TargetError

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_WHEEL_FOLDERS = ("cuda_nvcc/bin", "cu13/bin")


def missing(kind: str, sm: str = "") -> str | None:
    """What keeps programs from being compiled for ``kind`` here, as one line; None if nothing does.

    ``sm`` is the GPU architecture ptxas must know, such as ``"sm_90a"``. A GPU compile without a
    usable ptxas fails late, with a crash at worst, so it is run here once.
    """
    if kind == "tpu" and importlib.util.find_spec("libtpu") is None:
        return 'the TPU compiler (libtpu) is not installed: pip install "collmm[tpu]"'
    if kind != "gpu":
        return None
    if not any(_has_module(name) for name in _PLUGINS):
        return 'the CUDA compiler (jax-cuda12-plugin) is not installed: pip install "collmm[gpu]"'
    found = list(_ptxas_paths())
    if not found:
        return (
            'ptxas is not installed and no GPU program compiles without: pip install "collmm[gpu]"'
        )
    if sm and not any(sm in _architectures(path) for path in found):
        return f'{found[0]} does not run or does not know {sm}: pip install -U "collmm[gpu]"'
    return None


def require(kind: str, sm: str = "") -> None:
    """Raise TargetError with the line ``missing`` gives, if it gives one."""
    reason = missing(kind, sm)
    if reason is not None:
        raise TargetError(reason)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _ptxas_paths() -> Iterator[str]:
    """Every ptxas XLA would find: the wheels', those on PATH, the system toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    folders = [os.path.join(root, folder) for root in roots for folder in _WHEEL_FOLDERS]
    folders += [*os.get_exec_path(), "/usr/local/cuda/bin"]
    seen = set()
    for folder in folders:
        path = shutil.which("ptxas", path=folder)
        if path and path not in seen:
            seen.add(path)
            yield path


@functools.cache
def _architectures(ptxas: str) -> frozenset[str]:
    """The sm_* names a ptxas lists in its help; empty when it does not run."""
    try:
        run = subprocess.run([ptxas, "--help"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    words = run.stdout.replace("'", " ").replace(",", " ").split()
    return frozenset(word for word in words if word.startswith("sm_"))
