"""What travels between ranks: the contract of every payload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from lightning_distlab.payloads.wire import Wire


@dataclass(frozen=True)
class Traits:
    """What a collective may assume about a payload class.

    Attributes:
        linear: The decoded sum is the sum of the decoded payloads, so payloads can be added on the way.
        mergeable: Two payloads merge into one of the same class without loss.
        fixed_size: The number of bytes depends on shapes alone, never on the values.
        unbiased: The expectation of the decoded payload is the encoded tensor (no error feedback needed).
    """

    linear: bool
    mergeable: bool
    fixed_size: bool
    unbiased: bool


class Payload(ABC):
    """A vector of `length` elements in the form in which it travels.

    Payloads are immutable: `merge`, `split` and `concat` make new ones, so that one object can be sent to many peers
    and, in one process, handed to many virtual ranks. Values are rounded to what the wire can carry once, by
    `rounded`; after that `encode` and `decode` lose nothing, and neither does encoding any split of the payload.
    """

    traits: ClassVar[Traits]

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of elements of the index space that the payload describes."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the payload's tensors live."""

    @abstractmethod
    def rounded(self, wire: Wire) -> tuple[Self, Self | None]:
        """The payload as `wire` carries it, and what the rounding took away (None when nothing).

        `rounded + error` equals the payload bit for bit.
        """

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The sum `self + other`, carried in full precision from here on."""

    def maximum(self, other: Self) -> Self:
        """The elementwise maximum, for `Op.MAX`, in full precision; dense payloads and bundles of them only."""
        raise AssertionError(f"{type(self).__name__} has no maximum; `Collective.supports` says so")

    def as_sum(self, terms: int) -> Self:
        """This payload in the form in which the sum of `terms` of its kind travels: full precision, higher limits.

        It serves as the template by which a partial sum is decoded, so only its form matters, not its values.
        """
        return self

    def limited_like(self, template: Self) -> Self:
        """This payload with the agreed limits of `template`, whatever it was put together from."""
        return self

    def arrived(self) -> Self:
        """What `decode` makes of this payload's `encode`, without making the bytes."""
        return self

    @classmethod
    def merge_all(cls, payloads: Sequence[Self]) -> Self:
        """The sum in the order given; every rank that passes the same order gets the same bits."""
        total = payloads[0]
        for payload in payloads[1:]:
            total = total.merge(payload)
        return total

    @abstractmethod
    def split(self, bounds: Sequence[int]) -> list[Self]:
        """Cut at `bounds` = [0, b_1, ..., length] into `len(bounds) - 1` index ranges; indices restart at 0."""

    def split_evenly(self, parts: int) -> list[Self]:
        """Cut into `parts` index ranges whose sizes differ by one element at most."""
        return self.split(even_bounds(self.length, parts))

    @classmethod
    @abstractmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The inverse of `split`: lay index spaces one after the other."""

    @abstractmethod
    def wire_size(self) -> int:
        """Exact number of bytes of `encode()`, without making them."""

    @abstractmethod
    def max_wire_size(self, terms: int = 1) -> int:
        """Bytes that the sum of `terms` such payloads, one from each of that many ranks, needs at most.

        It equals `as_sum(terms).max_wire_size()`. All ranks compute the same number from shapes and agreed limits, so
        it sizes receive buffers.
        """

    @abstractmethod
    def encode(self) -> Tensor:
        """One contiguous uint8 buffer, 1-D, `wire_size()` bytes."""

    @abstractmethod
    def decode(self, buffer: Tensor) -> Self:
        """Read a peer's buffer; `self` is the template that tells shapes, dtype and codecs.

        Args:
            buffer: uint8, 1-D, at least as long as the message; what lies behind the message is ignored.
        """


def even_bounds(length: int, parts: int) -> list[int]:
    """Bounds that cut `length` elements into `parts` ranges whose sizes differ by one at most.

    >>> even_bounds(10, 4)
    [0, 3, 6, 8, 10]
    """
    base, extra = divmod(length, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + base + (part < extra))
    return bounds


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums travel: fp64 stays fp64, everything narrower is summed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def aligned_size(size: int) -> int:
    """`size` rounded up to 8 bytes, so that typed views of a buffer need no copy."""
    return (size + 7) & ~7
