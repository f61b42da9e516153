"""What a run communicated, as numbers, as a table for the terminal, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_distlab.exchange.ledger import Account, Ledger

MIB = 2**20

FORMULAS = (
    "payload ratio = dense / payload. dense: gradients exchanged x bytes per entry, every step. payload: what a rank's "
    "own messages weigh before any forwarding (the papers' convention).",
    "sent = all bytes that this rank put on the wire, forwarding and headers included (dense ring: 2 (N-1)/N x dense).",
    "share of step = (codec + exchange) / step; exchange is time spent waiting, hidden transfers cost none; step runs "
    "from the start of a batch to its end, accumulation included, data loading not.",
)


@runtime_checkable
class CountsCommunication(Protocol):
    """A strategy that keeps books."""

    @property
    def ledger(self) -> Ledger:
        """Bytes, messages and steps."""
        ...

    def comm_summary(self) -> dict[str, float]:
        """Totals so far under `comm/` names: bytes, milliseconds, steps."""
        ...


@dataclass(frozen=True)
class CommReport:
    """One rank's traffic over a run.

    Attributes:
        totals: The strategy's own numbers, by `comm/` name; bytes and milliseconds over the whole run.
        accounts: By (mesh axis, label), of this rank.
        step_s: Seconds of all steps together.
        ranks: Ranks over which gradients are averaged.
    """

    totals: Mapping[str, float]
    accounts: Mapping[tuple[str, str], Account]
    step_s: float
    ranks: int

    @classmethod
    def of(cls, strategy: CountsCommunication, *, rank: int, ranks: int, step_s: float) -> CommReport:
        """Read a strategy's books."""
        own = {(axis, label): account for (r, axis, label), account in strategy.ledger.accounts.items() if r == rank}
        return cls(strategy.comm_summary(), own, step_s, ranks)

    @property
    def steps(self) -> int:
        """Optimizer steps communicated."""
        return int(self.totals["comm/steps"])

    def metrics(self) -> dict[str, float]:
        """All numbers for loggers: the strategy's totals, and what follows from them per step."""
        steps = max(self.steps, 1)
        busy_ms = self.totals["comm/codec_ms"] + self.totals["comm/exchange_ms"]
        return {
            **self.totals,
            "comm/codec_ms_per_step": self.totals["comm/codec_ms"] / steps,
            "comm/exchange_ms_per_step": self.totals["comm/exchange_ms"] / steps,
            "comm/step_ms": 1e3 * self.step_s / steps,
            "comm/share_of_step": busy_ms / (1e3 * self.step_s) if self.step_s else 0.0,
            "comm/mib_per_step": self.totals["comm/bytes_sent_per_rank"] / MIB / steps,
        }

    def rows(self) -> list[tuple[str, str, int, int, float, str]]:
        """(axis, label, steps, messages, MiB sent, counted or modelled), by axis and label."""
        return [
            (axis, label, a.steps, a.messages, a.bytes_sent / MIB, "formula" if a.modelled else "counted")
            for (axis, label), a in sorted(self.accounts.items())
        ]

    def write_csv(self, path: Path) -> None:
        """Write `axis,label,quantity,value`: totals under axis and label `all`, in bytes, ms and counts."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["axis", "label", "quantity", "value"])
            for name, value in self.metrics().items():
                writer.writerow(["all", "all", name, _number(value)])
            for (axis, label), a in sorted(self.accounts.items()):
                counts = {"steps": a.steps, "messages": a.messages, "bytes_sent": a.bytes_sent}
                more = {"header_bytes": a.header_bytes, "bytes_received": a.bytes_received, "modelled": int(a.modelled)}
                for name, count in (counts | more).items():
                    writer.writerow([axis, label, name, count])

    def render(self) -> Table | Group:
        """The table at the end of a run."""
        if self.ranks == 1:
            note = Table(title="Communication", show_header=False)
            note.add_row("One rank: nothing is communicated.")
            return note
        footer = Text("\n".join(FORMULAS), style="dim")
        return Group(self._totals_table(), self._accounts_table(), footer)

    def _totals_table(self) -> Table:
        m = self.metrics()
        table = Table(title=f"Communication of rank 0 of {self.ranks}, {self.steps} steps", show_header=False)
        table.add_column("quantity")
        table.add_column("value", justify="right")
        table.add_row("dense gradients replaced", f"{m['comm/dense_bytes'] / MIB:,.3f} MiB")
        table.add_row("payload", f"{m['comm/payload_bytes'] / MIB:,.3f} MiB")
        table.add_row("payload ratio", f"{m['comm/payload_ratio']:,.2f}x")
        table.add_row("sent per rank, with headers", f"{m['comm/bytes_sent_per_rank'] / MIB:,.3f} MiB")
        table.add_row("codec", f"{m['comm/codec_ms_per_step']:,.3f} ms/step")
        table.add_row("exchange, exposed", f"{m['comm/exchange_ms_per_step']:,.3f} ms/step")
        table.add_row("step", f"{m['comm/step_ms']:,.3f} ms")
        table.add_row("share of step", f"{m['comm/share_of_step']:.1%}")
        table.add_row("skipped steps", f"{m['comm/skipped_steps']:,.0f}")
        return table

    def _accounts_table(self) -> Table:
        table = Table("axis", "exchange")
        for heading in ("steps", "messages", "MiB sent"):
            table.add_column(heading, justify="right")
        table.add_column("bytes are")
        for axis, label, steps, messages, mib, how in self.rows():
            table.add_row(axis, label, f"{steps:,}", f"{messages:,}", f"{mib:,.3f}", how)
        return table


def _number(value: float) -> int | float:
    """Whole numbers without a point."""
    return int(value) if value == int(value) else value
