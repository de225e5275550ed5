"""Two rings on one einsum: values and derivatives of the loops, and what compiles of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from primtools import labels_of, partial_of, sharding, spec_of
from rewritten import assert_equal_trees
from ringtools import FORMS, mesh_of

from collmm.errors import OptionError
from collmm.loops import Consumer, Inner
from collmm.primitives import (
    GatherUse,
    ScatterTerm,
    all_gather_einsum,
    before_inner,
    einsum_reduce_scatter,
)
from collmm.ring import gather_sends_written, scatter_sends_written
from collmm.schedule import Schedule

SIZES = {"b": 24, "s": 48, "k": 48, "f": 48, "h": 24}
MESHES = {
    "2x4": {"d": 2, "m": 4},
    "4x2": {"d": 4, "m": 2},
    "2x3": {"d": 2, "m": 3},
    "2x2x2": {"z": 2, "d": 2, "m": 2},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One einsum: its operands' shardings after both gathers, and what the two rings join.

    ``outer`` and ``inner``: (operand, dimension) that are gathered over m and over d; an outer one
    without an operand scatters that dimension of the result over m.
    """

    equation: str
    lhs: str
    rhs: str
    out: str
    outer: tuple
    inner: tuple


# Named by what the outer label and the inner one are in the einsum.
GATHERS = {
    "free-free": Case("sk,kf->sf", "- -", "- -", "- -", (0, 0), (1, 1)),
    "free-contracting": Case("sk,kf->sf", "- -", "- -", "- -", (0, 0), (1, 0)),
    "free-batch": Case("bsk,bkf->bsf", "- - -", "- - -", "- - -", (0, 1), (1, 0)),
    "contracting-free": Case("sk,kf->sf", "- -", "- -", "- -", (0, 1), (1, 1)),
    "contracting-contracting": Case("skh,khf->sf", "- - -", "- - -", "- -", (0, 1), (1, 1)),
    "contracting-batch": Case("bsk,bkf->bsf", "- - -", "- - -", "- - -", (0, 2), (1, 0)),
    "batch-free": Case("bsk,bkf->bfs", "- - -", "- - -", "- - -", (0, 0), (1, 2)),
    "batch-contracting": Case("bsk,bkf->bsf", "- - -", "- - -", "- - -", (0, 0), (1, 1)),
    "batch-batch": Case("bhsk,bhkf->bhsf", "- - - -", "- - - -", "- - - -", (0, 0), (1, 1)),
    "free-free-rhs": Case("sk,kf->fs", "- -", "- -", "- -", (1, 1), (0, 0)),
    "contracting-free-rhs": Case("sk,kf->sf", "- -", "- -", "- -", (1, 0), (0, 0)),
    "batch-contracting-rhs": Case("bsk,kbf->bsf", "- - -", "- - -", "- - -", (1, 1), (0, 2)),
    # What the axes shard once they are free again.
    "axes-reused": Case("bsk,kf->bsf", "d - -", "- m", "d - m", (0, 1), (1, 0)),
    "axes-reused-free": Case("bsk,kfh->bsfh", "d - -", "- - m", "d - - m", (0, 1), (1, 1)),
}
SCATTERS = {
    "free-contracting": Case("sk,kf->sf", "- m", "m -", "m -", (None, 0), (1, 0)),
    "free-free": Case("sk,kf->sf", "- m", "m -", "m -", (None, 0), (1, 1)),
    "free-free-lhs": Case("sk,kf->sf", "- m", "m -", "- m", (None, 1), (0, 0)),
    "free-contracting-lhs": Case("skh,khf->sf", "- m -", "m - -", "- m", (None, 1), (0, 2)),
    "free-batch": Case("bsk,bkf->bsf", "- - m", "- m -", "- m -", (None, 1), (1, 0)),
    "batch-free": Case("bsk,bkf->bsf", "- - m", "- m -", "m - -", (None, 0), (1, 2)),
    "batch-contracting": Case("bskh,bkhf->bsf", "- - m -", "- m - -", "m - -", (None, 0), (1, 2)),
    "axes-reused": Case("bsk,kf->bsf", "d - m", "m -", "d m -", (None, 1), (1, 1)),
}
CASES = {f"gather-{n}": c for n, c in GATHERS.items()} | {
    f"scatter-{n}": c for n, c in SCATTERS.items()
}


class Problem:
    """One case on one mesh: ``fn`` binds the primitive, ``plain`` is the einsum itself."""

    def __init__(self, case, mesh, form=(False, True), inner_form=None, dtype=jnp.int32, uses=1):
        self.mesh, self.case, self.dtype, self.uses = mesh, case, dtype, uses
        inner_form = inner_form or form
        self.schedule = Schedule(("m",), mesh.shape["m"], *form)
        self.inner = Inner(*case.inner, Schedule(("d",), mesh.shape["d"], *inner_form))
        self.partial = partial_of(case.equation, dtype, None, dtype)
        labels = labels_of(case.equation)
        self.shapes = [tuple(SIZES[x] for x in part) for part in labels[:2]]
        self.specs = [
            before_inner(spec_of(spec), k, self.inner)
            for k, spec in enumerate((case.lhs, case.rhs))
        ]
        side, dim = case.outer
        if side is not None:
            outer = Inner(side, dim, self.schedule)
            self.specs[side] = before_inner(self.specs[side], side, outer)

    def fn(self, *operands):
        case, side, dim = self.case, *self.case.outer
        if side is None:
            term = ScatterTerm(self.partial, spec_of(case.lhs), spec_of(case.rhs), self.inner)
            return einsum_reduce_scatter(
                [operands[2 * i : 2 * i + 2] for i in range(self.uses)],
                [term] * self.uses,
                out_spec=spec_of(case.out),
                dim=dim,
                schedule=self.schedule,
                mesh=self.mesh,
            )
        local = spec_of((case.lhs, case.rhs)[1 - side])
        use = GatherUse(Consumer(self.partial, side), local, spec_of(case.out), self.inner)
        outs = all_gather_einsum(
            operands[side],
            [operands[2 * i + 1 - side] for i in range(self.uses)],
            [use] * self.uses,
            gathered_spec=self.specs[side],
            dim=dim,
            schedule=self.schedule,
            mesh=self.mesh,
        )
        return outs if self.uses > 1 else outs[0]

    def plain(self, *operands):
        numbers, permutation = self.partial.einsum.to_dot_general()
        side = self.case.outer[0]
        outs = []
        for i in range(self.uses):
            pair = list(operands[2 * i : 2 * i + 2])
            if side is not None:
                pair[side] = operands[side]
            out = jax.lax.dot_general(*pair, numbers, preferred_element_type=self.dtype)
            outs.append(out if permutation is None else out.transpose(permutation))
        if side is None:
            return sum(outs[1:], outs[0])
        return outs if self.uses > 1 else outs[0]

    def operands(self, place=True):
        rng = np.random.default_rng(0)
        arrays = [
            rng.integers(-3, 4, shape).astype(self.dtype)
            for _ in range(self.uses)
            for shape in self.shapes
        ]
        if not place:
            return arrays
        specs = self.specs * self.uses
        return [
            jax.device_put(x, sharding(self.mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]

    @property
    def permutes(self):
        """In the text: those of one outer ring, and of one inner ring for each einsum."""
        side, dim = self.case.outer
        s, inner = self.schedule, self.inner.schedule
        if side is None:
            block = self.partial.einsum.out_shape(*self.shapes)[dim] // s.ring_size
            sends = scatter_sends_written(s.ring_size, block, s.accumulators, s.unroll)
        else:
            sends = gather_sends_written(s.ring_size, s.two_way, s.unroll)
        return sends + self.uses * gather_sends_written(
            inner.ring_size, inner.two_way, inner.unroll
        )


def permutes(fn, *operands):
    return jax.jit(fn).lower(*operands).as_text().count("stablehlo.collective_permute")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_value_is_that_of_the_einsum_and_nothing_is_gathered_whole(name, mesh):
    problem = Problem(CASES[name], mesh_of(**MESHES[mesh]))
    run = jax.jit(problem.fn)
    assert_equal_trees(run(*problem.operands()), problem.plain(*problem.operands(place=False)))
    assert permutes(problem.fn, *problem.operands()) == problem.permutes
    text = run.lower(*problem.operands()).compile().as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text


FEW = (
    "gather-free-contracting",
    "gather-contracting-free",
    "gather-batch-contracting-rhs",
    "gather-axes-reused-free",
    "scatter-free-contracting",
    "scatter-free-free-lhs",
    "scatter-batch-free",
)


@pytest.mark.parametrize("inner", FORMS)
@pytest.mark.parametrize("outer", FORMS)
@pytest.mark.parametrize("name", ["gather-contracting-free", "scatter-free-contracting"])
def test_both_rings_run_one_way_and_two_way_rolled_and_unrolled(name, outer, inner):
    problem = Problem(CASES[name], mesh_of(d=4, m=4), outer, inner)
    got = jax.jit(problem.fn)(*problem.operands())
    assert_equal_trees(got, problem.plain(*problem.operands(place=False)))
    assert permutes(problem.fn, *problem.operands()) == problem.permutes


@pytest.mark.parametrize("uses", [2, 3])
@pytest.mark.parametrize("name", FEW)
def test_einsums_of_one_outer_ring_have_an_inner_ring_each(name, uses):
    problem = Problem(CASES[name], mesh_of(d=2, m=4), (True, True), uses=uses)
    operands = problem.operands()
    side = problem.case.outer[0]
    if side is not None:  # they gather one value
        operands[2 + side :: 2] = [operands[side]] * len(operands[2 + side :: 2])
    got = jax.jit(problem.fn)(*operands)
    assert_equal_trees(got, problem.plain(*map(np.asarray, operands)))
    assert permutes(problem.fn, *operands) == problem.permutes


@pytest.mark.parametrize("name", FEW)
def test_derivatives_are_those_of_the_einsum(name):
    problem = Problem(CASES[name], mesh_of(d=2, m=4), (True, True), dtype=jnp.float32)

    def derived(fn):
        def run(operands, tangents):
            out, tangent = jax.jvp(fn, operands, tangents)
            return out, tangent, jax.vjp(fn, *operands)[1](out)

        return jax.jit(run)

    placed, host = tuple(problem.operands()), tuple(problem.operands(place=False))
    assert_equal_trees(derived(problem.fn)(placed, placed), derived(problem.plain)(host, host))


@pytest.mark.parametrize("axes", [(0, 0), (None, 1), (2, None)])
@pytest.mark.parametrize("name", FEW)
def test_vmap_keeps_both_rings(name, axes):
    problem = Problem(CASES[name], mesh_of(d=2, m=4), (True, True))
    rng = np.random.default_rng(1)
    operands = []
    for shape, axis in zip(problem.shapes, axes, strict=True):
        if axis is not None:
            shape = (*shape[:axis], 3, *shape[axis:])
        operands.append(rng.integers(-3, 4, shape).astype(np.int32))
    run = jax.vmap(problem.fn, in_axes=axes)
    want = jax.vmap(problem.plain, in_axes=axes)(*operands)
    everywhere = jax.device_put(operands, NamedSharding(problem.mesh, P()))
    assert_equal_trees(jax.jit(run)(*everywhere), want)
    assert permutes(run, *everywhere) == problem.permutes


def test_the_gathered_operand_is_handed_out_too():
    problem = Problem(CASES["gather-free-contracting"], mesh_of(d=2, m=4))
    x, w = problem.operands()

    def fn(x, w):
        use = GatherUse(Consumer(problem.partial, 0), ((), ()), ((), ()), problem.inner)
        return all_gather_einsum(
            x,
            [w],
            [use],
            gathered_spec=problem.specs[0],
            dim=0,
            schedule=problem.schedule,
            mesh=problem.mesh,
            hand_out=True,
        )

    y, whole = jax.jit(fn)(x, w)
    assert_equal_trees((y, whole), (problem.plain(x, w), x))
    assert whole.sharding.is_fully_replicated


def test_a_sum_over_both_rings_is_carried_in_float32_and_rounded_once():
    problem = Problem(
        CASES["gather-contracting-contracting"], mesh_of(d=2, m=4), dtype=jnp.bfloat16
    )
    x, w = (np.ones(shape, np.float32) for shape in problem.shapes)
    w[0, 0] = 257.0  # no bfloat16 between 256 and 258: a sum that is rounded early misses it
    x, w = jax.device_put(
        [jnp.asarray(v, jnp.bfloat16) for v in (x, w)], NamedSharding(problem.mesh, P())
    )
    want = np.einsum("skh,khf->sf", *(np.asarray(v, np.float32) for v in (x, w)))
    got = jax.jit(problem.fn)(x, w)
    assert (np.asarray(got) == np.asarray(jnp.asarray(want, jnp.bfloat16))).all()


def test_a_schedule_refuses_what_cannot_be_nested():
    ring = Schedule(("d",), 2, False, True)
    both = Schedule(("m",), 4, True, True, inner=ring)
    assert both.describe() == "two-way x4 unrolled + d one-way x2 unrolled"
    with pytest.raises(OptionError, match="inner cuts its shards into chains=2; an inner ring sen"):
        Schedule(("m",), 4, True, True, inner=Schedule(("d",), 2, False, True, chains=2))
    with pytest.raises(OptionError, match="no axis in common"):
        Schedule(("d", "m"), 8, True, True, inner=ring)
    with pytest.raises(OptionError, match="two rings are nested at most"):
        Schedule(("z",), 2, False, True, inner=both)
    with pytest.raises(OptionError, match="two members or more"):
        Schedule(("m",), 4, True, True, inner=Schedule(("d",), 1, False, True))
    with pytest.raises(OptionError, match="inner must be a Schedule or None, got 3"):
        Schedule(("m",), 4, True, True, inner=3)
