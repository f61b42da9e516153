"""Ring all-reduce over index ranges: reduce-scatter, then all-gather (Patarasuk and Yuan 2009)."""

from __future__ import annotations

from collections.abc import Generator
from itertools import pairwise
from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, Receive, Round, combine, sum_size
from lightning_distlab.payloads import Op, Payload, even_bounds


class Ring(Collective):
    """Each rank talks to its two neighbours only; a vector travels as W chunks, so no link ever carries all of it.

    Chunk c starts at rank c + 1 and collects contributions on its way round to its owner, rank c:

        W = 4, chunk sent by each rank       step 0   step 1   step 2  | step 3   step 4   step 5
        rank 0 -> 1                            3        2        1     |   0        3        2
        rank 1 -> 2                            0        3        2     |   1        0        3
        rank 2 -> 3                            1        0        3     |   2        1        0
        rank 3 -> 0                            2        1        0     |   3        2        1
                                             reduce-scatter: sums grow | all-gather: sums go round

    so in step s, rank r sends chunk r - 1 - s (mod W), merged from s + 1 ranks, and after W - 1 steps owns the sum of
    chunk r. The owners' sums then go round unchanged, which is why all ranks end with the same bits.

    Steps 2 (W - 1). Bytes of rank r, with |c| the size of chunk c: 2 M - |r| - |r + 1|, that is 2 M (W - 1) / W where
    W divides M. Sparse chunks grow while they collect: sum over s < W of K_s / W entries, then K_W (W - 1) / W for the
    way round, with K_s the entries in the union of s supports; a chunk turns dense where that is smaller.
    """

    name: ClassVar[str] = "ring"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX, Op.SCATTER_SUM, Op.ALL_GATHER})

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        if world_size == 1:
            return payload
        chunks = payload.split_evenly(world_size)
        if op is Op.ALL_GATHER:
            return type(payload).concat((yield from _all_gather(chunks, chunks[rank], 1, rank)))
        own = yield from _reduce_scatter(op, chunks, rank)
        if op is Op.SCATTER_SUM:
            return own
        return type(payload).concat((yield from _all_gather(chunks, own, world_size, rank)))

    @override
    def steps(self, world_size: int) -> int:
        return 2 * (world_size - 1)

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
        if rank is None:
            sizes = [elements / world_size] * world_size
        else:
            sizes = [b - a for a, b in pairwise(even_bounds(elements, world_size))]

        def size(terms: int, chunk: int) -> float:
            return sum_size(terms, sizes[chunk % world_size], density, entry_bytes, dense_bytes)

        return sum(
            size(step + 1, (rank or 0) - 1 - step) + size(world_size, (rank or 0) - step)
            for step in range(world_size - 1)
        )


def _reduce_scatter(op: Op, chunks: list[Payload], rank: int) -> Generator[Round, list[Payload], Payload]:
    """W - 1 steps, after which this rank holds chunk `rank` combined over all ranks."""
    world_size = len(chunks)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    partial = chunks[left]
    for step in range(world_size - 1):
        mine = chunks[(rank - 2 - step) % world_size]
        (arrived,) = yield Round(((right, partial),), (Receive(left, mine, step + 1),))
        partial = combine(op, arrived, mine)
    return partial


def _all_gather(
    chunks: list[Payload], own: Payload, terms: int, rank: int
) -> Generator[Round, list[Payload], list[Payload]]:
    """W - 1 steps, after which this rank holds every rank's `own`, in rank order.

    Args:
        chunks: Shapes of what each rank contributes.
        own: This rank's contribution.
        terms: Contributions merged in each of them.
        rank: This rank.
    """
    world_size = len(chunks)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    result = list(chunks)
    result[rank] = passing = own
    for step in range(world_size - 1):
        index = (rank - 1 - step) % world_size
        (passing,) = yield Round(((right, passing),), (Receive(left, chunks[index], terms),))
        result[index] = passing
    return result
