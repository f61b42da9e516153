"""A few entries of a vector on the wire."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.payloads.base import Payload, Traits, accumulation_dtype, aligned_size
from lightning_distlab.payloads.codecs import ValueCodec
from lightning_distlab.payloads.dense import exact_codec
from lightning_distlab.payloads.wire import Wire

_HEADER = struct.Struct("<BxxxIII")  # form, entries, index bytes, value bytes
_SPARSE, _DENSE = 0, 1
_DENSE_SHARE = 1 / 8  # from this many entries per element on, adding into a dense vector is faster than sorting


@dataclass(frozen=True, eq=False)
class SparsePayload(Payload):
    """Entries (index, value) of a vector; travels densely where that is smaller, and arrives with all entries then.

    The form on the wire: [form, entries, index bytes, body bytes: 16 bytes][indices, filled up to 8][values].

    Attributes:
        indices: int64, [k], strictly increasing, in [0, size).
        values: [k].
        size: Elements of the vector.
        limit: Entries that any rank sends at most in this place; all ranks agree on it, so it sizes receive buffers.
        wire: Codecs.
    """

    traits: ClassVar[Traits] = Traits(linear=True, mergeable=True, fixed_size=False, unbiased=False)

    indices: Tensor
    values: Tensor
    size: int
    limit: int
    wire: Wire = field(default_factory=Wire)

    def __post_init__(self) -> None:
        """Name the codecs that `exact` stands for."""
        wire = self.wire.resolved(exact_codec(self.values.dtype))
        if wire is not self.wire:
            object.__setattr__(self, "wire", wire)

    @property
    @override
    def length(self) -> int:
        return self.size

    @property
    @override
    def device(self) -> torch.device:
        return self.values.device

    @property
    def _value_codec(self) -> ValueCodec:
        """Codec of the values of the sparse form."""
        return self.wire.value_codec

    @property
    def _dense_codec(self) -> ValueCodec:
        """Codec of all elements, of the dense form; it can write 0."""
        return self.wire.value_codec

    @override
    def rounded(self, wire: Wire) -> tuple[Self, Self | None]:
        wire = wire.resolved(exact_codec(self.values.dtype))
        if wire.value == exact_codec(self.values.dtype):
            return replace(self, wire=wire), None
        values = wire.value_codec.round(self.values)
        return replace(self, values=values, wire=wire), replace(self, values=self.values - values, wire=wire)

    def to_dense(self) -> Tensor:
        """The vector, [size]."""
        return torch.zeros(self.size, dtype=self.values.dtype, device=self.device).index_copy_(
            0, self.indices, self.values
        )

    @override
    def merge(self, other: Self) -> Self:
        return type(self).merge_all([self, other])

    @override
    def as_sum(self, terms: int) -> Self:
        if terms == 1:
            return self
        dtype = accumulation_dtype(self.values.dtype)
        wire = self.wire.merged(exact_codec(dtype))
        return replace(self, values=self.values.to(dtype), limit=min(self.size, self.limit * terms), wire=wire)

    @classmethod
    @override
    def merge_all(cls, payloads: Sequence[Self]) -> Self:
        """The sum in the order given, over the union of the supports; each element is ((0 + v_0) + v_1) + ..."""
        first = payloads[0]
        filled = [p for p in payloads if p.indices.numel()]
        entries = sum(p.indices.numel() for p in filled)
        if len(filled) <= 1:
            indices, values = _add_alone(filled[0] if filled else first)
        elif entries >= _DENSE_SHARE * first.size:
            indices, values = _add_densely(filled, first.size)
        elif len(filled) > 2 and first.device.type == "cuda":
            return super().merge_all(payloads)  # two addends commute, more would race in one index_add_
        else:
            indices, values = _add_sorted(filled)
        limit = min(first.size, sum(p.limit for p in payloads))
        return cls(indices, values, first.size, limit, first.wire.merged(exact_codec(values.dtype)))

    @override
    def split(self, bounds: Sequence[int]) -> list[Self]:
        edges = torch.tensor(bounds, device=self.device)
        counts = torch.searchsorted(self.indices, edges).diff()
        indices = self.indices - edges[:-1].repeat_interleave(counts)
        sizes = counts.tolist()
        pieces = zip(indices.split(sizes), self.values.split(sizes), pairwise(bounds), strict=True)
        return [type(self)(i, v, b - a, min(self.limit, b - a), self.wire) for i, v, (a, b) in pieces]

    @classmethod
    @override
    def concat(cls, parts: Sequence[Self]) -> Self:
        offset, indices = 0, []
        for part in parts:
            indices.append(part.indices + offset)
            offset += part.size
        return replace(
            parts[0],
            indices=torch.cat(indices),
            values=torch.cat([part.values for part in parts]),
            size=offset,
            limit=sum(part.limit for part in parts),
        )

    @cached_property
    def _form(self) -> tuple[int, int]:
        """Which form is smaller, and the bytes of its body."""
        entries = self.indices.numel()
        dense = self._dense_codec.size(self.size)
        if entries == self.size:
            return _DENSE, dense
        sparse = aligned_size(self.wire.index_codec.size(self.indices, self.size)) + self._value_codec.size(entries)
        return (_SPARSE, sparse) if sparse < dense else (_DENSE, dense)

    @override
    def limited_like(self, template: Self) -> Self:
        return replace(self, limit=template.limit)

    @override
    def arrived(self) -> Self:
        if self._form[0] == _SPARSE or self.indices.numel() == self.size:
            return self
        return replace(self, indices=torch.arange(self.size, device=self.device), values=self.to_dense())

    @override
    def wire_size(self) -> int:
        return _HEADER.size + self._form[1]

    @override
    def max_wire_size(self, terms: int = 1) -> int:
        if terms > 1:
            return self.as_sum(terms).max_wire_size()
        indices = aligned_size(self.wire.index_codec.max_size(self.limit, self.size))
        sparse = indices + self._value_codec.size(self.limit)
        return _HEADER.size + min(sparse, self._dense_codec.size(self.size))

    @override
    def encode(self) -> Tensor:
        form, body = self._form
        buffer = torch.empty(_HEADER.size + body, dtype=torch.uint8, device=self.device)
        index_size = 0
        if form == _SPARSE:
            packed = self.wire.index_codec.encode(self.indices, self.size)
            index_size = packed.numel()
            buffer[_HEADER.size : _HEADER.size + index_size] = packed
            start = _HEADER.size + aligned_size(index_size)
            buffer[_HEADER.size + index_size : start] = 0  # whatever memory held before must not travel
            buffer[start:] = self._value_codec.encode(self.values)
        else:
            values = self.values if self.indices.numel() == self.size else self.to_dense()
            buffer[_HEADER.size :] = self._dense_codec.encode(values)
        header = _HEADER.pack(form, self.indices.numel(), index_size, body)
        buffer[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.device)
        return buffer

    @override
    def decode(self, buffer: Tensor) -> Self:
        form, entries, index_size, body = _HEADER.unpack(bytes(buffer[: _HEADER.size].cpu().numpy()))
        content = buffer[_HEADER.size : _HEADER.size + body]
        if form == _DENSE:
            indices = torch.arange(self.size, device=self.device)
            values = self._dense_codec.decode(content, self.size, self.values.dtype)
        else:
            indices = self.wire.index_codec.decode(content[:index_size], entries, self.size)
            values = self._value_codec.decode(content[aligned_size(index_size) :], entries, self.values.dtype)
        decoded = replace(self, indices=indices, values=values)
        decoded.__dict__["_form"] = (form, body)  # known already: saves measuring the indices when it is forwarded
        return decoded


def _add_alone(payload: SparsePayload) -> tuple[Tensor, Tensor]:
    """Indices and values of the sum where at most one payload has entries."""
    return payload.indices, payload.values.to(accumulation_dtype(payload.values.dtype)) + 0.0


def _add_densely(payloads: Sequence[SparsePayload], size: int) -> tuple[Tensor, Tensor]:
    """Indices and values of the sum, by way of a dense vector: O(size + entries)."""
    first = payloads[0]
    total = torch.zeros(size, dtype=accumulation_dtype(first.values.dtype), device=first.device)
    full = next((p.indices for p in payloads if p.indices.numel() == size), None)
    seen = torch.zeros(size, dtype=torch.bool, device=first.device) if full is None else None
    for payload in payloads:
        if payload.indices.numel() == size:
            total += payload.values
        else:
            total.index_add_(0, payload.indices, payload.values.to(total.dtype))
        if seen is not None:
            seen[payload.indices] = True
    if full is not None:
        return full, total
    assert seen is not None
    indices = seen.nonzero().flatten()
    return indices, total[indices]


def _add_sorted(payloads: Sequence[SparsePayload]) -> tuple[Tensor, Tensor]:
    """Indices and values of the sum, by sorting all entries: O(entries log entries)."""
    dtype = accumulation_dtype(payloads[0].values.dtype)
    # A stable sort keeps equal indices in the order given, and a sequential index_add_ adds them in that order.
    indices, order = torch.sort(torch.cat([p.indices for p in payloads]), stable=True)
    values = torch.cat([p.values for p in payloads]).to(dtype)[order]
    unique, place = torch.unique_consecutive(indices, return_inverse=True)
    # Adding to zeros even where all indices differ turns -0.0 into 0.0, as the dense way does: same bits either way.
    return unique, torch.zeros(unique.numel(), dtype=dtype, device=values.device).index_add_(0, place, values)
