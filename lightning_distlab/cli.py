"""The `distlab` command: everything beside training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lightning_distlab.report.comparison import choose_metrics, comparison_data, comparison_table
from lightning_distlab.report.runs import find_runs, group_runs

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as JSON.")]


@app.callback()
def _commands() -> None:
    """Strategies that cut communication: compare runs, read back from disk without a server."""


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, searched in depth.")],
    metric: Annotated[list[str] | None, typer.Option(help="Metric to show; may be repeated.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a metric over the bytes sent into this file.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Tabulate runs by strategy, seeds as spread: metrics, steps, time, and three figures of communication."""
    runs = find_runs(folders)
    groups = group_runs(runs)
    metrics = choose_metrics(runs, metric or [])
    Console(width=None if Console().is_terminal else 200).print(comparison_table(groups, metrics))
    if json_file is not None:
        write_json(json_file, comparison_data(groups))
    if plot is not None:
        from lightning_distlab.report.plots import plot_metric_over_bytes

        if not metrics:
            raise ValueError("nothing to draw: the runs have logged no metric")
        # a curve says more than an end point, and tests are run once only
        curves = [name for name in metrics if not name.startswith("test/")] or metrics
        plot_metric_over_bytes(groups, metric[0] if metric else curves[0], plot)


def write_json(path: Path, content: Any) -> None:
    """Write figures for programs; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Run the command line; a user's mistake ends in one line and exit code 2."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
