"""The programs behind the stored HLO texts in ``fixtures/``, and the script that made them.

    python tests/hlo/hlo_programs.py TARGET OUT [NAME...]

TARGET is ``cpu`` (8 simulated devices), ``gpu`` (8 H100 of one host) or a TPU topology such as
``v5e:2x4``; no TPU or GPU is needed, only its compiler (``jax[tpu]``; ``jax-cuda12-plugin``,
``jax-cuda12-pjrt``, ``nvidia-cuda-nvcc-cu12``). The tests look up line numbers of this file in the
stored texts by the comments ``[...]``: after moving lines here, make the fixtures again.
"""

import gzip
import os
import sys
from pathlib import Path

DEVICES = 8
LAYERS = 4  # turns of the scans
H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_address_bits: 64
  pcie_bandwidth: 34359738368 device_interconnect_info { active_links: 18 } }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }"""
OWN_DECOMPOSITION_OFF = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}
# Sizes of the tensor-parallel layer: x [ROWS, WIDTH], hidden HIDDEN.
ROWS, WIDTH, HIDDEN = 8192, 2048, 8192
ROWS_CPU, WIDTH_CPU, HIDDEN_CPU = 256, 128, 512


def line_of(tag: str) -> int:
    """The line of this file that ends in the comment ``# [tag]``."""
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1):
        if text.endswith(f"# [{tag}]"):
            return number
    raise ValueError(tag)


def build(target: str):
    """Names to (function, arguments, compiler options), for ``target``. Imports jax."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    cpu, gpu, tpu = target == "cpu", target == "gpu", ":" in target
    rows, width, hidden = (ROWS_CPU, WIDTH_CPU, HIDDEN_CPU) if cpu else (ROWS, WIDTH, HIDDEN)
    dtype = jnp.float32 if cpu else jnp.bfloat16
    off = OWN_DECOMPOSITION_OFF if tpu else {}

    def make_mesh(shape, axes):
        if cpu:
            auto = (jax.sharding.AxisType.Auto,) * len(axes)
            return jax.make_mesh(shape, axes, axis_types=auto)
        if gpu:
            topology = topologies.get_topology_desc(
                platform="cuda", topology="1x1x8", target_config=H100
            )
            return Mesh(np.array(topology.devices).reshape(shape), axes)
        megacore = {"chip_config_name": "megacore"} if target.startswith("v4") else {}
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target, **megacore)
        return topologies.make_mesh(topology, shape, axes)

    line = make_mesh((DEVICES,), ("model",))
    grid = make_mesh((2, 4), ("data", "model"))

    def arg(shape, *spec, mesh=line, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def pin(x, *spec, mesh=line):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def mlp(x, w, v):
        h = jax.nn.relu(x @ w)  # [gathered]
        y = pin(h, None, "model") @ v  # [scattered]
        return pin(y, "model", None)

    def layers(x, ws, vs):
        return lax.scan(lambda x, wv: (mlp(x, *wv), None), x, (ws, vs))[0]  # [scanned]

    step_down = [(i, (i - 1) % DEVICES) for i in range(DEVICES)]

    def ring(unrolled):
        def body(x, w):
            place, mine = lax.axis_index("model"), x.shape[0]
            out = jnp.zeros((DEVICES * mine, w.shape[1]), x.dtype)
            out = lax.pcast(out, ("model",), to="varying")

            def step(i, carry):
                out, x = carry
                following = lax.ppermute(x, "model", step_down)  # [permute]
                at = ((i + place) % DEVICES) * mine
                return lax.dynamic_update_slice(out, x @ w, (at, 0)), following

            carry = (out, x)
            if not unrolled:
                return lax.fori_loop(0, DEVICES, step, carry)[0]
            for i in range(DEVICES):
                carry = step(i, carry)
            return carry[0]

        specs = {"in_specs": (P("model", None), P(None, "model")), "out_specs": P(None, "model")}
        return jax.shard_map(body, mesh=line, **specs)

    def exchange(x, w):
        def body(x, w):
            turned = lax.all_to_all(x, "model", split_axis=1, concat_axis=0, tiled=True)  # [a2a]
            return turned @ w

        specs = {"in_specs": (P("model", None),) * 2, "out_specs": P("model", None)}
        return jax.shard_map(body, mesh=line, **specs)(x, w)

    def reduced(x, w):
        return pin(x @ w)  # [reduced]

    def either(x, w, flag):
        zero = jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
        return lax.cond(flag[0] > 0, lambda: reduced(x, w), lambda: zero)

    def stack(x, ws, vs):
        def layer(x, wv):
            h = pin(jax.nn.gelu(x @ wv[0]), "data", "model", mesh=grid)
            return pin(h @ wv[1], "data", "model", mesh=grid) + x, None

        return jnp.sum(lax.scan(layer, x, (ws, vs))[0].astype(jnp.float32) ** 2)

    x, w, v = (rows, width), (width, hidden), (hidden, width)
    weights = (arg(w, None, "model"), arg(v, "model", None))
    stacked = (
        arg((LAYERS, *w), None, None, "model"),
        arg((LAYERS, *v), None, "model", None),
    )
    grid_args = (
        arg(x, "data", "model", mesh=grid),
        arg((LAYERS, *w), None, "data", "model", mesh=grid),
        arg((LAYERS, *v), None, "model", "data", mesh=grid),
    )
    summed = (arg(x, None, "model"), arg(w, "model", None))
    own_merge_off = {"xla_gpu_dot_merger_threshold_mb": 0} if gpu else {}
    return {
        "mlp": (mlp, (arg(x, "model", None), *weights), off),
        "windowed": (mlp, (arg(x, "model", None), *weights), {}),
        "scan": (layers, (arg(x, "model", None), *stacked), off),
        "ring": (ring(False), (arg(x, "model", None), weights[0]), {}),
        "unrolled": (ring(True), (arg(x, "model", None), weights[0]), own_merge_off),
        "a2a": (exchange, (arg(x, "model", None), arg(w, "model", None)), {}),
        "reduced": (reduced, summed, {}),
        "cond": (either, (*summed, arg((DEVICES,), dtype=jnp.int32)), {}),
        "grid": (jax.grad(stack, argnums=(1, 2)), grid_args, off),
    }


def main(target: str, out: str, *names: str) -> None:
    """Compile and store ``{target}-jax{version}-{name}.hlo``, gzipped above 40 kB.

    A name that ends in ``-dumped``, such as ``scan-dumped``, stores what ``--xla_dump_to`` writes
    instead of what jax prints.
    """
    import tempfile

    dumps = tempfile.mkdtemp()
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} --xla_dump_to={dumps}"
    )
    import jax

    options = {}
    if target == "gpu":
        options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_collect_cost_model_stats": True}
    version = "".join(p.zfill(2) for p in jax.__version__.split(".")[:2]).lstrip("0").zfill(3)
    programs = build(target)
    for name in names or programs:
        function, args, more = programs[name.removesuffix("-dumped")]
        lowered = jax.jit(function).lower(*args)
        text = lowered.compile(compiler_options={**options, **more}).as_text()
        if name.endswith("-dumped"):
            written = Path(dumps).glob(f"*{function.__name__}*after_optimizations.txt")
            text = max(written, key=os.path.getmtime).read_text()
        text = text.replace(str(Path(__file__).resolve()), Path(__file__).name)
        path = Path(out) / f"{target.partition(':')[0]}-jax{version}-{name}.hlo"
        if len(text) > 40_000:
            path.with_suffix(".hlo.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            path.write_text(text)
        print(path.name, len(text), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
