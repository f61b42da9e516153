"""One message: everything that a bucket sends in one round, behind a header of flags."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property, lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.payloads.base import Payload, Traits, aligned_size, even_bounds
from lightning_distlab.payloads.wire import Wire

_HEADER = struct.Struct("<QBxHI")  # bytes of the message, flags, parts, bytes of `present`


class Flags(IntFlag):
    """What every rank learns from the header of any message, OR-ed over all ranks that contributed to it."""

    NONE = 0
    NONFINITE = 1
    """A rank's gradient holds NaN or infinity: all skip the step."""
    SIGNAL = 2
    """A rank was asked to stop (SIGTERM): all stop together after the step."""


@lru_cache
def _header_size(tensors: int, parts: int) -> int:
    return _HEADER.size + aligned_size((tensors + 7) // 8) + aligned_size(4 * parts)


@dataclass(frozen=True, eq=False)
class Bundle(Payload):
    """Payloads of several kinds in one buffer.

    Attributes:
        parts: The payloads, in an order that all ranks share.
        flags: OR over the ranks whose contributions are merged here.
        present: Bit i is set where a rank had a gradient for tensor i of the bucket; OR-ed like the flags.
        tensors: Number of tensors in the bucket, which is the number of bits of `present` that travel.
    """

    traits: ClassVar[Traits] = Traits(linear=True, mergeable=True, fixed_size=False, unbiased=False)

    parts: tuple[Payload, ...]
    flags: Flags = Flags.NONE
    present: int = 0
    tensors: int = 0

    @property
    @override
    def length(self) -> int:
        return sum(part.length for part in self.parts)

    @property
    @override
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def header_size(self) -> int:
        """Bytes in front of the parts: 16, one bit a tensor and 4 a part, the latter two filled up to 8."""
        return _header_size(self.tensors, len(self.parts))

    def _like(self, parts: Sequence[Payload], *others: Bundle) -> Self:
        flags, present = self.flags, self.present
        for other in others:
            if other.flags != flags:  # seldom, and the union of enumerations is slow
                flags |= other.flags
            present |= other.present
        return type(self)(tuple(parts), flags, present, self.tensors)

    @override
    def rounded(self, wire: Wire) -> tuple[Self, Self | None]:
        raise AssertionError("parts are rounded before they are bundled, since each error goes back to its own tensor")

    @override
    def merge(self, other: Self) -> Self:
        return self._like([a.merge(b) for a, b in zip(self.parts, other.parts, strict=True)], other)

    @override
    def maximum(self, other: Self) -> Self:
        return self._like([a.maximum(b) for a, b in zip(self.parts, other.parts, strict=True)], other)

    @override
    def as_sum(self, terms: int) -> Self:
        return self._like([part.as_sum(terms) for part in self.parts])

    @override
    def limited_like(self, template: Self) -> Self:
        return self._like([a.limited_like(b) for a, b in zip(self.parts, template.parts, strict=True)])

    @override
    def arrived(self) -> Self:
        parts = tuple([part.arrived() for part in self.parts])
        return self if parts == self.parts else self._like(parts)  # payloads are equal when identical

    @classmethod
    @override
    def merge_all(cls, payloads: Sequence[Self]) -> Self:
        columns = zip(*(p.parts for p in payloads), strict=True)
        return payloads[0]._like([type(column[0]).merge_all(column) for column in columns], *payloads[1:])

    @override
    def split_evenly(self, parts: int) -> list[Self]:
        """Cut every part into `parts` even index ranges; range i of all of them makes chunk i."""
        columns = [part.split(even_bounds(part.length, parts)) for part in self.parts]
        return [self._like(chunk) for chunk in zip(*columns, strict=True)]

    @override
    def split(self, bounds: Sequence[int]) -> list[Self]:
        raise AssertionError("a bundle has one index space per part; cut it with split_evenly")

    @classmethod
    @override
    def concat(cls, parts: Sequence[Self]) -> Self:
        columns = zip(*(p.parts for p in parts), strict=True)
        return parts[0]._like([type(column[0]).concat(column) for column in columns], *parts[1:])

    @cached_property
    def _size(self) -> int:
        return self.header_size + sum([aligned_size(part.wire_size()) for part in self.parts])

    @override
    def wire_size(self) -> int:
        return self._size

    @override
    def max_wire_size(self, terms: int = 1) -> int:
        return self.header_size + sum(aligned_size(part.max_wire_size(terms)) for part in self.parts)

    @override
    def encode(self) -> Tensor:
        encoded = [part.encode() for part in self.parts]
        total = self.header_size + sum(aligned_size(piece.numel()) for piece in encoded)
        buffer = torch.empty(total, dtype=torch.uint8, device=self.device)
        present_size = aligned_size((self.tensors + 7) // 8)
        sizes = struct.pack(f"<{len(encoded)}I", *(piece.numel() for piece in encoded))
        header = (
            _HEADER.pack(total, self.flags, len(encoded), present_size)
            + self.present.to_bytes(present_size, "little")
            + sizes.ljust(aligned_size(len(sizes)), b"\0")
        )
        buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.device)
        start = len(header)
        for piece in encoded:
            end = start + piece.numel()
            buffer[start:end] = piece
            start += aligned_size(piece.numel())
            buffer[end:start] = 0  # whatever memory held before must not travel
        return buffer

    @override
    def decode(self, buffer: Tensor) -> Self:
        head = bytes(buffer[: self.header_size].cpu().numpy())
        total, flags, count, present_size = _HEADER.unpack_from(head)
        present_start, sizes_start = _HEADER.size, _HEADER.size + aligned_size((self.tensors + 7) // 8)
        fits = count == len(self.parts) and present_size == sizes_start - present_start
        sizes = struct.unpack_from(f"<{count}I", head, sizes_start) if fits else ()
        if not fits or total > buffer.numel() or total != self.header_size + sum(map(aligned_size, sizes)):
            raise RuntimeError(
                f"A message of {total} bytes with {count} parts arrived where {len(self.parts)} parts in at most "
                f"{buffer.numel()} bytes were expected: the ranks do not run the same model and strategy."
            )
        present = int.from_bytes(head[present_start:sizes_start], "little")
        start, parts = self.header_size, []
        for template, size in zip(self.parts, sizes, strict=True):
            parts.append(template.decode(buffer[start : start + size]))
            start += aligned_size(size)
        return type(self)(tuple(parts), Flags(flags), present, self.tensors)
