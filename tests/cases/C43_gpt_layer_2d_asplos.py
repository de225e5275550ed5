"""A GPT layer in the 2D (batch x model) partitioning of Wang et al., ASPLOS 2023, with grads."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAME = "gpt_layer_2d_asplos"
SOURCE = "jax-ml/jax#15490"
WHAT = (
    "The question that asks for the paper's looped collective einsum: activations are [b@y, "
    "s, m@x], weights [m@y, f@x], so each projection gathers an operand along both axes and "
    "the way back scatters on x; at least the x-axis gather and scatter of every projection "
    "are eligible."
)
MESH = {"x": 2, "y": 4}
EXPECT = "rewrite"
TOL = 1e-4


def build(mesh):
    rng = np.random.default_rng(43)

    def put(a, *s):
        return jax.device_put(a, NamedSharding(mesh, P(*s)))

    def wsc(a, *s):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*s)))

    B, S, M, H, E, F = 4, 8, 32, 4, 8, 64
    specs = {
        "wq": ("y", "x", None),
        "wk": ("y", "x", None),
        "wv": ("y", "x", None),
        "wo": ("x", None, "y"),
        "w1": ("y", "x"),
        "b1": ("x",),
        "w2": ("x", "y"),
        "b2": (None,),
    }
    shapes = {
        "wq": (M, H, E),
        "wk": (M, H, E),
        "wv": (M, H, E),
        "wo": (H, E, M),
        "w1": (M, F),
        "b1": (F,),
        "w2": (F, M),
        "b2": (M,),
    }
    params = {k: put(rng.standard_normal(shapes[k], np.float32) / 6, *specs[k]) for k in specs}
    act = ("y", None, "x")
    x = put(rng.standard_normal((B, S, M), np.float32), *act)

    def norm(t):
        t = t - jnp.mean(t, -1, keepdims=True)
        return wsc(t * jax.lax.rsqrt(jnp.mean(t * t, -1, keepdims=True) + 1e-5), *act)

    def layer(p, x):
        n = norm(x)
        q, k, v = (
            wsc(jnp.einsum("bsm,mhe->bshe", n, p[w]), "y", None, "x", None)
            for w in ("wq", "wk", "wv")
        )
        s = jnp.einsum("bshe,bthe->bhst", q, k) / np.sqrt(E)
        a = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((S, S), bool)), s, -1e30), -1)
        o = wsc(jnp.einsum("bhst,bthe->bshe", a, v), "y", None, "x", None)
        x = x + wsc(jnp.einsum("bshe,hem->bsm", o, p["wo"]), *act)
        h = wsc(jax.nn.gelu(jnp.einsum("bsm,mf->bsf", norm(x), p["w1"]) + p["b1"]), "y", None, "x")
        return x + wsc(jnp.einsum("bsf,fm->bsm", h, p["w2"]), *act) + p["b2"]

    def fn(params, x):
        def f(p, x):
            return jnp.mean(jnp.square(layer(p, x)))

        val, (gp, gx) = jax.value_and_grad(f, argnums=(0, 1))(params, x)
        return val, {k: wsc(g, *specs[k]) for k, g in gp.items()}, wsc(gx, *act)

    return fn, (params, x)
