"""Recursive halving and doubling (Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005, section 4.5)."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, Receive, Round, combine, sum_size
from lightning_distlab.payloads import Op, Payload


class HalvingDoubling(Collective):
    """The bytes of a ring in the steps of a butterfly: a reduce-scatter by halving, an all-gather by doubling.

    A vector is cut into p chunks. At distance p/2, p/4, ..., 1 a rank keeps the half of its chunks that holds its own,
    and hands the other half to its partner:

        p = 4, chunks that rank 0 holds:  0123 -> (23 to 2)  01 -> (1 to 1)  0 | 0 -> (0 to 1)  01 -> (01 to 2)  0123
                                          halving                              doubling

    Where W = p + e with p the largest power of two, the first 2 e ranks form pairs as in recursive doubling: the even
    rank hands its payload to the odd one before, and gets the result after.

    Both sides of a swap merge the lower number's half first, and owners' sums travel unchanged, so all ranks end with
    the same bits. Steps 2 log2 p, and 2 more where e > 0. Bytes per rank at W = p: 2 M (W - 1) / W; even ranks of pairs
    M, odd ones M more than the others.
    """

    name: ClassVar[str] = "halving_doubling"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX})

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        if world_size == 1:
            return payload
        power, extra = _split(world_size)
        swaps = power.bit_length() - 1
        if rank < 2 * extra and rank % 2 == 0:
            yield Round(sends=((rank + 1, payload),))
            for _ in range(2 * swaps):
                yield Round()
            whole = type(payload).concat(_owned(payload, power, world_size))
            (result,) = yield Round(receives=(Receive(rank + 1, whole),))
            return result
        total = payload
        if rank < 2 * extra:
            (arrived,) = yield Round(receives=(Receive(rank - 1, payload),))
            total = combine(op, arrived, payload)
        elif extra:
            yield Round()
        number = rank // 2 if rank < 2 * extra else rank - extra
        total = yield from _butterfly(op, payload, total, number, world_size)
        if rank < 2 * extra:
            yield Round(sends=((rank - 1, total),))
        elif extra:
            yield Round()
        return total

    @override
    def steps(self, world_size: int) -> int:
        power, extra = _split(world_size)
        return 2 * (power.bit_length() - 1) + (2 if extra else 0)

    @override
    def sum_bytes(
        self,
        world_size: int,
        elements: int,
        density: float,
        entry_bytes: float,
        dense_bytes: float,
        *,
        rank: int | None = None,
    ) -> float:
        power, extra = _split(world_size)
        if rank is None:
            rank = 1 if extra else 0
            sizes = [elements / power] * power
        else:
            sizes = [float(size) for size in _halved(elements, power)]

        def size(terms: int, chunks: range) -> float:
            return sum_size(terms, sum(sizes[chunk] for chunk in chunks), density, entry_bytes, dense_bytes)

        paired = rank < 2 * extra
        if paired and rank % 2 == 0:
            return size(1, range(power))
        number = rank // 2 if paired else rank - extra
        total = size(world_size, range(power)) if paired else 0.0
        for distance in _distances(power):
            total += size(_terms(number, 2 * distance, power, extra), _block(number ^ distance, distance))
            total += size(world_size, _block(number, distance))
        return total


def _butterfly(op: Op, like: Payload, total: Payload, number: int, world_size: int) -> Exchange:
    """Reduce-scatter by halving, then all-gather by doubling, among the participants.

    Args:
        op: SUM or MAX.
        like: One rank's contribution, for the shape.
        total: What this participant brings, merged from one rank or a pair.
        number: Of this participant, which is also the number of the chunk that it will own.
        world_size: Number of ranks.
    """
    power, extra = _split(world_size)
    kind, owned = type(like), _owned(like, power, world_size)
    for distance in _distances(power):
        other = number ^ distance
        mine, theirs = (0, 1) if number < other else (1, 0)
        shapes, halves = like.split_evenly(2), total.split_evenly(2)
        peer = _rank(other, extra)
        receive = Receive(peer, shapes[mine], _terms(other, 2 * distance, power, extra))
        (arrived,) = yield Round(((peer, halves[theirs]),), (receive,))
        like = shapes[mine]
        total = combine(op, halves[mine], arrived) if mine == 0 else combine(op, arrived, halves[mine])
    for distance in reversed(_distances(power)):
        other = number ^ distance
        peer = _rank(other, extra)
        shape = kind.concat([owned[chunk] for chunk in _block(other, distance)])
        (arrived,) = yield Round(((peer, total),), (Receive(peer, shape),))
        total = kind.concat([total, arrived] if number < other else [arrived, total])
    return total


def _owned(like: Payload, power: int, world_size: int) -> list[Payload]:
    """The form of the chunks that halving ends with, in order, each the sum over all ranks.

    Laid together they may hold more entries than a sum that was never cut: each chunk has a limit of its own.
    """
    chunks = [like]
    while len(chunks) < power:
        chunks = [half for chunk in chunks for half in chunk.split_evenly(2)]
    return [chunk.as_sum(world_size) for chunk in chunks]


def _halved(elements: int, power: int) -> list[int]:
    """Sizes of the chunks that halving ends with; an odd rest belongs to the first half."""
    sizes = [elements]
    while len(sizes) < power:
        sizes = [half for size in sizes for half in (size - size // 2, size // 2)]
    return sizes


def _split(world_size: int) -> tuple[int, int]:
    """`world_size` as the largest power of two in it, and the rest."""
    power = 1 << (world_size.bit_length() - 1)
    return power, world_size - power


def _distances(power: int) -> list[int]:
    """p/2, p/4, ..., 1."""
    return [power >> bit for bit in range(1, power.bit_length())]


def _block(number: int, distance: int) -> range:
    """Chunks that participant `number` holds when its next partner on the way up is `distance` away."""
    start = number // distance * distance
    return range(start, start + distance)


def _rank(number: int, extra: int) -> int:
    """The rank that takes part under a number; of a pair it is the odd one."""
    return 2 * number + 1 if number < extra else number + extra


def _terms(number: int, stride: int, power: int, extra: int) -> int:
    """Ranks merged in what a participant holds: those of all participants at multiples of `stride` from it."""
    return sum(2 if member < extra else 1 for member in range(number % stride, power, stride))
