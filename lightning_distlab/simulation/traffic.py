"""Rounds and bytes of one exchange of a model's gradient, for any number of ranks, without playing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_distlab.collectives import (
    Auto,
    Collective,
    GTopK,
    Hierarchical,
    ParameterServer,
    RecursiveDoubling,
    Sequential,
    Tree,
)
from lightning_distlab.collectives.halving_doubling import HalvingDoubling
from lightning_distlab.collectives.recursive_doubling import split_power
from lightning_distlab.exchange.drivers import Link
from lightning_distlab.payloads import Op, Payload


@dataclass(frozen=True)
class Traffic:
    """What one exchange asks of the busiest node of each round.

    Attributes:
        rounds: One after the other.
        bytes: Through the busiest node, each round's added up.
        inner_rounds: Of these, rounds inside a node, on a link of its own.
        inner_bytes: Bytes of those.
    """

    rounds: int
    bytes: float
    inner_rounds: int = 0
    inner_bytes: float = 0.0

    def seconds(self, link: Link, inner: Link, handshakes: int = 1) -> tuple[float, float]:
        """Time of an exchange, in two parts: waiting for messages to arrive, and keeping links busy.

        Args:
            link: Between nodes.
            inner: Inside a node.
            handshakes: One-way delays that a message costs: 1, or 2 where the receiver says first that it is ready,
                as in gloo.
        """
        waiting = handshakes * (self.rounds * link.latency_s + self.inner_rounds * inner.latency_s)
        busy = self.bytes / link.bandwidth_bytes_per_s + self.inner_bytes / inner.bandwidth_bytes_per_s
        return waiting, busy


def traffic_of(
    messages: Sequence[tuple[Op, Payload]], collective: Collective, ranks: int, dense_bytes: float
) -> Traffic:
    """Traffic of what one rank asks for in a step, all ranks' contributions taken as alike and disjoint.

    Args:
        messages: Operations and this rank's payloads, in order.
        collective: Who carries them.
        ranks: Number of ranks.
        dense_bytes: The whole gradient, which averages inside nodes where the collective has nodes.

    Raises:
        ValueError: The collective does not work on that many ranks.
    """
    collective.check_world(ranks)
    if ranks == 1:
        return Traffic(0, 0.0)
    rounds, total = 0, 0.0
    inner_rounds, inner = 0, 0.0
    k = collective.ranks_per_node
    if k > 1:
        inner_rounds, inner = 2 * (k - 1), 2 * dense_bytes * (k - 1) / k
    for op, message in messages:
        if op in (Op.SCATTER_SUM, Op.ALL_GATHER):
            rounds += 1
            total += message.max_wire_size() * (ranks - 1) / ranks
            continue
        one, most = float(message.max_wire_size(1)), float(message.max_wire_size(ranks))
        if isinstance(collective, Hierarchical):
            nodes = ranks // k
            rounds += collective.outer.steps(nodes)
            total += critical_bytes(collective.outer, nodes, one / k, float(message.max_wire_size(nodes)) / k)
            inner_rounds += k > 1
            inner += (k - 1) * float(message.max_wire_size(nodes)) / k
        else:
            chosen = collective.choose(ranks, round(one), round(most)) if isinstance(collective, Auto) else collective
            rounds += chosen.steps(ranks)
            total += critical_bytes(chosen, ranks, one, most)
    return Traffic(rounds, total, inner_rounds, inner)


def critical_bytes(collective: Collective, ranks: int, one: float, total: float) -> float:
    """Sum over the rounds of one `Op.SUM` of the most that any rank sends or receives.

    Args:
        collective: The algorithm.
        ranks: Number of ranks.
        one: Bytes of one rank's message.
        total: Bytes of the sum of all; s merged contributions take min(s one, total).
    """
    if ranks == 1 or total == 0:
        return 0.0
    if isinstance(collective, ParameterServer):
        return (ranks - 1) * (one + total)
    if isinstance(collective, Sequential):
        return ranks * (ranks - 1) * one
    if isinstance(collective, Tree):
        levels = (ranks - 1).bit_length()
        return levels * total + sum(min(float(2**level) * one, total) for level in range(levels))
    share = min(1.0, one / total)
    sent = collective.sum_bytes(ranks, round(total), share, 1.0, 1.0)
    if isinstance(collective, RecursiveDoubling | HalvingDoubling | GTopK):
        _, extra = split_power(ranks)
        return sent + (one if extra else 0.0)  # the busiest rank receives its partner's message first
    return sent
