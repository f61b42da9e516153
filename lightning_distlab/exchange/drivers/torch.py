"""One rank of an exchange, over torch.distributed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from typing_extensions import override

from lightning_distlab.collectives.base import NativeRound, Receive, Round
from lightning_distlab.exchange.driver import Driver, Running, Ticket
from lightning_distlab.exchange.errors import RankLostError
from lightning_distlab.exchange.ledger import Account, Ledger
from lightning_distlab.exchange.lost_ranks import name_missing_ranks, someone_broke_off
from lightning_distlab.payloads import DensePayload, Op, Payload

_LOOK_ROUND = timedelta(seconds=0.5)
_REDUCE = {Op.SUM: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX}


@dataclass
class _Flight:
    """A message under way: the work, its peer, and the buffer, which must live until the work is done."""

    work: dist.Work
    peer: int
    buffer: Tensor


@dataclass(eq=False)
class _Open(Ticket):
    """An exchange under way on this rank.

    Attributes:
        running: Its generator.
        account: Its book.
        posted: The round under way; None when the generator has ended.
        rounds: Rounds posted so far.
        incoming: Messages expected in this round, in the order of its receives.
        outgoing: Sends of this round and of earlier ones that nobody has waited for.
        sent: Payload and bytes of each send of this round.
        fresh: The messages that arrived last and their buffers, by identity, for passing them on unchanged.
        result: What the generator returned.
    """

    running: Running[Any]
    account: Account
    posted: Round | NativeRound | None = None
    rounds: int = 0
    incoming: list[_Flight] = field(default_factory=list)
    outgoing: deque[_Flight] = field(default_factory=deque)
    sent: list[tuple[Payload, int]] = field(default_factory=list)
    fresh: dict[int, tuple[Payload, Tensor]] = field(default_factory=dict)
    result: Any = None


class TorchDriver(Driver):
    """Carries this rank's messages over a process group.

    On gloo a message is as long as it is (the receiver posts a buffer of the agreed capacity, and the length stands in
    the message), with a tag from step, bucket and round. NCCL can only move what both sides agree on beforehand, so
    there the whole capacity travels, and a round is one group of sends and receives. Nothing runs beside the calls to
    `open` and `finish`: no thread, no callback.

    In the ledger, `exchange_s` is the time spent waiting, `codec_s` the time inside encoders, decoders and generators.
    On CUDA the latter measures launches, not kernels.

    Args:
        group: The process group; the default one when None.
        device: Where payloads live.
        ledger: Where everything is counted.
        axis: Mesh axis, for the ledger.
        grace_s: How long survivors wait for each other to find out who is missing when a rank is lost.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        ledger: Ledger | None = None,
        axis: str = "replicate",
        grace_s: float = 5.0,
    ) -> None:
        super().__init__(ledger, axis)
        self.group = group if group is not None else distributed_c10d._get_default_group()
        self.device = torch.device(device)
        self.rank = dist.get_rank(self.group)
        self.ranks = (self.rank,)
        self.world_size = dist.get_world_size(self.group)
        self.grace_s = grace_s
        backend = self.group._get_backend(self.device).name()
        self._fixed_length = backend == "nccl"
        # gloo sends from main memory only
        self._wire_device = self.device if self._fixed_length else torch.device("cpu")
        self._open: list[_Open] = []

    @override
    def open(self, running: Mapping[int, Running[Any]], key: tuple[int, int], label: str) -> Ticket:
        older = list(self._open)
        ticket = _Open(key, label, running[self.rank], self.ledger.account(self.rank, self.axis, label))
        self._open.append(ticket)
        self._resume(ticket, None)
        for exchange in older:
            self._advance(exchange)
        return ticket

    @override
    def finish(self, ticket: Ticket) -> dict[int, Any]:
        assert isinstance(ticket, _Open)
        position = self._open.index(ticket)
        while ticket.posted is not None:
            for exchange in self._open[: position + 1]:
                self._advance(exchange)
        self._wait_for_sends(ticket, 0)
        self._open.remove(ticket)
        return {self.rank: ticket.result}

    def _advance(self, exchange: _Open) -> None:
        """Wait for the round under way and post the next one."""
        posted = exchange.posted
        if posted is None:
            return
        if isinstance(posted, NativeRound):
            self._wait_native(exchange.incoming[0], exchange)
            assert isinstance(posted.payload, DensePayload)
            values = posted.payload.values
            self._record_native(self.rank, posted.op, values.numel() * values.element_size())
            self._resume(exchange, [DensePayload(exchange.incoming[0].buffer)])
            return
        for flight in exchange.incoming:
            self._wait(flight, exchange)
        # A slow receiver should not hold up this rank's next round, so sends get one round more.
        self._wait_for_sends(exchange, len(exchange.sent))
        started = time.perf_counter()
        exchange.fresh = {}
        answers, received = [], 0
        for flight, receive in zip(exchange.incoming, posted.receives, strict=True):
            buffer = flight.buffer.to(self.device)
            payload = receive.template.decode(buffer)
            size = payload.wire_size()
            exchange.fresh[id(payload)] = (payload, buffer[:size])
            received += buffer.numel() if self._fixed_length else size
            answers.append(payload)
        self.ledger.codec_s += time.perf_counter() - started
        self._record(exchange.account, exchange.sent, received)
        self._resume(exchange, answers)

    def _resume(self, exchange: _Open, answers: list[Payload] | None) -> None:
        """Send the generator its answer (None starts it) and post the round that it yields."""
        started = time.perf_counter()
        exchange.incoming, exchange.sent = [], []
        try:
            exchange.posted = exchange.running.send(answers)  # type: ignore[arg-type]
        except StopIteration as stop:
            exchange.posted, exchange.result, exchange.fresh = None, stop.value, {}
        self.ledger.codec_s += time.perf_counter() - started
        if isinstance(exchange.posted, NativeRound):
            self._post_native(exchange.posted, exchange)
        elif exchange.posted is not None:
            self._post(exchange.posted, exchange)
        exchange.rounds += 1

    def _post_native(self, posted: NativeRound, exchange: _Open) -> None:
        """Start a collective of the backend, in place."""
        assert isinstance(posted.payload, DensePayload)
        values = posted.payload.values
        assert values.is_contiguous()
        try:
            work = dist.all_reduce(values, _REDUCE[posted.op], group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._lost(None, exchange, error) from error
        assert work is not None
        exchange.incoming = [_Flight(work, -1, values)]

    def _post(self, posted: Round, exchange: _Open) -> None:
        """Start all messages of a round, receives first."""
        started = time.perf_counter()
        buffers: dict[int, Tensor] = {}
        outgoing: list[tuple[int, Tensor]] = []
        for peer, payload in posted.sends:
            if id(payload) not in buffers:
                buffers[id(payload)] = self._encode(payload, exchange)
            outgoing.append((peer, buffers[id(payload)]))
            exchange.sent.append((payload, buffers[id(payload)].numel()))
        self.ledger.codec_s += time.perf_counter() - started
        if self._fixed_length:
            self._issue_batch(posted.receives, outgoing, exchange)
        else:
            self._issue(posted.receives, outgoing, exchange)

    def _encode(self, payload: Payload, exchange: _Open) -> Tensor:
        """The bytes of a message; those that just arrived where it is only passed on."""
        known = exchange.fresh.get(id(payload))
        buffer = payload.encode() if known is None else known[1]
        if self._fixed_length:
            padded = buffer.new_empty(payload.max_wire_size())
            padded[: buffer.numel()] = buffer
            return padded
        return buffer.to(self._wire_device)

    def _issue(self, receives: Sequence[Receive], outgoing: list[tuple[int, Tensor]], exchange: _Open) -> None:
        """Gloo: single messages, told apart by their tag."""
        tag = _tag(exchange.key, exchange.rounds)
        for receive in receives:
            buffer = torch.empty(receive.capacity, dtype=torch.uint8, device=self._wire_device)
            try:
                work = dist.irecv(buffer, group=self.group, group_src=receive.peer, tag=tag)
            except RuntimeError as error:
                raise self._lost(receive.peer, exchange, error) from error
            assert work is not None
            exchange.incoming.append(_Flight(work, receive.peer, buffer))
        for peer, buffer in outgoing:
            try:
                work = dist.isend(buffer, group=self.group, group_dst=peer, tag=tag)
            except RuntimeError as error:
                raise self._lost(peer, exchange, error) from error
            assert work is not None
            exchange.outgoing.append(_Flight(work, peer, buffer))

    def _issue_batch(self, receives: Sequence[Receive], outgoing: list[tuple[int, Tensor]], exchange: _Open) -> None:
        """NCCL: one group of calls, so that no order among them can block."""
        operations, peers, buffers = [], [], []
        for receive in receives:
            buffers.append(torch.empty(receive.capacity, dtype=torch.uint8, device=self._wire_device))
            operations.append(dist.P2POp(dist.irecv, buffers[-1], group=self.group, group_peer=receive.peer))
            peers.append(receive.peer)
        for peer, buffer in outgoing:
            buffers.append(buffer)
            operations.append(dist.P2POp(dist.isend, buffer, group=self.group, group_peer=peer))
            peers.append(peer)
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        # A backend that coalesces answers with one work for the whole group.
        works = works if len(works) == len(operations) else works * len(operations)
        flights = [_Flight(work, peer, buffer) for work, peer, buffer in zip(works, peers, buffers, strict=True)]
        exchange.incoming = flights[: len(receives)]
        exchange.outgoing.extend(flights[len(receives) :])

    def _wait_for_sends(self, exchange: _Open, keep: int) -> None:
        """Wait for all sends but the `keep` latest."""
        while len(exchange.outgoing) > keep:
            self._wait(exchange.outgoing.popleft(), exchange)

    def _wait(self, flight: _Flight, exchange: _Open) -> None:
        """Wait for one message."""
        started = time.perf_counter()
        try:
            flight.work.wait()
        except RuntimeError as error:
            raise self._lost(flight.peer, exchange, error) from error
        self.ledger.exchange_s += time.perf_counter() - started

    def _wait_native(self, flight: _Flight, exchange: _Open) -> None:
        """Wait for a collective of the backend; on gloo, look now and then whether others have given it up."""
        started = time.perf_counter()
        while True:
            try:
                flight.work.wait(*([] if self._fixed_length else [_LOOK_ROUND]))
                break
            except RuntimeError as error:
                # Work that failed is completed; work that is merely not ready goes on behind the short timeout.
                over = self._fixed_length or flight.work.is_completed()
                if over or someone_broke_off(distributed_c10d._get_default_store()):
                    raise self._lost(None, exchange, error) from error
        self.ledger.exchange_s += time.perf_counter() - started

    def _lost(self, peer: int | None, exchange: _Open, cause: RuntimeError) -> RankLostError:
        """The error that names who is gone; leaves a note for the others."""
        ranks = dist.get_process_group_ranks(self.group)
        missing = name_missing_ranks(
            distributed_c10d._get_default_store(),
            ranks,
            ranks[self.rank],
            suspect=None if peer is None else ranks[peer],
            grace_s=self.grace_s,
        )
        step, bucket = exchange.key
        what = f"{exchange.label} on axis {self.axis!r} (step {step}, bucket {bucket}, round {exchange.rounds})"
        return RankLostError(missing, what, str(cause).splitlines()[0])


def _tag(key: tuple[int, int], round_number: int) -> int:
    """A tag for gloo, 31 bits. Messages of one tag and pair arrive in order, so that it may wrap around."""
    step, bucket = key
    return (step % 1024 << 21) | (bucket % 1024 << 11) | round_number % 2048
