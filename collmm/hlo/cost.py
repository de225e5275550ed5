"""What the compiler itself says an instruction costs, and which instructions cost nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from collmm.hlo.instruction import Instruction

# Instructions that move or compute nothing on the device's compute stream.
_FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id"),
    *("replica-id", "after-all", "opt-barrier", "add-dependency", "domain", "get-dimension-size"),
}
_FREE_TARGETS = {'"AllocateBuffer"', '"ConcatBitcast"', '"Sharding"'}
# These take their time even when the result is one number.
_WORK_TO_SCALAR = {
    *("fusion", "reduce", "dot", "convolution", "custom-call", "call", "while", "conditional"),
    *("sort", "reduce-window", "dynamic-slice", "gather", "scatter", "rng", "rng-bit-generator"),
    *("infeed", "outfeed"),
}


def estimated_cycles(i: Instruction) -> int | None:
    """TensorCore cycles of one run, as TPU HLO states them; None when it does not."""
    window = i.backend_config.get("window_config")
    text = str(window.get("estimated_cycles", "")) if isinstance(window, dict) else ""
    return int(text) if text.isdigit() else None


def exec_time_us(i: Instruction) -> float | None:
    """Microseconds of one run, from GPU HLO compiled with cost model statistics; else None.

    The figure of the speed-of-light model is taken where there is one, else the first.
    """
    entries = [e for e in _reifications(i) if isinstance(e.get("exec_time_us"), int | float)]
    best = next((e for e in entries if e.get("name") == "sol"), entries[0] if entries else None)
    return float(best["exec_time_us"]) if best else None


def seconds(i: Instruction, clock_hz: float | None) -> float | None:
    """Seconds of one run: cycles over ``clock_hz``, or the GPU figure; None when unknown."""
    us = exec_time_us(i)
    if us is not None:
        return us * 1e-6
    cycles = estimated_cycles(i)
    return cycles / clock_hz if cycles is not None and clock_hz else None


def is_free(i: Instruction) -> bool:
    """Whether ``i`` takes no time that matters on the compute stream.

    Bookkeeping does, and so does arithmetic on single numbers. Starts and dones of copies run on
    engines of their own and are free here as well.
    """
    if i.opcode in _FREE or i.opcode.endswith(("-start", "-update", "-done")):
        return True
    if i.opcode == "custom-call":
        return i.attrs.get("custom_call_target") in _FREE_TARGETS
    shape = i.shape
    return not shape.is_tuple and math.prod(shape.dims) == 1 and i.opcode not in _WORK_TO_SCALAR


def is_synchronous(i: Instruction) -> bool:
    """Whether the backend configuration says ``is_sync``: a GPU collective that blocks."""
    config = i.backend_config.get("collective_backend_config")
    return isinstance(config, dict) and config.get("is_sync") is True


def _reifications(i: Instruction) -> Iterator[dict]:
    entries = i.backend_config.get("reification_cost") or ()
    for e in entries if isinstance(entries, list) else [entries]:
        if isinstance(e, dict):
            yield e
