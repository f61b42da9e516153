"""Two levels: dense inside a node, where links are fast, and any algorithm between nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, NativeRound, Receive, Round, sum_size
from lightning_distlab.collectives.halving_doubling import HalvingDoubling
from lightning_distlab.collectives.recursive_doubling import RecursiveDoubling
from lightning_distlab.collectives.ring import Ring
from lightning_distlab.collectives.tree import Tree
from lightning_distlab.payloads import Op, Payload, RoundSpec, even_bounds

OUTER: dict[str, type[Collective]] = {kind.name: kind for kind in (Ring, RecursiveDoubling, HalvingDoubling, Tree)}
"""Algorithms between nodes, by name."""


class Hierarchical(Collective):
    """Ranks r k, ..., r k + k - 1 make node r. They average first, and then compress as one.

        within a node     ring all-reduce of the dense gradient          2 (k - 1) steps
        compressor        the same on all ranks of a node: same gradient, same memory, same payload
        between nodes     local rank l takes index range l of the payload to the ranks l of the other nodes
        within a node     each local rank hands its range of the sum to the others      1 step

    So there is one residual a node (each of its ranks keeps a copy), N/k contributions are averaged, and every network
    port of a node carries 1/k of what a leader would have to send alone. Bytes between nodes: those of the outer
    algorithm among N/k ranks for a vector of M/k. Bytes inside: 2 M (k - 1)/k dense, and (k - 1) shares of the sum.

    Args:
        ranks_per_node: k; must divide the number of ranks.
        outer: Algorithm between nodes: `ring`, `recursive_doubling`, `halving_doubling` or `tree`.

    Raises:
        ValueError: No such algorithm, or k below 1.
    """

    name: ClassVar[str] = "hierarchical"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX})

    def __init__(self, ranks_per_node: int = 2, outer: str = "recursive_doubling") -> None:
        if isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int) or ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={ranks_per_node!r} must be an integer, at least 1.")
        if outer not in OUTER:
            raise ValueError(f"outer={outer!r} must be one of {', '.join(sorted(OUTER))}.")
        self.ranks_per_node = ranks_per_node
        self.outer = OUTER[outer]()

    @override
    def check_world(self, world_size: int) -> None:
        if world_size % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} does not divide {world_size} ranks; use a divisor of them."
            )

    @override
    def contributor(self, rank: int, world_size: int) -> tuple[int, int]:
        return rank // self.ranks_per_node, world_size // self.ranks_per_node

    @override
    def within(self, payload: Payload, rank: int, world_size: int) -> Exchange:
        node, local = divmod(rank, self.ranks_per_node)
        first = node * self.ranks_per_node
        exchange = Ring().run(Op.SUM, payload, local, self.ranks_per_node)
        return (yield from _renumbered(exchange, lambda peer: first + peer))

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        self.check_world(world_size)
        k, nodes = self.ranks_per_node, world_size // self.ranks_per_node
        node, local = divmod(rank, k)
        ranges = payload.split_evenly(k)
        exchange = self.outer.run(op, ranges[local], node, nodes)
        own = yield from _renumbered(exchange, lambda peer: peer * k + local)
        if k == 1:
            return own
        own = own.limited_like(ranges[local].as_sum(nodes))
        peers = [(local + 1 + i) % k for i in range(k - 1)]
        arrived = yield Round(
            [(node * k + peer, own) for peer in peers],
            [Receive(node * k + peer, ranges[peer], nodes) for peer in peers],
        )
        by_local = {local: own, **dict(zip(peers, arrived, strict=True))}
        return type(payload).concat([by_local[i] for i in range(k)])

    @override
    def supports(self, spec: RoundSpec) -> str | None:
        if spec.op not in self.ops:
            return f"{self.name} cannot perform {spec.op.name}"
        return self.outer.supports(spec)

    @override
    def steps(self, world_size: int) -> int:
        return self.outer.steps(world_size // self.ranks_per_node) + (self.ranks_per_node > 1)

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
        k, nodes = self.ranks_per_node, world_size // self.ranks_per_node
        node, local = (None, 0) if rank is None else divmod(rank, k)
        bounds = even_bounds(elements, k)
        share = bounds[local + 1] - bounds[local]
        between = self.outer.sum_bytes(nodes, share, density, entry_bytes, dense_bytes, rank=node)
        return between + (k - 1) * sum_size(nodes, share, density, entry_bytes, dense_bytes)


def _renumbered(exchange: Exchange, number: Callable[[int], int]) -> Exchange:
    """An exchange among some of the ranks: peers become what `number` says."""
    answer: list[Payload] | None = None
    while True:
        try:
            posted = exchange.send(answer) if answer is not None else next(exchange)
        except StopIteration as stop:
            result: Payload = stop.value
            return result
        assert not isinstance(posted, NativeRound)
        answer = yield Round(
            [(number(peer), payload) for peer, payload in posted.sends],
            [receive._replace(peer=number(receive.peer)) for receive in posted.receives],
        )
