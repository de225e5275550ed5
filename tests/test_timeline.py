"""Predicted schedules: the clock, the origins of times, and the pictures of them. No jax."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "hlo"))
from hlotools import NAMES, hlo, stored

from collmm.cost.hardware import chip
from collmm.errors import HloError, OptionError
from collmm.hlo import durations as times
from collmm.hlo.durations import Durations
from collmm.hlo.findings import Verdict
from collmm.hlo.gantt import gantt
from collmm.hlo.live import live_results
from collmm.hlo.neighbours import einsums_beside
from collmm.hlo.parse import parse
from collmm.hlo.timeline import COMPUTE, COPIES, WAIT, Origin, timeline
from collmm.hlo.trace import trace_events
from collmm.hlo.traffic import copied_bytes, matrix_flops, traffic_bytes
from collmm.prediction import durations_for, predict
from collmm.targets import parse_target

ONE_WAY, OTHER_WAY = "{{0,1},{1,2},{2,3},{3,0}}", "{{0,3},{1,0},{2,1},{3,2}}"
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"CYCLES"}}'
HEAD = """
%p = f32[64]{0} parameter(0)
"""


def work(name, cycles, operand="%p"):
    config = CYCLES.replace("CYCLES", str(cycles))
    return f"%{name} = f32[64]{{0}} negate({operand}), {config}"


def start(name, pairs=ONE_WAY, size=64):
    shape = f"f32[{size}]{{0}}"
    return (
        f"%{name} = ({shape}, {shape}, u32[], u32[]) collective-permute-start(%p), channel_id=1, "
        f"source_target_pairs={pairs}"
    )


def done(name, of, size=64):
    return f"%{name} = f32[{size}]{{0}} collective-permute-done(%{of})"


def copy_start(name, size=64):
    shape = f"f32[{size}]{{0}}"
    return f"%{name} = ({shape}, {shape}, u32[]) copy-start(%p)"


def copy_done(name, of, size=64):
    return f"%{name} = f32[{size}]{{0}} copy-done(%{of})"


def module(*lines, others=""):
    body = "\n".join(f"  {line}" for line in lines)
    entry = f"ENTRY %main (p: f32[64]) -> () {{\n  %p = f32[64]{{0}} parameter(0)\n{body}\n"
    text = "HloModule m, is_scheduled=true, num_partitions=4\n\n"
    return parse(f"{text}{others}{entry}  ROOT %end = () tuple()\n}}\n")


def predicted(mod, transfer=10.0, **kwargs):
    """The timeline with a clock of 1 Hz; a copy of 64 floats takes 4 s."""
    durations = Durations(clock_hz=1.0, memory=64.0)
    given = {"transfer_time": lambda f: transfer, "durations": durations, **kwargs}
    return timeline(mod, **given)


# --- what the clock adds up ---


def test_compute_exposed_and_copies_make_the_step():
    line = predicted(
        module(
            start("s"),
            copy_start("c"),
            copy_done("e", "c"),  # waits 4
            work("w", 3),
            done("d", "s"),  # waits 3 more
            work("v", 5, "%d"),
        )
    )
    assert (line.compute, line.exposed, line.copying, line.step) == (8.0, 3.0, 4.0, 15.0)
    assert line.complete
    assert line.lanes() == [COMPUTE, WAIT, COPIES, "links"]


def test_copies_run_one_after_the_other_and_hide_behind_work():
    line = predicted(
        module(
            copy_start("a"),
            copy_start("b"),
            work("w", 5),
            copy_done("x", "a"),
            copy_done("y", "b"),
        )
    )
    assert [(s.name, s.start, s.seconds) for s in line.slices() if s.lane == COPIES] == [
        ("a", 0.0, 4.0),
        ("b", 4.0, 4.0),
    ]
    assert (line.copying, line.step) == (3.0, 8.0)


def test_a_copy_to_the_host_has_no_time():
    mod = parse(
        hlo("""
        ENTRY %main (p: f32[64]) -> f32[64] {
          %p = f32[64]{0} parameter(0)
          %s = (f32[64]{0:S(5)}, f32[64]{0}, u32[]) copy-start(%p)
          ROOT %d = f32[64]{0:S(5)} copy-done(%s)
        }
        """)
    )
    assert copied_bytes(mod, mod.entry, mod.entry["s"]) is None


def test_a_loop_takes_its_turns():
    others = (
        hlo("""
    %body (s: (f32[64])) -> (f32[64]) {
      %s = (f32[64]{0}) parameter(0)
      %x = f32[64]{0} get-tuple-element(%s), index=0
      WORK
      %r = f32[64]{0} all-to-all(%w), channel_id=3, replica_groups={}
      ROOT %t = (f32[64]{0}) tuple(%r)
    }

    %go (s.1: (f32[64])) -> pred[] {
      %s.1 = (f32[64]{0}) parameter(0)
      ROOT %yes = pred[] constant(true)
    }
    """)
        .partition("\n\n")[2]
        .replace("WORK", work("w", 5, "%x"))
    )
    loop = (
        "%l = (f32[64]{0}) while(%q), condition=%go, body=%body, "
        'backend_config={"known_trip_count":{"n":"3"}}'
    )
    line = predicted(module("%q = (f32[64]{0}) tuple(%p)", loop, others=others + "\n"), 2.0)
    assert (line.compute, line.exposed, line.step) == (15.0, 6.0, 21.0)
    assert line.origins[times.CYCLES] == times_origin(3, 15.0)
    shown = [(s.name, s.start) for s in line.slices() if s.lane == COMPUTE]
    assert shown == [("l", 0.0), ("w", 0.0), ("w", 7.0), ("w", 14.0)]
    few = [s.name for s in line.slices(limit=3) if s.lane == COMPUTE]
    assert few == ["l", "w"]


def times_origin(runs, seconds):
    return Origin(runs, seconds)


def test_what_has_no_time_is_named_and_the_totals_are_bounds():
    line = predicted(
        module(
            '%k = f32[64]{0} custom-call(%p), custom_call_target="mine"',
            "%q = (f32[64]{0}) sort(%p), dimensions={0}, to_apply=%less",
            work("w", 3),
        )
    )
    assert dict(line.untimed) == {"k": "custom-call", "q": "sort"}
    assert (line.step, line.complete) == (3.0, False)
    assert "at least 3 s predicted" in gantt(line)
    names = [e["args"].get("name", "") for e in trace_events({"x": line})["traceEvents"]]
    assert "x, predicted (lower bound)" in names


def test_a_link_without_a_figure_is_named():
    line = predicted(module(start("s"), work("w", 3), done("d", "s")), None)
    assert line.untimed == {"s": "collective-permute without a link model"}
    assert line.findings[0].verdict is Verdict.UNKNOWN


def test_an_unscheduled_text_and_a_mesh_of_another_size_are_refused():
    text = stored("cpu-jax012-mlp")
    with pytest.raises(HloError, match=r"expected is_scheduled=true"):
        predicted(parse(text.replace("is_scheduled=true, ", "")))
    with pytest.raises(OptionError, match=r"make 9 devices and the module runs on 8"):
        predicted(parse(text), mesh_axes={"a": 9})


@st.composite
def schedules(draw):
    """(lines, number of transfers): starts, dones, work and copies in any order that is valid."""
    lines, flying, copying, count = [], [], [], 0
    for k in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["work", "start", "done", "copy", "copied"]))
        if kind == "start":
            lines.append(start(f"s{k}", draw(st.sampled_from([ONE_WAY, OTHER_WAY]))))
            flying.append(f"s{k}")
            count += 1
        elif kind == "done" and flying:
            lines.append(done(f"d{k}", flying.pop(draw(st.integers(0, len(flying) - 1)))))
        elif kind == "copy":
            lines.append(copy_start(f"c{k}"))
            copying.append(f"c{k}")
        elif kind == "copied" and copying:
            lines.append(copy_done(f"e{k}", copying.pop(0)))
        else:
            lines.append(work(f"w{k}", draw(st.integers(1, 20))))
    lines += [done(f"z{n}", n) for n in flying]
    lines += [copy_done(f"y{n}", n) for n in copying]
    return lines, count


@given(schedules())
def test_any_schedule_adds_up(drawn):
    lines, count = drawn
    line = predicted(module(*lines), 10.0)
    assert line.step == pytest.approx(line.compute + line.exposed + line.copying)
    assert 0 <= line.exposed <= 10.0 * count
    assert sum(f.exposed for f in line.findings) == pytest.approx(line.exposed)
    slices = list(line.slices())
    for lane in (COMPUTE, WAIT, COPIES):
        mine = sorted((s.start, s.start + s.seconds) for s in slices if s.lane == lane)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(mine))
    busy = sum(s.seconds for s in slices if s.lane in (COMPUTE, WAIT))
    assert busy == pytest.approx(line.step)
    # One link in each direction: transfers of one direction queue.
    for pairs in (ONE_WAY, OTHER_WAY):
        ends = [
            (s.start, s.start + s.seconds)
            for s in slices
            if s.finding is not None
            and s.lane == "links"
            and str(line.findings[s.finding].pairs)
            .replace(" ", "")
            .replace("(", "{")
            .replace(")", "}")
            == pairs
        ]
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(sorted(ends)))


# --- where times come from ---


def fusion(*lines, operands="%a, %b", extra=""):
    body = "\n".join(f"          {line}" for line in lines)
    return parse(
        hlo(
            f"""
        %fused (x: bf16[8,64], y: bf16[2,64]) -> bf16[8,64] {{
          %x = bf16[8,64]{{1,0}} parameter(0)
          %y = bf16[2,64]{{1,0}} parameter(1)
          %zero = s32[] constant(0)
{body}
        }}

        ENTRY %main (a: bf16[8,64], b: bf16[2,64]) -> bf16[8,64] {{
          %a = bf16[8,64]{{1,0}} parameter(0)
          %b = bf16[2,64]{{1,0}} parameter(1)
          ROOT %f = bf16[8,64]{{1,0}} fusion({operands}), kind=kLoop, calls=%fused{extra}
        }}
        """
        )
    )


ROW = 64 * 2  # bytes


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        (["ROOT %r = bf16[8,64]{1,0} negate(%x)"], 16 * ROW),
        (["ROOT %r = bf16[8,64]{1,0} dynamic-update-slice(%x, %y, %zero, %zero)"], 4 * ROW),
        (
            [
                "%n = bf16[2,64]{1,0} negate(%y)",
                "%u = bf16[8,64]{1,0} dynamic-update-slice(%x, %n, %zero, %zero)",
                "ROOT %r = bf16[8,64]{1,0} bitcast(%u)",
            ],
            4 * ROW,
        ),
        (
            [
                "%s = bf16[1,64]{1,0} dynamic-slice(%x, %zero, %zero), dynamic_slice_sizes={1,64}",
                "ROOT %r = bf16[1,64]{1,0} negate(%s)",
            ],
            2 * ROW,
        ),
    ],
    ids=["stream", "update-in-place", "update-of-work", "slice"],
)
def test_traffic_of_a_fusion(lines, size):
    mod = fusion(*lines)
    assert traffic_bytes(mod, mod.entry, mod.entry["f"]) == size
    assert matrix_flops(mod, mod.entry, mod.entry["f"]) == 0


def product(target="__cublas$gemm", out="bf16", us="0.5"):
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}},'
        f'"reification_cost":[{{"exec_time_us":{us},"name":"sol"}}]}}'
    )
    return parse(
        hlo(
            f"""
        ENTRY %main (a: bf16[128,256], b: bf16[256,512]) -> {out}[128,512] {{
          %a = bf16[128,256]{{1,0}} parameter(0)
          %b = bf16[256,512]{{1,0}} parameter(1)
          ROOT %g = ({out}[128,512]{{1,0}}, s8[4096]{{0}}) custom-call(%a, %b), \
        custom_call_target="{target}", backend_config={config}
        }}
        """
        )
    )


def test_a_library_product_has_its_flops_and_bytes():
    mod = product()
    gemm = mod.entry["g"]
    assert matrix_flops(mod, mod.entry, gemm) == 2 * 128 * 256 * 512
    assert traffic_bytes(mod, mod.entry, gemm) == 2 * (128 * 256 + 256 * 512 + 128 * 512)
    other = product("cudnn$fmha")
    assert traffic_bytes(other, other.entry, other.entry["g"]) is None


def test_the_compilers_figure_comes_first_then_flops_or_bytes():
    mod = product()
    durations = Durations(peak=lambda dtype, precision: 1e12, memory=1e12)
    stated = durations.of(mod, mod.entry, mod.entry["g"])
    assert (stated.seconds, stated.origin) == (0.5e-6, times.EXEC_TIME)
    dot = parse(
        hlo("""
        ENTRY %main (a: bf16[128,256], b: bf16[256,512]) -> bf16[128,512] {
          %a = bf16[128,256]{1,0} parameter(0)
          %b = bf16[256,512]{1,0} parameter(1)
          ROOT %d = bf16[128,512]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
        rhs_contracting_dims={0}
        }
        """)
    )
    flops, size = 2 * 128 * 256 * 512, 2 * (128 * 256 + 256 * 512 + 128 * 512)
    by_flops = durations.of(dot, dot.entry, dot.entry["d"])
    assert (by_flops.seconds, by_flops.origin) == (flops / 1e12, times.PRODUCT)
    slow = Durations(peak=lambda dtype, precision: 1e18, memory=1e12)
    by_bytes = slow.of(dot, dot.entry, dot.entry["d"])
    assert (by_bytes.seconds, by_bytes.origin) == (size / 1e12, times.MEMORY)
    unknown = Durations(peak=lambda dtype, precision: None, memory=1e12)
    assert unknown.of(dot, dot.entry, dot.entry["d"]) is None
    assert Durations().of(dot, dot.entry, dot.entry["d"]) is None


def test_a_widening_product_without_tensor_cores_is_not_believed():
    h100 = durations_for(chip("h100"))
    mod = product(out="f32", us="100.0")
    corrected = h100.of(mod, mod.entry, mod.entry["g"])
    assert corrected.origin == times.CORRECTED
    # At the share of the peak that XLA's table gives the same product with a bf16 result.
    share = chip("h100").table.share(128, 256, 512)
    assert corrected.seconds == pytest.approx(2 * 128 * 256 * 512 / 795e12 / share)
    plausible = product(out="f32", us="0.4")
    assert h100.of(plausible, plausible.entry, plausible.entry["g"]).origin == times.EXEC_TIME
    same_type = product(out="bf16", us="100.0")
    assert h100.of(same_type, same_type.entry, same_type.entry["g"]).origin == times.EXEC_TIME


# --- stored texts ---

TARGETS = {"v5e": "tpu:v5e:2x4", "v4": "tpu:v4:2x2x2", "tpu7x": "tpu:tpu7x:2x2x1"}
STORED = [n.partition(".")[0] for n in NAMES]


def target_of(name):
    kind = name.partition("-")[0]
    return parse_target({"gpu": "gpu:h100:8", "cpu": "cpu:8", **TARGETS}[kind])


@pytest.mark.parametrize("name", [n for n in STORED if not n.startswith("cpu")])
def test_stored_schedules_are_predicted(name):
    mod, target = parse(stored(name)), target_of(name)
    line = predict(mod, target).timeline
    assert line.step > 0
    assert line.step == pytest.approx(line.compute + line.exposed + line.copying)
    assert set(line.untimed.values()) <= {"branches of different length"}
    assert all(f.transfer > 0 for f in line.findings)
    known = [f for f in line.findings if f.executed is not None]
    if line.complete:
        total = sum(f.exposed * f.executed for f in known)
        assert total == pytest.approx(line.exposed)


@pytest.mark.parametrize("name", [n for n in STORED if n.startswith("cpu")])
def test_a_cpu_schedule_has_no_times_and_says_why(name):
    prediction = predict(parse(stored(name)), target_of(name))
    assert prediction.timeline is None
    assert "CPU code runs every collective synchronously" in prediction.notes[0]
    assert all(f.transfer is None for f in prediction.findings)


def test_a_gather_and_a_scatter_lead_to_their_einsums():
    for name in ("v5e-jax012-mlp", "gpu-jax012-mlp", "cpu-jax012-mlp", "v4-jax012-mlp"):
        mod, target = parse(stored(name)), target_of(name)
        prediction = predict(mod, target)
        kinds = {c.finding.kind: c for c in prediction.candidates}
        assert {"all-gather"} < set(kinds), name
        for c in kinds.values():
            assert len(c.einsums) == 1
            assert c.einsums[0].source.file == "hlo_programs.py"
        first, last = (next(iter(kinds.values())), list(kinds.values())[-1])
        assert first.einsums[0].name != last.einsums[0].name


def test_a_permute_has_no_einsum_that_a_loop_could_take():
    mod = parse(stored("v5e-jax012-unrolled"))
    prediction = predict(mod, target_of("v5e-jax012-unrolled"))
    assert prediction.candidates == ()
    f = prediction.findings[0]
    assert einsums_beside(mod, f, Durations()) == []


def test_an_all_to_all_leads_to_the_einsum_it_feeds():
    name = "v5e-jax012-a2a"
    (c,) = predict(parse(stored(name)), target_of(name)).candidates
    assert c.finding.kind == "all-to-all"
    (einsum,) = c.einsums
    assert einsum.source.file == "hlo_programs.py"
    assert einsum.source.line == c.finding.source.line + 1
    assert c.saving is not None


def test_an_all_to_all_leads_back_to_the_einsum_that_made_it():
    text = hlo(
        """
        %sum (a: f32[], b: f32[]) -> f32[] {
          %a = f32[] parameter(0)
          %b = f32[] parameter(1)
          ROOT %c = f32[] add(%a, %b)
        }

        ENTRY %main (p: f32[GROUP,64], w: f32[64,32]) -> f32[GROUP,32] {
          %p = f32[GROUP,64]{1,0} parameter(0)
          %w = f32[64,32]{1,0} parameter(1)
          %zero = f32[] constant(0)
          %y = f32[GROUP,1,32]{2,1,0} dot(%p, %w), lhs_contracting_dims={1}, \
        rhs_contracting_dims={0}
          %squeezed = f32[GROUP,32]{1,0} reduce(%y, %zero), dimensions={1}, to_apply=%sum
          ROOT %x = f32[GROUP,32]{1,0} all-to-all(%squeezed), channel_id=1, \
        replica_groups=[1,GROUP]<=[GROUP], dimensions={0}
        }
        """,
        header="is_scheduled=true, num_partitions=GROUP",
    )
    (c,) = predict(parse(text.replace("GROUP", "16")), None).candidates
    assert [e.name for e in c.einsums] == ["y"]
    # An exchange has a permute per peer: it is made among sixteen at most.
    assert predict(parse(text.replace("GROUP", "32")), None).candidates == ()


def test_savings_are_what_the_rule_hides():
    prediction = predict(parse(stored("gpu-jax012-mlp")), target_of("gpu"))
    for c in prediction.candidates:
        (einsum,) = c.einsums
        t, n = c.finding.transfer, 8
        after = max(einsum.seconds, t) + 2 * t / n
        assert c.saving == pytest.approx(max(0.0, t + einsum.seconds - after), rel=0.01)


# --- memory of results ---


def test_live_results_end_with_their_last_reader():
    mod = parse(
        hlo("""
        ENTRY %main (p: f32[8]) -> f32[64] {
          %p = f32[8]{0} parameter(0)
          %g = f32[64]{0} all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}
          %b = f32[8,8]{1,0} bitcast(%g)
          %h = f32[64]{0} all-gather(%p), channel_id=2, replica_groups={}, dimensions={0}
          %u = f32[8,8]{1,0} negate(%b)
          %k = f32[64]{0} all-gather(%p), channel_id=3, replica_groups={}, dimensions={0}
          %q = f32[8]{0} all-to-all(%p), channel_id=4, replica_groups={}
          ROOT %r = f32[64]{0} add(%h, %k)
        }
        """)
    )
    # g and h are live together, then h and k; never all three.
    live = live_results(mod)
    assert (live.gathered, live.others) == (2 * 64 * 4, 8 * 4)


def test_results_in_the_on_chip_memory_of_a_tpu_hold_no_main_memory():
    body = """
    ENTRY %main (p: f32[8]) -> f32[64] {
      %p = f32[8]{0:T(128)} parameter(0)
      %g = f32[64]{0:T(128)S(1)} all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}
      %s = (f32[8]{0}, f32[8]{0:T(128)S(1)}) collective-permute-start(%p), channel_id=2, PAIRS
      %d = f32[8]{0:T(128)S(1)} collective-permute-done(%s)
      %u = f32[64]{0:T(128)} negate(%g)
      %h = f32[16]{0:T(128)} all-gather(%d), channel_id=3, replica_groups={}, dimensions={0}
      ROOT %r = f32[64]{0:T(128)} negate(%u)
    }
    """.replace("PAIRS", "source_target_pairs={{0,1},{1,0}}")
    layout = "entry_computation_layout={(f32[8]{0:T(128)})->f32[64]{0:T(128)}}"
    live = live_results(parse(hlo(body, header=f"is_scheduled=true, {layout}")))
    assert (live.gathered, live.others) == (16 * 4, 0)
    # Space 1 of a GPU is main memory.
    live = live_results(parse(hlo(body)))
    assert (live.gathered, live.others) == (64 * 4, 8 * 4)


def test_an_unscheduled_text_has_no_live_results():
    with pytest.raises(HloError, match="is_scheduled"):
        live_results(parse(stored("cpu-jax012-mlp").replace("is_scheduled=true, ", "")))


# --- pictures ---


def small():
    return predicted(
        module(
            start("s"),
            work("w", 5),
            done("d", "s"),
            work("v", 10, "%d"),
        )
    )


def test_the_gantt_chart_shows_each_lane():
    assert gantt(small(), width=20).splitlines() == [
        "compute │█████     ██████████│",
        "exposed │     █████          │",
        "links   │██████████          │",
        "         0     20 s predicted",
    ]


def test_an_empty_schedule_has_no_chart():
    assert gantt(predicted(module())) == "nothing with a known time runs"


@pytest.mark.parametrize("name", ["gpu-jax012-grid", "v5e-jax012-windowed", "v5e-jax012-grid"])
def test_a_trace_has_a_thread_per_lane_whose_events_nest(name):
    line = predict(parse(stored(name)), target_of(name)).timeline
    document = json.loads(json.dumps(trace_events({"original": line, "again": line}, "a note")))
    assert document["otherData"] == {"predicted": True, "note": "a note"}
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in document["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert {"compute", "exposed (waiting)"} <= set(threads.values())
    assert {(e["pid"], e["tid"]) for e in events} == set(threads)
    for thread in threads:
        open_until = []
        for e in (e for e in events if (e["pid"], e["tid"]) == thread):
            end = e["ts"] + e["dur"]
            while open_until and open_until[-1] <= e["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)
    transfers = [e for e in events if "verdict" in e["args"]]
    assert transfers
    assert all(e["args"]["where"].startswith("hlo_programs.py:") for e in transfers)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(line.step * 1e6, rel=1e-3)


def test_a_picture_is_drawn_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    from collmm.hlo.plot import plot

    for name in ("a.png", "a.svg"):
        plot({"original": small()}, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "20" in (tmp_path / "a.svg").read_text()
    with pytest.raises(OptionError, match=r"cannot draw '.*a\.nothing'"):
        plot({"original": small()}, str(tmp_path / "a.nothing"))


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    from collmm.hlo.plot import plot

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(OptionError, match=r'pip install "collmm\[plot\]"'):
        plot({"original": small()}, tmp_path / "a.png")
