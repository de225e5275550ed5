"""The memory a compiled program takes, and programs that do not fit."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collmm.cost.hardware import chip
from collmm.hlo.parse import parse
from collmm.memory import (
    Memory,
    compiled_or_overflow,
    memory_of,
    overflow_of,
    table,
    with_memory,
)
from collmm.plan import Plan

MIB, GIB = 2**20, 2**30


def compiled():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=auto, devices=jax.devices()[:4])

    def array(*spec):
        return jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return jax.jit(lambda a, b: a @ b).lower(array("x"), array(None, "x")).compile()


def test_a_compiled_program_is_broken_into_its_parts():
    program = compiled()
    m = memory_of(program, parse(program.as_text()), chip("v5e"))
    assert (m.arguments, m.outputs) == (MIB // 2, MIB // 4)
    assert m.gathered == MIB  # one operand is gathered whole
    assert m.temporaries >= m.gathered
    assert m.peak >= m.arguments + m.outputs + m.temporaries
    assert (m.capacity, m.excess) == (16_000_000_000, 0)
    bare = memory_of(program)
    assert (bare.gathered, bare.collectives, bare.capacity, bare.excess) == (None, None, None, 0)


def test_outputs_in_the_buffer_of_an_argument_count_once():
    stats = types.SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=60,
        alias_size_in_bytes=50,
        temp_size_in_bytes=30,
        generated_code_size_in_bytes=7,
    )
    m = memory_of(types.SimpleNamespace(memory_analysis=lambda: stats))
    assert (m.outputs, m.peak) == (10, 147)
    assert memory_of(types.SimpleNamespace(memory_analysis=lambda: None)) is None


def test_what_the_compiler_allocates_is_the_peak_where_it_says():
    stats = types.SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=60,
        alias_size_in_bytes=0,
        temp_size_in_bytes=30,
        generated_code_size_in_bytes=7,
        peak_memory_in_bytes=150,  # what is live, without the gaps between
        total_allocation_bytes=180,
    )
    m = memory_of(types.SimpleNamespace(memory_analysis=lambda: stats))
    assert (m.arguments, m.outputs, m.temporaries, m.code, m.peak) == (100, 60, 20, 7, 187)


PLAN = Plan((), "auto", "v5e")


def test_a_plan_tells_the_memory_of_its_program():
    known = with_memory(
        PLAN,
        {
            "before": Memory(3 * GIB, GIB, GIB, GIB, 0, GIB // 2, 0, 4 * GIB),
            "after": Memory(5 * GIB, GIB, GIB, 3 * GIB, 0, 0, MIB, 4 * GIB),
        },
    )
    assert str(known).splitlines()[-2:] == [
        "memory of each device, as compiled: 3.0 GiB before, 5.0 GiB after, of 4.0 GiB",
        "the plan does not fit: 1.0 GiB too much",
    ]
    told = known.to_json()["memory"]
    assert (told["before"]["excess"], told["after"]["excess"]) == (0, GIB)
    assert hash(known) != hash(PLAN)


def test_a_plan_of_a_program_that_never_fitted_says_so():
    refused = Memory(6 * GIB, capacity=4 * GIB, compiled=False)
    lines = str(with_memory(PLAN, {"before": refused, "after": Memory(2 * GIB)})).splitlines()
    assert lines[-2:] == [
        "memory of each device, as compiled: at least 6.0 GiB before, 2.0 GiB after, of 4.0 GiB",
        "the original program does not fit: at least 2.0 GiB too much",
    ]
    assert "memory" not in str(PLAN)
    assert PLAN.to_json()["memory"] == {}


def test_the_table_says_by_how_much_a_program_does_not_fit():
    rows = {
        "before": Memory(3 * GIB, GIB, GIB, GIB, 0, GIB // 2, 0, 4 * GIB),
        "after": Memory(5 * GIB, GIB, GIB, 3 * GIB, 0, 0, MIB, 4 * GIB),
        "refused": Memory(6 * GIB, capacity=4 * GIB, compiled=False),
    }
    lines = table(rows).splitlines()
    assert lines[0].split() == [
        *("memory", "peak", "arguments", "outputs", "code", "temporaries"),
        *("of", "them", "gathered", "other", "collectives"),
    ]
    # The parts make the peak: 3 = 1 + 1 + 0 + 1.
    assert lines[2].split()[6:13] == ["1.0", "GiB", "1.0", "GiB", "0", "B", "1.0"]
    assert lines[2].startswith("before   3.0 GiB of 4.0 GiB")
    assert lines[4].startswith("refused  >= 6.0 GiB of 4.0 GiB")
    assert lines[5:] == [
        "after does not fit: 1.0 GiB more than the 4.0 GiB of the device",
        "refused does not fit: at least 2.0 GiB more than the 4.0 GiB of the device",
    ]
    assert rows["after"].to_json()["excess"] == GIB


@pytest.mark.parametrize(
    ("text", "need", "have"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (61.5G) exceeds available HBM (15.75G). HLO m",
            int(61.5 * GIB),
            int(15.75 * GIB),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.25G of 15.75G hbm. "
            "Exceeded hbm capacity by 4.50G.",
            int(20.25 * GIB),
            int(15.75 * GIB),
        ),
    ],
)
def test_what_a_compiler_says_of_memory_that_lacks(text, need, have):
    m = overflow_of(RuntimeError(text))
    assert (m.peak, m.capacity, m.compiled) == (need, have, False)
    assert m.excess == need - have

    def fail():
        raise RuntimeError(text)

    assert compiled_or_overflow(fail) == (None, m)


@pytest.mark.parametrize(
    "text", ["INTERNAL: something else", "RESOURCE_EXHAUSTED: out of scratch registers"]
)
def test_other_errors_pass_through(text):
    def fail():
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=text):
        compiled_or_overflow(fail)
