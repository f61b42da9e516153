"""What each all-reduce costs on N workers, counted from the rounds that it really carries out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from lightning_distlab.collectives import (
    Collective,
    Gather,
    HalvingDoubling,
    ParameterServer,
    RecursiveDoubling,
    Ring,
    Sequential,
    Tree,
)
from lightning_distlab.exchange.drivers import InProcessDriver, Link
from lightning_distlab.payloads import DensePayload, Op
from lightning_distlab.report.style import MARKERS, PALETTE, figure_style

ELEMENTS = 4032  # 64 * 63: divisible by every power of two in the table

ALGORITHMS: dict[str, Collective] = {
    "parameter_server": ParameterServer(dedicated=True),
    "sequential": Sequential(),
    "parallel": Gather(),
    "ring": Ring(),
    "butterfly": RecursiveDoubling(),
    "halving_doubling": HalvingDoubling(),
    "tree": Tree(),
}
"""Rows of the table, in the lecture's words; the server of the first is a rank beside the N workers."""

LINKS: dict[str, Link] = {
    "100 Gb/s, 5 µs": Link(5e-6, 100e9 / 8),
    "10 Gb/s, 50 µs": Link(50e-6, 10e9 / 8),
    "1 Gb/s, 30 ms": Link(30e-3, 1e9 / 8),
}
"""Inside a rack of GPUs, between servers, between sites."""


@dataclass(frozen=True)
class Row:
    """One all-reduce of M bytes on N workers.

    Attributes:
        algorithm: Its name.
        world_size: N.
        steps: Rounds, one after the other.
        peak_node_bytes_per_step: The most that a node, the server among them, sends or receives in one round.
        total_bytes: Sent by all nodes together.
        bytes_per_rank: Sent by the worker that sends most.
        critical_bytes: Sum over the rounds of the most that a node sends or receives, which the time follows.
    """

    algorithm: str
    world_size: int
    steps: int
    peak_node_bytes_per_step: int
    total_bytes: int
    bytes_per_rank: int
    critical_bytes: int

    def seconds(self, link: Link, size: float) -> float:
        """Time on a link, in the alpha-beta model, of a vector of `size` bytes instead of the one counted."""
        return link.seconds(self.critical_bytes * size / (4 * ELEMENTS), self.steps)


def count(algorithm: str, workers: int) -> Row:
    """Carry out one all-reduce of `ELEMENTS` fp32 numbers and count."""
    collective = ALGORITHMS[algorithm]
    ranks = workers + (1 if isinstance(collective, ParameterServer) else 0)
    driver = InProcessDriver(ranks, Link(bandwidth_bytes_per_s=1.0))
    vector = torch.ones(ELEMENTS)
    driver.run({r: collective.run(Op.SUM, DensePayload(vector), r, ranks) for r in range(ranks)}, algorithm)
    books = [driver.ledger.account(rank, driver.axis, algorithm) for rank in range(ranks)]
    return Row(
        algorithm,
        workers,
        steps=max(book.steps for book in books),
        peak_node_bytes_per_step=max(book.peak_step_bytes for book in books),
        total_bytes=sum(book.bytes_sent for book in books),
        bytes_per_rank=max(book.bytes_sent for book in books[ranks - workers :]),
        critical_bytes=round(driver.clock_s),
    )


def count_all(world_sizes: Iterable[int]) -> list[Row]:
    """All algorithms at all numbers of workers."""
    sizes = list(world_sizes)
    jobs = [(name, size) for name in ALGORITHMS for size in sizes]
    return [count(name, size) for name, size in track(jobs, "Counting", transient=True)]


def rows_as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for JSON."""
    return [{key: value for key, value in asdict(row).items() if key != "critical_bytes"} for row in rows]


def collective_table(rows: Sequence[Row], size: float) -> Table:
    """Bytes in units of the vector, and modelled milliseconds for a vector of `size` bytes."""
    out = Table(title=f"One all-reduce of M bytes on N workers (times: M = {size / 2**20:g} MiB)")
    for column in ("algorithm", "N", "steps", "peak node / M", "total / M", "worker sends / M", *LINKS):
        out.add_column(column, justify="left" if column == "algorithm" else "right")
    unit = 4 * ELEMENTS
    for i, row in enumerate(rows):
        bytes_ = (row.peak_node_bytes_per_step, row.total_bytes, row.bytes_per_rank)
        out.add_row(
            row.algorithm,
            str(row.world_size),
            str(row.steps),
            *(f"{number / unit:.4g}" for number in bytes_),
            *(f"{1e3 * row.seconds(link, size):,.1f} ms" for link in LINKS.values()),
            end_section=i + 1 < len(rows) and rows[i + 1].algorithm != row.algorithm,
        )
    return out


def plot_collectives(rows: Sequence[Row], size: float, path: Path) -> None:
    """Total bytes, and modelled time on three links, over the number of workers.

    Args:
        rows: Of `count`.
        size: Bytes of the vector that is timed.
        path: Where the picture goes; its ending says which format.
    """
    import matplotlib.pyplot as plt

    with figure_style():
        figure, grid = plt.subplots(2, 2, figsize=(11, 8), sharex=True)
        panels = grid.flat
        for axes, title in zip(panels, ("bytes of all nodes / M", *LINKS), strict=True):
            link = LINKS.get(title)
            for name, color, marker in zip(ALGORITHMS, cycle(PALETTE), cycle(MARKERS)):
                own = [row for row in rows if row.algorithm == name]
                values = [row.total_bytes / (4 * ELEMENTS) if link is None else row.seconds(link, size) for row in own]
                every = max(1, len(own) // 8)
                axes.plot(
                    [row.world_size for row in own],
                    values,
                    color=color,
                    marker=marker,
                    markevery=every,
                    markersize=5,
                    linewidth=1.3,
                    label=name,
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(title if link is None else f"seconds, {title}, M = {size / 2**20:g} MiB", fontsize=11)
        for axes in grid[1]:
            axes.set_xlabel("workers N")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)
