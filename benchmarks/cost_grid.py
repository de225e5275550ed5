"""The cost model against the timelines of compiled programs, over a grid of single sites.

    python benchmarks/cost_grid.py report [RESULTS.json]
    python benchmarks/cost_grid.py cross [RESULTS.json]
    python benchmarks/cost_grid.py fit [RESULTS.json]
    python benchmarks/cost_grid.py compile RESULTS.json [--only=tpu:v5e] [--sites=20] [--shipped]
    python benchmarks/cost_grid.py products RESULTS.json

``compile`` compiles sites of ``grid_sites`` with the real compilers, in every schedule the planner
weighs and whole, and adds what their timelines take to RESULTS.json; a site that is there is only
compiled in the schedules that it lacks, and those sites come first. ``products`` adds the times of
single einsums on a GPU. ``report`` prints how far the model is off, and whether it chooses well, on
the half of the sites that its figures are fitted to and on the other half; ``fit`` prints those
figures as ``collmm/cost/einsum_fits.py`` has them, and ``cross`` fits to each half and reports on
the other. Without a file these three take the results stored beside the tests. Only ``compile`` and
``products`` need the compilers.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import pathlib
from typing import Any
from zlib import crc32

import grid_fit
import grid_report
from absl import app, flags
from grid_sites import GridSite, sites

from collmm.cost.hardware import chip
from collmm.schedule import Schedule

STORED = pathlib.Path(__file__).parents[1] / "tests" / "data" / "cost_grid.json"
TABLE = "h100"

_ONLY = flags.DEFINE_string("only", "", "compile sites of targets that begin with this")
_SITES = flags.DEFINE_integer("sites", 20, "compile at most that many more", lower_bound=1)
_SHIPPED = flags.DEFINE_bool("shipped", False, "on a TPU, as the compiler itself decomposes it too")


def compile_sites(path: pathlib.Path, only: str, most: int) -> None:
    """Compile up to ``most`` sites that ``path`` lacks, or of which it lacks schedules."""
    from collmm.targets import apply_environment

    wanted = [g for g in sites() if g.target.startswith(only)]
    if not wanted:
        raise app.UsageError(f"no target of the grid begins with {only!r}")
    apply_environment(wanted[0].target)
    results = _read(path)
    found = list(grid_report.entries(results))
    done = {entry.grid_site.name for entry in found}
    for entry, stored in zip(found, results["sites"], strict=True):
        lacking = _lacking(entry) if entry.grid_site.target.startswith(only) else []
        if lacking and most:
            stored["timeline"] |= _timed(entry.grid_site, lacking)
            path.write_text(json.dumps(results))
            print(entry.grid_site.name, flush=True)
            most -= 1
    # A sample of them all, but the same every time, and one target after the other.
    left = sorted((g for g in wanted if g.name not in done), key=lambda g: crc32(g.name.encode()))
    for g in sorted(left[:most], key=lambda g: g.target):
        results["sites"].append(_compiled(g))
        path.write_text(json.dumps(results))
        print(g.name, flush=True)


def compile_products(path: pathlib.Path) -> None:
    """Compile the einsums of the GPU table, each way round, and add their times."""
    from collmm.targets import apply_environment

    name = f"gpu:{TABLE}:1"
    apply_environment(name)
    import grid_compile

    results, table = _read(path), chip(TABLE).table
    assert table is not None
    shapes = itertools.product(table.short, table.depth, table.long)
    both = dict.fromkeys(
        s for short, k, long in shapes for s in ((short, k, long), (long, k, short))
    )
    results["products"] = {
        TABLE: [[*shape, grid_compile.product_seconds(name, *shape)] for shape in both]
    }
    path.write_text(json.dumps(results))


def _read(path: pathlib.Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return {"versions": versions, "sites": []}


def _lacking(entry: grid_report.Entry) -> list[Schedule]:
    """The schedules that the planner weighs for a stored site and that were not compiled."""
    row = chip(entry.chip_name).per_device()
    return [
        s
        for s in grid_report.planned_schedules(entry.site, row)
        if grid_report.variant(s) not in entry.timeline
    ]


def _timed(g: GridSite, wanted: list[Schedule]) -> dict[str, float]:
    """What the timelines of the site take under some schedules."""
    import grid_compile

    order = grid_compile.place_of(g).order
    return {
        grid_report.variant(s): grid_compile.timed(g, dataclasses.replace(s, order=order))["step"]
        for s in wanted
    }


def _compiled(g: GridSite) -> dict[str, Any]:
    import grid_compile

    place = grid_compile.place_of(g)
    assert place.ring is not None
    timeline = {grid_report.WHOLE: grid_compile.timed(g, None, "off")["step"]}
    if g.target.startswith("tpu") and _SHIPPED.value:
        timeline[grid_report.SHIPPED] = grid_compile.timed(g, None)["step"]
    timeline |= _timed(g, grid_compile.schedules_of(g))
    return {
        "site": dataclasses.asdict(g),
        "ring": dataclasses.asdict(place.ring),
        "timeline": timeline,
    }


def main(argv: list[str]) -> None:
    """Compile, fit, or report."""
    command, *files = argv[1:] or [""]
    path = pathlib.Path(files[0]) if files else STORED
    if len(files) > 1 or (not files and command in ("compile", "products")):
        raise app.UsageError(f"{command} takes one results file")
    if command == "compile":
        compile_sites(path, _ONLY.value, _SITES.value)
    elif command == "products":
        compile_products(path)
    elif command in ("report", "cross", "fit"):
        results = json.loads(path.read_text())
        found = list(grid_report.entries(results))
        if command == "fit":
            print(grid_fit.text_of_all(results))
        else:
            print(", ".join(f"{k} {v}" for k, v in results["versions"].items()))
            rows = grid_fit.crossed(found) if command == "cross" else grid_fit.predicted_by(found)
            print(grid_report.text(rows, crossed=command == "cross"))
    else:
        raise app.UsageError("want report, cross, fit, compile or products, and a results file")


if __name__ == "__main__":
    app.run(main)
