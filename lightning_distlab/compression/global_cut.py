"""The k largest entries of many tensors taken together, without laying them into one."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_distlab.compression.base import Scratch
from lightning_distlab.compression.selection import above

Pieces = Mapping[str, tuple[Tensor, Tensor | None]]
"""By name, (residual, gradient or None for zero), each 1-D; the entries meant are those of their sum."""

_MARGIN = 1.25
"""How many more entries than k the sampled threshold aims at, beside four standard deviations of the sample."""


def counts_of_global_top_k(pieces: Pieces, k: int, scratch: Scratch, sample_size: int = 1 << 17) -> dict[str, int]:
    """How many of the k largest magnitudes lie in each tensor; exactly k in total.

    The threshold of Aji & Heafield (2017) is a quantile over all parameters, estimated from a sample. Here a sample
    only proposes a lower bound; the entries above it are collected and cut exactly, and if they are fewer than k the
    bound falls. One pass is the rule. Ties at the threshold go to the first tensors in the order of `pieces`.

    Memory: the sum of the largest single tensor, in `scratch`, and a little more than k magnitudes.

    Args:
        pieces: The tensors. NaN is taken for zero (such a step is skipped anyway).
        k: Number of entries, at most the number of elements.
        scratch: Working memory.
        sample_size: Elements of the sample, about.

    Returns:
        Entries to take from each tensor.
    """
    sample = _sample(pieces, sample_size)
    total = sum(residual.numel() for residual, _ in pieces.values())
    share = k / total * sample.numel()
    rank = math.ceil(_MARGIN * share + 4 * math.sqrt(share) + 1)
    while True:
        bound = float(torch.topk(sample, rank).values[-1]) if rank <= sample.numel() else 0.0
        beyond = {name: _magnitudes_beyond(piece, bound, scratch) for name, piece in pieces.items()}
        found = sum(magnitudes.numel() for magnitudes, _ in beyond.values())
        tied = sum(ties for _, ties in beyond.values())
        if found + tied >= k:
            break
        rank = 4 * rank if rank < sample.numel() else sample.numel() + 1
    if found < k:  # the bound itself is the threshold
        greater, ties = {name: m.numel() for name, (m, _) in beyond.items()}, {n: t for n, (_, t) in beyond.items()}
    else:
        everything = torch.cat([magnitudes for magnitudes, _ in beyond.values()])
        threshold = torch.topk(everything, k, sorted=False).values.min()
        greater = {name: int((m > threshold).sum()) for name, (m, _) in beyond.items()}
        ties = {name: int((m == threshold).sum()) for name, (m, _) in beyond.items()}
    return _share_ties(greater, ties, k)


def _share_ties(greater: Mapping[str, int], ties: Mapping[str, int], k: int) -> dict[str, int]:
    """Fill up to k with entries that equal the threshold, first come, first served."""
    missing = k - sum(greater.values())
    counts = {}
    for name, certain in greater.items():
        taken = min(missing, ties[name])
        counts[name] = certain + taken
        missing -= taken
    assert missing == 0, "fewer entries at and above the threshold than it was chosen for"
    return counts


def _sample(pieces: Pieces, size: int) -> Tensor:
    """Every stride-th magnitude of all tensors; fp32 where dtypes differ, which every tensor can hold."""
    stride = -(-sum(residual.numel() for residual, _ in pieces.values()) // size) | 1
    parts = []
    for residual, grad in pieces.values():
        part = residual[::stride]
        parts.append((part if grad is None else part + grad[::stride]).abs())
    narrowest = min((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    return torch.cat([part.to(narrowest) for part in parts]).nan_to_num_(nan=0.0)


def _magnitudes_beyond(piece: tuple[Tensor, Tensor | None], bound: float, scratch: Scratch) -> tuple[Tensor, int]:
    """The magnitudes greater than `bound` of one tensor, and how many more are equal to it (0: all others)."""
    residual, grad = piece
    if grad is None:
        values = residual
    else:
        values = torch.add(residual, grad, out=scratch.take(residual, purpose="candidate"))
    if bound == 0.0:
        magnitudes = values[values.abs() > 0.0].abs()
        return magnitudes, values.numel() - magnitudes.numel()
    reached = values[above(values, bound)].abs()
    magnitudes = reached[reached > bound]
    return magnitudes, int((reached == bound).sum())
