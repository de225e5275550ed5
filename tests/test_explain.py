"""Explanations: break-evens are where decisions turn, and words say what the numbers say."""

import dataclasses
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from steptools import ALWAYS, arguments, make_mesh, make_step

from collmm import Options, Reason, breakeven, overlap_collectives
from collmm.breakeven import break_evens, excess
from collmm.cli.main import run
from collmm.cost.candidates import RingPlace, candidates
from collmm.cost.hardware import chip
from collmm.cost.hiding import Behind
from collmm.einsum import Einsum
from collmm.explanation import REMEDIES
from collmm.plan import make_plan
from collmm.sites import ALL_GATHER, REDUCE_SCATTER, Collective, EinsumSite

MARGIN = 0.02


pytestmark = pytest.mark.usefixtures("kept_environment")


def matmul(kind, rows, depth, columns, ring=8):
    """``ab,bc->ac`` in bf16, its rows gathered, or its depth sharded and rows scattered."""
    whole = ()
    if kind == ALL_GATHER:
        collective = Collective(ALL_GATHER, 0, 0, ("m",), rows * depth * 2)
        specs = ((whole, whole), (whole, ("m",)), (whole, ("m",)))
    else:
        collective = Collective(REDUCE_SCATTER, None, 0, ("m",), rows * columns * 2)
        specs = ((whole, ("m",)), (("m",), whole), (whole, whole))
    return EinsumSite(
        0,
        Einsum((0, 1), (1, 2), (0, 2)),
        ((rows, depth), (depth, columns), (rows, columns)),
        ("bfloat16",) * 3,
        (2,) * 3,
        *specs,
        (collective,),
        axis_sizes=(("m", ring),),
    )


def weighed(site, row, **given):
    return candidates(site, row, lambda site, axes: RingPlace(), **given)


def gain(site, row, **given):
    """What the best way to loop a site surely saves."""
    return max(c.estimate.sure_gain for c in weighed(site, row, **given))


SHAPES = list(itertools.product((256, 4096, 32768), (512, 8192), (1024, 16384)))
CASES = [
    (name, kind, shape)
    for name in ("v5e", "v5p", "h100")
    for kind in (ALL_GATHER, REDUCE_SCATTER)
    for shape in SHAPES
]


@pytest.mark.parametrize(("name", "kind", "shape"), CASES, ids=str)
def test_a_size_is_the_first_that_pays(name, kind, shape):
    """The model is asked again at every answer, on a site that is built anew."""
    row = chip(name)

    def pays(label, size):
        sizes = dict(zip("abc", shape, strict=True)) | {label: size}
        return gain(matmul(kind, *sizes.values()), row) >= MARGIN

    units = {"a": 8, "b": 8 if kind == REDUCE_SCATTER else 1, "c": 8 if kind == ALL_GATHER else 1}
    for turn in break_evens(weighed(matmul(kind, *shape), row), row, MARGIN):
        if turn.what != "size":
            continue
        unit = units[turn.name]
        if row.kind == "gpu" and turn.now % (8 * unit) == 0:
            unit *= 8  # of what is padded nothing is told
        assert turn.now == dict(zip("abc", shape, strict=True))[turn.name]
        assert turn.value % unit == 0
        assert pays(turn.name, turn.value)
        beyond = turn.value - unit if turn.pays_above else turn.value + unit
        assert beyond == 0 or not pays(turn.name, beyond)
        assert turn.pays_now == pays(turn.name, turn.now)


def test_break_evens_are_found_where_there_are_any():
    found = 0
    for name, kind, shape in CASES:
        row = chip(name)
        turns = break_evens(weighed(matmul(kind, *shape), row), row, MARGIN)
        found += any(turn.what == "size" for turn in turns)
        assert list(turns) == sorted(turns, key=lambda turn: turn.factor)
    assert found > 0.7 * len(CASES)


@pytest.mark.parametrize(("name", "kind", "shape"), CASES[::5], ids=str)
def test_a_link_speed_is_where_the_gain_is_the_margin(name, kind, shape):
    row = chip(name)
    site = matmul(kind, *shape)
    for turn in break_evens(weighed(site, row), row, MARGIN):
        if turn.what == "link":
            assert turn.now == row.link_bytes_per_s()
            link = row.link.scaled(turn.value / turn.now, "x")
            there = gain(site, dataclasses.replace(row, link=link))
            assert there == pytest.approx(MARGIN, abs=1e-4)


def test_a_hidden_share_has_a_closed_form():
    row = chip("v5e")
    site = matmul(ALL_GATHER, 16384, 8192, 32768)
    for part in (0.1, 0.5, 0.95):
        seconds = part * weighed(site, row)[0].estimate.collective_s
        found = weighed(site, row, hidden={(0, site.collectives[0]): Behind(seconds)})
        (turn,) = [t for t in break_evens(found, row, MARGIN) if t.what == "hidden"]
        at = dataclasses.replace(found[0].estimate, hidden_s=turn.value)
        assert at.sure_gain == pytest.approx(MARGIN)
        assert turn.pays_now == found[0].estimate.pays(MARGIN)


def test_what_is_told_of_a_size_is_what_planning_does_there():
    """From a declined plan to the size it names, and one below: the plan itself turns."""
    row = chip("v5e")

    def decided(rows):
        return make_plan([matmul(ALL_GATHER, rows, 8192, 32768)], Options(), row).decisions[0]

    left = make_plan([matmul(ALL_GATHER, 64, 8192, 32768)], Options(), row)
    assert not left.rewritten
    (site,) = left.explain().sites
    told = " ".join(site.words)
    size = int(re.search(r"pays from a = (\d+) up \(now 64\)", told)[1])
    assert decided(size).rewritten
    assert not decided(size - 8).rewritten


# --- words ---


def words(site, row="v5e", **options):
    plan = make_plan([site], Options(**options), chip(row))
    return " ".join(plan.explain().sites[0].words)


def test_a_transfer_that_an_einsum_cannot_hide():
    text = words(matmul(REDUCE_SCATTER, 4200, 512, 4096, ring=7))
    assert re.match(
        r"declined: the [\d.]+ us einsum cannot hide [\d.]+ [mu]s of transfer, [\d.]+ [mu]s stay "
        r"exposed; a loop costs [\d.]+ % ",
        text,
    )
    assert re.search(r"pays from b = \d+ up \(now 512\)", text)


def test_a_collective_that_is_too_small_to_matter():
    text = words(matmul(ALL_GATHER, 8192, 1024, 1 << 19, ring=2))
    assert re.match(
        r"declined: the all-gather takes [\d.]+ [mu]s of [\d.]+ ms: hiding all of it would save "
        r"[01]\.\d %, less than the 2 % asked for",
        text,
    )


def test_a_decode_gemm_has_nothing_to_hide_behind():
    text = words(matmul(ALL_GATHER, 8, 1024, 1024))
    assert re.match(
        r"declined: (starting 8 steps takes [\d.]+ us|8 smaller einsums take [\d.]+ us longer than "
        r"the whole one), and there is [\d.]+ us of all-gather to hide; a loop costs",
        text,
    )


def test_a_loop_that_is_made_says_what_it_saves_and_when_it_would_not():
    text = words(matmul(ALL_GATHER, 16384, 8192, 32768))
    assert re.match(r"rewritten as \S+ x8 unrolled: a loop saves \d\d\.\d % \(", text)
    assert "all-gather run behind the einsum; next best is all-gather" in text
    assert re.search(r"would not pay below a = \d+ \(now 16384\)", text)


def test_constraints_are_told_with_their_remedy():
    site = matmul(ALL_GATHER, 16384, 8192, 32768)
    assert words(site, policy="never").startswith(
        "left alone: the policy is 'never'; a loop saves "
    )
    assert 'set policy="auto"' in words(site, policy="never")
    assert "declined" in words(site, min_gain=0.9)
    at = "?:0"
    assert "override 'always'" in words(site, min_gain=0.9, overrides={at: "always"})
    assert words(site, overrides={at: "never"}) == (
        "left alone: an override in Options says 'never' drop the override"
    )
    assert set(REMEDIES) <= set(Reason)


def test_what_other_work_hides_is_told():
    """A weight that is gathered while the einsums before it run."""
    mesh = make_mesh()

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=on(*spec))

    def step(x, *weights):
        for w in weights:
            x = jax.lax.with_sharding_constraint(x @ w, on("m", None))
        return x

    weight = array(4096, 4096, spec=(None, "m"))
    args = array(65536, 4096, spec=("m", None)), weight, weight, weight
    plan = overlap_collectives(step, Options(chip="v5e")).plan(*args)
    last = plan.decisions[-1]
    assert last.reason is Reason.ALREADY_HIDDEN
    text = " ".join(plan.explain().sites[-1].words)
    assert "run behind earlier einsums as it is, and a loop costs" in text
    assert re.search(r"pays once no more than [\d.]+ us of the all-gather is hidden already", text)


def test_a_large_hidden_size_on_v6e_has_little_to_gain():
    """128 times the width: the einsums dwarf the collectives, and smaller ones lose more."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=on(*spec))

    def mlp(x, w_in, w_out):
        x = jax.lax.with_sharding_constraint(x, on("data", None, None))
        hidden = jax.nn.gelu(x @ w_in)
        return jax.lax.with_sharding_constraint(hidden @ w_out, on("data", "model", None))

    plan = overlap_collectives(mlp, Options(chip="v6e")).plan(
        array(8, 1024, 2048, spec=("data", "model", None)),
        array(2048, 262144, spec=(None, "model")),
        array(262144, 2048, spec=("model", None)),
    )
    assert [d.reason for d in plan.decisions] == [Reason.NOT_WORTH] * 2
    for site in plan.explain().sites:
        text = " ".join(site.words)
        assert re.match(r"declined: 4 smaller einsums take [\d.]+ us longer than the whole", text)
        assert re.search(r"a loop costs [\d.]+ %", text)
        assert re.search(r"pays on links of [\d.]+ GB/s and slower \(90 GB/s reckoned with\)", text)


# --- documents and the command ---


def test_an_explanation_is_text_and_json():
    mesh = make_mesh()
    plan = overlap_collectives(make_step(mesh), ALWAYS).plan(*arguments(mesh))
    explanation = plan.explain()
    text = str(explanation)
    assert text.startswith("times are predicted, for v5e\nnote: CPU devices")
    for i in range(2):
        assert f"site {i}  steptools.py:" in text
    assert text.count("\n  ->  ") == 2
    assert text.endswith("2 of 2 einsums rewritten (policy always)")
    document = json.loads(json.dumps(explanation.to_json()))
    assert document["min_gain"] == 0.02
    for site, d in zip(document["sites"], plan.decisions, strict=True):
        assert len(site["candidates"]) == len(d.candidates)
        (made,) = [c for c in site["candidates"] if c["made"]]
        assert made["predicted"]["after_s"] == d.estimate.after_s
        b = site["baseline"]
        parts = b["einsum_s"] + b["collective_s"] + b["others_s"] - b["hidden_s"]
        assert b["before_s"] == pytest.approx(parts)
        assert site["words"]


def test_every_term_of_a_line_adds_up_to_its_total():
    for _, kind, shape in CASES[::7]:
        e = weighed(matmul(kind, *shape), chip("v5e"))[0].estimate
        terms = (e.einsum_s, e.loss_s, e.traffic_s, e.launch_s, e.exposed_s, e.rest_s, e.others_s)
        assert e.after_s == pytest.approx(math.fsum(terms))
        assert excess(e, 0.0) == pytest.approx(e.after_s + e.doubt_s - e.before_s)


def test_einsums_of_one_ring_are_explained_once():
    mesh = make_mesh()

    def qkv(x, q, k, v):
        return x @ q, x @ k, x @ v

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w = array(8, 256, spec=(None, "m"))
    plan = overlap_collectives(qkv, ALWAYS).plan(array(16, 8, spec=("m", None)), w, w, w)
    text = str(plan.explain())
    assert text.count("as it is: 3 einsums") == 1
    assert text.count("on the ring of site 0") == 2


def test_a_plan_that_follows_a_file_is_explained(tmp_path):
    mesh = make_mesh()
    path = tmp_path / "plan.json"
    step, args = make_step(mesh), arguments(mesh)
    overlap_collectives(step, ALWAYS).plan(*args).save(path)
    content = json.loads(path.read_text())
    content["sites"][0]["schedule"].update(two_way=False, unroll=False)
    content["sites"][1]["decision"] = "leave"
    path.write_text(json.dumps(content))
    first, second = overlap_collectives(step, Options(plan=path)).plan(*args).explain().sites
    assert first.words[0].startswith("rewritten as one-way x4 rolled")
    assert sum(c["made"] for c in first.to_json()["candidates"]) == 1
    assert second.words[0].startswith("left alone: the plan file leaves it as it is; a loop ")


PROGRAM = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = {"model": 4}

def step(x, w):
    return x @ w

def build(mesh):
    print("a line of the program")
    def array(*axes):
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=sharding)
    return step, (array("model", None), array(None, "model"))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_the_command_explains_and_saves(program, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert run(["explain", str(program), f"--save={plan}"]) == 0
    out = capsys.readouterr().out
    assert "site 0  program.py:9  ab,bc->ac  bfloat16[4096,4096] x " in out
    assert f'wrote the plan to {plan}; follow it: Options(plan="{plan}")' in out
    assert run(["explain", str(program), f"--plan={plan}", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert "a line of the program" in captured.err
    assert f"decided as {plan} says" in document["note"]
    assert run(["explain", str(program), "--policy=never", "--chip=h100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["chip"], document["sites"][0]["reason"]) == ("h100", "policy-never")


BAD = {
    "none": (["explain"], r"0 program files; give one, see collmm explain --help"),
    "save": (["explain", "PROGRAM", "--save=no/such/plan.json"], r"cannot write the plan to no/"),
    "plan": (["explain", "PROGRAM", "--plan=PROGRAM"], r"the plan .*program.py is not JSON: "),
}


@pytest.mark.parametrize(("argv", "expected"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2(argv, expected, program, capsys):
    assert run([a.replace("PROGRAM", str(program)) for a in argv]) == 2
    captured = capsys.readouterr()
    assert re.search(f"^collmm explain: {expected}", captured.err)
    assert captured.err.count("\n") == 1


def test_explaining_asks_the_model_a_bounded_number_of_times(monkeypatch):
    sites = [
        dataclasses.replace(matmul(ALL_GATHER, 1024 + 8 * i, 4096, 8192), index=i)
        for i in range(50)
    ]
    plan = make_plan(sites, Options(), chip("v5e"))
    asked = []
    estimate = breakeven.estimate
    monkeypatch.setattr(
        breakeven, "estimate", lambda *args, **kw: asked.append(args) or estimate(*args, **kw)
    )
    plan.explain()
    assert 0 < len(asked) < 300 * len(sites)


def test_a_scatter_that_pays_only_in_one_loop_with_the_gather_before_it():
    first = matmul(ALL_GATHER, 8192, 8192, 28672)
    last = dataclasses.replace(matmul(REDUCE_SCATTER, 8192, 28672, 8192), index=1)
    row = chip("h100")
    apart = make_plan([first, last], Options(), row)
    assert [d.rewritten for d in apart.decisions] == [True, False]
    following = dataclasses.replace(last, follows=0)
    plan = make_plan([first, following], Options(), row)
    assert [d.rewritten for d in plan.decisions] == [True, True]
    assert "in one loop with the gather of einsum 0" in plan.decisions[1].detail
    made, *turns = plan.explain().sites[1].words
    assert ": by itself a loop " in made
    assert turns
    assert all(turn.startswith("by itself ") for turn in turns if "dimension" not in turn)
    assert "by itself" not in str(apart.explain())
    for options in (Options(chains=False), Options(max_permutes=20), Options(policy="never")):
        assert not make_plan([first, following], options, row).decisions[1].rewritten
