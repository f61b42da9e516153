"""Cutting sparse sums to an agreed number of entries, and who gets back what the cut has dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lightning_distlab.payloads import Bundle, Payload, SparsePayload

P = TypeVar("P", bound=Payload)

Losers = tuple[SparsePayload | None, ...]
"""For each part of a message, entries that did not get through; None for parts that are not sparse."""


def parts_of(payload: Payload) -> tuple[Payload, ...]:
    """The parts of a bundle, or a payload by itself."""
    return payload.parts if isinstance(payload, Bundle) else (payload,)


def cut(total: P, template: P) -> tuple[P, Losers]:
    """Keep the largest entries of every sparse part, as many as the template's limit says; and what was dropped.

    Ties go to the lowest index, so that all who hold the same total keep the same.
    """
    kept: list[Payload] = []
    dropped: list[SparsePayload | None] = []
    for part, like in zip(parts_of(total), parts_of(template), strict=True):
        if isinstance(part, SparsePayload):
            assert isinstance(like, SparsePayload)
            largest, rest = _cut(part, like)
            kept.append(largest)
            dropped.append(rest)
        else:
            kept.append(part)
            dropped.append(None)
    return _rebuilt(total, kept), tuple(dropped)


def take(own: P, indices: Sequence[Tensor | None]) -> tuple[P, Losers]:
    """Divide a payload into entries at other places, and those at `indices` (of each part; None takes nothing)."""
    rest: list[Payload] = []
    taken: list[SparsePayload | None] = []
    for part, places in zip(parts_of(own), indices, strict=True):
        if isinstance(part, SparsePayload) and places is not None:
            hit = torch.isin(part.indices, places, assume_unique=True)
            rest.append(replace(part, indices=part.indices[~hit], values=part.values[~hit]))
            taken.append(replace(part, indices=part.indices[hit], values=part.values[hit]))
        else:
            rest.append(part)
            taken.append(None)
    return _rebuilt(own, rest), tuple(taken)


def added(first: Losers, second: Losers) -> Losers:
    """Losers of two rounds together."""
    return tuple(b if a is None else a if b is None else a.merge(b) for a, b in zip(first, second, strict=True))


def indices_of(parts: Sequence[Payload | None]) -> list[Tensor | None]:
    """Where the entries of sparse parts are."""
    return [part.indices if isinstance(part, SparsePayload) else None for part in parts]


def arrived_at(parts: Sequence[Payload]) -> list[Tensor | None]:
    """Where sparse parts are not zero: what has travelled in dense form has an entry everywhere."""
    return [part.indices[part.values != 0] if isinstance(part, SparsePayload) else None for part in parts]


def tightened(payload: P, share: int) -> P:
    """A template that allows 1/share of the entries, rounded up."""
    parts = [
        replace(part, limit=-(-part.limit // share)) if isinstance(part, SparsePayload) else part
        for part in parts_of(payload)
    ]
    return _rebuilt(payload, parts)


def _cut(total: SparsePayload, like: SparsePayload) -> tuple[SparsePayload, SparsePayload]:
    # Zeros are never kept. They are contributions that have cancelled, or places that the dense form has filled in,
    # which whoever has made the message does not see.
    keep = total.values != 0
    if int(keep.sum()) > like.limit:
        order = torch.sort(total.values.abs(), descending=True, stable=True).indices
        keep[order[like.limit :]] = False
    kept = replace(total, indices=total.indices[keep], values=total.values[keep], limit=like.limit)
    return kept, replace(total, indices=total.indices[~keep], values=total.values[~keep])


def _rebuilt(payload: P, parts: Sequence[Payload]) -> P:
    if isinstance(payload, Bundle):
        return replace(payload, parts=tuple(parts))
    (part,) = parts
    return part  # type: ignore[return-value]
