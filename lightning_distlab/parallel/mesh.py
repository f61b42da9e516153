"""The one object that knows how ranks are laid out, and the owner of every process group.

Ranks are numbered row-major over the axes, outermost first, so that neighbours on the last axis have adjacent ranks and
with that the fastest links. The order follows how often an axis talks: `tensor` several times a layer, `ulysses` and
`ring` once an attention, `shard` once a layer, `replicate` once a step, `pipeline` one activation a micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Axis: TypeAlias = Literal["pipeline", "replicate", "shard", "ring", "ulysses", "tensor"]
Axes: TypeAlias = Axis | tuple[Axis, ...]

AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "ring", "ulysses", "tensor")
"""All mesh axes, outermost first."""

DATA_AXES: tuple[Axis, ...] = ("replicate", "shard")
"""Axes whose ranks read different samples: the sampler's coordinate."""

GRADIENT_AXES: tuple[Axis, ...] = ("replicate", "shard", "ring", "ulysses")
"""Axes over which gradients are averaged: ranks of a ring read the same samples but other tokens of them."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of all axes, outermost first. Pure arithmetic: needs no process group.

    Args:
        pipeline: Pipeline stages.
        replicate: Copies of the (sharded) model that read different samples.
        shard: Ranks that share the parameters, gradients or optimizer states of one copy (ZeRO).
        ring: Ranks that pass keys and values around (ring attention).
        ulysses: Ranks that trade sequence for heads (Ulysses).
        tensor: Ranks that split single layers.

    Raises:
        ValueError: If a size is not a positive integer.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.shape, strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"{axis}={size!r} is no mesh size: sizes are integers >= 1 (1 leaves the axis unused; -1, for one "
                    f"axis, is understood by Mesh.of(world_size, {axis}=-1))"
                )

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        pipeline: int = 1,
        replicate: int = -1,
        shard: int = 1,
        ring: int = 1,
        ulysses: int = 1,
        tensor: int = 1,
    ) -> Mesh:
        """The mesh of so many ranks; one size may be -1 and takes what the others leave.

        Raises:
            ValueError: If more than one size is -1, or the sizes do not multiply to the world size.
        """
        sizes = dict(zip(AXES, (pipeline, replicate, shard, ring, ulysses, tensor), strict=True))
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            raise ValueError(f"{' and '.join(f'{axis}=-1' for axis in open_axes)}: only one size can be left open")
        for axis in open_axes:
            sizes[axis] = 1
            known = cls(**sizes).size
            if world_size < 1 or world_size % known:
                raise ValueError(
                    f"{axis}=-1 cannot be filled in: world size {world_size} is not divisible by the other sizes, "
                    f"{_factors(sizes, without=axis)} = {known}. Nearest world sizes: {_nearest(world_size, known)}"
                )
            sizes[axis] = world_size // known
        mesh = cls(**sizes)
        mesh.check(world_size)
        return mesh

    def check(self, world_size: int) -> None:
        """Compare with the number of ranks there are.

        Raises:
            ValueError: If they differ; prints every factor and the ways out.
        """
        if self.size == world_size:
            return
        sizes = dict(zip(AXES, self.shape, strict=True))
        fits = [f"{a}={world_size // (self.size // n)}" for a, n in sizes.items() if not world_size % (self.size // n)]
        remedy = f"change one of them to {' or '.join(fits)}, or" if fits and world_size > 0 else "change them, or"
        raise ValueError(
            f"the mesh {_factors(sizes)} = {self.size} ranks, but the world has {world_size}: {remedy} start "
            f"{self.size} ranks"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def axis_size(self, axes: Axes) -> int:
        """Number of ranks that differ on these axes only."""
        return math.prod(getattr(self, axis) for axis in _as_axes(axes))

    def coordinate(self, rank: int) -> dict[Axis, int]:
        """A rank's place on every axis."""
        self._check_rank(rank)
        place: dict[Axis, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def rank(self, coordinate: dict[Axis, int]) -> int:
        """The rank at a place; axes that are left out count as 0.

        Raises:
            ValueError: If a coordinate lies outside its axis.
        """
        _as_axes(tuple(coordinate))
        rank = 0
        for axis, size in zip(AXES, self.shape, strict=True):
            index = coordinate.get(axis, 0)
            if not 0 <= index < size:
                raise ValueError(f"{axis}={index} lies outside the mesh: {axis} has {size} ranks, 0 to {size - 1}")
            rank = rank * size + index
        return rank

    def groups(self, axes: Axes) -> list[list[int]]:
        """All sets of ranks that differ on these axes only, each in ascending order, the sets by their first rank."""
        inner = _as_axes(axes)
        outer = [axis for axis in AXES if axis not in inner]
        return [
            [self.rank(dict(zip(outer, fixed)) | dict(zip(inner, free))) for free in self._indices(inner)]
            for fixed in self._indices(outer)
        ]

    def peers(self, rank: int, axes: Axes) -> list[int]:
        """The ranks that differ from this one on these axes only, itself among them, in ascending order."""
        place = self.coordinate(rank)
        inner = _as_axes(axes)
        return [self.rank(place | dict(zip(inner, free))) for free in self._indices(inner)]

    @property
    def data_size(self) -> int:
        """Number of different shares that the data is cut into: the sampler's `num_replicas`."""
        return self.axis_size(DATA_AXES)

    def data_rank(self, rank: int) -> int:
        """Which share of the data a rank reads: the sampler's `rank`. Equal for ranks that work on the same samples."""
        place = self.coordinate(rank)
        return place["replicate"] * self.shard + place["shard"]

    @property
    def gradient_size(self) -> int:
        """Number of ranks over which a gradient is averaged."""
        return self.axis_size(GRADIENT_AXES)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """This layout as torch's mesh, axes of size 1 kept. Needs the default process group; all ranks must call it."""
        self.check(dist.get_world_size())
        return init_device_mesh(device_type, self.shape, mesh_dim_names=AXES)

    def _indices(self, axes: Sequence[Axis]) -> itertools.product[tuple[int, ...]]:
        return itertools.product(*(range(getattr(self, axis)) for axis in axes))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} lies outside the mesh of {self.size} ranks, 0 to {self.size - 1}")


class ProcessGroups:
    """The process groups of a mesh, made all at once in one agreed order when the first is asked for.

    torch's `new_group` must be called by all ranks in the same order, also by those outside. So the first request of
    any group makes every group: all ranks must come to their first request, after that requests cost nothing.
    Axes of size 1 have no group: there is nobody to talk to.

    Args:
        mesh: Layout.
        rank: This rank.
        backend: ``gloo``, ``nccl``, ...; None takes the default group's.
        timeout: How long a collective waits for a peer; None takes torch's default.
        unions: Sets of axes that get a group as one, beside the single axes.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        backend: str | None = None,
        timeout: timedelta | None = None,
        unions: Sequence[tuple[Axis, ...]] = (DATA_AXES, GRADIENT_AXES),
    ) -> None:
        mesh._check_rank(rank)
        self.mesh = mesh
        self.rank = rank
        self.backend = backend
        self.timeout = timeout
        self._wanted: tuple[tuple[Axis, ...], ...] = (*((axis,) for axis in AXES), *map(_as_axes, unions))
        self._groups: dict[tuple[Axis, ...], dist.ProcessGroup] | None = None

    def group(self, axes: Axes) -> dist.ProcessGroup:
        """This rank's group on these axes.

        Raises:
            ValueError: If it has one rank only (see `optional`), or is no single axis and not among the unions.
        """
        group = self.optional(axes)
        if group is None:
            named = " x ".join(_as_axes(axes))
            raise ValueError(f"{named} has size 1 in {self.mesh}: there is no group and nothing to communicate")
        return group

    def optional(self, axes: Axes) -> dist.ProcessGroup | None:
        """This rank's group on these axes, None where it would be alone."""
        key = _as_axes(axes)
        if key not in self._wanted:
            raise ValueError(f"no group for {' x '.join(key)}: name it in ProcessGroups(..., unions=[{key!r}])")
        if self._groups is None:
            self._groups = self._make()
        return self._groups.get(key)

    def destroy(self) -> None:
        """Give the groups back; the next request makes new ones."""
        for group in (self._groups or {}).values():
            dist.destroy_process_group(group)
        self._groups = None

    def _make(self) -> dict[tuple[Axis, ...], dist.ProcessGroup]:
        """One group per set of axes, in the order of `_wanted` and of `Mesh.groups`, on all ranks alike."""
        self.mesh.check(dist.get_world_size())
        made: dict[tuple[Axis, ...], dist.ProcessGroup] = {}
        for axes in self._wanted:
            if axes in made or self.mesh.axis_size(axes) == 1:
                continue
            for ranks in self.mesh.groups(axes):
                group = dist.new_group(ranks, timeout=self.timeout, backend=self.backend, group_desc="_".join(axes))
                if self.rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    made[axes] = group
        return made


def _as_axes(axes: Axes) -> tuple[Axis, ...]:
    """Axes in mesh order.

    Raises:
        ValueError: If a name is unknown.
    """
    named = (axes,) if isinstance(axes, str) else axes
    if unknown := [axis for axis in named if axis not in AXES]:
        raise ValueError(f"unknown mesh axis {', '.join(map(repr, unknown))}: the axes are {', '.join(AXES)}")
    return tuple(axis for axis in AXES if axis in named)


def _factors(sizes: dict[Axis, int], without: Axis | None = None) -> str:
    """Write `pipeline 2 x replicate 1 x ...`."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != without)


def _nearest(world_size: int, factor: int) -> str:
    """Write the multiples of a factor next to a world size."""
    below = world_size // factor * factor
    return f"{below} or {below + factor}" if below > 0 else str(factor)
