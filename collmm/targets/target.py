"""A target: what a program is compiled for, with its mesh, hardware row and compiler options.

Importing this module does not import jax; using a target's mesh or compiler does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from collmm.cost.collectives import Ring, torus_ring
from collmm.cost.figures import Basis
from collmm.cost.hardware import CHIPS, Chip
from collmm.errors import TargetError
from collmm.targets import compilation, rings
from collmm.targets.compilation import Compilation, compile_apart
from collmm.targets.cuda_config import DEVICES, target_config
from collmm.targets.environment import compiler_defaults
from collmm.targets.installed import require
from collmm.targets.names import TargetName, parse_name
from collmm.targets.options import CompilerOption, Value, as_dict, baseline_for, options_for

if TYPE_CHECKING:
    import jax

_PLANNING_CHIP = "v5e"
_SHOWN_SHAPES = 8


def parse_target(text: str, table: Mapping[str, Chip] = CHIPS) -> Target:
    """The target called ``text``: ``cpu:8``, ``tpu:v5e:2x4``, ``gpu:h100:8``, ``gpu:h100:2x8``.

    ``table`` is the hardware table, such as ``load_profile`` returns. Nothing is loaded or checked
    for beyond the name. Raises TargetError in one line for anything else.
    """
    name = parse_name(text, table)
    hardware = table[name.model] if name.model else None
    wrap: tuple[bool, ...] = ()
    if name.kind == "tpu" and hardware is not None:
        wrap = tuple(bool(hardware.wraps(size, name.shape)) for size in name.shape)
    return Target(name.text, name, hardware, wrap, table[_PLANNING_CHIP])


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
        name: such as ``"tpu:v5e:2x4"``; one GPU host is left out.
        parsed: the name in parts.
        hardware: row of the hardware table; None for a cpu.
        wrap: TPU: which torus axes have wraparound links, by ``hardware``'s rule. The compiler
            makes other collectives for a torus than for a mesh.
        fallback: the row plans use where ``hardware`` is None.
    """

    name: str
    parsed: TargetName
    hardware: Chip | None
    wrap: tuple[bool, ...]
    fallback: Chip = dataclasses.field(repr=False)

    @property
    def kind(self) -> Literal["cpu", "tpu", "gpu"]:
        """``"cpu"``, ``"tpu"`` or ``"gpu"``."""
        return self.parsed.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """cpu (devices,); tpu chips per torus axis; gpu (hosts, GPUs per host)."""
        return self.parsed.shape

    @property
    def device_count(self) -> int:
        """Number of JAX devices: chips, times two where a chip is two devices."""
        per_chip = self.hardware.devices_per_chip if self.hardware else 1
        return math.prod(self.shape) * per_chip

    @property
    def planning_hardware(self) -> Chip:
        """The row a plan is made with, per JAX device."""
        return (self.hardware or self.fallback).per_device()

    @property
    def note(self) -> str:
        """What a plan for this target had to assume, one line; empty if nothing."""
        if self.hardware is None:
            return (
                f"{self.name} has no figures of its own: planned with those of {self.fallback.name}"
            )
        if self.kind == "tpu" and self.hardware.wraps(4) is None:
            return f"{self.hardware.name}: {self.hardware.wrap.source}; taken not to wrap"
        return ""

    @property
    def timed(self) -> bool:
        """Whether the compiler writes its own time estimates into the compiled text.

        TPU: ``estimated_cycles``. GPU: ``exec_time_us``, on Hopper only. cpu: none.
        """
        if self.kind == "gpu":
            return DEVICES[self.parsed.model].major == 9
        return self.kind == "tpu"

    @property
    def options(self) -> tuple[CompilerOption, ...]:
        """The options for programs collmm rewrote, with their reasons."""
        return options_for(self.kind, self.timed)

    @property
    def compiler_options(self) -> dict[str, Value]:
        """``options`` as a dict, for compiling without the hardware."""
        return as_dict(self.options)

    @property
    def hardware_options(self) -> dict[str, Value]:
        """The ones to set on the hardware itself: ``jax.jit(..., compiler_options=...)``."""
        return as_dict(tuple(o for o in self.options if not o.without_hardware))

    def baseline_options(self, decomposition: str = "default") -> dict[str, Value]:
        """Options to compile the original program with.

        ``decomposition``: ``"off"`` turns the compiler's own decomposition off, ``"default"``
        leaves it as shipped; anything else raises OptionError. They differ on TPU only.
        """
        return as_dict(baseline_for(self.kind, self.timed, decomposition))

    def require_compiler(self) -> None:
        """Raise TargetError, naming what to install, where this target cannot be compiled for."""
        require(self.kind, DEVICES[self.parsed.model].sm if self.kind == "gpu" else "")

    def devices(self) -> list[jax.Device]:
        """The devices: of this process for a cpu, else described, not attached.

        Raises TargetError when the compiler is missing or there are fewer cpu devices.
        """
        import jax

        if self.kind == "cpu":
            return self._cpu_devices(jax.devices("cpu"))
        self.require_compiler()
        for key, value in compiler_defaults(self.kind).items():
            os.environ.setdefault(key, value)
        from jax.experimental import topologies

        try:
            return list(topologies.get_topology_desc(**self._topology()).devices)
        except NotImplementedError:
            raise TargetError(
                f"{self.name}: jax did not load the plugin for it; "
                "set JAX_PLATFORMS=cpu before importing jax"
            ) from None
        except jax.errors.JaxRuntimeError as error:
            line = str(error).splitlines()[0]
            raise TargetError(f"{self.name}: the compiler knows no such topology: {line}") from None

    def _topology(self) -> dict[str, Any]:
        size = "x".join(map(str, self.shape))
        if self.kind == "gpu":
            # Slices x hosts x GPUs per host.
            return {
                "platform": "cuda",
                "topology": f"1x{size}",
                "target_config": target_config(self.parsed.model),
            }
        wanted: dict[str, Any] = {"platform": "tpu", "topology_name": f"{self.parsed.model}:{size}"}
        if any(self.wrap):
            wanted["wrap"] = (*self.wrap, *(False,) * (3 - len(self.wrap)))
        if self.parsed.model == "v4":
            # Both TensorCores of a chip as one device.
            wanted["chip_config_name"] = "megacore"
        if math.prod(self.shape) == 1:
            wanted["chips_per_host_bounds"] = (1, 1, 1)
        return wanted

    def _cpu_devices(self, found: Sequence[jax.Device]) -> list[jax.Device]:
        if len(found) < self.device_count:
            raise TargetError(
                f"{self.name} needs {self.device_count} cpu devices and this process has "
                f"{len(found)}; set XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{self.device_count} before jax starts"
            )
        return list(found[: self.device_count])

    def mesh(
        self, axis_sizes: Mapping[str, int], axis_types: tuple[Any, ...] | None = None
    ) -> jax.sharding.Mesh:
        """A mesh over all devices of the target.

        Args:
            axis_sizes: mesh axis name -> number of devices, outermost first.
            axis_types: one ``jax.sharding.AxisType`` per axis; jax's default without.

        On a TPU each mesh axis must be made of whole torus axes, as on the real slice. TargetError
        names the shapes that fit when the sizes do not; on GPU and cpu devices fill row by row.
        """
        import jax

        names, sizes = tuple(axis_sizes), tuple(axis_sizes.values())
        shown = " x ".join(f"{name}={size}" for name, size in axis_sizes.items())
        if not names or any(size < 1 for size in sizes):
            raise TargetError(f"mesh {shown or '{}'!r}: each axis needs a size of at least 1")
        if math.prod(sizes) != self.device_count:
            wrong = f"mesh {shown} has {math.prod(sizes)} devices"
            raise TargetError(
                f"{wrong}, {self.name} has {self.device_count}{self._fitting(len(sizes))}"
            )
        if axis_types is not None and len(axis_types) != len(names):
            raise TargetError(
                f"{len(axis_types)} axis types for the {len(names)} axes of mesh {shown}"
            )
        devices = self._arrange(self.devices(), sizes)
        if devices is None:
            raise TargetError(
                f"mesh {shown} is not made of whole torus axes of {self.name}"
                f"{self._fitting(len(sizes))}"
            )
        types = {} if axis_types is None else {"axis_types": axis_types}
        return jax.sharding.Mesh(devices, names, **types)

    def _arrange(self, devices: Sequence[jax.Device], sizes: tuple[int, ...]) -> np.ndarray | None:
        """The devices as an array of ``sizes``; None where that does not map to the torus."""
        if self.kind != "tpu":
            return np.array(devices).reshape(sizes)
        from jax.experimental import mesh_utils

        try:
            return mesh_utils.create_device_mesh(sizes, list(devices))
        except NotImplementedError:
            return None

    def _fitting(self, axes: int) -> str:
        """Half a sentence with the shapes of that many axes that fit."""
        try:
            devices = self.devices() if self.kind == "tpu" else []
        except TargetError:
            return ""
        fits = (s for s in _factors(self.device_count, axes) if self._fits(devices, s))
        shapes = ["x".join(map(str, shape)) for shape in itertools.islice(fits, _SHOWN_SHAPES + 1)]
        if len(shapes) > _SHOWN_SHAPES:
            shapes[-1] = "..."
        count = "1 axis" if axes == 1 else f"{axes} axes"
        return f"; {count} can be {', '.join(shapes)}" if shapes else f"; no {axes} axes fit"

    def _fits(self, devices: Sequence[jax.Device], sizes: tuple[int, ...]) -> bool:
        return self.kind != "tpu" or self._arrange(devices, sizes) is not None

    def ring(
        self,
        mesh: jax.sharding.Mesh,
        axes: str | Sequence[str],
        order: Sequence[int] | None = None,
        basis: Basis = "achievable",
    ) -> Ring:
        """The ring of devices along mesh ``axes`` on this target's links, for the cost model.

        ``mesh`` is one that ``mesh`` made; ``order`` the order in which the ring visits the
        members, that of the mesh without. A TPU ring knows which torus axes it spans, whether they
        wrap and how its order loads the links. A cpu's is one torus axis of the fallback.
        """
        members = rings.groups(mesh.devices, tuple(mesh.axis_names), _names(axes))
        if order is not None:
            members = members[:, list(order)]
        if self.hardware is None:
            return torus_ring(self.fallback, [members.shape[1]], basis=basis)
        if self.kind == "gpu":
            return rings.gpu_ring_of(self.hardware, members, basis)
        return rings.tpu_ring_of(self.hardware, self.shape, self.wrap, members, basis)

    def ring_order(self, mesh: jax.sharding.Mesh, axes: str | Sequence[str]) -> list[int]:
        """The order in which a permute ring over mesh ``axes`` should visit its members.

        Indices along the axes, row by row; the mesh's own order wherever no other loads the links
        less, and always on GPU and cpu.
        """
        members = rings.groups(mesh.devices, tuple(mesh.axis_names), _names(axes))
        if self.kind != "tpu":
            return list(range(members.shape[1]))
        return rings.ring_order(self.shape, self.wrap, members)

    def start_compiler(self) -> None:
        """Let the compiler of a TPU or GPU load in its process, while the program is made ready."""
        if self.kind != "cpu":
            compilation.start()

    def compile(
        self, lowered: jax.stages.Lowered, options: Mapping[str, Value] | None = None
    ) -> jax.stages.Compiled | Compilation:
        """Compile a program that was lowered on this target's mesh.

        ``options`` replaces ``compiler_options``; give ``baseline_options()`` for an original
        program. For a TPU or GPU the compiler runs in a process of its own, and its text and
        memory figures come back; for a cpu it runs here. Where the compiler is missing, TargetError
        names what to install; where it crashes, CrashError says so and this process goes on. What
        XLA says about the program itself is raised as it is.
        """
        import jax

        chosen: dict[str, Any] = dict(self.compiler_options if options is None else options)
        try:
            if self.kind == "cpu":
                return lowered.compile(compiler_options=chosen)
            self.require_compiler()
            return compile_apart(lowered, self._topology(), chosen, self.name)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" in str(error):
                line = str(error).splitlines()[0]
                raise TargetError(f"{self.name}: this compiler lacks an option: {line}") from error
            raise


def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``number`` as an ordered product of ``parts`` factors above 1."""
    if parts == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _factors(number // first, parts - 1):
                yield (first, *rest)
