"""A dense vector on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.payloads.base import Payload, Traits, accumulation_dtype
from lightning_distlab.payloads.codecs import VALUE_CODECS, ValueCodec
from lightning_distlab.payloads.wire import Wire

_EXACT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def exact_codec(dtype: torch.dtype) -> str:
    """Name of the value codec that carries `dtype` unchanged."""
    return _EXACT[dtype]


class DensePayload(Payload):
    """All elements of a vector.

    Args:
        values: 1-D, `length` elements. Not copied: whoever sends it does not change it until the step is over.
        codec: Name of the value codec; the default carries the dtype unchanged.
    """

    traits: ClassVar[Traits] = Traits(linear=True, mergeable=True, fixed_size=True, unbiased=True)

    def __init__(self, values: Tensor, codec: str | None = None) -> None:
        self.values = values
        self.codec = codec or exact_codec(values.dtype)

    @property
    @override
    def length(self) -> int:
        return self.values.numel()

    @property
    @override
    def device(self) -> torch.device:
        return self.values.device

    @property
    def _codec(self) -> ValueCodec:
        return VALUE_CODECS[self.codec]

    @override
    def rounded(self, wire: Wire) -> tuple[Self, Self | None]:
        wire = wire.resolved(exact_codec(self.values.dtype))
        if wire.dense == "fp32" and self.values.dtype != torch.float64:
            return self, None  # half precision travels as it is: widening it would only cost bytes
        if wire.dense == exact_codec(self.values.dtype):
            return self, None
        values = VALUE_CODECS[wire.dense].round(self.values)
        return type(self)(values, wire.dense), type(self)(self.values - values)

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(_widened(self.values) + _widened(other.values))

    @override
    def maximum(self, other: Self) -> Self:
        return type(self)(torch.maximum(_widened(self.values), _widened(other.values)))

    @override
    def as_sum(self, terms: int) -> Self:
        dtype = accumulation_dtype(self.values.dtype)
        if terms == 1 or self.codec == exact_codec(dtype):
            return self
        return type(self)(self.values if self.values.dtype == dtype else torch.empty_like(self.values, dtype=dtype))

    @override
    def split(self, bounds: Sequence[int]) -> list[Self]:
        pieces = self.values.split([b - a for a, b in pairwise(bounds)])
        return [type(self)(piece, self.codec) for piece in pieces]

    @classmethod
    @override
    def concat(cls, parts: Sequence[Self]) -> Self:
        flat = _as_one_view([part.values for part in parts])
        return cls(flat, parts[0].codec)

    @override
    def wire_size(self) -> int:
        return self._codec.size(self.length)

    @override
    def max_wire_size(self, terms: int = 1) -> int:
        return self.as_sum(terms).wire_size()

    @override
    def encode(self) -> Tensor:
        return self._codec.encode(self.values)

    @override
    def decode(self, buffer: Tensor) -> Self:
        values = self._codec.decode(buffer[: self.wire_size()], self.length, self.values.dtype)
        return type(self)(values, self.codec)


class ExactPayload(DensePayload):
    """A few numbers that all ranks compute with, such as scales: they travel unrounded whatever the wire."""

    @override
    def rounded(self, wire: Wire) -> tuple[Self, Self | None]:
        return self, None


def _widened(values: Tensor) -> Tensor:
    """`values` in the dtype in which they are added."""
    return values if values.dtype in (torch.float32, torch.float64) else values.to(torch.float32)


def _as_one_view(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate 1-D tensors; without a copy where they already lie one behind the other in one storage."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for piece in pieces:
        if (
            piece.untyped_storage().data_ptr() != storage
            or piece.storage_offset() != offset
            or piece.dtype != first.dtype
            or not piece.is_contiguous()
        ):
            return torch.cat(list(pieces))
        offset += piece.numel()
    return first.as_strided((offset - first.storage_offset(),), (1,), first.storage_offset())
