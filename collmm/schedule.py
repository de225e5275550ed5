"""How one ring is run: its axes and length, its direction, and the shape of its loop.

Pure: imports nothing of jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from collmm.errors import OptionError

MAX_UNROLLED_RING = 8
"""Longer rings are rolled by default, so that compile time does not grow with the ring."""

MAX_PEERS = 16
"""All-to-alls with more peers are not split: an exchange has one permute per peer, each with a
table of its own."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of one ring of permutes and the partial einsums between them.

    ``axes``: the mesh axes of the ring, major to minor; a device's position on the ring is its
    flattened index over these axes. ``ring_size``: the number of positions. ``two_way``: shards
    travel both ways round the ring at once. ``unroll``: False gives a loop whose program does not
    grow with the ring. ``barrier``: optimization barriers tell each partial einsum of a
    reduce-scatter whether to wait for the accumulator it adds to, and on a GPU each step of an
    unrolled gather to wait for the one before. ``chains``: into how many parts a
    block is cut, each of which travels by itself. A gather sends whole shards with None or 1. A
    reduce-scatter has an accumulator for each part, which travel out of phase; None takes 1
    one-way, two-way 4 and in a rolled loop 2. With two, one is on its way while the other
    is multiplied; with four, each is on its way while three are multiplied, which hides an
    accumulator that is wider than the operands. ``order``: the members in the order in which
    the ring visits them, where the order of the axes is not that of the links; None is
    ``0, 1, 2, ...``. ``shards_per_step``: how many neighbours on the ring first put their shards
    together (a reduce-scatter: last take their sum apart); the loop then runs over such groups, in
    that many times fewer steps, with einsums that many times larger. It divides the ring into two
    groups or more. ``inner``: the schedule of a second ring, on which another operand of the
    einsum is gathered during the first step of this one; ``collmm.nesting`` says which.
    ``in_step``: of an unrolled reduce-scatter with several accumulators, each einsum waits for the
    one before it, so that no accumulator runs ahead of the others.

    Raises ``OptionError`` for a value that is not allowed.
    """

    axes: tuple[str, ...]
    ring_size: int
    two_way: bool
    unroll: bool
    barrier: bool = True
    chains: int | None = None
    order: tuple[int, ...] | None = None
    shards_per_step: int = 1
    in_step: bool = False
    inner: Schedule | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.axes, tuple) or not self.axes:
            raise OptionError(
                f"Schedule axes must be a non-empty tuple of mesh axis names, got {self.axes!r}"
            )
        for axis in self.axes:
            if not isinstance(axis, str):
                raise OptionError(f"Schedule axes must be strings, got {axis!r} in {self.axes!r}")
        if len(set(self.axes)) != len(self.axes):
            raise OptionError(f"Schedule axes {self.axes!r} name an axis twice; name each once")
        if (
            not isinstance(self.ring_size, int)
            or isinstance(self.ring_size, bool)
            or self.ring_size < 1
        ):
            raise OptionError(f"Schedule ring_size must be an int >= 1, got {self.ring_size!r}")
        for name in ("two_way", "unroll", "barrier", "in_step"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(f"Schedule {name} must be True or False, got {value!r}")
        least = 2 if self.two_way else 1
        if self.chains is not None and (type(self.chains) is not int or self.chains < least):
            raise OptionError(
                f"Schedule chains must be None or an int >= {least} where two_way is "
                f"{self.two_way}, got {self.chains!r}"
            )
        if self.order is not None and sorted(self.order) != list(range(self.ring_size)):
            raise OptionError(
                f"Schedule order {self.order!r} must name each of the {self.ring_size} members once"
            )
        self._check_shards_per_step()
        if self.inner is not None:
            self._check_inner()

    def _check_shards_per_step(self) -> None:
        g = self.shards_per_step
        if type(g) is not int or g < 1:
            raise OptionError(f"Schedule shards_per_step must be an int >= 1, got {g!r}")
        if g > 1 and (self.ring_size % g or self.ring_size < 2 * g):
            raise OptionError(
                f"Schedule shards_per_step={g} must divide the ring of {self.ring_size} into two "
                "groups or more"
            )
        if g > 1 and self.order is not None and not groups_follow(self.order, g):
            raise OptionError(
                f"Schedule shards_per_step={g}: the order {self.order!r} does not take the members "
                f"of each run of {g} one after the other"
            )
        if g > 1 and self.inner is not None:
            raise OptionError(
                f"Schedule shards_per_step={g} with an inner ring; leave one of the two out"
            )

    def _check_inner(self) -> None:
        inner = self.inner
        if not isinstance(inner, Schedule):
            raise OptionError(f"Schedule inner must be a Schedule or None, got {inner!r}")
        if set(inner.axes) & set(self.axes):
            raise OptionError(
                f"Schedule inner runs over {inner.axes} and the outer one over {self.axes}; "
                "they must have no axis in common"
            )
        if inner.chunks > 1:
            raise OptionError(
                f"Schedule inner cuts its shards into chains={inner.chunks}; an inner ring sends "
                "whole ones: leave chains out of it"
            )
        if inner.inner is not None:
            raise OptionError(
                "Schedule inner has an inner one itself; two rings are nested at most"
            )
        if min(inner.ring_size, self.ring_size) < 2:
            raise OptionError("Schedule inner: both rings must have two members or more")

    @property
    def accumulators(self) -> int:
        """The accumulators of a reduce-scatter, as many as the block can be cut into at most."""
        if self.chains is not None:
            return self.chains
        if not self.two_way:
            return 1
        # Nothing is on its way across the turns of a loop: one of four would be waited for.
        return 4 if self.unroll else 2

    @property
    def chunks(self) -> int:
        """The pieces of a gathered shard, as many as it can be cut into at most."""
        return self.chains or 1

    def describe(self) -> str:
        """Short text for tables, such as ``"two-way x4 unrolled"``, and the inner ring's.

        Parts that are not those of a default follow: ``"two-way x4 unrolled chains 2"``.
        """
        direction = "two-way" if self.two_way else "one-way"
        own = f"{direction} x{self.ring_size} {'unrolled' if self.unroll else 'rolled'}"
        if self.chunks > 1:
            own += f" chains {self.chunks}"
        if self.shards_per_step > 1:
            own += f", {self.shards_per_step} shards a step"
        if self.inner is None:
            return own
        return f"{own} + {','.join(self.inner.axes)} {self.inner.describe()}"

    @property
    def chunked(self) -> bool:
        """Whether a gather cuts its shards."""
        return self.chunks > 1

    @property
    def groups(self) -> int:
        """The positions of the ring on which the loop runs: groups of ``shards_per_step``."""
        return self.ring_size // self.shards_per_step

    @property
    def grouped(self) -> bool:
        """Whether a step takes several shards."""
        return self.shards_per_step > 1

    @property
    def nested(self) -> bool:
        """Whether there is an inner ring."""
        return self.inner is not None


def groups_follow(order: Sequence[int], g: int) -> bool:
    """Whether a ring in that order visits members ``k g .. k g + g - 1`` together, for every k.

    Their shards then follow each other in the gathered value.
    """
    return all(len({m // g for m in order[i : i + g]}) == 1 for i in range(0, len(order), g))


def group_sizes(ring_size: int, order: Sequence[int] | None) -> tuple[int, ...]:
    """The values that ``shards_per_step`` can have on a ring besides 1, the smallest first."""
    sizes = (g for g in range(2, ring_size // 2 + 1) if ring_size % g == 0)
    return tuple(g for g in sizes if order is None or groups_follow(order, g))


def with_groups(schedule: Schedule) -> Schedule:
    """``schedule`` with as few shards per step as there can be above one, without an inner ring.

    As it is where it has groups already, or can have none.
    """
    sizes = group_sizes(schedule.ring_size, schedule.order)
    if schedule.grouped or not sizes:
        return schedule
    return replace(schedule, shards_per_step=sizes[0], inner=None)


def default_schedule(axes: Sequence[str], ring_size: int, *, rolled: bool = False) -> Schedule:
    """The schedule used where nothing better is known.

    Two-way when the ring has more than two positions (on two, both ways are the same pair of
    links); unrolled up to ``MAX_UNROLLED_RING`` positions unless ``rolled``.
    """
    return Schedule(
        axes=tuple(axes),
        ring_size=ring_size,
        two_way=ring_size > 2,
        unroll=not rolled and ring_size <= MAX_UNROLLED_RING,
    )
