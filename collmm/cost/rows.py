"""The rows of the hardware table: TPU chips and GPUs, each figure with its source.

Sources: ``book`` is the scaling book (jax-ml/scaling-book, tpus.md and gpus.md); ``gcp`` the Google
Cloud TPU pages; ``mle`` the datasheets and measurements of stas00/ml-engineering; ``nvidia`` and
``amd`` the vendors' datasheets; ``jax`` jax/_src/tpu_info.py. ``derived`` says from what.

The book's link figures are about 0.9 of the datasheets': the book's are taken as achievable, the
datasheets' as nominal.
"""

from __future__ import annotations

from collmm.cost.einsum_fits import SHAPES, TABLES
from collmm.cost.figures import Chip, Figure, Rate, WrapRule

_FLOPS = "flop/s"
_BYTES = "bytes/s"
_GIB = 2**30


def _rate(value: float, unit: str, source: str) -> Rate:
    figure = Figure(value, unit, source)
    return Rate(figure, figure)


def _two(achieved: float, source: str, nominal: float, nominal_source: str, unit: str) -> Rate:
    return Rate(Figure(achieved, unit, source), Figure(nominal, unit, nominal_source))


# Measured for v5e only: an all-gather of 128 kB over 4 chips takes 8 us where 3 hops predict 3 us.
_LAUNCH_V5E = Figure(5e-6, "s", "book: 128 kB all-gather on v5e, 8 us measured less 3 us of hops")
_LAUNCH_LIKE_V5E = Figure(5e-6, "s", "derived: as v5e, no measurement of this chip is known")
_HOP = Figure(1e-6, "s", "book: about 1 us per ICI hop")
_CUBES = WrapRule("gcp: slices made of whole 4x4x4 cubes are a torus", multiple=4)
_FULL_16 = WrapRule("book: only a full axis of 16 wraps", exact=16)


def _tpu(name: str, bf16: Rate, **fields) -> Chip:
    """A TPU row; float32 follows bf16, as JAX multiplies float32 in passes of bf16."""
    defaults = {
        "f32": bf16.scaled(1, "float32 at default precision is one bf16 pass"),
        "f32_highest": bf16.scaled(1 / 6, "derived: Precision.HIGHEST is 6 bf16 passes"),
        "hop_latency": _HOP,
        "launch": _LAUNCH_LIKE_V5E,
        "step_launch": _LAUNCH_LIKE_V5E,
        "matrix_tile": 128,
        "shape": SHAPES.get(name),
        # libtpu 0.0.50 compiles all-gathers that wait for nothing as synchronous ones for v4, v5p,
        # v6e and tpu7x, and for v5e inside the einsums before them.
        "early_gathers": False,
    }
    return Chip(name=name, kind="tpu", bf16=bf16, **{**defaults, **fields})


_TPUS = (
    _tpu(
        "v3",
        _two(123e12, "gcp", 140e12, "book", _FLOPS),
        int8=_rate(140e12, _FLOPS, "book"),
        hbm=_rate(900e9, _BYTES, "gcp, book"),
        hbm_capacity=Figure(32 * _GIB, "bytes", "gcp"),
        link=_rate(100e9, _BYTES, "book"),
        dcn=_rate(25e9 / 8, _BYTES, "derived: book, 25 GB/s per host of 8 chips"),
        torus_dims=2,
        pod_shape=(32, 32),
        wrap=WrapRule("derived: a full axis of the 32x32 pod", exact=32),
        clock=Figure(0.94e9, "Hz", "derived: 123 TFLOP/s on 4 MXUs of 128x128"),
        devices_per_chip=2,
    ),
    _tpu(
        "v4",
        _rate(275e12, _FLOPS, "gcp, book"),
        int8=_rate(275e12, _FLOPS, "gcp, book"),
        hbm=_rate(1200e9, _BYTES, "gcp, book"),
        hbm_capacity=Figure(32 * _GIB, "bytes", "gcp"),
        link=_rate(45e9, _BYTES, "book"),
        dcn=_rate(25e9 / 4, _BYTES, "derived: book, 25 GB/s per host of 4 chips"),
        torus_dims=3,
        pod_shape=(16, 16, 16),
        wrap=_CUBES,
        clock=Figure(1.05e9, "Hz", "gcp; 8 MXUs of 128x128 at 275 TFLOP/s"),
        launch=Figure(13e-6, "s", "MeshSlice fit on v4: 13-26 us base per collective, low end"),
        step_launch=Figure(5e-6, "s", "MeshSlice fit on v4: 5-50 us per step, low end"),
    ),
    _tpu(
        "v5e",
        _rate(197e12, _FLOPS, "gcp, book"),
        int8=_rate(394e12, _FLOPS, "gcp, book"),
        fp8=_rate(197e12, _FLOPS, "derived: as v5p, where fp8 runs at the bf16 rate"),
        hbm=_rate(819e9, _BYTES, "gcp; book 810 GB/s"),
        hbm_capacity=Figure(16e9, "bytes", "gcp"),
        link=_two(45e9, "book", 50e9, "gcp", _BYTES),
        dcn=_rate(3.1e9, _BYTES, "book: 25 GB/s per host of 8 chips"),
        torus_dims=2,
        pod_shape=(16, 16),
        wrap=_FULL_16,
        clock=Figure(1.5e9, "Hz", "derived: 197 TFLOP/s on 4 MXUs of 128x128"),
        launch=_LAUNCH_V5E,
        step_launch=_LAUNCH_V5E,
        early_gathers=True,
    ),
    _tpu(
        "v5p",
        _rate(459e12, _FLOPS, "gcp, book"),
        int8=_rate(918e12, _FLOPS, "gcp, book"),
        fp8=_rate(459e12, _FLOPS, "gcp"),
        hbm=_rate(2765e9, _BYTES, "gcp; book 2800 GB/s, jax 2460 GB/s"),
        hbm_capacity=Figure(95 * _GIB, "bytes", "gcp"),
        link=_two(90e9, "book", 100e9, "gcp", _BYTES),
        dcn=_rate(6.25e9, _BYTES, "book: 25 GB/s per host of 4 chips"),
        torus_dims=3,
        pod_shape=(16, 20, 28),
        wrap=_CUBES,
        clock=Figure(1.75e9, "Hz", "derived: 459 TFLOP/s on 8 MXUs of 128x128"),
    ),
    _tpu(
        "v6e",
        _rate(918e12, _FLOPS, "gcp; book, jax 920 TFLOP/s"),
        int8=_rate(1836e12, _FLOPS, "gcp; book, jax 1840 TFLOP/s"),
        fp8=_rate(918e12, _FLOPS, "gcp; jax 920 TFLOP/s"),
        hbm=_rate(1638e9, _BYTES, "gcp; book 1600 GB/s"),
        hbm_capacity=Figure(32e9, "bytes", "gcp"),
        link=_two(90e9, "book", 100e9, "gcp", _BYTES),
        dcn=_rate(12.5e9, _BYTES, "gcp"),
        torus_dims=2,
        pod_shape=(16, 16),
        wrap=_FULL_16,
        matrix_tile=256,
        clock=Figure(
            1.75e9,
            "Hz",
            "derived: 918 TFLOP/s at 524288 flop per cycle; libtpu estimates up to 0.82 of that",
        ),
    ),
    _tpu(
        "tpu7x",
        _rate(2307e12, _FLOPS, "gcp; jax 2310 TFLOP/s"),
        fp8=_rate(4614e12, _FLOPS, "gcp; jax 4600 TFLOP/s"),
        hbm=_rate(7380e9, _BYTES, "gcp; jax 7400 GB/s"),
        hbm_capacity=Figure(192 * _GIB, "bytes", "gcp"),
        link=_two(90e9, "book", 100e9, "gcp", _BYTES),
        dcn=_rate(12.5e9, _BYTES, "gcp"),
        torus_dims=3,
        wrap=WrapRule("no rule is published"),
        devices_per_chip=2,
        matrix_tile=256,
        clock=Figure(
            2.2e9,
            "Hz",
            "derived: 2307 TFLOP/s at 2 x 524288 flop per cycle; libtpu estimates up to 0.88 of it",
        ),
    ),
)

_NVLINK_SHARE = 0.8
_NCCL_LAUNCH = Figure(5e-6, "s", "XLA's GPU collective model: 5 us per NCCL kernel")
_ROUND = Figure(6e-6, "s", "Pallas H100 collective-matmul example: about 6 us per round")
_NO_TORUS = WrapRule("a switch has no torus axes")


def _gpu(name: str, achieved: Figure, nominal: float, source: str, fp8: float | None, **f) -> Chip:
    """A GPU row; ``achieved`` bf16 sets the achievable share of every other matrix peak."""
    share = achieved.value / nominal

    def peak(value: float, origin: str) -> Rate:
        why = f"derived: {origin} times the achieved share of bf16, {share:.2f}"
        return _two(value * share, why, value, origin, _FLOPS)

    bf16 = Rate(achieved, Figure(nominal, _FLOPS, source))
    for field in ("int8", "f32", "f32_highest"):
        if f.get(field) is not None:
            f[field] = peak(*f[field])
    link, link_source = f.pop("nvlink")
    link_rate = _two(
        link * _NVLINK_SHARE,
        f"derived: {link_source}, of which NVLink achieves about 80 %",
        link,
        link_source,
        _BYTES,
    )
    defaults = {
        "link": link_rate,
        "dcn": _rate(50e9, _BYTES, "one 400 Gb/s NIC per GPU"),
        "hop_latency": _NCCL_LAUNCH,
        "launch": _NCCL_LAUNCH,
        "step_launch": _ROUND,
        "wrap": _NO_TORUS,
        "domain": 8,
        "fp8": peak(fp8, source) if fp8 else None,
        "table": TABLES.get(name),
    }
    return Chip(name=name, kind="gpu", bf16=bf16, **{**defaults, **f})


_GPUS = (
    _gpu(
        "a100",
        Figure(271e12, _FLOPS, "mle, measured"),
        312e12,
        "nvidia",
        None,
        int8=(624e12, "nvidia"),
        f32=(156e12, "nvidia: TF32, JAX's default for float32"),
        f32_highest=(19.5e12, "nvidia: FP32 on CUDA cores"),
        hbm=_rate(2039e9, _BYTES, "nvidia"),
        hbm_capacity=Figure(80e9, "bytes", "nvidia"),
        nvlink=(300e9, "nvidia"),
        dcn=_rate(25e9, _BYTES, "one 200 Gb/s NIC per GPU"),
    ),
    _gpu(
        "h100",
        Figure(795e12, _FLOPS, "mle, measured"),
        989e12,
        "nvidia",
        1979e12,
        int8=(1979e12, "nvidia"),
        f32=(494.7e12, "nvidia: TF32, JAX's default for float32"),
        f32_highest=(66.9e12, "nvidia: FP32 on CUDA cores"),
        hbm=_rate(3350e9, _BYTES, "nvidia"),
        hbm_capacity=Figure(80e9, "bytes", "nvidia"),
        nvlink=(450e9, "nvidia"),
    ),
    _gpu(
        "h200",
        Figure(795e12, _FLOPS, "derived: as measured on h100, the same die"),
        989e12,
        "nvidia",
        1979e12,
        int8=(1979e12, "nvidia"),
        f32=(494.7e12, "nvidia: TF32, JAX's default for float32"),
        f32_highest=(66.9e12, "nvidia: FP32 on CUDA cores"),
        hbm=_rate(4800e9, _BYTES, "nvidia"),
        hbm_capacity=Figure(141e9, "bytes", "nvidia"),
        nvlink=(450e9, "nvidia"),
    ),
    _gpu(
        "b200",
        Figure(1745e12, _FLOPS, "mle, measured"),
        2250e12,
        "nvidia",
        4500e12,
        int8=(4500e12, "nvidia"),
        f32=(1100e12, "nvidia: TF32, JAX's default for float32"),
        f32_highest=(80e12, "nvidia: FP32 on CUDA cores"),
        hbm=_rate(8000e9, _BYTES, "nvidia"),
        hbm_capacity=Figure(180e9, "bytes", "nvidia: 180-192 GB by system, the smaller"),
        nvlink=(900e9, "nvidia"),
    ),
    _gpu(
        "gb200",
        Figure(2250e12, _FLOPS, "book"),
        2500e12,
        "mle",
        5000e12,
        int8=(5000e12, "nvidia"),
        f32=(1250e12, "nvidia: TF32, JAX's default for float32"),
        f32_highest=(90e12, "nvidia: FP32 on CUDA cores"),
        hbm=_rate(8000e9, _BYTES, "nvidia"),
        hbm_capacity=Figure(186e9, "bytes", "nvidia"),
        nvlink=(900e9, "nvidia"),
        domain=72,
    ),
    _gpu(
        "mi300x",
        Figure(668e12, _FLOPS, "mle, measured"),
        1307e12,
        "amd",
        2615e12,
        int8=(2615e12, "amd"),
        f32=(163.4e12, "amd: FP32 matrix; whether JAX uses XF32 here is not known"),
        f32_highest=(163.4e12, "amd: FP32 matrix"),
        hbm=_rate(5300e9, _BYTES, "amd"),
        hbm_capacity=Figure(192e9, "bytes", "amd"),
        nvlink=(448e9, "amd: 7 xGMI links"),
        link=_rate(448e9, _BYTES, "amd: 7 xGMI links, nominal; what they achieve is not known"),
        peer=_rate(64e9, _BYTES, "amd: one xGMI link, nominal; what it achieves is not known"),
    ),
)

CHIPS: dict[str, Chip] = {row.name: row for row in (*_TPUS, *_GPUS)}
