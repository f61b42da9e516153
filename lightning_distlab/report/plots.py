"""Accuracy against traffic: the picture this project is about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from lightning_distlab.report.runs import Group, Run, read_curve
from lightning_distlab.report.style import MARKERS, PALETTE, figure_style

BYTES = "comm/bytes_sent_per_rank"


def plot_metric_over_bytes(groups: Sequence[Group], metric: str, path: Path) -> None:
    """Draw a metric over the MiB that each rank had sent by then, one colour per strategy, one thin line per seed.

    Bytes are taken to grow evenly with the steps. Runs without a curve on disk are drawn as a point at their end.

    Args:
        groups: Groups of runs.
        metric: The logged metric.
        path: Where the picture goes; its ending says which format.

    Raises:
        ValueError: If no run has both the metric and counted bytes above zero.
    """
    import matplotlib.pyplot as plt

    drawable = [
        (group, [run for run in group.runs if metric in run.last and run.numbers.get(BYTES)]) for group in groups
    ]
    if not any(runs for _, runs in drawable):
        raise ValueError(f"nothing to draw: no run has {metric!r} and {BYTES!r} above zero (one rank sends nothing)")
    with figure_style():
        figure, axes = plt.subplots()
        for (group, runs), color, marker in zip(drawable, cycle(PALETTE), cycle(MARKERS)):
            if not runs:
                continue
            for run in runs:
                _draw_curve(axes, run, metric, color)
            ends = [(run.numbers[BYTES] / 2**20, run.last[metric]) for run in runs]
            label = f"{group.label}, {group.world_size} ranks (n={len(runs)})"
            axes.plot(*zip(*ends), marker, color=color, markersize=8, linestyle="", label=label)
        axes.set_xscale("log")
        axes.set_xlabel("MiB sent per rank")
        axes.set_ylabel(metric)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _draw_curve(axes: object, run: Run, metric: str, color: str) -> None:
    curve = read_curve(run, metric)
    steps = run.numbers.get("steps", 0.0)
    if len(curve) < 2 or not steps:
        return
    # CSVLogger counts steps from 0: after step s there have been s + 1 exchanges
    mib = [run.numbers[BYTES] * (step + 1) / steps / 2**20 for step, _ in curve]
    axes.plot(mib, [value for _, value in curve], color=color, alpha=0.6, linewidth=1.2)  # type: ignore[attr-defined]
