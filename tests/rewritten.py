"""What a rewritten program holds: primitives in its jaxpr, collectives in its HLO."""

import re
from collections import Counter

import jax

from collmm import Options, _jax, overlap_collectives
from collmm.primitives import all_gather_einsum_p, einsum_reduce_scatter_p

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def always(fn):
    """Every site rewritten; a gather and the scatter that follows it stay two rings."""
    return overlap_collectives(fn, Options("always", strict=True, chains=False))


def collectives(fn, *args):
    text = fn.lower(*args).compile().as_text()
    return {k: len(re.findall(rf" {k}(?:-start)?\(", text)) for k in KINDS}


def rings(fn, *args):
    """Return a list of (primitive name, number of einsums on the ring) in program order."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive is all_gather_einsum_p:
                found.append(("gather", len(eqn.params["uses"])))
            elif eqn.primitive is einsum_reduce_scatter_p:
                found.append(("scatter", len(eqn.params["terms"])))
            for _, _, sub in _jax.jaxprs_in(eqn):
                walk(_jax.open_jaxpr(sub))

    walk(fn.trace(*args).jaxpr.jaxpr)
    return found


def ring_counts(fn, *args):
    return Counter(kind for kind, _ in rings(fn, *args))


def assert_equal_trees(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        assert (g == w).all()
