"""Payloads for tests: random contributions of each rank, and what their sum must be."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_distlab.payloads import Bundle, DensePayload, Flags, Payload, SparsePayload, Wire

EXACT = Wire(index="int32", value="fp64", dense="fp64")


def dense(rank: int, size: int, dtype: torch.dtype = torch.float64) -> DensePayload:
    """A random vector of this rank's."""
    generator = torch.Generator().manual_seed(1000 * size + rank)
    return DensePayload(torch.randn(size, generator=generator, dtype=dtype))


def sparse(rank: int, size: int, entries: int, wire: Wire = EXACT, dtype: torch.dtype = torch.float64) -> SparsePayload:
    """`entries` random entries of this rank's, at most `size`."""
    generator = torch.Generator().manual_seed(1000 * size + 10 * entries + rank)
    entries = min(size, entries)
    indices = torch.randperm(size, generator=generator)[:entries].sort().values
    values = torch.randn(entries, generator=generator, dtype=dtype)
    return SparsePayload(indices, values, size, entries, wire)


def bundle(rank: int, size: int, entries: int) -> Bundle:
    """A dense and a sparse part; each rank has another tensor of the first 70, and rank 1 a flag."""
    flags = Flags.SIGNAL if rank == 1 else Flags.NONE
    return Bundle((dense(rank, size + 1), sparse(rank, size, entries)), flags, 1 << (rank % 70), 70)


def as_vector(payload: Payload) -> Tensor:
    """All of a payload's elements, one part behind the other."""
    if isinstance(payload, Bundle):
        return torch.cat([as_vector(part) for part in payload.parts])
    if isinstance(payload, SparsePayload):
        return payload.to_dense()
    assert isinstance(payload, DensePayload)
    return payload.values


def bits(payload: Payload) -> list[bytes]:
    """The memory of a payload's elements, for comparing ranks bit by bit (0.0 and -0.0 differ)."""
    vector = as_vector(payload)
    return [vector.numpy().tobytes()]
