"""A few whole quanta, positive or negative, on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.payloads.codecs import ValueCodec
from lightning_distlab.payloads.codecs.bits import pack, packed_size, unpack
from lightning_distlab.payloads.codecs.levels import decode_levels, encode_levels, level_dtype, levels_size
from lightning_distlab.payloads.sparse import SparsePayload
from lightning_distlab.payloads.wire import Wire


@dataclass(frozen=True, eq=False)
class QuantaPayload(SparsePayload):
    """Entries whose values are counts of one quantum: +1 or -1 from one rank, up to +-terms in a sum.

    A rank's own message spends one bit on a sign, a sum the bits of its range: int8 up to 127 ranks, and less for
    few. Where most elements have an entry the vector of counts travels whole. Counts are kept as floating-point
    numbers, which add exactly.

    Attributes:
        terms: Contributions merged, which bounds the counts.
    """

    terms: int = 1

    @property
    @override
    def _value_codec(self) -> ValueCodec:
        return _SignCodec() if self.terms == 1 else _CountCodec(self.terms)

    @property
    @override
    def _dense_codec(self) -> ValueCodec:
        return _CountCodec(self.terms)

    @override
    def rounded(self, wire: Wire) -> tuple[Self, Self | None]:
        return replace(self, wire=Wire(index=wire.index)), None

    @override
    def as_sum(self, terms: int) -> Self:
        return replace(self, limit=min(self.size, self.limit * terms), terms=self.terms * terms)

    @classmethod
    @override
    def merge_all(cls, payloads: Sequence[Self]) -> Self:
        return replace(super().merge_all(payloads), terms=sum(payload.terms for payload in payloads))

    @override
    def split(self, bounds: Sequence[int]) -> list[Self]:
        return [replace(piece, terms=self.terms) for piece in super().split(bounds)]


class _SignCodec(ValueCodec):
    """Values +1 and -1, one bit each."""

    name = "sign"

    @override
    def encode(self, values: Tensor) -> Tensor:
        return pack((values > 0).to(torch.uint8), 1)

    @override
    def decode(self, buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return unpack(buffer, count, 1, torch.uint8).to(dtype).mul_(2).sub_(1)

    @override
    def size(self, count: int) -> int:
        return packed_size(count, 1)


class _CountCodec(ValueCodec):
    """Whole numbers in [-terms, terms], each in the fewest bits.

    Args:
        terms: Largest magnitude.
    """

    name = "count"

    def __init__(self, terms: int) -> None:
        self.terms = terms

    @override
    def encode(self, values: Tensor) -> Tensor:
        return encode_levels(values.to(level_dtype(self.terms)), self.terms, "bits")

    @override
    def decode(self, buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return decode_levels(buffer, count, self.terms, "bits").to(dtype)

    @override
    def size(self, count: int) -> int:
        return levels_size(count, self.terms, "bits")
