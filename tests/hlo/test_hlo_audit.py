import dataclasses
import re

import pytest
from hlo_programs import DEVICES, LAYERS, ROWS, WIDTH, line_of
from hlotools import NAMES, hlo, stored

from collmm.errors import HloError, OptionError
from collmm.hlo.audit import audit
from collmm.hlo.collectives import summarize
from collmm.hlo.findings import Verdict
from collmm.hlo.parse import parse

X = ROWS * WIDTH * 2
LINE = {"model": DEVICES}
CLOCK = 1.5e9  # of a v5e TensorCore


def audited(name, seconds=1e-4, **kwargs):
    kwargs = {"transfer_time": lambda f: seconds, "clock_hz": CLOCK, **kwargs}
    return audit(parse(stored(name)), **kwargs)


@pytest.mark.parametrize("name", [n.partition(".")[0] for n in NAMES])
def test_an_audit_finds_what_a_count_finds(name):
    """Every collective of a stored text is judged once, with the same bytes and executions."""
    findings = audited(name)
    for kind, count in summarize(parse(stored(name))).items():
        mine = [f for f in findings if f.kind == kind]
        assert len(mine) == count.count
        assert sum(f.bytes for f in mine) == count.bytes
        if count.executed is not None:
            assert sum(f.executed for f in mine) == count.executed
    assert {f.kind for f in findings} == set(summarize(parse(stored(name))))


@pytest.mark.parametrize("name", [n.partition(".")[0] for n in NAMES])
def test_every_collective_leads_to_a_line_of_the_program(name):
    for f in audited(name):
        if f.kind == "collective-permute" and f.bytes < X // DEVICES and "v5e" in name:
            continue  # the compiler's own, to mend the padding of a reduce-scatter
        assert f.source is not None, f
        assert f.source.file == "hlo_programs.py"


@pytest.mark.parametrize("name", ["gpu-jax012-ring", "cpu-jax012-ring", "cpu-jax010-ring"])
def test_a_rolled_ring(name):
    (f,) = audited(name, mesh_axes=LINE)
    assert (f.kind, f.executed, f.axes, f.shift) == ("collective-permute", 8, ("model",), -1)
    assert f.pairs == tuple((s, (s - 1) % 8) for s in range(8))
    assert f.source.line == line_of("permute")
    assert f.asynchronous == ("gpu" in name)


def test_hidden_partly_and_exposed_by_the_figures_of_the_text():
    name = "gpu-jax012-ring"
    body = next(c for c in stored(name).split("\n\n") if "collective-permute-start(" in c)
    between = body[body.index("permute-start(") : body.index("permute-done(")]
    times = re.findall(r'"exec_time_us":([\d.]+),"compute_time_us":0,"[^}]*"name":"sol"', between)
    covered = sum(map(float, times)) * 1e-6
    assert covered > 1e-5
    expected = [
        (covered * 0.5, Verdict.HIDDEN, 0.0),
        (covered * 2, Verdict.PARTLY_EXPOSED, covered),
        (covered * 1000, Verdict.EXPOSED, covered * 999),
    ]
    for transfer, verdict, exposed in expected:
        (f,) = audited(name, transfer)
        assert f.verdict is verdict
        assert f.transfer == transfer
        assert f.exposed == pytest.approx(exposed, abs=1e-12)
        assert sum(w.seconds for w in f.work) == pytest.approx(covered)
        assert "custom-call" in {w.opcode for w in f.work}


def test_cycles_become_seconds_by_the_clock():
    slow, fast = (audited("v5e-jax012-windowed", clock_hz=c) for c in (1e9, 2e9))
    for one, other in zip(slow, fast, strict=True):
        for a, b in zip(one.work, other.work, strict=True):
            assert a.cycles == b.cycles
            assert a.seconds == pytest.approx(a.cycles / 1e9)
            assert a.seconds == pytest.approx(2 * b.seconds)


def test_without_times_only_the_structure_is_judged():
    findings = audit(parse(stored("v5e-jax012-unrolled")))
    assert all(f.exposed is None and f.transfer is None for f in findings)
    assert [f.verdict for f in findings] == [Verdict.EXPOSED] * 3 + [Verdict.UNKNOWN] * 4
    assert all(bool(f.work) == (f.verdict is Verdict.UNKNOWN) for f in findings)


def test_work_without_a_figure_leaves_it_unknown():
    findings = audited("v5e-jax012-unrolled", clock_hz=None)
    assert [f.verdict for f in findings] == [Verdict.EXPOSED] * 3 + [Verdict.UNKNOWN] * 4
    timed = audited("v5e-jax012-unrolled", clock_hz=None, op_time=lambda i: 1.0)
    assert [f.verdict for f in timed] == [Verdict.EXPOSED] * 3 + [Verdict.HIDDEN] * 4


def test_synchronous_collectives_are_exposed():
    for name in ("v5e-jax012-mlp", "v5e-jax012-reduced", "v5e-jax012-a2a", "gpu-jax012-mlp"):
        for f in audited(name, mesh_axes=LINE):
            if f.kind != "collective-permute":
                assert (f.verdict, f.asynchronous, f.done) == (Verdict.EXPOSED, False, None)
                assert f.exposed == pytest.approx(f.transfer)
                assert f.axes == ("model",)
                assert f.groups == (tuple(range(8)),)


@pytest.mark.parametrize("name", ["gpu-jax012-unrolled", "gpu-jax010-unrolled"])
def test_what_the_gpu_compiler_made_synchronous_is_exposed(name):
    """0.12 prints such a permute as one instruction, 0.10 as a start and a done: both block."""
    findings = audited(name, 1e-6)
    assert stored(name).count('"is_sync":true') == 5
    assert [f.asynchronous for f in findings] == [False] * 5 + [True] * 2
    assert [f.verdict for f in findings] == [Verdict.EXPOSED] * 5 + [Verdict.HIDDEN] * 2


def test_an_async_collective_fusion_is_hidden_by_the_fusion_that_carries_it():
    findings = audited("v5e-jax012-grid", mesh_axes={"data": 2, "model": 4})
    fused = [f for f in findings if f.name.startswith("async-collective-start")]
    assert len(fused) == 3
    for f in fused:
        assert f.done == f.name.replace("start", "done")
        assert f.verdict is Verdict.HIDDEN
        assert max(w.cycles for w in f.work) > 200_000
        assert f.executed == LAYERS
    scattered = [f for f in findings if f.kind == "reduce-scatter"]
    assert [(f.axes, f.verdict) for f in scattered] == [(("model",), Verdict.EXPOSED)] * 2


def test_a_sparse_core_collective_starts_where_its_operands_arrive():
    """TPU7x readies it by a call-start without operands, sends it off by a call-update."""
    gather, scatter = audited("tpu7x-jax012-scan", 1.0, mesh_axes=LINE)
    assert gather.name.endswith("call-update")
    assert gather.done.endswith("call-done")
    assert (gather.kind, gather.operand_bytes, gather.result_bytes) == ("all-gather", X // 8, X)
    assert (scatter.kind, scatter.operand_bytes) == ("reduce-scatter", X)
    assert gather.source.line == line_of("scanned")  # the compiler names the loop itself
    assert scatter.source.line == line_of("scattered")


def test_a_gathered_argument_leads_to_the_einsum_it_is_for():
    module = parse(stored("v5e-jax012-mlp"))
    gather = next(f for f in audit(module) if f.kind == "all-gather")
    assert module.source(module.entry[gather.name]) is None
    assert gather.source.line == line_of("gathered")
    assert gather.op_name == "x"


PERMUTE = (
    "(f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=1, "
    "source_target_pairs="
)
ONE_WAY, OTHER_WAY = "{{0,1},{1,2},{2,3},{3,0}}", "{{0,3},{1,0},{2,1},{3,2}}"


def work(name, cycles, operand="%p"):
    """A line of a fusion that takes so many cycles."""
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"%{name} = f32[64]{{0}} negate({operand}), {config}"


def schedule(*lines):
    """A module on 4 devices whose entry is these lines, then a tuple."""
    body = "\n".join(f"  {line}" for line in lines)
    text = hlo(
        """
        %sum (a: f32[], b: f32[]) -> f32[] {
          %a = f32[] parameter(0)
          %b = f32[] parameter(1)
          ROOT %c = f32[] add(%a, %b)
        }
        """,
        header="is_scheduled=true, num_partitions=4",
    )
    text += f"\nENTRY %main (p: f32[64]) -> () {{\n  %p = f32[64]{{0}} parameter(0)\n{body}\n"
    return parse(text + "  ROOT %end = () tuple()\n}\n")


def judged(module, seconds, **kwargs):
    """Findings with a clock of 1 Hz, so that cycles are seconds."""
    times = {"transfer_time": lambda f: seconds, "clock_hz": 1.0, **kwargs}
    return audit(module, **times)


def two_permutes(first, second):
    return schedule(
        f"%s1 = {PERMUTE}{first}",
        f"%s2 = {PERMUTE}{second}",
        work("w", 10),
        "%d1 = f32[64]{0} collective-permute-done(%s1)",
        "%d2 = f32[64]{0} collective-permute-done(%s2)",
    )


def test_two_directions_are_two_links():
    one, other = judged(two_permutes(ONE_WAY, OTHER_WAY), 10.0)
    assert (one.verdict, other.verdict) == (Verdict.HIDDEN, Verdict.HIDDEN)


def test_two_permutes_over_one_link_are_serialised():
    one, other = judged(two_permutes(ONE_WAY, ONE_WAY), 10.0)
    assert one.verdict is Verdict.HIDDEN
    assert (other.verdict, other.behind, other.exposed) == (Verdict.SERIALISED, ("s1",), 10.0)


def test_the_caller_says_what_shares_a_link():
    module = two_permutes(ONE_WAY, OTHER_WAY)
    _, other = judged(module, 10.0, shares_link=lambda a, b: True)
    assert (other.verdict, other.behind) == (Verdict.SERIALISED, ("s1",))
    _, apart = judged(two_permutes(ONE_WAY, ONE_WAY), 10.0, shares_link=lambda a, b: False)
    assert apart.verdict is Verdict.HIDDEN


def test_a_permute_whose_result_the_next_work_needs_is_serialised_with_it():
    module = schedule(
        work("before", 10),
        f"%s = {PERMUTE}{ONE_WAY}",
        "%d = f32[64]{0} collective-permute-done(%s)",
        "%cast = f32[64]{0} bitcast(%d)",
        work("after", 10, "%cast"),
    )
    (f,) = judged(module, 10.0)
    assert (f.verdict, f.behind, f.exposed, f.work) == (Verdict.SERIALISED, ("after",), 10.0, ())


def test_a_permute_that_waits_for_nothing_is_just_exposed():
    module = schedule(
        f"%s = {PERMUTE}{ONE_WAY}",
        "%d = f32[64]{0} collective-permute-done(%s)",
        work("other", 10),
    )
    (f,) = judged(module, 10.0)
    assert (f.verdict, f.behind) == (Verdict.EXPOSED, ())


def test_a_synchronous_collective_that_waits_for_a_link_charges_who_holds_it():
    module = schedule(
        f"%s = {PERMUTE}{ONE_WAY}",
        work("w", 4),
        "%r = f32[64]{0} all-reduce(%p), channel_id=2, replica_groups={}, to_apply=%sum",
        "%d = f32[64]{0} collective-permute-done(%s)",
    )
    permute, reduction = judged(module, 10.0)
    assert (permute.exposed, permute.verdict) == (6.0, Verdict.PARTLY_EXPOSED)
    assert (reduction.exposed, reduction.verdict) == (10.0, Verdict.EXPOSED)


def test_known_and_unknown_work_together_give_an_upper_bound():
    module = schedule(
        f"%s = {PERMUTE}{ONE_WAY}",
        work("w", 4),
        "%m = f32[64]{0} copy(%p)",
        "%d = f32[64]{0} collective-permute-done(%s)",
    )
    (f,) = judged(module, 10.0)
    assert (f.verdict, f.exposed) == (Verdict.PARTLY_EXPOSED, 6.0)
    assert "1 of 2 is not fully known" in f.because
    assert [w.complete for w in f.work] == [True, False]


def test_scalar_arithmetic_and_bookkeeping_hide_nothing():
    module = schedule(
        f"%s = {PERMUTE}{ONE_WAY}",
        "%id = u32[] partition-id()",
        "%one = u32[] constant(1)",
        "%next = u32[] add(%id, %one)",
        "%cell = u32[1]{0} bitcast(%next)",
        '%buffer = f32[9]{0} custom-call(), custom_call_target="AllocateBuffer"',
        "%c = (f32[64]{0}, f32[64]{0}, u32[]) copy-start(%p)",
        "%e = f32[64]{0} copy-done(%c)",
        "%d = f32[64]{0} collective-permute-done(%s)",
    )
    (f,) = judged(module, 10.0)
    assert (f.verdict, f.work, f.exposed) == (Verdict.EXPOSED, (), 10.0)


@pytest.mark.parametrize("is_sync", [False, True])
def test_a_collective_kernel_started_as_a_fusion(is_sync):
    """The GPU compiler writes its own all-reduce kernels so."""
    text = hlo(
        """
        %sum (a: f32[], b: f32[]) -> f32[] {
          %a = f32[] parameter(0)
          %b = f32[] parameter(1)
          ROOT %c = f32[] add(%a, %b)
        }

        %fused (q: f32[64]) -> f32[64] {
          %q = f32[64]{0} parameter(0)
          ROOT %r = f32[64]{0} all-reduce(%q), channel_id=7, replica_groups=[2,2]<=[2,2]T(1,0), \
        use_global_device_ids=true, to_apply=%sum, backend_config=CONFIG
        }

        ENTRY %main (p: f32[64]) -> f32[64] {
          %p = f32[64]{0} parameter(0)
          %s = ((f32[64]{0}), f32[64]{0}) fusion-start(%p), kind=kCustom, calls=%fused
          WORK
          ROOT %d = f32[64]{0} fusion-done(%s)
        }
        """,
        header="is_scheduled=true, num_partitions=4",
    )
    config = f'{{"collective_backend_config":{{"is_sync":{str(is_sync).lower()}}}}}'
    text = text.replace("CONFIG", config).replace("WORK", work("w", 20))
    (f,) = judged(parse(text), 10.0, mesh_axes={"data": 2, "model": 2})
    assert (f.kind, f.name, f.bytes, f.axes) == ("all-reduce", "s", 256, ("data",))
    assert f.asynchronous is not is_sync
    assert f.verdict is (Verdict.EXPOSED if is_sync else Verdict.HIDDEN)


@pytest.mark.parametrize("is_sync", [False, True])
def test_a_collective_wrapped_in_a_generic_start_may_be_synchronous(is_sync):
    """Dumps of some GPU compilers write so what jax prints as ``all-to-all-start``."""
    text = hlo(
        """
        %wrapped (q: f32[8,64]) -> f32[8,64] {
          %q = f32[8,64]{1,0} parameter(0)
          ROOT %r = f32[8,64]{1,0} all-to-all(%q), channel_id=1, replica_groups=[1,4]<=[4], \
        dimensions={0}
        }

        ENTRY %main (p: f32[8,64]) -> f32[8,64] {
          %p = f32[8,64]{1,0} parameter(0)
          %s = ((f32[8,64]{1,0}), f32[8,64]{1,0}) async-start(%p), calls=%wrapped, \
        backend_config=CONFIG
          WORK
          ROOT %d = f32[8,64]{1,0} async-done(%s)
        }
        """,
        header="is_scheduled=true, num_partitions=4",
    )
    config = f'{{"collective_backend_config":{{"is_sync":{str(is_sync).lower()}}}}}'
    text = text.replace("CONFIG", config).replace("WORK", work("w", 20))
    (f,) = judged(parse(text), 10.0)
    assert (f.kind, f.name, f.bytes, f.asynchronous) == ("all-to-all", "s", 2048, not is_sync)
    assert f.verdict is (Verdict.EXPOSED if is_sync else Verdict.HIDDEN)


def test_a_dump_is_judged_as_what_jax_prints():
    printed, dumped = (audited(f"gpu-jax012-scan{end}", mesh_axes=LINE) for end in ("", "-dumped"))

    def facts(f):
        return (f.kind, f.name, f.bytes, f.axes, f.executed, f.verdict, f.because, len(f.work))

    assert len(printed) > 1
    assert list(map(facts, dumped)) == list(map(facts, printed))
    assert [f.work for f in dumped] == [f.work for f in printed]


def test_a_start_without_its_done_is_unknown():
    (f,) = judged(schedule(f"%s = {PERMUTE}{ONE_WAY}", work("w", 99)), 10.0)
    assert (f.verdict, f.done, f.exposed) == (Verdict.UNKNOWN, None, None)


def looped(turns):
    config = f'{{"known_trip_count":{{"n":"{turns}"}}}}' if turns else "{}"
    return parse(
        hlo(
            """
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

            ENTRY %main (p: f32[64]) -> f32[64] {
              %p = f32[64]{0} parameter(0)
              %s.2 = PERMUTE
              %t.2 = (f32[64]{0}) tuple(%p)
              %l = (f32[64]{0}) while(%t.2), condition=%go, body=%body, backend_config=CONFIG
              ROOT %d = f32[64]{0} collective-permute-done(%s.2)
            }
            """,
            header="is_scheduled=true, num_partitions=4",
        )
        .replace("WORK", work("w", 5, "%x"))
        .replace("PERMUTE", PERMUTE + ONE_WAY)
        .replace("CONFIG", config)
    )


def test_a_loop_counts_with_all_its_turns_and_its_own_exposed_time():
    permute, inner = judged(looped(3), 0.0, transfer_time=lambda f: 50.0 if f.pairs else 2.0)
    (turns,) = permute.work
    assert (turns.name, turns.opcode, turns.seconds) == ("l", "while", 3 * (5.0 + 2.0))
    assert (permute.exposed, permute.verdict) == (50.0 - 21.0, Verdict.PARTLY_EXPOSED)
    assert (inner.executed, inner.exposed, inner.computation) == (3, 2.0, "body")


def test_a_loop_of_unknown_length_has_no_time():
    permute, inner = judged(looped(None), 10.0)
    assert permute.verdict is Verdict.UNKNOWN
    assert permute.work[0].seconds is None
    assert not permute.work[0].complete
    assert inner.executed is None


def test_a_branch_is_judged_and_its_executions_unknown():
    (f,) = audited("v5e-jax012-cond", mesh_axes=LINE)
    assert (f.kind, f.executed, f.verdict) == ("all-reduce", None, Verdict.EXPOSED)
    assert f.source.line == line_of("reduced")


def test_an_unscheduled_text_is_refused():
    text = stored("cpu-jax012-mlp").replace("is_scheduled=true, ", "")
    with pytest.raises(HloError, match=r"line 1: expected is_scheduled=true"):
        audit(parse(text))


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(OptionError, match=r"make 16 devices and the module runs on 8"):
        audit(parse(stored("cpu-jax012-mlp")), mesh_axes={"a": 4, "b": 4})


def test_the_link_model_sees_the_facts_of_the_finding():
    seen = []

    def transfer_time(f):
        seen.append(dataclasses.replace(f))
        return f.bytes / 1e9

    findings = audit(parse(stored("v5e-jax012-mlp")), transfer_time=transfer_time, mesh_axes=LINE)
    assert [(f.kind, f.bytes, f.axes) for f in seen] == [
        (f.kind, f.bytes, f.axes) for f in findings
    ]
    assert [f.transfer for f in findings] == [f.bytes / 1e9 for f in seen]
