"""The cost model against the timelines of compiled programs, over a grid of single sites.

    python benchmarks/cost_grid.py report [RESULTS.json]
    python benchmarks/cost_grid.py compile RESULTS.json [--only=tpu:v5e] [--sites=20]

``compile`` compiles sites of ``grid_sites`` with the real compilers, in every schedule the planner
weighs and whole, and adds what their timelines take to RESULTS.json; a site that is there is not
compiled again. ``report`` prints how far the model is off, and whether it chooses well; without a
file, for the results stored beside the tests. Only ``compile`` needs the compilers.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib

import grid_report
from absl import app, flags
from grid_sites import GridSite, sites

STORED = pathlib.Path(__file__).parents[1] / "tests" / "data" / "cost_grid.json"

_ONLY = flags.DEFINE_string("only", "", "compile sites of targets that begin with this")
_SITES = flags.DEFINE_integer("sites", 20, "compile at most that many more", lower_bound=1)


def compile_sites(path: pathlib.Path, only: str, most: int) -> None:
    """Compile up to ``most`` sites that ``path`` lacks and add them."""
    from collmm.targets import apply_environment

    wanted = [g for g in sites() if g.target.startswith(only)]
    if not wanted:
        raise app.UsageError(f"no target of the grid begins with {only!r}")
    apply_environment(wanted[0].target)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    results = {"versions": versions, "sites": []}
    if path.exists():
        results = json.loads(path.read_text())
    done = {
        GridSite(**dict(e["site"], mesh=tuple(map(tuple, e["site"]["mesh"])))).name
        for e in results["sites"]
    }
    for g in [g for g in wanted if g.name not in done][:most]:
        results["sites"].append(_compiled(g))
        path.write_text(json.dumps(results))
        print(g.name, flush=True)


def _compiled(g: GridSite) -> dict:
    import grid_compile

    place = grid_compile.place_of(g)
    assert place.ring is not None
    timeline = {grid_report.WHOLE: grid_compile.timed(g, None, "off")["step"]}
    if g.target.startswith("tpu"):
        timeline[grid_report.SHIPPED] = grid_compile.timed(g, None)["step"]
    for schedule in grid_compile.schedules_of(g):
        seconds = grid_compile.timed(g, schedule)["step"]
        timeline[grid_report.variant(schedule)] = seconds
    return {
        "site": dataclasses.asdict(g),
        "ring": dataclasses.asdict(place.ring),
        "timeline": timeline,
    }


def main(argv: list[str]) -> None:
    """Compile, or report."""
    if len(argv) == 3 and argv[1] == "compile":
        compile_sites(pathlib.Path(argv[2]), _ONLY.value, _SITES.value)
    elif len(argv) in (2, 3) and argv[1] == "report":
        results = json.loads((pathlib.Path(argv[2]) if len(argv) == 3 else STORED).read_text())
        print(", ".join(f"{k} {v}" for k, v in results["versions"].items()))
        print(grid_report.text(list(grid_report.rows(results))))
    else:
        raise app.UsageError("want: report [RESULTS.json], or compile RESULTS.json")


if __name__ == "__main__":
    app.run(main)
