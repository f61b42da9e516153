"""Index codecs: which entries of a vector a sparse message carries.

All take strictly increasing int64 indices in [0, length). A share d of the elements at random places needs H(d)/d bits
per index at least (H: binary entropy): 11.41 at d = 0.1 %, 8.08 at 1 %. Rice reaches 11.49 and 8.11.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.payloads.codecs.bits import (
    aligned,
    as_bytes,
    pack,
    pack_flags,
    packed_size,
    unpack,
    unpack_flags,
)


class IndexCodec(ABC):
    """Strictly increasing indices to bytes and back, without loss.

    Attributes:
        name: The word that a user writes.
    """

    name: ClassVar[str]

    @abstractmethod
    def encode(self, indices: Tensor, length: int) -> Tensor:
        """Write indices.

        Args:
            indices: int64, [count], strictly increasing, in [0, length).
            length: Elements of the vector.

        Returns:
            uint8, [size(indices, length)].
        """

    @abstractmethod
    def decode(self, buffer: Tensor, count: int, length: int) -> Tensor:
        """Read indices.

        Args:
            buffer: uint8, 1-D, exactly what `encode` returned.
            count: Number of indices in it.
            length: Elements of the vector.

        Returns:
            int64, [count].

        Raises:
            ValueError: The buffer does not hold `count` indices.
        """

    @abstractmethod
    def size(self, indices: Tensor, length: int) -> int:
        """Exact number of bytes that `encode` returns, without making them."""

    @abstractmethod
    def max_size(self, count: int, length: int) -> int:
        """Bytes that any `count` or fewer indices below `length` need at most."""


def _gaps(indices: Tensor) -> Tensor:
    """Elements left out before each index: [3, 4, 7] gives [3, 0, 2]."""
    gaps = indices.clone()
    gaps[1:] -= indices[:-1] + 1
    return gaps


def _check_found(found: int, count: int, codec: str) -> None:
    if found != count:
        raise ValueError(f"A {codec} buffer holds {found} indices where {count} were announced: it is damaged.")


class Int32Codec(IndexCodec):
    """Each index as an unsigned 32-bit integer; for vectors of up to 2^32 elements."""

    name = "int32"
    max_length: ClassVar[int] = 1 << 32

    def _check(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(f"The int32 index codec counts up to 2^32 elements, the vector has {length}; use rice.")

    @override
    def encode(self, indices: Tensor, length: int) -> Tensor:
        self._check(length)
        return as_bytes(indices.to(torch.int32))  # keeps the low 32 bits

    @override
    def decode(self, buffer: Tensor, count: int, length: int) -> Tensor:
        self._check(length)
        _check_found(buffer.numel() // 4, count, self.name)
        return aligned(buffer, 4).view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)

    @override
    def size(self, indices: Tensor, length: int) -> int:
        return self.max_size(indices.numel(), length)

    @override
    def max_size(self, count: int, length: int) -> int:
        self._check(length)
        return 4 * count


class Run16Codec(IndexCodec):
    """The number of zeros before each entry in 16 bits, as in Deep Gradient Compression (Lin et al. 2018, section 4).

    The code 65535 is no entry but 65535 zeros more (a filler): any gap can be written, and every filler costs 2 bytes.
    """

    name = "run16"
    filler: ClassVar[int] = 65535

    @override
    def encode(self, indices: Tensor, length: int) -> Tensor:
        gaps = _gaps(indices)
        fillers = gaps // self.filler
        codes = gaps - fillers * self.filler
        places = torch.cumsum(fillers + 1, 0) - 1
        total = int(places[-1]) + 1 if indices.numel() else 0
        if total > indices.numel():
            codes = torch.full((total,), self.filler, device=indices.device).index_copy_(0, places, codes)
        return as_bytes(codes.to(torch.int16))

    @override
    def decode(self, buffer: Tensor, count: int, length: int) -> Tensor:
        steps = aligned(buffer, 2).view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
        entries = steps != self.filler
        ends = torch.cumsum(steps + entries, 0)[entries]  # an entry takes one place itself, a filler none
        _check_found(ends.numel(), count, self.name)
        return ends.sub_(1)

    @override
    def size(self, indices: Tensor, length: int) -> int:
        return 2 * (indices.numel() + int((_gaps(indices) // self.filler).sum()))

    @override
    def max_size(self, count: int, length: int) -> int:
        return 2 * (count + length // self.filler) if count else 0


class RiceCodec(IndexCodec):
    """Rice code (Golomb 1966 with a power of two) of the gaps, in planes that decode without a loop over entries.

    A gap g is the quotient g >> k, in unary, and the remainder, k bits. Layout: [k: 1 byte][remainders][quotients].
    All quotients make one bitmap in which bit `sum(q_0..q_i) + i` is the i-th one, so the positions of the ones, their
    differences and one cumulative sum give the indices back.
    """

    name = "rice"

    @staticmethod
    def parameter(count: int, length: int) -> int:
        """The k with the fewest expected bits for `count` of `length` at random places.

        A gap is geometric, P(g >= n) = (1 - d)^n, so a code word has k + 1 + E[g >> k] bits with
        E[g >> k] = z / (1 - z), z = (1 - d)^(2^k).
        """
        if count >= length:
            return 0
        log_miss = math.log1p(-count / length)

        def bits(k: int) -> float:
            return k + 1 + 1 / math.expm1(-log_miss * 2.0**k) if -log_miss * 2.0**k < 700 else k + 1

        guess = max(0, round(math.log2(math.log(2) * length / count)))
        return min(range(max(0, guess - 2), guess + 3), key=bits)

    @staticmethod
    def bytes_needed(count: int, k: int, quotients: int) -> int:
        """Bytes of `count` gaps whose quotients by 2^k sum to `quotients`."""
        return 1 + packed_size(count, k) + (count + quotients + 7) // 8

    @override
    def encode(self, indices: Tensor, length: int) -> Tensor:
        count = indices.numel()
        if count == 0:
            return torch.empty(0, dtype=torch.uint8, device=indices.device)
        k = self.parameter(count, length)
        gaps = _gaps(indices)
        ones = torch.cumsum((gaps >> k).add_(1), 0).sub_(1)  # [count], places in the bitmap
        flags = torch.zeros((int(ones[-1]) + 8) // 8 * 8, dtype=torch.uint8, device=indices.device)
        flags.index_fill_(0, ones, 1)
        header = torch.full((1,), k, dtype=torch.uint8, device=indices.device)
        return torch.cat([header, pack(gaps, k), pack_flags(flags)])

    @override
    def decode(self, buffer: Tensor, count: int, length: int) -> Tensor:
        if count == 0:
            return torch.empty(0, dtype=torch.int64, device=buffer.device)
        k = int(buffer[0]) if buffer.numel() else 0
        start = 1 + packed_size(count, k)
        ones = unpack_flags(buffer[start:]).nonzero().view(-1)
        _check_found(ones.numel(), count, self.name)
        gaps = (_gaps(ones) << k).bitwise_or_(unpack(buffer[1:start], count, k))
        return torch.cumsum(gaps.add_(1), 0).sub_(1)

    @override
    def size(self, indices: Tensor, length: int) -> int:
        count = indices.numel()
        if count == 0:
            return 0
        k = self.parameter(count, length)
        return self.bytes_needed(count, k, int((_gaps(indices) >> k).sum()))

    @override
    def max_size(self, count: int, length: int) -> int:
        return _rice_bound(min(count, length), length)


@lru_cache(maxsize=8192)
def _rice_bound(count: int, length: int) -> int:
    """Largest Rice message of at most `count` indices below `length`; asked again every step, hence the cache.

    With n indices the quotients sum to at most (length - n) >> k, so among numbers with the same k the largest needs
    most. Fewer indices with a larger k may still need more, but only the next k can: from there on the largest number
    with a given k halves with every k, and with it both the remainders and the quotients. What is left is rounding: the
    three parts of a byte that a remainder may have and the quotients may each waste 7 bits.
    """
    worst = 0
    for _ in range(2):
        if count == 0:
            break
        k = RiceCodec.parameter(count, length)
        worst = max(worst, RiceCodec.bytes_needed(count, k, (length - count) >> k))
        fewer, same = 0, count  # bisect for the largest number of indices with a larger k
        while same - fewer > 1:
            middle = (fewer + same) // 2
            if RiceCodec.parameter(middle, length) > k:
                fewer = middle
            else:
                same = middle
        count = fewer
    return worst + 3 if worst else 0


class BitmapCodec(IndexCodec):
    """One bit per element of the vector, whatever the number of entries."""

    name = "bitmap"

    @override
    def encode(self, indices: Tensor, length: int) -> Tensor:
        flags = torch.zeros(8 * self.max_size(0, length), dtype=torch.uint8, device=indices.device)
        return pack_flags(flags.index_fill_(0, indices, 1))

    @override
    def decode(self, buffer: Tensor, count: int, length: int) -> Tensor:
        indices = unpack_flags(buffer).nonzero().view(-1)
        _check_found(indices.numel(), count, self.name)
        return indices

    @override
    def size(self, indices: Tensor, length: int) -> int:
        return self.max_size(indices.numel(), length)

    @override
    def max_size(self, count: int, length: int) -> int:
        return (length + 7) // 8


class AutoCodec(IndexCodec):
    """The smallest of Rice, bitmap and int32, named by the first byte; nothing at all for no indices."""

    name = "auto"
    choices: ClassVar[tuple[IndexCodec, ...]] = (RiceCodec(), BitmapCodec(), Int32Codec())

    def _usable(self, length: int) -> range:
        return range(len(self.choices) - (length > Int32Codec.max_length))

    def _sizes(self, indices: Tensor, length: int) -> dict[int, int]:
        return {tag: self.choices[tag].size(indices, length) for tag in self._usable(length)}

    @override
    def encode(self, indices: Tensor, length: int) -> Tensor:
        if indices.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=indices.device)
        sizes = self._sizes(indices, length)
        tag = min(sizes, key=sizes.__getitem__)
        header = torch.full((1,), tag, dtype=torch.uint8, device=indices.device)
        return torch.cat([header, self.choices[tag].encode(indices, length)])

    @override
    def decode(self, buffer: Tensor, count: int, length: int) -> Tensor:
        if count == 0:
            return torch.empty(0, dtype=torch.int64, device=buffer.device)
        tag = int(buffer[0]) if buffer.numel() else -1
        if tag not in self._usable(length):
            raise ValueError(f"An index buffer starts with the codec number {tag}, which is none: it is damaged.")
        return self.choices[tag].decode(buffer[1:], count, length)

    @override
    def size(self, indices: Tensor, length: int) -> int:
        return 1 + min(self._sizes(indices, length).values()) if indices.numel() else 0

    @override
    def max_size(self, count: int, length: int) -> int:
        return 1 + min(self.choices[tag].max_size(count, length) for tag in self._usable(length)) if count else 0


INDEX_CODECS: dict[str, IndexCodec] = {
    codec.name: codec for codec in (Int32Codec(), Run16Codec(), RiceCodec(), BitmapCodec(), AutoCodec())
}
"""Index codecs by the name that `Wire.index` takes."""
