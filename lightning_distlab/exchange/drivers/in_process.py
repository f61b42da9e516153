"""All ranks of an exchange in one process, in lock step, with a clock for the links between them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.collectives.base import NativeRound, Receive, Round
from lightning_distlab.exchange.driver import Driver, Running, Ticket
from lightning_distlab.exchange.ledger import Account, Ledger
from lightning_distlab.payloads import DensePayload, Op, Payload


@dataclass(frozen=True)
class Link:
    """The link of each rank to all others, in the alpha-beta model: a round takes latency + bytes / bandwidth.

    Attributes:
        latency_s: Seconds from sending to arrival of an empty message (alpha).
        bandwidth_bytes_per_s: Bytes a second, each way, at the same time (1 / beta).

    Raises:
        ValueError: A negative or non-finite latency, a bandwidth that is not positive.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        """Check both numbers."""
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s={self.latency_s} must be a finite number of seconds, at least 0.")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s={self.bandwidth_bytes_per_s} must be greater than 0.")

    def seconds(self, size: float, rounds: int = 1) -> float:
        """Time of `rounds` dependent rounds that move `size` bytes through one rank altogether."""
        return rounds * self.latency_s + size / self.bandwidth_bytes_per_s


@dataclass(eq=False)
class _Open(Ticket):
    """An exchange under way on all ranks.

    Attributes:
        running: Its generators, by rank.
        accounts: Their books, by rank.
        posted: What each rank yielded last; empty when all have ended.
        results: What they returned.
    """

    running: list[Running[Any]]
    accounts: list[Account]
    posted: list[Round | NativeRound] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)


class InProcessDriver(Driver):
    """Plays N ranks, round by round; what one sends is what the other receives.

    Messages are handed over as objects, and only measured; since payloads are immutable and their encoding loses
    nothing, the result has the same bits as when they are really encoded (`faithful`). A collective of the backend adds
    the ranks' tensors in rank order, and all ranks share the one result, which nobody may change.

    Args:
        world_size: Number of ranks.
        link: What a round costs on `clock_s`; free when absent.
        faithful: Really encode and decode every message.
        ledger: Where everything is counted; `codec_s` is the sum over all ranks.
        axis: Mesh axis, for the ledger.

    Attributes:
        clock_s: Simulated seconds of communication: rounds one after the other, each as long as its slowest rank takes.

    Raises:
        ValueError: A world size below 1.
    """

    def __init__(
        self,
        world_size: int,
        link: Link | None = None,
        faithful: bool = False,
        ledger: Ledger | None = None,
        axis: str = "replicate",
    ) -> None:
        super().__init__(ledger, axis)
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1.")
        self.world_size = world_size
        self.ranks = tuple(range(world_size))
        self.link = link or Link()
        self.faithful = faithful
        self.clock_s = 0.0
        self._open: list[_Open] = []

    @override
    def open(self, running: Mapping[int, Running[Any]], key: tuple[int, int], label: str) -> Ticket:
        older = list(self._open)
        ticket = _Open(
            key,
            label,
            [running[rank] for rank in self.ranks],
            [self.ledger.account(rank, self.axis, label) for rank in self.ranks],
        )
        with _no_garbage_collection():
            self._resume(ticket, [None] * self.world_size)
            self._open.append(ticket)
            for exchange in older:
                self._advance(exchange)
        return ticket

    @override
    def finish(self, ticket: Ticket) -> dict[int, Any]:
        assert isinstance(ticket, _Open)
        position = self._open.index(ticket)
        with _no_garbage_collection():
            while ticket.posted:
                for exchange in self._open[: position + 1]:
                    self._advance(exchange)
        self._open.remove(ticket)
        return ticket.results

    def _advance(self, exchange: _Open) -> None:
        """Carry out the round that all ranks have posted, and let them post the next."""
        if not exchange.posted:
            return
        rounds = [posted for posted in exchange.posted if isinstance(posted, Round)]
        if len(rounds) == self.world_size:
            self._resume(exchange, self._deliver(rounds, exchange))
            return
        natives = [posted for posted in exchange.posted if isinstance(posted, NativeRound)]
        if len(natives) != self.world_size or len({native.op for native in natives}) > 1:
            raise AssertionError(f"{exchange.label}: the ranks do not agree on what to do: {exchange.posted}")
        self._resume(exchange, [[self._reduce(natives)]] * self.world_size)

    def _resume(self, exchange: _Open, answers: Sequence[Any]) -> None:
        """Send each generator its answer (None starts it) and keep what it yields or returns."""
        started = time.perf_counter()
        posted = []
        for rank, (running, answer) in enumerate(zip(exchange.running, answers, strict=True)):
            try:
                posted.append(running.send(answer))
            except StopIteration as stop:
                exchange.results[rank] = stop.value
        self.ledger.codec_s += time.perf_counter() - started
        if posted and exchange.results:
            raise AssertionError(f"{exchange.label}: ranks {sorted(exchange.results)} ended before the others")
        exchange.posted = posted

    def _deliver(self, rounds: Sequence[Round], exchange: _Open) -> list[list[Payload]]:
        """Hand all messages of a round over; what each rank receives."""
        world = self.world_size
        under_way: dict[int, tuple[Payload, int]] = {}  # sender * N + receiver -> message and its bytes
        sent: list[list[tuple[Payload, int]]] = []
        for rank, posted in enumerate(rounds):
            outgoing = [(payload, payload.wire_size()) for _, payload in posted.sends]
            for (peer, _), message in zip(posted.sends, outgoing, strict=True):
                under_way[rank * world + peer] = message
            sent.append(outgoing)
        if len(under_way) != sum(map(len, sent)):
            raise AssertionError(f"{exchange.label}: a rank sends two messages to the same peer in one round")
        encoded: dict[int, Tensor] = {}
        answers, busiest = [], 0
        for rank, posted in enumerate(rounds):
            answer, into = [], 0
            for receive in posted.receives:
                found = under_way.pop(receive.peer * world + rank, None)
                if found is None:
                    raise AssertionError(
                        f"{exchange.label}: rank {rank} waits for rank {receive.peer}, which sends nothing"
                    )
                payload, size = found
                into += size
                answer.append(_through_wire(payload, receive, encoded) if self.faithful else payload.arrived())
            busiest = max(busiest, into, self._record(exchange.accounts[rank], sent[rank], into))
            answers.append(answer)
        if under_way:
            lost = [f"{key // world} to {key % world}" for key in under_way]
            raise AssertionError(f"{exchange.label}: nobody receives the messages of ranks {', '.join(lost)}")
        self._wait(self.link.seconds(busiest))
        return answers

    def _reduce(self, natives: Sequence[NativeRound]) -> Payload:
        """What the backend would do, in rank order; time and bytes by the formula of its ring."""
        vectors = []
        for native in natives:
            assert isinstance(native.payload, DensePayload)
            vectors.append(native.payload.values)
        op, total = natives[0].op, vectors[0].clone()
        for vector in vectors[1:]:
            total = torch.maximum(total, vector, out=total) if op is Op.MAX else total.add_(vector)
        size = total.numel() * total.element_size()
        for rank in self.ranks:
            self._record_native(rank, op, size)
        rounds = 2 * (self.world_size - 1)
        self._wait(self.link.seconds(size * rounds / self.world_size, rounds))
        return DensePayload(total)

    def _wait(self, seconds: float) -> None:
        self.clock_s += seconds
        self.ledger.exchange_s += seconds


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Many ranks hold millions of small objects, which the collector would walk through again and again for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _through_wire(payload: Payload, receive: Receive, encoded: dict[int, Tensor]) -> Payload:
    """Encode (once for all receivers) and decode a message, as real ranks do."""
    buffer = encoded.get(id(payload))
    if buffer is None:
        buffer = encoded[id(payload)] = payload.encode()
    size, capacity = buffer.numel(), receive.capacity
    assert size == payload.wire_size(), f"wire_size() says {payload.wire_size()}, encode() makes {size} bytes"
    assert size <= capacity, f"{size} bytes do not fit into a receive buffer of {capacity}"
    assert capacity == payload.max_wire_size(), f"sender and receiver disagree: {payload.max_wire_size()}, {capacity}"
    behind = torch.full((capacity - size,), 0xA5, dtype=torch.uint8, device=buffer.device)
    return receive.template.decode(torch.cat([buffer, behind]))
