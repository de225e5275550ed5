"""An 8-way tensor-parallel MLP with sequence parallelism, forward, sized for 8 TPU v5e."""

from mlp import mlp

MESH = {"model": 8}


def build(mesh):
    return mlp(mesh, rows=16384, width=8192, hidden=32768)
