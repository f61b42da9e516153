"""Binomial tree: reduce to rank 0, then broadcast from it."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, Receive, Round, combine, sum_size
from lightning_distlab.payloads import Op, Payload


class Tree(Collective):
    """The parameter server with its load spread over a tree: whole payloads go up to rank 0, the sum comes down again.

        W = 6    up:    1->0 3->2 5->4    2->0    4->0        down:    0->4    0->2    0->1 2->3 4->5

    At distance d = 1, 2, 4, ... rank r with r mod 2d = d hands its sum to rank r - d; on the way down the arrows turn
    round. All ranks get the bits of rank 0.

    Steps 2 ceil(log2 W) for any W. Bytes of rank r: M going up (0 for rank 0), and M for each child going down, so no
    rank sends more than M ceil(log2 W).
    """

    name: ClassVar[str] = "tree"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX})

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        distances = _distances(world_size)
        total = payload
        for distance in distances:
            if rank % (2 * distance) == distance:
                yield Round(sends=((rank - distance, total),))
            elif rank % (2 * distance) == 0 and rank + distance < world_size:
                terms = min(distance, world_size - rank - distance)
                (arrived,) = yield Round(receives=(Receive(rank + distance, payload, terms),))
                total = combine(op, total, arrived)
            else:
                yield Round()
        for distance in reversed(distances):
            if rank % (2 * distance) == distance:
                (total,) = yield Round(receives=(Receive(rank - distance, payload, world_size),))
            elif rank % (2 * distance) == 0 and rank + distance < world_size:
                yield Round(sends=((rank + distance, total),))
            else:
                yield Round()
        return total

    @override
    def steps(self, world_size: int) -> int:
        return 2 * len(_distances(world_size))

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
        rank = rank or 0  # rank 0 has the most children
        terms = []
        for distance in _distances(world_size):
            if rank % (2 * distance) == distance:
                terms.append(min(distance, world_size - rank))
            elif rank % (2 * distance) == 0 and rank + distance < world_size:
                terms.append(world_size)
        return sum(sum_size(n, elements, density, entry_bytes, dense_bytes) for n in terms)


def _distances(world_size: int) -> list[int]:
    """1, 2, 4, ... below `world_size`."""
    return [1 << bit for bit in range((world_size - 1).bit_length())]
