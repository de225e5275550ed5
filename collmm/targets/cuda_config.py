"""The GpuTargetConfigProto text that lets XLA compile for a GPU that is not there. No jax.

Figures: NVIDIA's data sheets and device queries, as openxla/xla publishes them in
``xla/backends/gpu/target_config``. Only fields that jax 0.10 knows are written.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CudaDevice:
    """What XLA needs to know of one GPU.

    Attributes:
        major: compute capability, major number (the minor is 0 for all of these).
        accelerated: whether code for the ``a`` variant of the architecture is made.
        cores: streaming multiprocessors.
        fpus: float32 units per multiprocessor.
        shared: shared memory of a multiprocessor, bytes.
        shared_optin: the most of it one block can ask for, bytes.
        hbm: memory bandwidth, bytes/s.
        l2: cache, bytes.
        clock_ghz: boost clock.
        memory: bytes.
        nvlinks: NVLink links of the device.
    """

    major: int
    accelerated: bool
    cores: int
    fpus: int
    shared: int
    shared_optin: int
    hbm: int
    l2: int
    clock_ghz: float
    memory: int
    nvlinks: int

    @property
    def sm(self) -> str:
        """The architecture as ptxas names it."""
        return f"sm_{self.major}0{'a' if self.accelerated else ''}"


_HOPPER = CudaDevice(
    major=9,
    accelerated=True,
    cores=132,
    fpus=128,
    shared=233472,
    shared_optin=232448,
    hbm=3_352_320_000_000,
    l2=52_428_800,
    clock_ghz=1.98,
    memory=84_942_979_072,
    nvlinks=18,
)
_BLACKWELL = dataclasses.replace(
    _HOPPER,
    major=10,
    cores=148,
    hbm=7_672_320_000_000,
    l2=132_644_864,
    clock_ghz=1.965,
    memory=191_514_411_008,
)
DEVICES = {
    "a100": CudaDevice(
        major=8,
        accelerated=False,
        cores=108,
        fpus=64,
        shared=167936,
        shared_optin=166912,
        hbm=2_039_040_000_000,
        l2=41_943_040,
        clock_ghz=1.41,
        memory=85_100_068_864,
        nvlinks=12,
    ),
    "h100": _HOPPER,
    "h200": dataclasses.replace(_HOPPER, hbm=4_800_000_000_000, memory=151_397_597_184),
    "b200": _BLACKWELL,
    "gb200": dataclasses.replace(
        _BLACKWELL,
        cores=152,
        hbm=7_928_064_000_000,
        l2=135_528_448,
        clock_ghz=2.062,
        memory=197_897_748_480,
    ),
}

_TEMPLATE = """\
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {major} feature_extension: {extension} }}
  core_count: {cores}
  fpus_per_core: {fpus}
  clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {hbm}
  device_memory_size: {memory}
  l2_cache_size: {l2}
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_optin}
  shared_memory_per_block: 49152
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  device_interconnect_info {{ active_links: {nvlinks} }}
}}
"""


def target_config(model: str) -> str:
    """The proto text for a model of ``DEVICES``."""
    device = DEVICES[model]
    extension = "ACCELERATED_FEATURES" if device.accelerated else "NONE"
    return _TEMPLATE.format(extension=extension, **dataclasses.asdict(device))
