"""gTop-k (Shi et al., ICDCS 2019): a butterfly whose sums never grow."""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, NativeRound, Receive, Round, combine, sum_size
from lightning_distlab.collectives.losers import Losers, added, cut, indices_of, parts_of, take
from lightning_distlab.collectives.recursive_doubling import RecursiveDoubling, merged_ranks, split_power
from lightning_distlab.payloads import Op, Payload


class GTopK(Collective):
    """Recursive doubling in which every merged sum is cut back to the k largest entries of what one rank may send.

        W = 4, k = 2    swap 0-1, 2-3: keep 2 of up to 4    swap 0-2, 1-3: keep 2 of up to 4

    An entry that a merge drops goes back to the ranks that have contributed to it, each its own part: everybody in the
    merged block sees what is dropped. So nothing is lost, and the sum of what arrives and of what comes back is the sum
    of what was sent. Where W = p + e is no power of two, the first 2 e ranks form pairs as in recursive doubling, and
    the odd rank of a pair takes back what is dropped of both.

    The entries that survive are not always the k largest of the whole sum: one that is second-rate everywhere may
    have been dropped before its contributions met. What is not sparse is summed as by recursive doubling.

    Steps log2 p, and 2 more where e > 0; bytes per rank k entries a step, whatever W.
    """

    name: ClassVar[str] = "gtopk"
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
        power, extra = split_power(world_size)

        def form(terms: int) -> Payload:
            """How a cut sum of that many contributions travels."""
            return payload.as_sum(terms).limited_like(payload)

        if rank < 2 * extra and rank % 2 == 0:
            yield Round(sends=((rank + 1, payload),))
            for _ in range(power.bit_length() - 1):
                yield Round()
            (result,) = yield Round(receives=(Receive(rank + 1, form(world_size)),))
            return result, None
        total = alive = payload
        lost: Losers = (None,) * len(parts_of(payload))
        if rank < 2 * extra:
            (arrived,) = yield Round(receives=(Receive(rank - 1, payload),))
            alive = combine(op, arrived, payload)
            total, lost = cut(alive, payload)
            alive, _ = take(alive, indices_of(lost))
        elif extra:
            yield Round()
        number = rank // 2 if rank < 2 * extra else rank - extra
        distance = 1
        while distance < power:
            other = number ^ distance
            peer = 2 * other + 1 if other < extra else other + extra
            (arrived,) = yield Round(((peer, total),), (Receive(peer, form(merged_ranks(other, distance, extra))),))
            both = combine(op, total, arrived) if number < other else combine(op, arrived, total)
            total, dropped = cut(both, payload)
            alive, own = take(alive, indices_of(dropped))
            lost = added(lost, own)
            distance *= 2
        if rank < 2 * extra:
            yield Round(sends=((rank - 1, total),))
        elif extra:
            yield Round()
        return total, lost

    @override
    def steps(self, world_size: int) -> int:
        return RecursiveDoubling().steps(world_size)

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
        rank = (1 if extra else 0) if rank is None else rank
        paired = rank < 2 * extra
        messages = 1 if paired and rank % 2 == 0 else power.bit_length() - 1 + paired
        return messages * sum_size(1, elements, density, entry_bytes, dense_bytes)
