"""A layer of the published 512B decoder model: 1024 chips, batch 4096, width 20480."""

from gpt import layer_step

MESH = {"data": 64, "model": 16}


def build(mesh):
    return layer_step(mesh, batch=4096, width=20480)
