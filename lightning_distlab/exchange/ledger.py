"""Exact book-keeping of what was sent: it counts the rounds that drivers carry out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Account:
    """Totals of one rank on one mesh axis under one label.

    Attributes:
        bytes_sent: On the wire, headers included.
        header_bytes: The share of it that is headers.
        bytes_received: On the wire, headers included.
        messages: Messages sent.
        steps: Rounds carried out, one after the other.
        peak_step_bytes: Largest max(in, out) of one round.
        modelled: The bytes come from a formula, because the backend moved them itself.
    """

    bytes_sent: int = 0
    header_bytes: int = 0
    bytes_received: int = 0
    messages: int = 0
    steps: int = 0
    peak_step_bytes: int = 0
    modelled: bool = False


@dataclass
class Ledger:
    """Bytes, messages and steps per rank and mesh axis, and what they replaced.

    Attributes:
        accounts: Keyed by (rank, mesh axis, label); the label is the collective's name, or `native:<op>`.
        dense_bytes: What the exchanged gradients weigh uncompressed, summed over steps, for one rank.
        payload_bytes: What one rank's own messages weigh before any forwarding (the papers' convention), summed.
        codec_s: Seconds spent in compressing, encoding, decoding and merging.
        exchange_s: Seconds spent waiting for messages.
        steps: Optimizer steps communicated.
        skipped_steps: Of these, how many were skipped because a gradient was not finite.
    """

    accounts: dict[tuple[int, str, str], Account] = field(default_factory=lambda: defaultdict(Account))
    dense_bytes: int = 0
    payload_bytes: int = 0
    codec_s: float = 0.0
    exchange_s: float = 0.0
    steps: int = 0
    skipped_steps: int = 0

    def account(self, rank: int, axis: str, label: str) -> Account:
        """The account of a rank on an axis, opened on first use."""
        return self.accounts[rank, axis, label]

    def bytes_sent(self, rank: int) -> int:
        """Bytes a rank has sent on all axes."""
        return sum(account.bytes_sent for (owner, _, _), account in self.accounts.items() if owner == rank)
