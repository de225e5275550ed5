"""The cost model against stored timelines: how far its times are off, how well it chooses.

results (a JSON file of ``cost_grid.py``)  ->  a row per chip, and the sites it gets wrong

Nothing of jax is imported.
"""

from __future__ import annotations

import dataclasses
import statistics
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from grid_sites import GridSite

from collmm.cost.candidates import Candidate, RingPlace, candidates
from collmm.cost.collectives import Ring
from collmm.cost.figures import Chip
from collmm.cost.hardware import chip
from collmm.einsum import Einsum
from collmm.schedule import Schedule
from collmm.sites import ALL_GATHER, REDUCE_SCATTER, Collective, EinsumSite, Spec

WHOLE, SHIPPED = "whole", "as the compiler ships"
MIN_GAIN = 0.02
_MATMUL = Einsum((0, 1), (1, 2), (0, 2))
_MODEL = ("model",)


def site_of(g: GridSite) -> EinsumSite:
    """The site as planning sees it."""
    sizes = dict(g.mesh)
    data = ("data",) if "data" in sizes else ()
    rows = g.rows // sizes.get("data", 1)
    specs: dict[str, tuple[Spec, Spec, Spec]] = {
        "gather": ((data, ()), ((), _MODEL), (data, _MODEL)),
        "weights": (((*data, *_MODEL), ()), ((), ()), ((*data, *_MODEL), ())),
        "columns": (((*data, *_MODEL), ()), ((), ()), ((*data, *_MODEL), ())),
        "scatter": ((data, _MODEL), (_MODEL, ()), (data, ())),
    }
    collective = {
        "gather": Collective(ALL_GATHER, 0, 0, _MODEL, 2 * rows * g.depth),
        "weights": Collective(ALL_GATHER, 1, 0, _MODEL, 2 * g.depth * g.columns),
        "columns": Collective(ALL_GATHER, 1, 1, _MODEL, 2 * g.depth * g.columns),
        "scatter": Collective(REDUCE_SCATTER, None, 0, _MODEL, 2 * rows * g.columns),
    }[g.kind]
    shapes = (g.rows, g.depth), (g.depth, g.columns), (g.rows, g.columns)
    return EinsumSite(
        0,
        _MATMUL,
        shapes,
        ("bfloat16",) * 3,
        (2, 2, 2),
        *specs[g.kind],
        (collective,),
        axis_sizes=g.mesh,
    )


def variant(schedule: Schedule) -> str:
    """The name under which the results of a schedule are stored."""
    return schedule.describe() + (" chains 1" if schedule.chains == 1 else "")


def planned_schedules(site: EinsumSite, row: Chip) -> list[Schedule]:
    """Every schedule that planning weighs for a site of the grid on ``row``."""
    found = candidates(site, row, lambda site, axes: RingPlace())
    return [c.schedule for c in found]


@dataclasses.dataclass(frozen=True)
class Row:
    """One site: predicted and timeline seconds by variant, and what the model chooses.

    ``doubt``: seconds by which a loop's estimate is uncertain. ``fitted``: whether the figures of
    the model were fitted to this site.
    """

    site: GridSite
    predicted: Mapping[str, float]
    timeline: Mapping[str, float]
    doubt: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fitted: bool = False

    @property
    def errors(self) -> list[float]:
        """``|predicted / timeline - 1|`` of every variant that was compiled."""
        both = self.predicted.keys() & self.timeline.keys()
        return [abs(self.predicted[v] / self.timeline[v] - 1) for v in both]

    @property
    def chosen(self) -> str:
        """The fastest by the model, or the whole einsum where no loop saves enough."""
        loops = {v: s for v, s in self.predicted.items() if v != WHOLE and v in self.timeline}
        best = min(loops, key=lambda v: loops[v], default=WHOLE)
        if best == WHOLE:
            return WHOLE
        with_doubt = loops[best] + self.doubt.get(best, 0.0)
        return best if with_doubt < (1 - MIN_GAIN) * self.predicted[WHOLE] else WHOLE

    @property
    def behind(self) -> float:
        """How much slower the timeline shows the choice than the best of its candidates."""
        offered = [s for v, s in self.timeline.items() if v in self.predicted]
        return self.timeline[self.chosen] / min(offered) - 1

    @property
    def worse(self) -> float:
        """How much slower a chosen loop is than the whole einsum; 0 where none is chosen."""
        return self.timeline[self.chosen] / self.timeline[WHOLE] - 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A site of a results file: as planning sees it, on its ring, with its timeline seconds."""

    grid_site: GridSite
    site: EinsumSite
    ring: Ring
    timeline: Mapping[str, float]

    @property
    def chip_name(self) -> str:
        """Such as ``v5e``."""
        return self.grid_site.target.split(":")[1]

    @property
    def fitted(self) -> bool:
        """Whether the model's figures are fitted to it: every other site, by a hash of its name."""
        return zlib.crc32(self.grid_site.name.encode()) % 2 == 0

    def row(self, row: Chip) -> Row:
        """The site as the model sees it on ``row``."""
        found: tuple[Candidate, ...] = candidates(
            self.site, row, lambda site, axes: RingPlace(self.ring)
        )
        predicted = {variant(c.schedule): c.estimate.after_s for c in found}
        predicted[WHOLE] = found[0].estimate.before_s
        doubt = {variant(c.schedule): c.estimate.doubt_s for c in found}
        return Row(self.grid_site, predicted, self.timeline, doubt, self.fitted)


def entries(results: Mapping[str, Any]) -> Iterator[Entry]:
    """Every site of a results file."""
    for entry in results["sites"]:
        g = GridSite(**dict(entry["site"], mesh=tuple(map(tuple, entry["site"]["mesh"]))))
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in entry["ring"].items()}
        yield Entry(g, site_of(g), Ring(**fields), entry["timeline"])


def rows(results: Mapping[str, Any]) -> Iterator[Row]:
    """Every site of a results file, predicted with the hardware table."""
    for entry in entries(results):
        yield entry.row(chip(entry.chip_name).per_device())


def quantile(values: list[float], part: float) -> float:
    """The value below which that part of ``values`` lies."""
    return sorted(values)[int(part * (len(values) - 1))]


def summary(found: list[Row]) -> dict[str, float]:
    """The figures of the report for some sites."""
    errors = [e for row in found for e in row.errors]
    return {
        "sites": len(found),
        "programs": len(errors),
        "median": statistics.median(errors),
        "p90": quantile(errors, 0.9),
        "close": sum(row.behind <= 0.03 for row in found) / len(found),
        "slower": sum(row.worse > 0.02 for row in found),
    }


def text(found: list[Row], crossed: bool = False) -> str:
    """The report: a line per chip, one for all, both halves apart, and the sites chosen wrongly.

    ``crossed``: each half was predicted by a model that is fitted to the other.
    """
    lines = [
        f"{'':10s}  sites  programs  median error  p90 error  within 3 % of best  slower by > 2 %"
    ]
    chips = sorted({row.site.target.split(":")[1] for row in found})
    groups = {name: [r for r in found if r.site.target.split(":")[1] == name] for name in chips}
    if crossed:
        groups["held out"] = found
    else:
        groups |= {
            "all": found,
            "fitted to": [r for r in found if r.fitted],
            "held out": [r for r in found if not r.fitted],
        }
    for name, rows_of in groups.items():
        if rows_of:
            s = summary(rows_of)
            lines.append(
                f"{name:10s}  {s['sites']:5.0f}  {s['programs']:8.0f}  {s['median']:12.1%}"
                f"  {s['p90']:9.1%}  {s['close']:18.0%}  {s['slower']:15.0f}"
            )
    wrong = sorted((r for r in found if r.behind > 0.03), key=lambda r: -r.behind)
    lines += ["", *(f"{r.site.name}: {r.chosen}, {r.behind:.0%} behind the best" for r in wrong)]
    return "\n".join(lines)
