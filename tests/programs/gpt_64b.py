"""A layer of the published 64B decoder model: 128 chips, batch 512, width 10240."""

from gpt import layer_step

MESH = {"data": 16, "model": 8}


def build(mesh):
    return layer_step(mesh, batch=512, width=10240)
