"""One bit an element and two numbers a column, on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.payloads.base import Payload, Traits
from lightning_distlab.payloads.codecs.bits import aligned, as_bytes, pack, packed_size, unpack
from lightning_distlab.payloads.dense import DensePayload
from lightning_distlab.payloads.wire import Wire

_BLOCK = 1 << 16  # elements that are restored together: they stay in a core's cache


@dataclass(frozen=True, eq=False)
class SignPayload(Payload):
    """A range of a matrix whose columns lie one after the other, each element one of its column's two values.

    On the wire: [two fp32 numbers a column][one bit an element]. A sum of such payloads has more than two values a
    column, so partial sums cannot travel as one of these: what is merged or laid together is dense.

    Attributes:
        flags: uint8, [length], 1 where an element has its column's higher value.
        means: fp32, [columns that the range touches, 2], the lower and the higher value of each.
        column: Elements of a column.
        offset: Elements of the first column that lie before the range.
        dtype: Of the restored elements.
    """

    traits: ClassVar[Traits] = Traits(linear=False, mergeable=False, fixed_size=True, unbiased=False)

    flags: Tensor
    means: Tensor
    column: int
    offset: int
    dtype: torch.dtype

    @property
    @override
    def length(self) -> int:
        return self.flags.numel()

    @property
    @override
    def device(self) -> torch.device:
        return self.flags.device

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Restored elements, some at a time: a range of positions, and a tensor [elements] for each."""
        for at, number in column_blocks(self.length, self.column, self.offset, _BLOCK):
            low, high = self.means[number].to(self.dtype).unsqueeze(-1).unbind(1)  # [columns, 1]
            flags = self.flags[at].view(low.shape[0], -1)
            yield at, flags.to(self.dtype).mul_(high - low).add_(low).view(-1)

    @property
    def values(self) -> Tensor:
        """All restored elements, [length]."""
        values = torch.empty(self.length, dtype=self.dtype, device=self.device)
        for at, block in self.blocks():
            values[at] = block
        return values

    @override
    def rounded(self, wire: Wire) -> tuple[Self, Self | None]:
        return self, None

    @override
    def merge(self, other: Self) -> Self:
        raise AssertionError("a sum of sign payloads is none; merge_all makes it dense at its destination")

    @classmethod
    @override
    def merge_all(cls, payloads: Sequence[Self]) -> Self | DensePayload:  # type: ignore[override]
        """The sum in the order given, dense."""
        if len(payloads) == 1:
            return payloads[0]
        total = payloads[0].values
        for payload in payloads[1:]:
            for at, block in payload.blocks():
                total[at] += block
        return DensePayload(total)

    @override
    def split(self, bounds: Sequence[int]) -> list[Self]:
        pieces = []
        for a, b in pairwise(bounds):
            first, offset = divmod(self.offset + a, self.column)
            last = first + columns_of(b - a, self.column, offset)
            pieces.append(replace(self, flags=self.flags[a:b], means=self.means[first:last], offset=offset))
        return pieces

    @classmethod
    @override
    def concat(cls, parts: Sequence[Self]) -> Self | SignRanges:  # type: ignore[override]
        return parts[0] if len(parts) == 1 else SignRanges(parts)

    @property
    def _means_size(self) -> int:
        return 8 * columns_of(self.length, self.column, self.offset)

    @override
    def wire_size(self) -> int:
        return self._means_size + packed_size(self.length, 1)

    @override
    def max_wire_size(self, terms: int = 1) -> int:
        assert terms == 1, "sums of sign payloads do not travel"
        return self.wire_size()

    @override
    def encode(self) -> Tensor:
        return torch.cat([as_bytes(self.means.reshape(-1)), pack(self.flags, 1)])

    @override
    def decode(self, buffer: Tensor) -> Self:
        split = self._means_size
        means = aligned(buffer[:split], 4).view(torch.float32).view(-1, 2)
        flags = unpack(buffer[split : self.wire_size()], self.length, 1, torch.uint8)
        return replace(self, flags=flags, means=means)


class SignRanges(DensePayload):
    """Ranges of one matrix laid together; two owners of one column may have given it different values.

    Elements are restored when they are asked for, so that whoever goes through `blocks` needs no memory for them.
    """

    def __init__(self, parts: Sequence[SignPayload]) -> None:
        self.parts = parts

    @property
    @override
    def length(self) -> int:
        return sum(part.length for part in self.parts)

    @property
    @override
    def device(self) -> torch.device:
        return self.parts[0].device

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """As of `SignPayload`."""
        start = 0
        for part in self.parts:
            for at, block in part.blocks():
                yield slice(start + at.start, start + at.stop), block
            start += part.length

    @cached_property
    def values(self) -> Tensor:  # type: ignore[override]
        """All restored elements, [length]."""
        return torch.cat([part.values for part in self.parts])


def columns_of(length: int, column: int, offset: int) -> int:
    """Columns that a range of `length` elements touches when `offset` elements of the first lie before it."""
    return -(-(offset + length) // column) if length else 0


def column_blocks(length: int, column: int, offset: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut a range into blocks of whole columns, about `size` elements each, with an incomplete column by itself.

    Yields:
        Positions in the range, and the numbers of the columns that they make up, counted from the first touched.
    """
    start = number = 0
    if offset and length:
        start, number = min(length, column - offset), 1
        yield slice(0, start), slice(0, 1)
    whole = (length - start) // column
    stride = max(1, size // column)
    for first in range(0, whole, stride):
        count = min(stride, whole - first)
        at = start + first * column
        yield slice(at, at + count * column), slice(number + first, number + first + count)
    if start + whole * column < length:
        yield slice(start + whole * column, length), slice(number + whole, number + whole + 1)
