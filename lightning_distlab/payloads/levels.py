"""Integer multiples of a number that all ranks know, on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.payloads.base import Payload, Traits
from lightning_distlab.payloads.codecs.levels import decode_levels, encode_levels, level_dtype, levels_size
from lightning_distlab.payloads.wire import Wire


@dataclass(frozen=True, eq=False)
class LevelPayload(Payload):
    """A whole vector of small integers. Sums are exact, and take the bits that their larger range needs.

    Attributes:
        levels: `level_dtype(bound)`, [length], each in [-bound, bound].
        bound: Largest magnitude.
        code: `bits` or `base3` (of three levels only; sums travel as bits).
    """

    traits: ClassVar[Traits] = Traits(linear=True, mergeable=True, fixed_size=True, unbiased=True)

    levels: Tensor
    bound: int
    code: str = "bits"

    @property
    @override
    def length(self) -> int:
        return self.levels.numel()

    @property
    @override
    def device(self) -> torch.device:
        return self.levels.device

    @override
    def rounded(self, wire: Wire) -> tuple[Self, Self | None]:
        return self, None

    @override
    def merge(self, other: Self) -> Self:
        bound = self.bound + other.bound
        wide = level_dtype(bound)
        return replace(self, levels=self.levels.to(wide) + other.levels.to(wide), bound=bound)

    @override
    def as_sum(self, terms: int) -> Self:
        return replace(self, bound=self.bound * terms)

    @override
    def split(self, bounds: Sequence[int]) -> list[Self]:
        return [replace(self, levels=piece) for piece in self.levels.split([b - a for a, b in pairwise(bounds)])]

    @classmethod
    @override
    def concat(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        return replace(parts[0], levels=torch.cat([part.levels for part in parts]))

    @override
    def wire_size(self) -> int:
        return levels_size(self.length, self.bound, self.code)

    @override
    def max_wire_size(self, terms: int = 1) -> int:
        return levels_size(self.length, self.bound * terms, self.code)

    @override
    def encode(self) -> Tensor:
        return encode_levels(self.levels, self.bound, self.code)

    @override
    def decode(self, buffer: Tensor) -> Self:
        return replace(self, levels=decode_levels(buffer[: self.wire_size()], self.length, self.bound, self.code))
