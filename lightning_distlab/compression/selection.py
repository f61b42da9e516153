"""Which entries of a gradient to send: the k largest magnitudes, exactly, in one pass over memory.

Deep Gradient Compression (Lin et al. 2018, section 3) estimates a threshold from a sample and cuts what passes it to k.
The same idea is made exact here. A sample only proposes where to start; whatever it proposes, the result is the exact
top k, ties to the lowest index, so no part of a tensor is ever starved by its position:

    threshold <- a magnitude that, says the sample, a little more than k entries reach
    for each block of the tensor (small enough to stay in cache):
        keep the entries that reach the threshold
        if far more than k are kept: cut them to the k largest, and raise the threshold to above the smallest of these
    if fewer than k are kept: start again with a lower threshold (the third time with 0), else cut to k

Magnitudes are compared as integers: without their sign bit, the bits of floating-point numbers order as their
magnitudes do. That makes one integer path of all four dtypes, and ties and -0.0 need no thought.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Ints = npt.NDArray[Any]  # int16, int32 or int64, as wide as the floating-point type

_BLOCK = 1 << 18
"""Elements of a block: it, its magnitudes and its mask stay in cache between the passes over them."""

_SAMPLE_HITS = 128
"""Entries of the top k that a sample should hold: its estimate of k is then off by 1/11 (one standard deviation)."""

_DIGIT = 11
"""Bits of a digit in radix selection: 2^11 counters stay in the first-level cache."""

_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

SCRATCH_BYTES = _BLOCK * (8 + 1)
"""Size of working memory that serves every dtype."""


def top_k(x: Tensor, k: int, *, scratch: Tensor | None = None, seed: int = 0) -> Tensor:
    """Indices of exactly min(k, numel) entries with the largest magnitude.

    Args:
        x: Floating point, any shape, free of NaN; read as its flattened self.
        k: Number of entries.
        scratch: Working memory to use again from call to call: a contiguous CPU tensor of `SCRATCH_BYTES` bytes or
            more, overwritten. Small, and never needed on CUDA.
        seed: Moves the sample. The result does not depend on it.

    Returns:
        int64, [min(k, numel)], strictly increasing. Of equal magnitudes, those at the lowest indices are taken.

    Raises:
        ValueError: `x` is not of a real floating-point dtype, `k` is negative, or `scratch` is too small.
    """
    flat = _flat(x)
    if k < 0:
        raise ValueError(f"top_k cannot take k={k} entries; k must be 0 or more.")
    if k >= flat.numel():
        return torch.arange(flat.numel(), device=flat.device)
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=flat.device)
    if flat.device.type != "cpu":
        return _top_k_by_sort(flat, k)
    return torch.from_numpy(_select(_BlockReader([flat], scratch), k, seed)[0])


def threshold_for(x: Tensor | Sequence[Tensor], k: int, *, scratch: Tensor | None = None, seed: int = 0) -> float:
    """The k-th largest magnitude of a tensor, or of several tensors taken together.

    Args:
        x: One tensor, or several of one dtype and device; as for `top_k`.
        k: 1 to the number of elements.
        scratch: As for `top_k`.
        seed: As for `top_k`.

    Returns:
        The magnitude, exactly; `above(x, it)` finds k entries, and more only if some tie with it.

    Raises:
        ValueError: As for `top_k`, or k is outside [1, number of elements].
    """
    flats = [_flat(t) for t in ([x] if isinstance(x, Tensor) else x)]
    total = sum(flat.numel() for flat in flats)
    if not 1 <= k <= total:
        raise ValueError(f"{total} elements have no {k}-th largest magnitude; k must be in [1, {total}].")
    if flats[0].device.type != "cpu":
        bits = int(torch.topk(_magnitudes(torch.cat(flats)), k, sorted=False).values.min())
    else:
        bits = int(_select(_BlockReader(flats, scratch), k, seed)[1].min())
    return float(torch.tensor(bits, dtype=_BITS[flats[0].dtype]).view(flats[0].dtype))


def above(x: Tensor, threshold: float, *, scratch: Tensor | None = None) -> Tensor:
    """Indices of all entries with `|x| >= threshold`, for a threshold that comes from elsewhere.

    Args:
        x: As for `top_k`.
        threshold: 0 or more; 0 takes every entry.
        scratch: As for `top_k`.

    Returns:
        int64, strictly increasing.

    Raises:
        ValueError: `x` is not of a real floating-point dtype, the threshold is negative or NaN, or `scratch` is too
            small.
    """
    flat = _flat(x)
    if not threshold >= 0:
        raise ValueError(f"A threshold on magnitudes cannot be {threshold}; it must be 0 or more.")
    bound = _bits_at_least(threshold, flat.dtype)
    if flat.device.type != "cpu":
        return (_magnitudes(flat) >= bound).nonzero().view(-1)
    reader = _BlockReader([flat], scratch)
    kept = [np.empty(0, dtype=np.int64)]
    for offset, magnitudes in reader.blocks():
        kept.append(reader.reaching(magnitudes, bound) + offset)
    return torch.from_numpy(np.concatenate(kept))


def _flat(x: Tensor) -> Tensor:
    """`x` as one contiguous dimension, without a copy where it is contiguous."""
    if x.dtype not in _BITS:
        raise ValueError(f"Magnitudes of {x.dtype} cannot be selected; use float16, bfloat16, float32 or float64.")
    return x.detach().reshape(-1).contiguous()


def _sign_mask(bits: torch.dtype) -> int:
    """All bits but the sign's."""
    return torch.iinfo(bits).max


def _magnitudes(flat: Tensor) -> Tensor:
    """Magnitudes as integers of the same order."""
    bits = _BITS[flat.dtype]
    return flat.view(bits) & _sign_mask(bits)


def _bits_at_least(threshold: float, dtype: torch.dtype) -> int:
    """Integer form of the smallest number of `dtype` that is not below `threshold`."""
    nearest = torch.tensor(threshold, dtype=torch.float64).to(dtype)
    return int(nearest.view(_BITS[dtype])) + (float(nearest) < threshold)


def _top_k_by_sort(flat: Tensor, k: int) -> Tensor:
    """`top_k` with the device's own selection, where blocks in a cache are no gain."""
    magnitudes = _magnitudes(flat)
    smallest = torch.topk(magnitudes, k, sorted=False).values.min()
    sure = (magnitudes > smallest).nonzero().view(-1)
    ties = (magnitudes == smallest).nonzero().view(-1)[: k - sure.numel()]
    return torch.cat([sure, ties]).sort().values


class _BlockReader:
    """Magnitudes of tensors that lie one after the other, block by block, in working memory of one block."""

    def __init__(self, flats: Sequence[Tensor], scratch: Tensor | None) -> None:
        bits = _BITS[flats[0].dtype]
        self.parts: list[_Ints] = [flat.view(bits).numpy() for flat in flats]
        self.total = sum(part.size for part in self.parts)
        self.mask = _sign_mask(bits)
        block = min(_BLOCK, max((part.size for part in self.parts), default=0))
        split = block * bits.itemsize
        if scratch is None:
            memory = np.empty(split + block, dtype=np.uint8)
        else:
            memory = _as_bytes(scratch)
        self._magnitudes: _Ints = memory[:split].view(self.parts[0].dtype)
        self._reaches: npt.NDArray[np.bool_] = memory[split : split + block].view(np.bool_)

    def blocks(self) -> Iterator[tuple[int, _Ints]]:
        """Pairs (place of the first element, magnitudes); the magnitudes last until the next pair."""
        offset = 0
        for part in self.parts:
            for start in range(0, part.size, _BLOCK):
                block = part[start : start + _BLOCK]
                yield offset + start, np.bitwise_and(block, self.mask, out=self._magnitudes[: block.size])
            offset += part.size

    def reaching(self, magnitudes: _Ints, bound: int) -> npt.NDArray[np.int64]:
        """Places within the block whose magnitude is at least `bound`."""
        return np.flatnonzero(np.greater_equal(magnitudes, bound, out=self._reaches[: magnitudes.size]))

    def sample(self, size: int, seed: int) -> _Ints:
        """About `size` magnitudes at an odd stride, which falls in step with few layouts of a weight tensor."""
        stride = self.total // size | 1
        return np.concatenate([part[seed * 7919 % stride :: stride] for part in self.parts]) & self.mask


def _as_bytes(scratch: Tensor) -> npt.NDArray[np.uint8]:
    if scratch.device.type != "cpu" or not scratch.is_contiguous() or scratch.nbytes < SCRATCH_BYTES:
        raise ValueError(
            f"scratch is {scratch.nbytes} bytes on {scratch.device}, contiguous: {scratch.is_contiguous()}; "
            f"give a contiguous CPU tensor of SCRATCH_BYTES = {SCRATCH_BYTES} bytes or more, or None."
        )
    return scratch.detach().view(-1).view(torch.uint8).numpy()


def _select(reader: _BlockReader, k: int, seed: int) -> tuple[npt.NDArray[np.int64], _Ints]:
    """Places, increasing, and magnitudes of the k largest; 0 < k <= reader.total."""
    for bound in _proposals(reader, k, seed):
        kept = _keep_largest(reader, k, bound)
        if kept is not None:
            return kept
    raise AssertionError("every magnitude reaches the last proposal, 0")


def _proposals(reader: _BlockReader, k: int, seed: int) -> Iterator[int]:
    """Where to start: a bound that probably more than k magnitudes reach, then a lower one, then 0."""
    size = min(_SAMPLE_HITS * reader.total // k, reader.total // 200)
    size = max(size, 4096)
    if size < reader.total // 2:
        sample = reader.sample(size, seed)
        hits = k * sample.size / reader.total
        rank = int(hits + 3 * hits**0.5) + 3  # three standard deviations low, and never without slack
        for rank_from_top in (rank, 4 * rank):
            if rank_from_top < sample.size:
                yield _kth_largest(sample, rank_from_top)
    yield 0


def _keep_largest(reader: _BlockReader, k: int, bound: int) -> tuple[npt.NDArray[np.int64], _Ints] | None:
    """One pass: the k largest of all magnitudes that reach `bound`, None if there are fewer.

    Whenever twice as many are kept as needed (and a block's worth), they are cut and the bound rises, so working memory
    stays near k entries even where all magnitudes are equal, and the work is at most twice that of one exact selection.
    """
    places: list[npt.NDArray[np.int64]] = []
    magnitudes: list[_Ints] = []
    count, limit = 0, k + max(k, _BLOCK // 4)
    for offset, block in reader.blocks():
        reaching = reader.reaching(block, bound)
        if not reaching.size:
            continue
        magnitudes.append(block[reaching])
        places.append(np.add(reaching, offset, out=reaching))
        count += reaching.size
        if count > limit:
            kept = _cut(np.concatenate(places), np.concatenate(magnitudes), k)
            places, magnitudes, count = [kept[0]], [kept[1]], k
            bound = int(kept[1].min()) + 1  # an equal one further on would lose the tie
    if count < k:
        return None
    return _cut(np.concatenate(places), np.concatenate(magnitudes), k)


def _cut(places: npt.NDArray[np.int64], magnitudes: _Ints, k: int) -> tuple[npt.NDArray[np.int64], _Ints]:
    """The k largest, in order of place; of equal ones those that come first."""
    if places.size == k:
        return places, magnitudes
    smallest = _kth_largest(magnitudes, k)
    keep = magnitudes > smallest
    keep[np.flatnonzero(magnitudes == smallest)[: k - int(keep.sum())]] = True
    return places[keep], magnitudes[keep]


def _kth_largest(magnitudes: _Ints, k: int) -> int:
    """The k-th largest, by radix selection: find its highest digit, keep what shares it, go on to the next digit.

    Digits start at the range that occurs, as magnitudes above a threshold differ in few bits. The time is bounded
    whatever the order and the ties; quickselect and introselect have orders (descending) and ties (half of all 0) that
    cost them 20 to 1000 times as much.
    """
    base = int(magnitudes.min())
    rest = magnitudes - base
    shift = max(0, int(rest.max()).bit_length() - _DIGIT)
    while True:
        digits = np.right_shift(rest, shift, dtype=np.int64)
        from_top = np.bincount(digits)[::-1].cumsum()
        rank = int(np.searchsorted(from_top, k))  # the digit is the rank-th from the highest that occurs
        digit = from_top.size - 1 - rank
        k -= int(from_top[rank - 1]) if rank else 0
        base += digit << shift
        if shift == 0:
            return base
        rest = rest[digits == digit] - (digit << shift)
        shift = max(0, shift - _DIGIT)
