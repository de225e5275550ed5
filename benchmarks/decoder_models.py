"""The cost model against published MFU: decoder models of 32B to 1024B parameters on TPU v4.

    python benchmarks/decoder_models.py        # needs the "tpu" extra; plans, compiles nothing

One layer of each model, forward and backward with the published remat, is planned on the mesh of
its pod slice; the layer's predicted seconds and the floating-point operations of the model give an
MFU, which stands beside the one that was published (google/paxml, lm_cloud, read off a plot).

Assumed:

* A step is its layers: embedding, loss and optimizer are left out, in the time and in the count.
* MFU counts ``72 tokens d^2 + 12 tokens sequence d`` operations a layer, forward and backward, the
  scores in full; what remat computes again takes time and is not counted.
* A layer's time is the sum of its einsums and collectives as they are planned, less what is hidden,
  and the passes over the attention scores, which no einsum's own traffic holds: reads and writes
  of bfloat16 scores (``FORWARD_PASSES``, ``BACKWARD_PASSES``) at the achievable bandwidth. Other
  elementwise work is taken to fuse.
* The published system is taken to overlap where the plan does.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import types

from absl import app

from collmm import Options, overlap_collectives, parse_target
from collmm.cost.einsum import product_of, time_of
from collmm.plan import Plan
from collmm.targets import apply_environment

SEQUENCE, HEAD, CHIP = 1024, 128, "v4"

# Of the softmax over the scores. Forward: the maximum, the sum, and the weights read and written.
# Backward: the weights and their cotangent read for the sum and again, the result written.
FORWARD_PASSES, BACKWARD_PASSES = 4, 5


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model: its layer, how it was run, and the MFU in percent that was read.

    Attributes:
      layers, width: of the model; the hidden size is four times the width, a head has 128.
      topology: chips of TPU v4.
      mesh: (data, model).
      batch: sequences of 1024 tokens.
      saved: what remat keeps of the forward pass.
      mfu: percent; None where none was published.
    """

    name: str
    layers: int
    width: int
    topology: str
    mesh: tuple[int, int]
    batch: int
    saved: tuple[str, ...]
    mfu: float | None


MODELS = (
    Model("32B", 40, 8192, "4x4x4", (16, 4), 512, ("context", "project"), 42.3),
    Model("64B", 51, 10240, "4x4x8", (16, 8), 512, ("context", "project"), None),
    Model("128B", 71, 12288, "4x8x8", (64, 4), 1024, (), 48.6),
    Model("256B", 80, 16384, "8x8x8", (64, 8), 2048, (), 53.2),
    Model("512B", 102, 20480, "8x8x16", (64, 16), 4096, (), 49.0),
    Model("1024B", 142, 24576, "8x16x16", (256, 8), 4096, (), 53.6),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """What is predicted of one model.

    Attributes:
      model: which.
      layer_s: seconds of one layer, forward, recomputed and backward.
      einsums_s, scores_s: its einsums whole; the passes over the scores.
      ideal_s: the counted operations at peak.
      rewritten, einsums: how many of the layer's einsums become loops, of how many.
    """

    model: Model
    layer_s: float
    einsums_s: float
    scores_s: float
    ideal_s: float
    rewritten: int
    einsums: int

    @property
    def mfu(self) -> float:
        """Predicted, in percent."""
        return 100 * self.ideal_s / self.layer_s

    @property
    def error(self) -> float | None:
        """Points by which the prediction is above what was published."""
        return None if self.model.mfu is None else self.mfu - self.model.mfu

    @property
    def step_s(self) -> float:
        """Seconds of all layers."""
        return self.model.layers * self.layer_s


def rows() -> list[Row]:
    """Predict every model."""
    apply_environment(f"tpu:{CHIP}:{MODELS[0].topology}")
    return [_row(model) for model in MODELS]


def _row(model: Model) -> Row:
    plan = _planned(model)
    assert plan.row is not None
    data, tensor = model.mesh
    tokens, width = model.batch * SEQUENCE, model.width
    flops = 72 * tokens * width**2 + 12 * tokens * SEQUENCE * width
    einsums = [time_of(product_of(d.site), plan.row).seconds for d in plan.decisions]
    scores = model.batch // data * (width // HEAD // tensor) * SEQUENCE**2
    passes = 2 * FORWARD_PASSES + BACKWARD_PASSES  # remat computes the weights again
    scores_s = passes * 2 * scores / plan.row.hbm_bytes_per_s()
    return Row(
        model,
        _planned_s(plan) + scores_s,
        sum(einsums),
        scores_s,
        flops / (data * tensor * plan.row.bf16.value("nominal")),
        len(plan.rewritten),
        len(plan.decisions),
    )


def _planned(model: Model) -> Plan:
    """Plan one layer, forward and backward, on the mesh of its slice."""
    target = parse_target(f"tpu:{CHIP}:{model.topology}")
    mesh = target.mesh(dict(zip(("data", "model"), model.mesh, strict=True)))
    width, heads = model.width, model.width // HEAD
    fn, args = _example().layer_step(
        mesh, model.batch, SEQUENCE, width, 4 * width, heads, HEAD, keep=model.saved
    )
    return overlap_collectives(fn, Options(chip=CHIP)).plan(*args)


def _planned_s(plan: Plan) -> float:
    """Seconds of a plan's einsums and collectives; a ring that several share counts once."""
    assert plan.row is not None
    total, seen = 0.0, set()
    for d in plan.decisions:
        if d.estimate is None:
            total += time_of(product_of(d.site), plan.row).seconds
        elif not d.group or d.group not in seen:
            seen.add(d.group)
            total += d.estimate.after_s if d.rewritten else d.estimate.before_s
    return total


def _example() -> types.ModuleType:
    path = pathlib.Path(__file__).parents[1] / "examples" / "gpt_layer_2d.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text(found: list[Row]) -> str:
    """Return the table."""
    lines = [
        "model   mesh    loops     layer   einsums   scores     step  predicted  published MFU"
    ]
    for r in found:
        mesh = "x".join(map(str, r.model.mesh))
        published = "-" if r.error is None else f"{r.model.mfu:.1f} % ({r.error:+.1f})"
        lines.append(
            f"{r.model.name:6s}  {mesh:6s}  {r.rewritten:2d}/{r.einsums:2d}"
            f"  {1e3 * r.layer_s:5.0f} ms  {1e3 * r.einsums_s:5.0f} ms  {1e3 * r.scores_s:4.0f} ms"
            f"  {r.step_s:5.1f} s  {r.mfu:7.1f} %  {published}"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Print the table; all times are predicted."""
    if len(argv) > 1:
        raise app.UsageError("takes no arguments")
    print(text(rows()))


if __name__ == "__main__":
    app.run(main)
