"""An 8-way tensor-parallel MLP with sequence parallelism, forward, sized for 8 H100."""

from mlp import mlp

MESH = {"model": 8}


def build(mesh):
    return mlp(mesh, rows=8192, width=8192, hidden=28672)
