"""Everybody sends everything to everybody: one step, at the price of bytes that grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Generator
from functools import reduce
from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, Receive, Round, combine, sum_size
from lightning_distlab.payloads import Op, Payload


class Gather(Collective):
    """Direct exchange: one message from each rank to each other rank, all at the same time.

        rank 0: x0 -> 1, 2, 3      rank 2: x2 -> 0, 1, 3      every rank then adds x0 + x1 + x2 + x3
        rank 1: x1 -> 0, 2, 3      rank 3: x3 -> 0, 1, 2      itself, in rank order

    1 step, (W - 1) M bytes per rank, for any W. With sparse payloads nothing is merged on the way, so a message stays
    as small as its sender made it. Best for few ranks, slow links and little to send. `SCATTER_SUM` sends index range
    p to rank p only, `ALL_GATHER` one's own range to all: one step and about M bytes each.
    """

    name: ClassVar[str] = "gather"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX, Op.GATHER, Op.ALL_GATHER, Op.SCATTER_SUM})
    merges_in_transit: ClassVar[bool] = False

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        if world_size == 1:
            return payload
        if op is Op.SCATTER_SUM:
            ranges = payload.split_evenly(world_size)
            return type(payload).merge_all((yield from _exchange(ranges, [ranges[rank]] * world_size, rank)))
        if op is Op.ALL_GATHER:
            ranges = payload.split_evenly(world_size)
            return type(payload).concat((yield from _exchange([ranges[rank]] * world_size, ranges, rank)))
        payloads = yield from self.gather(payload, rank, world_size)
        if op is Op.MAX:
            return reduce(lambda a, b: combine(op, a, b), payloads)
        return type(payload).merge_all(payloads)

    @override
    def gather(self, payload: Payload, rank: int, world_size: int) -> Generator[Round, list[Payload], list[Payload]]:
        return (yield from _exchange([payload] * world_size, [payload] * world_size, rank))

    @override
    def steps(self, world_size: int) -> int:
        return 1 if world_size > 1 else 0

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
        return (world_size - 1) * sum_size(1, elements, density, entry_bytes, dense_bytes)


def _exchange(
    outgoing: list[Payload], likes: list[Payload], rank: int
) -> Generator[Round, list[Payload], list[Payload]]:
    """Send `outgoing[p]` to each other rank p; what came from each rank, in rank order, one's own in its place.

    Args:
        outgoing: One payload for each rank; the one for this rank itself stays here.
        likes: The shape of what comes from each rank.
        rank: This rank.
    """
    # Starting behind oneself spreads the load: no rank is everybody's first target.
    peers = [(rank + 1 + i) % len(outgoing) for i in range(len(outgoing) - 1)]
    arrived = yield Round([(p, outgoing[p]) for p in peers], [Receive(p, likes[p]) for p in peers])
    by_rank = dict(zip(peers, arrived, strict=True))
    by_rank[rank] = outgoing[rank]
    return [by_rank[p] for p in range(len(outgoing))]
