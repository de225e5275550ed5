"""What an instruction moves and multiplies: bytes of memory traffic, floating-point operations.

These serve where the compiler states no time of its own. ``None`` says that the text does not
tell, never that nothing is moved.
"""

from __future__ import annotations

import math
import re

from collmm.hlo.instruction import Computation, Instruction
from collmm.hlo.parse import Module

# What reads its operands and writes its result once.
_STREAMING = {
    *("copy", "transpose", "reshape", "broadcast", "iota", "concatenate", "pad", "reverse"),
    *("slice", "convert", "bitcast-convert", "reduce", "reduce-window", "map", "select", "clamp"),
    *("compare", "add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs"),
    *("and", "or", "xor", "not", "exponential", "log", "tanh", "logistic", "rsqrt", "sqrt"),
    *("power", "sign", "floor", "ceil", "cosine", "sine", "is-finite", "reduce-precision"),
    *("dot", "convolution", "exponential-minus-one", "log-plus-one", "erf", "remainder"),
    *("shift-left", "shift-right-logical", "shift-right-arithmetic", "round-nearest-even"),
    *("round-nearest-afz", "copy-done", "slice-done"),
}
_READS_A_SLICE = ("dynamic-slice", "slice", "gather")
_TRANSPARENT = ("bitcast", "reshape", "get-tuple-element", "convert", "copy")
# Calls of these hold matrix products that the text describes like a dot.
_GEMM_TARGET = re.compile(r"__cublas|__triton_gemm|__onednn\$matmul")
_MOVES = {
    *("parameter", "slice", "dynamic-slice", "dynamic-update-slice", "copy", "bitcast", "constant"),
    *("tuple", "get-tuple-element"),
}


def traffic_bytes(module: Module, computation: Computation, i: Instruction) -> int | None:
    """Bytes of memory that one run of ``i`` reads and writes; None where that cannot be told.

    A slice that is updated in place counts twice, read and written, the buffer around it not at
    all; of an operand that a fusion only slices, the slice counts.
    """
    if i.opcode == "fusion":
        callee = _callee(module, i)
        return None if callee is None else _fusion_bytes(callee)
    if i.opcode == "custom-call" and is_gemm(i):
        return sum(o.shape.bytes for o in computation.operands(i)) + _product(i).bytes
    if i.opcode in ("dynamic-slice", "gather"):
        return 2 * i.shape.bytes
    if i.opcode == "dynamic-update-slice":
        return 2 * computation[i.operands[1]].shape.bytes
    if i.opcode not in _STREAMING:
        return None
    return sum(o.shape.bytes for o in computation.operands(i)) + i.shape.bytes


def matrix_flops(module: Module, computation: Computation, i: Instruction) -> int | None:
    """Floating-point operations of the matrix products in ``i``, a multiply-add counted as two.

    0 where there is no product; None where there is one of which the text does not tell the size.
    """
    if i.opcode == "dot":
        return _dot_flops(computation, i, i.attrs.get("lhs_contracting_dims", "{}"))
    if i.opcode == "convolution":
        return None
    if i.opcode == "custom-call" and is_gemm(i):
        return _gemm_flops(computation, i)
    if i.opcode not in ("fusion", "call"):
        return 0
    callee = _callee(module, i)
    if callee is None:
        return None
    found = [matrix_flops(module, callee, inner) for inner in callee]
    return None if None in found else sum(f for f in found if f)


def product_operand(
    module: Module, computation: Computation, i: Instruction
) -> tuple[str, str] | None:
    """(HLO element type of the left operand, precision) of the first matrix product in ``i``."""
    if i.opcode == "dot" or (i.opcode == "custom-call" and is_gemm(i)):
        config = i.attrs.get("operand_precision", "") + str(
            i.backend_config.get("gemm_backend_config")
        )
        highest = "highest" in config.lower()
        return computation.operands(i)[0].shape.dtype, "highest" if highest else "default"
    callee = _callee(module, i) if i.opcode in ("fusion", "call") else None
    if callee is None:
        return None
    found = (product_operand(module, callee, inner) for inner in callee)
    return next((f for f in found if f), None)


def is_gemm(i: Instruction) -> bool:
    """Whether the custom call ``i`` is a matrix product of a library."""
    return bool(_GEMM_TARGET.search(i.attrs.get("custom_call_target", "")))


def copied_bytes(module: Module, computation: Computation, start: Instruction) -> int | None:
    """Bytes of the asynchronous copy that ``start`` begins; None when it begins anything else.

    A copy to or from the memory of the host (memory space 5) is no such copy: it runs over another
    bus.
    """
    if start.opcode in ("async-start", "call-start", "fusion-start"):
        callee = _callee(module, start)
        if callee is None or any(i.opcode not in _MOVES for i in callee):
            return None
    elif start.opcode not in ("copy-start", "slice-start", "dynamic-slice-start"):
        return None
    done = computation.done_of(start)
    shapes = list(start.shape.leaves())
    if done is None or any(s.memory_space == 5 for s in shapes):
        return None
    return done.shape.bytes


def _callee(module: Module, i: Instruction) -> Computation | None:
    names = i.called().get("calls") or i.called().get("to_apply") or ()
    return module[names[0]] if names and names[0] in module else None


def _fusion_bytes(fused: Computation) -> int:
    """Traffic of a fusion: every parameter as far as it is used, and the result."""
    users: dict[str, list[Instruction]] = {}
    for i in fused:
        for operand in dict.fromkeys(i.operands):
            users.setdefault(operand, []).append(i)
    total = sum(_read(p, users) for p in fused if p.opcode == "parameter")
    return total + _written(fused, fused.root)


def _read(value: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Bytes read of a value that comes from memory: all of it, or the slices that are used."""
    total = 0
    for user in users.get(value.name, ()):
        if user.opcode in _READS_A_SLICE and user.operands[0] == value.name:
            total += user.shape.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # updated in place
        elif user.opcode == "bitcast":
            total += _read(user, users)
        else:
            return value.shape.bytes
    return min(total, value.shape.bytes)


def _written(fused: Computation, root: Instruction) -> int:
    if root.opcode == "tuple":
        return sum(_written(fused, fused[name]) for name in root.operands)
    if root.opcode == "bitcast" and root.operands:
        return _written(fused, fused[root.operands[0]])
    if root.opcode == "dynamic-update-slice":
        return fused[root.operands[1]].shape.bytes
    return root.shape.bytes


def _dot_flops(computation: Computation, i: Instruction, contracting: str) -> int:
    lhs = computation.operands(i)[0].shape.dims
    dims = [int(d) for d in re.findall(r"\d+", contracting)]
    return 2 * math.prod(i.shape.dims) * math.prod(lhs[d] for d in dims)


def _gemm_flops(computation: Computation, i: Instruction) -> int | None:
    lhs = computation.operands(i)[0].shape.dims
    config = i.backend_config.get("gemm_backend_config")
    if isinstance(config, dict) and isinstance(config.get("dot_dimension_numbers"), dict):
        named = config["dot_dimension_numbers"].get("lhs_contracting_dimensions", [])
        dims = [int(d) for d in named]
    elif len(lhs) == 2:  # oneDNN: rows times columns
        dims = [1]
    else:
        return None
    return 2 * math.prod(_product(i).dims) * math.prod(lhs[d] for d in dims)


def _product(i: Instruction):
    """The shape of the product itself: a library call may also return its work space."""
    return i.shape.elements[0] if i.shape.is_tuple and i.shape.elements else i.shape
