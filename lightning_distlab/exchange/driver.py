"""Who carries out the rounds of an exchange: the contract of both drivers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_distlab.collectives.base import NativeRound, Round
from lightning_distlab.exchange.ledger import Account, Ledger
from lightning_distlab.payloads import Bundle, Op, Payload

T = TypeVar("T")
Running = Generator[Round | NativeRound, list[Payload], T]
"""Anything that yields rounds: a bare collective, or a whole bucket with its compressors."""


@dataclass(eq=False)
class Ticket:
    """An open exchange: one running generator for every rank that this process plays.

    Attributes:
        key: (step, bucket), the tag by which messages of several open exchanges are told apart.
        label: Name of the collective, for the ledger.
    """

    key: tuple[int, int]
    label: str


class Driver(ABC):
    """Carries out the rounds of exchanges and counts them.

    Several exchanges can be open at the same time. Every rank opens the same exchanges in the same order; `open` posts
    the first round of the new one and brings each older one forward by one round, so that all ranks issue their
    messages in one agreed order and the work of `finish` hides behind whatever happens between the calls.

    Attributes:
        ranks: The ranks that this process plays: one under torch.distributed, all of them in one process.
        world_size: Number of ranks.
        axis: Mesh axis, for the ledger.
        ledger: Where everything is counted.
    """

    ranks: tuple[int, ...]
    world_size: int

    def __init__(self, ledger: Ledger | None = None, axis: str = "replicate") -> None:
        self.ledger = ledger or Ledger()
        self.axis = axis

    @abstractmethod
    def open(self, running: Mapping[int, Running[Any]], key: tuple[int, int], label: str) -> Ticket:
        """Start an exchange; `running` holds one generator for each of `ranks`."""

    @abstractmethod
    def finish(self, ticket: Ticket) -> dict[int, Any]:
        """Carry an exchange (and, round by round, those opened before it) to its end; what the generators returned."""

    def run(self, running: Mapping[int, Running[T]], label: str = "exchange") -> dict[int, T]:
        """Open and finish at once."""
        return self.finish(self.open(running, (0, 0), label))

    def _record(self, account: Account, sent: Sequence[tuple[Payload, int]], received: int) -> int:
        """Enter one round: (payload, bytes) of each send, bytes received; returns the bytes sent."""
        out = 0
        for payload, size in sent:
            out += size
            if isinstance(payload, Bundle):
                account.header_bytes += payload.header_size
        account.bytes_sent += out
        account.bytes_received += received
        account.messages += len(sent)
        account.steps += 1
        peak = out if out > received else received
        account.peak_step_bytes = max(account.peak_step_bytes, peak)
        return out

    def _record_native(self, rank: int, op: Op, size: int) -> None:
        """Enter a collective of the backend on M = `size` bytes: its ring moves 2 M (N - 1) / N in 2 (N - 1) steps."""
        account = self.ledger.account(rank, self.axis, f"native:{op.value}")
        steps = 2 * (self.world_size - 1)
        moved = round(size * steps / self.world_size)
        account.bytes_sent += moved
        account.bytes_received += moved
        account.messages += steps
        account.steps += steps
        account.modelled = True
