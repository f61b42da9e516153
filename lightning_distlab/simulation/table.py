"""Step time, efficiency and speed-up of strategies over ranks and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from lightning_distlab.collectives import Collective, Native
from lightning_distlab.compression import Compressor, NoCompression
from lightning_distlab.exchange.drivers import Link
from lightning_distlab.payloads import Op, Payload, Wire
from lightning_distlab.report.compression_table import messages_of
from lightning_distlab.report.model_shapes import Shapes
from lightning_distlab.report.style import MARKERS, PALETTE, figure_style
from lightning_distlab.simulation.clock import Schedule, step_seconds
from lightning_distlab.simulation.traffic import traffic_of
from lightning_distlab.strategies.registry import NAMES

LOCAL = ("fedavg", "dga")
"""Schedules that exchange seldom, or late; over the backend's all-reduce of everything."""


@dataclass(frozen=True)
class Settings:
    """What all rows share.

    Attributes:
        compute_s: Of a step.
        period: Local steps of `fedavg` and `dga`.
        delay: Steps of delay of `dga`.
        overhead: Share of computing that `dga` loses to messages under way.
        jitter: Of the computing time, standard deviation of its logarithm.
        handshakes: One-way delays of a message.
        inner: The link inside a node, for hierarchical collectives.
        steps: Steps that are played.
    """

    compute_s: float = 0.2
    period: int = 5
    delay: int = 20
    overhead: float = 0.0
    jitter: float = 0.0
    handshakes: int = 1
    inner: Link = field(default_factory=lambda: Link(5e-6, 100e9 / 8))
    steps: int = 200


@dataclass(frozen=True)
class Row:
    """One strategy on one number of ranks over one link.

    Attributes:
        strategy: Its name.
        ranks: Their number.
        link: As it was given.
        compute_s: Seconds of computing in a step.
        step_s: Seconds of a step.
        efficiency: compute / step.
        speedup: Batches per second against one rank that computes only.
    """

    strategy: str
    ranks: int
    link: str
    compute_s: float
    step_s: float
    efficiency: float
    speedup: float


@dataclass(frozen=True)
class Subject:
    """A strategy as the simulation needs it.

    Attributes:
        name: The word that selects it.
        collective: Who carries its messages.
        messages: What a rank asks for in an exchange.
        dense_bytes: The gradient in fp32.
    """

    name: str
    collective: Collective
    messages: list[tuple[Op, Payload]]
    dense_bytes: int


def subjects(names: Sequence[str], shapes: Shapes) -> list[Subject]:
    """Put together what each strategy sends for a network.

    Raises:
        ValueError: No strategy has that name.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = {n: torch.randn(math.prod(s), generator=generator) for n, s in shapes.items()}
    size = 4 * sum(gradient.numel() for gradient in gradients.values())
    found: list[Subject] = []
    for name in track(names, "Messages", transient=True):
        compressor, collective, wire = parts_of(name)
        found.append(Subject(name, collective, messages_of(compressor, wire, shapes, gradients), size))
    return found


def parts_of(name: str) -> tuple[Compressor, Collective, Wire]:
    """Compressor, collective and wire of a strategy.

    Raises:
        ValueError: No strategy has that name.
    """
    if name in (*LOCAL, "ddp", "lightning_ddp"):
        return NoCompression(), Native(), Wire()
    if name not in NAMES:
        raise ValueError(f"strategies={name!r} must be one of ddp, {', '.join([*NAMES, *LOCAL])}.")
    kind, _, options = NAMES[name]
    strategy = kind(**options)
    return strategy.compressor, strategy.collective, strategy.wire


def schedule_of(name: str, settings: Settings) -> Schedule:
    """When a strategy exchanges and waits."""
    if name == "fedavg":
        return Schedule(settings.period)
    if name == "dga":
        return Schedule(settings.period, settings.delay, settings.overhead)
    return Schedule()


def simulate(chosen: Sequence[Subject], ranks: Sequence[int], links: dict[str, Link], settings: Settings) -> list[Row]:
    """Play every strategy on every number of ranks over every link; pairs that cannot be are left out."""
    jobs = [(subject, label, n) for label in links for subject in chosen for n in ranks]
    rows = []
    for subject, label, n in track(jobs, "Simulating", transient=True):
        if n % subject.collective.ranks_per_node:
            continue
        traffic = traffic_of(subject.messages, subject.collective, n, subject.dense_bytes)
        waiting, busy = traffic.seconds(links[label], settings.inner, settings.handshakes)
        schedule = schedule_of(subject.name, settings)
        step = step_seconds(
            schedule, n, settings.compute_s, waiting, busy, jitter=settings.jitter, steps=settings.steps
        )
        efficiency = settings.compute_s / step if step else 1.0
        rows.append(Row(subject.name, n, label, settings.compute_s, step, efficiency, n * efficiency))
    return rows


def rows_as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for JSON."""
    return [asdict(row) for row in rows]


def simulation_table(rows: Sequence[Row]) -> Table:
    """Rows for the terminal."""
    out = Table(title="Simulated steps")
    for column in ("link", "strategy", "ranks", "step", "efficiency", "speed-up"):
        out.add_column(column, justify="left" if column in ("link", "strategy") else "right")
    for i, row in enumerate(rows):
        out.add_row(
            row.link,
            row.strategy,
            f"{row.ranks:,}",
            f"{row.step_s:.4g} s",
            f"{100 * row.efficiency:.1f} %",
            f"{row.speedup:,.2f}x",
            end_section=i + 1 < len(rows) and rows[i + 1].link != row.link,
        )
    return out


def plot_simulation(rows: Sequence[Row], path: Path) -> None:
    """Speed-up over ranks, one panel for each link, with the ideal beside it."""
    import matplotlib.pyplot as plt

    links = list(dict.fromkeys(row.link for row in rows))
    names = list(dict.fromkeys(row.strategy for row in rows))
    with figure_style():
        width = min(3, len(links))
        height = -(-len(links) // width)
        figure, grid = plt.subplots(
            height, width, figsize=(4.6 * width, 3.9 * height + 0.8), squeeze=False, sharey=True
        )
        for axes in grid.flat[len(links) :]:
            axes.set_visible(False)
        for axes, link in zip(grid.flat, links):
            ranks = sorted({row.ranks for row in rows if row.link == link})
            axes.plot(ranks, ranks, color="0.6", linestyle="--", linewidth=1, label="ideal")
            for name, color, marker in zip(names, cycle(PALETTE), cycle(MARKERS)):
                own = [row for row in rows if (row.link, row.strategy) == (link, name)]
                values = ([row.ranks for row in own], [row.speedup for row in own])
                axes.plot(*values, color=color, marker=marker, markersize=5, linewidth=1.3, label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_title(link, fontsize=11)
            axes.set_xlabel("ranks")
        grid[0, 0].set_ylabel("speed-up over one rank")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)
