import pytest
from hlo_programs import (
    DEVICES,
    HIDDEN,
    HIDDEN_CPU,
    LAYERS,
    ROWS,
    ROWS_CPU,
    WIDTH,
    WIDTH_CPU,
)
from hlotools import hlo, repeated, stored

from collmm.hlo.collectives import CollectiveCount, collectives, kind_of, summarize
from collmm.hlo.parse import parse

X = ROWS * WIDTH * 2  # the whole activation in bytes, bfloat16
X_CPU = ROWS_CPU * WIDTH_CPU * 4
SHARD = X // DEVICES
WEIGHT = WIDTH * HIDDEN * 2


def counts(name):
    return {
        kind: (c.count, c.bytes, c.executed, c.executed_bytes)
        for kind, c in summarize(parse(stored(name))).items()
    }


def once(size, times=1, count=1):
    return (count, count * size, count * times, count * times * size)


# The tensor-parallel layer gathers x and reduces its result; CPU and this v4 mesh do an
# all-reduce and slice. The rings send a shard each step, N - 1 times when unrolled.
PROGRAMS = [
    ("cpu-jax010-mlp", {"all-gather": once(X_CPU), "all-reduce": once(X_CPU)}),
    ("cpu-jax012-mlp", {"all-gather": once(X_CPU), "all-reduce": once(X_CPU)}),
    ("cpu-jax010-ring", {"collective-permute": once(X_CPU // DEVICES, DEVICES)}),
    ("cpu-jax012-ring", {"collective-permute": once(X_CPU // DEVICES, DEVICES)}),
    ("cpu-jax010-scan", {"all-gather": once(X_CPU, LAYERS), "all-reduce": once(X_CPU, LAYERS)}),
    ("cpu-jax012-a2a", {"all-to-all": once(X_CPU // DEVICES)}),
    ("v4-jax012-mlp", {"all-gather": once(X), "all-reduce": once(X)}),
    ("gpu-jax012-mlp", {"all-gather": once(X), "reduce-scatter": once(X)}),
    ("gpu-jax012-scan", {"all-gather": once(X, LAYERS), "reduce-scatter": once(X, LAYERS)}),
    ("tpu7x-jax012-scan", {"all-gather": once(X, LAYERS), "reduce-scatter": once(X, LAYERS)}),
    ("gpu-jax012-ring", {"collective-permute": once(SHARD, DEVICES)}),
    ("gpu-jax012-unrolled", {"collective-permute": once(SHARD, count=DEVICES - 1)}),
    ("gpu-jax010-unrolled", {"collective-permute": once(SHARD, count=DEVICES - 1)}),
    ("v5e-jax012-unrolled", {"collective-permute": once(SHARD, count=DEVICES - 1)}),
    ("v5e-jax012-a2a", {"all-to-all": once(SHARD)}),
    ("v5e-jax012-reduced", {"all-reduce": once(ROWS * HIDDEN * 2)}),
]


@pytest.mark.parametrize(("name", "expected"), PROGRAMS)
def test_known_programs(name, expected):
    assert counts(name) == expected


@pytest.mark.parametrize("name", ["v5e-jax012-windowed", "v5e-jax010-windowed"])
def test_the_compilers_own_decomposition(name):
    """Each two-way ring: 4 permutes a turn for 2 turns, and one before or after it."""
    expected = (2 * (4 + 1), 10 * SHARD, 2 * (4 * 2 + 1), 18 * SHARD)
    assert counts(name) == {"collective-permute": expected}


def test_a_fused_reduce_scatter_is_one():
    """TPU writes it as an all-reduce of a padded array inside a fusion; x is what goes in."""
    for name, times in (("v5e-jax012-mlp", 1), ("v5e-jax012-scan", LAYERS)):
        found = counts(name)
        permute = found.pop("collective-permute")  # mends the padding; small
        assert permute[0] == 1
        assert permute[1] < SHARD
        assert found == {"all-gather": once(X, times), "reduce-scatter": once(X, times)}


def test_an_async_collective_fusion_counts_once():
    """Forward: gather x, w (in part async), v (async); scatter y. Backward likewise."""
    text = stored("v5e-jax012-grid")
    assert text.count("AsyncCollectiveStart") == 3
    assert text.count("AsyncCollectiveDone") == 3
    found = summarize(parse(text))
    assert {k: (c.count, c.executed) for k, c in found.items()} == {
        "all-gather": (7, 7 * LAYERS),
        "reduce-scatter": (2, 2 * LAYERS),
        "all-reduce": (1, LAYERS),
    }
    # Over the model axis (4) an x of half the rows, over the data axis (2) a quarter of a weight.
    assert found["reduce-scatter"].bytes == 2 * X // 2
    assert found["all-gather"].bytes == 3 * X // 2 + 4 * WEIGHT // 4


@pytest.mark.parametrize("name", ["cpu-jax012-cond", "v5e-jax012-cond"])
def test_a_branch_runs_an_unknown_number_of_times(name):
    found = summarize(parse(stored(name)))["all-reduce"]
    assert (found.count, found.unknown) == (1, 1)
    assert found.executed is None
    assert found.executed_bytes is None
    assert found.bytes == (ROWS_CPU * HIDDEN_CPU * 4 if "cpu" in name else ROWS * HIDDEN * 2)


def module_of(lines):
    body = "\n".join(f"  {line}" for line in lines)
    return parse(
        hlo("%sum (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n")
        + "  %b = f32[] parameter(1)\n  ROOT %c = f32[] add(%a, %b)\n}\n\n"
        + f"ENTRY %main (p: f32[64]) -> f32[64] {{\n  %p = f32[64]{{0}} parameter(0)\n{body}\n}}\n"
    )


# Each spelling: lines, kind, bytes put in and got out per device.
SPELLINGS = [
    (
        [
            "%s = ((f32[64]{0}), f32[512]{0}) all-gather-start(%p), dimensions={0}",
            "ROOT %d = f32[512]{0} all-gather-done(%s)",
        ],
        ("all-gather", 256, 2048),
    ),
    (
        [
            "%s = f32[64]{0} all-reduce-start(%p), to_apply=%sum",
            "ROOT %d = f32[64]{0} all-reduce-done(%s)",
        ],
        ("all-reduce", 256, 256),
    ),
    (
        ["%s = f32[64]{0} all-reduce-start(%p), to_apply=%sum", "ROOT %n = f32[64] negate(%p)"],
        ("all-reduce", 256, 256),
    ),
    (
        [
            "%s = (f32[64]{0}, f32[64]{0}, u32[]{:S(2)}, u32[]) collective-permute-start(%p)",
            "ROOT %n = f32[64] negate(%p)",
        ],
        ("collective-permute", 256, 256),
    ),
    (
        [
            "%h = f32[32]{0} slice(%p), slice={[0:32]}",
            "ROOT %r = (f32[64]{0}, f32[32]{0}) all-reduce(%p, %h), to_apply=%sum",
        ],
        ("all-reduce", 384, 384),
    ),
    (["ROOT %r = f32[8]{0} reduce-scatter(%p), to_apply=%sum"], ("reduce-scatter", 256, 32)),
    (["ROOT %r = f32[64]{0} collective-broadcast(%p)"], ("collective-broadcast", 256, 256)),
    (
        [
            "%o = f32[96]{0} broadcast(%p)",
            "%i = s32[8]{0} constant({0, 1})",
            "ROOT %r = f32[96]{0} ragged-all-to-all(%p, %o, %i, %i, %i, %i)",
        ],
        ("ragged-all-to-all", 256, 384),
    ),
]


@pytest.mark.parametrize(("lines", "expected"), SPELLINGS)
def test_spellings(lines, expected):
    (found,) = collectives(module_of(lines))
    assert (found.kind, found.operand_bytes, found.result_bytes) == expected
    assert found.bytes == max(expected[1:])


def test_a_wrapped_collective_counts_once_and_runs_with_its_start():
    text = hlo(
        """
        %wrapped (q: f32[64]) -> f32[64] {
          %q = f32[64]{0} parameter(0)
          ROOT %r = f32[64]{0} all-to-all(%q), channel_id=1, dimensions={0}
        }

        ENTRY %main (p: f32[64]) -> f32[64] {
          %p = f32[64]{0} parameter(0)
          %s = ((f32[64]{0}), f32[64]{0}, u32[]) async-start(%p), calls=%wrapped
          %u = ((f32[64]{0}), f32[64]{0}, u32[]) async-update(%s)
          ROOT %d = f32[64]{0} async-done(%u)
        }
        """
    )
    assert summarize(parse(text)) == {
        "all-to-all": CollectiveCount("all-to-all", 1, 256, 1, 256, 0)
    }


def test_names_and_strings_that_look_like_collectives_are_not():
    lines = [
        '%all-gather.1 = f32[64]{0} negate(%p), metadata={op_name="x all-gather(y"}',
        "ROOT %all-gather-done = f32[64]{0} negate(%all-gather.1)",
    ]
    assert summarize(module_of(lines)) == {}


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("all-gather", "all-gather"),
        ("all-gather-start", "all-gather"),
        ("all-gather-done", None),
        ("ragged-all-to-all", "ragged-all-to-all"),
        ("all-gatherer", None),
        ("add", None),
    ],
)
def test_kinds(opcode, kind):
    assert kind_of(opcode) == kind


def test_a_repeated_module_counts_that_many_times():
    """The generator of large texts makes what it says, and counting it is linear in it."""
    text = stored("v5e-jax012-grid")
    one, many = summarize(parse(text)), summarize(parse(repeated(text, 7)))
    assert {k: (c.count, c.bytes, c.executed) for k, c in many.items()} == {
        k: (7 * c.count, 7 * c.bytes, 7 * c.executed) for k, c in one.items()
    }
