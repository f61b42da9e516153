"""One rank after the other collects everything: what all-reduce costs when nothing is clever."""

from __future__ import annotations

from functools import reduce
from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, Receive, Round, combine, sum_size
from lightning_distlab.payloads import Op, Payload


class Sequential(Collective):
    """W reduces, one per step: in step r all other ranks send what they have to rank r, which adds it up.

        W = 3    step 0: 1 -> 0, 2 -> 0    step 1: 0 -> 1, 2 -> 1    step 2: 0 -> 2, 1 -> 2

    W steps; (W - 1) M bytes sent per rank over all of them, and (W - 1) M into one node in each. Every rank adds in
    rank order, so all end with the same bits. The same bytes as `Gather` in W times as many steps: it exists to be
    compared with.
    """

    name: ClassVar[str] = "sequential"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX})
    merges_in_transit: ClassVar[bool] = False

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        if world_size == 1:
            return payload
        peers = [peer for peer in range(world_size) if peer != rank]
        contributions: list[Payload] = []
        for collector in range(world_size):
            if collector == rank:
                contributions = yield Round(receives=[Receive(peer, payload) for peer in peers])
            else:
                yield Round(sends=((collector, payload),))
        contributions.insert(rank, payload)
        if op is Op.MAX:
            return reduce(lambda a, b: combine(op, a, b), contributions)
        return type(payload).merge_all(contributions)

    @override
    def steps(self, world_size: int) -> int:
        return world_size if world_size > 1 else 0

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
