"""A schedule as a target is predicted to run it: its timeline, what could be overlapped, and why.

This joins what the text says (``hlo``) with a target's links and figures. Importing it never
imports jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from collmm.cost import collectives
from collmm.cost.figures import Basis, Chip, Figure
from collmm.hlo import durations as times
from collmm.hlo.audit import audit
from collmm.hlo.durations import Durations
from collmm.hlo.findings import Finding, Verdict
from collmm.hlo.neighbours import Einsum, einsums_beside
from collmm.hlo.parse import Module
from collmm.hlo.timeline import Timeline, timeline
from collmm.schedule import MAX_PEERS
from collmm.targets.links import Links
from collmm.targets.target import Target

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "u8": "uint8"}
# Collectives next to an einsum that permutes can replace.
_LOOPABLE = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
CPU_NOTE = (
    "CPU code runs every collective synchronously and has no figures: this says what is moved, "
    "not what an accelerator would overlap; name a tpu or gpu target for that"
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An exposed collective next to an einsum, which permutes could overlap.

    Attributes:
      finding: the collective.
      einsums: the einsums whose operand it gathers or exchanges, or whose result it scatters or
        exchanges.
      saving: predicted seconds per run of the program that they would hide, by the published
        rule; 0 where it would hide nothing, None where a time is not known.
    """

    finding: Finding
    einsums: tuple[Einsum, ...]
    saving: float | None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One scheduled program on a target.

    Attributes:
      findings: its collectives, judged.
      timeline: what runs when; None for a cpu and without a target.
      candidates: exposed collectives that a ring could overlap.
      sources: where every figure comes from, one line each.
      notes: what had to be assumed, one line each.
    """

    findings: tuple[Finding, ...]
    timeline: Timeline | None
    candidates: tuple[Candidate, ...]
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def predict(
    module: Module,
    target: Target | None,
    *,
    devices: Sequence[Any] | None = None,
    mesh_axes: Mapping[str, int] | None = None,
    basis: Basis = "achievable",
) -> Prediction:
    """Predict how ``target`` runs a scheduled module.

    Args:
      module: the text.
      target: what it was compiled for; without one, or for a cpu, only the structure is judged.
      devices: the devices in the order of the program's device assignment, under jax
        ``mesh.devices.flat``; see ``targets.links.Links``.
      mesh_axes: the mesh's axes with their sizes, in order.
      basis: ``"achievable"`` or ``"nominal"`` rates.

    Raises HloError for a text that is not scheduled, OptionError or TargetError where mesh or
    target do not hold its devices.
    """
    if target is None or target.hardware is None:
        findings = tuple(audit(module, mesh_axes=mesh_axes))
        found = tuple(
            Candidate(f, beside, None)
            for f in findings
            if (beside := _beside(module, f, Durations()))
        )
        return Prediction(findings, None, found, notes=() if target is None else (CPU_NOTE,))
    links = Links(target, devices, basis)
    chip = target.hardware.per_device()
    durations = durations_for(chip, basis)
    line = timeline(
        module,
        mesh_axes=mesh_axes,
        transfer_time=lambda f: links.transfer(f).seconds,
        durations=durations,
        shares_link=links.shares,
        lanes=lambda f: links.transfer(f).lanes,
    )
    candidates = tuple(
        Candidate(f, beside, _saving(f, beside, links))
        for f in line.findings
        if (beside := _beside(module, f, durations))
    )
    notes = [target.note] if target.note else []
    notes += dict.fromkeys(n for f in line.findings if (n := links.transfer(f).note))
    if devices is None and line.findings:
        notes.append("where each device stands is not known: rings are taken to join neighbours")
    return Prediction(
        line.findings, line, candidates, _sources(line, chip, basis), tuple(dict.fromkeys(notes))
    )


def durations_for(chip: Chip, basis: Basis = "achievable") -> Durations:
    """The times of kernels on one device of ``chip``: the compiler's, else by the chip's rates."""

    def peak(dtype: str, precision: str) -> float | None:
        name = f"float8_{dtype[2:]}" if dtype.startswith("f8") else _DTYPES.get(dtype, dtype)
        return chip.flops_per_s(name, precision, basis)

    def share(rows: int, depth: int, columns: int) -> float:
        return 1.0 if chip.table is None else chip.table.share(rows, depth, columns)

    return Durations(
        clock_hz=chip.clock_hz(), peak=peak, memory=chip.hbm_bytes_per_s(basis), share=share
    )


def _beside(module: Module, f: Finding, durations: Durations) -> tuple[Einsum, ...]:
    if f.kind not in _LOOPABLE or f.verdict is Verdict.HIDDEN:
        return ()
    if f.kind == "all-to-all" and f.groups and len(f.groups[0]) > MAX_PEERS:
        return ()
    return tuple(einsums_beside(module, f, durations))


def _saving(f: Finding, einsums: tuple[Einsum, ...], links: Links) -> float | None:
    """What a ring would hide of an exposed collective.

    By the published rule (Wang et al., ASPLOS 2023) a loop takes max(einsum, ring) and two steps
    of the ring that nothing hides.
    """
    known = [e.seconds for e in einsums if e.seconds is not None]
    if f.transfer is None or f.exposed is None or len(known) < len(einsums) or f.executed is None:
        return None
    ring = links.ring(f)
    einsum_s = sum(known)
    # Of an all-reduce the ring takes the reduce-scatter; the gather after it stays.
    rest_s = f.transfer / 2 if f.kind == "all-reduce" else 0.0
    # The permutes of an exchange use the links that the all-to-all does.
    exchange = f.kind == "all-to-all"
    slower = 1.0 if exchange else collectives.slowdown(ring, two_way=ring.size > 2)
    ring_s = (f.transfer - rest_s) * slower
    after_s = max(einsum_s, ring_s) + 2 * ring_s / ring.size + rest_s
    return f.executed * max(0.0, f.exposed - (after_s - einsum_s))


def _sources(line: Timeline, chip: Chip, basis: Basis) -> tuple[str, ...]:
    texts = {
        times.CYCLES: f"the compiler's estimated_cycles at {_figure(chip.clock)}",
        times.EXEC_TIME: "the compiler's exec_time_us",
        times.MEMORY: f"bytes over memory bandwidth, {_figure(chip.hbm.figure(basis))}",
        times.CORRECTED: "bytes over memory bandwidth or flops over matrix peak, the longer: the "
        "compiler's exec_time_us of a bf16 product with a float32 result is that without tensor "
        "cores",
        times.PRODUCT: f"flops over matrix peak, bf16 {_figure(chip.bf16.figure(basis))}",
    }
    out = [
        f"{origin.runs} kernel runs, {origin.seconds * 1e3:.3g} ms: {texts.get(name, name)}"
        for name, origin in line.origins.items()
    ]
    if line.findings:
        link = _figure(chip.link.figure(basis))
        out.append(
            f"links: {link} one way; hop {_figure(chip.hop_latency)}; launch {_figure(chip.launch)}"
        )
    return tuple(out)


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return "unknown"
    for unit, factor, name in (
        ("Hz", 1e9, "GHz"),
        ("bytes/s", 1e9, "GB/s"),
        ("flop/s", 1e12, "TFLOP/s"),
        ("s", 1e-6, "us"),
    ):
        if figure.unit == unit:
            return f"{figure.value / factor:.4g} {name} ({figure.source})"
    return str(figure)
