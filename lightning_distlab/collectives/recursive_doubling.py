"""Recursive doubling, the butterfly of whole payloads (Thakur, Rabenseifner and Gropp 2005, section 4.5)."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, Receive, Round, combine, sum_size
from lightning_distlab.payloads import Op, Payload


class RecursiveDoubling(Collective):
    """In step t a rank swaps all it has with the rank at distance 2^t; log2 W steps, whatever the size of the vector.

        W = 8, t = 0: 0-1 2-3 4-5 6-7     t = 1: 0-2 1-3 4-6 5-7     t = 2: 0-4 1-5 2-6 3-7

    Where W = p + e with p the largest power of two, the first 2 e ranks form pairs. The even rank of a pair hands its
    payload to the odd one before the butterfly, and gets the result after it; p ranks, numbered anew, take part:

        W = 6, p = 4, e = 2: 0->1 2->3, butterfly of {1, 3, 4, 5} as 0..3, 1->0 3->2

    Both sides of a swap merge the lower number's payload with the higher one's in that order, so all ranks evaluate
    one expression tree and end with the same bits.

    Steps log2 p, and 2 more where e > 0. Dense bytes per rank: M log2 p; even ranks of pairs M, odd ones
    M (log2 p + 1). Sparse: in step t the union of the supports of the (at least 2^t) ranks merged so far.
    """

    name: ClassVar[str] = "recursive_doubling"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX})

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        if world_size == 1:
            return payload
        power, extra = split_power(world_size)
        if rank < 2 * extra and rank % 2 == 0:
            yield Round(sends=((rank + 1, payload),))
            for _ in range(power.bit_length() - 1):
                yield Round()
            (result,) = yield Round(receives=(Receive(rank + 1, payload, world_size),))
            return result
        total = payload
        if rank < 2 * extra:
            (arrived,) = yield Round(receives=(Receive(rank - 1, payload),))
            total = combine(op, arrived, payload)
        elif extra:
            yield Round()
        number = rank // 2 if rank < 2 * extra else rank - extra
        distance = 1
        while distance < power:
            other = number ^ distance
            peer = 2 * other + 1 if other < extra else other + extra
            terms = merged_ranks(other, distance, extra)
            (arrived,) = yield Round(((peer, total),), (Receive(peer, payload, terms),))
            total = combine(op, total, arrived) if number < other else combine(op, arrived, total)
            distance *= 2
        if rank < 2 * extra:
            yield Round(sends=((rank - 1, total),))
        elif extra:
            yield Round()
        return total

    @override
    def steps(self, world_size: int) -> int:
        power, extra = split_power(world_size)
        return power.bit_length() - 1 + (2 if extra else 0)

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
        power, extra = split_power(world_size)
        if rank is None:
            rank = 1 if extra else 0  # belongs to a pair if there is any, and its blocks hold the most pairs
        paired = rank < 2 * extra
        if paired and rank % 2 == 0:
            terms = [1]
        else:
            number = rank // 2 if paired else rank - extra
            terms = [merged_ranks(number, 1 << t, extra) for t in range(power.bit_length() - 1)] + [world_size] * paired
        return sum(sum_size(n, elements, density, entry_bytes, dense_bytes) for n in terms)


def split_power(world_size: int) -> tuple[int, int]:
    """`world_size` as the largest power of two in it, and the rest."""
    power = 1 << (world_size.bit_length() - 1)
    return power, world_size - power


def merged_ranks(number: int, distance: int, extra: int) -> int:
    """Ranks merged in what participant `number` sends at `distance`: its block of participants, pairs counted twice."""
    start = number // distance * distance
    return distance + max(0, min(start + distance, extra) - start)
