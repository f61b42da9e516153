"""The algorithm that the alpha-beta model says is fastest for a message."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, Round
from lightning_distlab.collectives.gather import Gather
from lightning_distlab.collectives.halving_doubling import HalvingDoubling
from lightning_distlab.collectives.recursive_doubling import RecursiveDoubling
from lightning_distlab.collectives.ring import Ring
from lightning_distlab.collectives.tree import Tree
from lightning_distlab.payloads import Op, Payload, RoundSpec


class Auto(Collective):
    """For each message: the algorithm with the least steps x latency + bytes of the busiest rank / bandwidth.

    Bytes follow from what a message may hold at most, which all ranks know and agree on, not from what it holds: with
    c_1 the capacity of one rank's message and c_W that of the sum, s merged contributions count as min(s c_1, c_W).
    So small messages on many ranks go by recursive doubling or a tree, few ranks exchange directly, and large
    messages by halving and doubling, or by a ring where the number of ranks is no power of two.

    Candidates: gather, ring, recursive doubling, halving and doubling, tree. Ranges that have owners, and whole
    payloads, always go by `gather`.

    Args:
        latency_s: Of a message, in seconds.
        gbit_per_s: Of a rank's link, each way.

    Raises:
        ValueError: A number that no link has.
    """

    name: ClassVar[str] = "auto"
    ops: ClassVar[frozenset[Op]] = Gather.ops
    candidates: ClassVar[tuple[Collective, ...]] = (
        Gather(),
        RecursiveDoubling(),
        HalvingDoubling(),
        Ring(),
        Tree(),
    )

    def __init__(self, latency_s: float = 50e-6, gbit_per_s: float = 10.0) -> None:
        if not 0 <= latency_s < math.inf:
            raise ValueError(f"latency_s={latency_s!r} must be a finite number of seconds, at least 0.")
        if not gbit_per_s > 0:
            raise ValueError(f"gbit_per_s={gbit_per_s!r} must be greater than 0.")
        self.latency_s = latency_s
        self.gbit_per_s = gbit_per_s

    def choose(self, world_size: int, one: int, total: int) -> Collective:
        """The fastest candidate.

        Args:
            world_size: Number of ranks.
            one: Bytes of one rank's message.
            total: Bytes of the sum of all.
        """
        share = min(1.0, one / total) if total else 1.0

        def seconds(candidate: Collective) -> float:
            size = candidate.sum_bytes(world_size, total, share, 1.0, 1.0)
            return candidate.steps(world_size) * self.latency_s + size * 8e-9 / self.gbit_per_s

        return min(self.candidates, key=seconds)

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        chosen: Collective = self.candidates[0]
        if op in (Op.SUM, Op.MAX):
            chosen = self.choose(world_size, payload.max_wire_size(1), payload.max_wire_size(world_size))
        return (yield from chosen.run(op, payload, rank, world_size))

    @override
    def gather(self, payload: Payload, rank: int, world_size: int) -> Generator[Round, list[Payload], list[Payload]]:
        return (yield from self.candidates[0].gather(payload, rank, world_size))

    @override
    def supports(self, spec: RoundSpec) -> str | None:
        if spec.op not in (Op.SUM, Op.MAX):
            return self.candidates[0].supports(spec)
        return next((reason for c in self.candidates if (reason := c.supports(spec)) is not None), None)

    @override
    def steps(self, world_size: int) -> int:
        """Of the candidate for the smallest messages."""
        return self.choose(world_size, 0, 0).steps(world_size)

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
        one = min(density * elements * entry_bytes, elements * dense_bytes)
        total = min(world_size * density * elements * entry_bytes, elements * dense_bytes)
        chosen = self.choose(world_size, round(one), round(total))
        return chosen.sum_bytes(world_size, elements, density, entry_bytes, dense_bytes, rank=rank)
