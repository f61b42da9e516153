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
    """Strategies that cut communication: what they cost, and what runs have shown, read back from disk."""


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


@app.command()
def collectives(
    workers: Annotated[str, typer.Option(help="Numbers of workers, as in 2,4,8 or 2-64.")] = "2-64",
    mebibytes: Annotated[float, typer.Option(help="Size of the vector that is timed; 97.5 is ResNet-50.")] = 97.5,
    plot: Annotated[Path | None, typer.Option(help="Draw bytes and modelled times into this file.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Carry out every all-reduce in one process and tabulate its steps and bytes, counted, and its modelled time."""
    from lightning_distlab.collectives.parameter_server import server_bandwidth
    from lightning_distlab.report.collective_table import (
        collective_table,
        count_all,
        plot_collectives,
        rows_as_data,
    )

    sizes = numbers("workers", workers, 2)
    if not mebibytes > 0:
        raise ValueError(f"mebibytes={mebibytes!r} must be greater than 0.")
    rows = count_all(sizes)
    powers = [row for row in rows if row.world_size & (row.world_size - 1) == 0] or rows
    console = Console(width=None if Console().is_terminal else 200)
    console.print(collective_table(powers if len(sizes) > 8 else rows, mebibytes * 2**20))
    inflow = server_bandwidth(97.5 * 2**20, 256, 3) / 2**30
    console.print(
        f"A server to which 256 workers push ResNet-50 (97.5 MiB) 3 times a second takes in {inflow:.1f} GiB/s."
    )
    if json_file is not None:
        write_json(json_file, rows_as_data(rows))
    if plot is not None:
        plot_collectives(rows, mebibytes * 2**20, plot)


@app.command("compression-table")
def compression_table(
    models: Annotated[list[str] | None, typer.Option(help="Network; may be repeated. All without it.")] = None,
    compressors: Annotated[list[str] | None, typer.Option(help="Part of a method's label; may be repeated.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the page of the documentation to this file.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compress a step of the literature's networks with every method, and tabulate sizes and processor time."""
    from lightning_distlab.report import compression_table as tables
    from lightning_distlab.report.model_shapes import MODELS

    chosen = models or list(MODELS)
    for model in chosen:
        if model not in MODELS:
            raise ValueError(f"models={model!r} must be one of {', '.join(MODELS)}.")
    labels = [label for label in tables.METHODS if not compressors or any(part in label for part in compressors)]
    if not labels:
        raise ValueError(f"compressors={compressors!r} must be part of one of {'; '.join(tables.METHODS)}.")
    rows = tables.measure_all(chosen, labels)
    Console(width=None if Console().is_terminal else 200).print(tables.compression_table(rows))
    if json_file is not None:
        write_json(json_file, tables.rows_as_data(rows))
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(tables.compression_page(rows))


@app.command()
def simulate(
    strategies: Annotated[str, typer.Option(help="Names, with commas; ddp, fedavg, dga and all registered ones.")] = (
        "ddp,dgc_gather,powersgd,fedavg,dga"
    ),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, as in 1,2,4 or 1-8.")] = "1,2,4,8,16,32,64",
    links: Annotated[list[str] | None, typer.Option(help="Profile, or as 20ms,100mbit; may be repeated.")] = None,
    compute: Annotated[float, typer.Option(help="Seconds of computing in a step.")] = 0.2,
    model: Annotated[str, typer.Option(help="Network whose gradient is exchanged.")] = "resnet50",
    period: Annotated[int, typer.Option(help="Local steps of fedavg and dga.")] = 5,
    delay: Annotated[int, typer.Option(help="Steps of delay of dga.")] = 20,
    overhead: Annotated[float, typer.Option(help="Share of computing that dga loses to messages under way.")] = 0.0,
    jitter: Annotated[float, typer.Option(help="Standard deviation of the logarithm of computing times.")] = 0.0,
    handshakes: Annotated[int, typer.Option(help="One-way delays of a message; 2 for gloo.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps that are played.")] = 200,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up over ranks into this file.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Play the clocks of many ranks over links that are not there: step time, efficiency and speed-up."""
    from lightning_distlab.report.model_shapes import MODELS
    from lightning_distlab.simulation.links import parse_link
    from lightning_distlab.simulation.table import (
        Settings,
        plot_simulation,
        rows_as_data,
        simulation_table,
        subjects,
    )
    from lightning_distlab.simulation.table import simulate as play

    if model not in MODELS:
        raise ValueError(f"model={model!r} must be one of {', '.join(MODELS)}.")
    settings = Settings(compute, period, delay, overhead, jitter, handshakes, steps=steps)
    named = {text: parse_link(text) for text in links or ["datacenter", "home-wifi", "globe"]}
    chosen = subjects([name.strip() for name in strategies.split(",")], MODELS[model]())
    rows = play(chosen, numbers("ranks", ranks, 1), named, settings)
    Console(width=None if Console().is_terminal else 120).print(simulation_table(rows))
    if json_file is not None:
        write_json(json_file, rows_as_data(rows))
    if plot is not None:
        plot_simulation(rows, plot)


@app.command()
def pairs(
    page: Annotated[Path | None, typer.Option(help="Write the page of the documentation to this file.")] = None,
) -> None:
    """Show which compressor runs over which collective."""
    from lightning_distlab.report.pairs import pairs_page, pairs_table

    Console(width=None if Console().is_terminal else 200).print(pairs_table())
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(pairs_page())


def numbers(option: str, text: str, least: int) -> list[int]:
    """Whole numbers from a list such as `2,4,8-16`.

    Raises:
        ValueError: It is none, or a number lies below `least`.
    """
    found: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise ValueError(f"{option}={text!r} must be numbers such as 2,4,8 or a range such as 2-64.")
        found += range(int(first), int(last or first) + 1)
    if not found or min(found) < least:
        raise ValueError(f"{option}={text!r} must name numbers from {least} on.")
    return sorted(set(found))


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
