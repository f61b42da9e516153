"""Balanced sparse all-reduce (after Ok-Topk, Li and Hoefler, PPoPP 2022): traffic that does not depend on W."""

from __future__ import annotations

from collections.abc import Generator
from functools import reduce as fold
from itertools import pairwise
from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, NativeRound, Receive, Round, combine, sum_size
from lightning_distlab.collectives.losers import Losers, arrived_at, cut, indices_of, parts_of, take, tightened
from lightning_distlab.payloads import Op, Payload, even_bounds


class Balanced(Collective):
    """Each rank adds one index range up, keeps its largest sums, and hands those to everybody.

        step 0    range p of what a rank sends goes to rank p, which adds all W contributions
        step 1    rank p keeps the k / W largest sums of its range and sends them to all others

    So a rank sends and receives no more than 2 k (W - 1) / W entries where supports spread evenly, and every sum that
    gets through is complete. A contribution whose sum was not kept goes back to its owner, who sees that its index is
    missing: nothing is lost. Ok-Topk moves the borders of ranges with the gradient and estimates one threshold for all
    of them; here ranges are even and each keeps the same number, so the entries kept are the largest of their range.

    2 steps. What is not sparse is summed by ranges and sent round, 2 M (W - 1) / W.
    """

    name: ClassVar[str] = "balanced"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX})
    cuts: ClassVar[bool] = True

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        result, _ = yield from self.reduce(op, payload, rank, world_size)
        return result

    @override
    def reduce(
        self, op: Op, payload: Payload, rank: int, world_size: int
    ) -> Generator[Round | NativeRound, list[Payload], tuple[Payload, Losers | None]]:
        if world_size == 1:
            return payload, None
        ranges = payload.split_evenly(world_size)
        kept = [
            like.as_sum(world_size).limited_like(like)
            for like in tightened(payload, world_size).split_evenly(world_size)
        ]
        peers = [(rank + 1 + i) % world_size for i in range(world_size - 1)]
        arrived = yield Round([(p, ranges[p]) for p in peers], [Receive(p, ranges[rank]) for p in peers])
        by_rank = {rank: ranges[rank], **dict(zip(peers, arrived, strict=True))}
        contributions = [by_rank[p] for p in range(world_size)]
        if op is Op.MAX:
            total = fold(lambda a, b: combine(op, a, b), contributions)
        else:
            total = type(payload).merge_all(contributions)
        own, _ = cut(total, kept[rank])
        sums = yield Round([(p, own) for p in peers], [Receive(p, kept[p]) for p in peers])
        by_rank = {rank: own, **dict(zip(peers, sums, strict=True))}
        result = type(payload).concat([by_rank[p] for p in range(world_size)])
        through, _ = take(payload, arrived_at(parts_of(result)))
        _, lost = take(payload, indices_of(parts_of(through)))
        return result, lost

    @override
    def steps(self, world_size: int) -> int:
        return 2 if world_size > 1 else 0

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
            sizes = [float(b - a) for a, b in pairwise(even_bounds(elements, world_size))]
        parts = [sum_size(1, size, density, entry_bytes, dense_bytes) for size in sizes]
        own = parts[rank or 0]
        return sum(parts) - own + (world_size - 1) * own if world_size > 1 else 0.0
