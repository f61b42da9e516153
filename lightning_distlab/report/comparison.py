"""Strategies side by side: what `distlab compare` shows, and the same as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from lightning_distlab.report.runs import Group, Run, Spread

# Column: title, key in `Run.numbers`, factor, decimals
_COSTS = (
    ("steps", "steps", 1.0, 0),
    ("wall s", "wall_s", 1.0, 1),
    ("payload ratio", "comm/payload_ratio", 1.0, 1),
    ("MiB sent/rank", "comm/bytes_sent_per_rank", 1 / 2**20, 2),
    ("codec ms", "comm/codec_ms", 1.0, 0),
)
FOOTER = (
    "± is the sample standard deviation over seeds. Payload ratio: dense bytes of all gradients / bytes of what was "
    "made of them, headers included. MiB sent/rank: all that a rank really sent, the way the collective sends it. "
    "Codec ms: compression and decoding over the whole run. - : not counted by this strategy."
)
_DEFAULT_METRICS = ("test/acc", "val/acc", "val/loss")


def choose_metrics(runs: Sequence[Run], asked: Sequence[str]) -> list[str]:
    """Return the metrics to show: those asked for, else the usual ones that some run has, else all of the last values.

    Raises:
        ValueError: If no run has an asked metric; the message names those there are.
    """
    known = sorted({name for run in runs for name in run.last})
    for name in asked:
        if name not in known:
            raise ValueError(f"no run has the metric {name!r}; there are {', '.join(known) or 'none'}")
    return list(asked) or [name for name in _DEFAULT_METRICS if name in known] or known


def comparison_table(groups: Sequence[Group], metrics: Sequence[str]) -> Table:
    """Return the Rich table: a row per strategy, recipe and world size."""
    table = Table(title="Runs by strategy", caption=FOOTER, caption_justify="left")
    for title in ("recipe", "strategy"):
        table.add_column(title, no_wrap=True)
    for title in ("ranks", "seeds"):
        table.add_column(title, justify="right")
    for metric in metrics:
        table.add_column(f"{metric} last", justify="right")
        table.add_column("best", justify="right")
    for title, *_ in _COSTS:
        table.add_column(title, justify="right")
    for group in groups:
        cells = [group.recipe, group.label, str(group.world_size), str(len(group.runs))]
        for metric in metrics:
            cells += [_cell(group.spread(metric, kind), 1.0, 4) for kind in ("last", "best")]
        cells += [_cell(group.spread(key), factor, decimals) for _, key, factor, decimals in _COSTS]
        table.add_row(*cells)
    return table


def comparison_data(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return everything as plain data: per group mean, std and n of each figure, and the runs one by one."""
    return [
        {
            "strategy": group.strategy,
            "recipe": group.recipe,
            "world_size": group.world_size,
            "settings": group.settings,
            "n": len(group.runs),
            **{kind: _spreads(group, kind) for kind in ("last", "best")},
            **_spreads(group, "numbers"),
            "runs": [
                {"folder": str(run.folder), "seed": run.seed, "last": run.last, "best": run.best, **run.numbers}
                for run in group.runs
            ],
        }
        for group in groups
    ]


def _spreads(group: Group, kind: str) -> dict[str, Any]:
    keys = sorted({key for run in group.runs for key in getattr(run, kind)})
    spreads = {key: group.spread(key, kind) for key in keys}
    return {key: {"mean": s.mean, "std": s.std, "n": s.n} for key, s in spreads.items() if s is not None}


def _cell(spread: Spread | None, factor: float, decimals: int) -> str:
    if spread is None:
        return "-"
    mean = f"{spread.mean * factor:,.{decimals}f}"
    return mean if spread.std is None else f"{mean} ± {spread.std * factor:,.{decimals}f}"
