"""Runs read back from disk: one record each, and groups of runs that differ only in their seed."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_distlab.report.wandb_files import WandbRun, find_wandb_files, read_wandb_run

SUMMARY = "summary.json"
_SECTIONS = ("strategy.", "model.", "data.", "trainer.")
# A place and ways of starting: nothing that a result depends on.
_NO_NUMBERS = ("last/", "best/", "_")
_NO_SETTINGS = ("trainer.default_root_dir", "strategy.start_method", "strategy.timeout_s")


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        folder: Where it lies.
        strategy: The strategy's name.
        recipe: What was trained.
        world_size: Ranks that averaged.
        seed: Seed, None if it had none.
        numbers: ``steps``, ``wall_s``, ``comm/...`` and so on; only what is a number.
        last: Last value by metric.
        best: Best value by metric.
        config: Flat settings, ``strategy.density`` and the like.
    """

    folder: Path
    strategy: str
    recipe: str
    world_size: int
    seed: int | None
    numbers: dict[str, float]
    last: dict[str, float]
    best: dict[str, float]
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: mean, sample standard deviation (None for one run), number of runs."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of the values, None if there are none."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Group:
    """Runs of one recipe under one strategy on the same number of ranks, with the same settings but for the seed.

    Attributes:
        strategy: Strategy.
        recipe: Recipe.
        world_size: Ranks that averaged.
        settings: Those settings in which it differs from other groups of the same name.
        runs: The runs, by seed.
    """

    strategy: str
    recipe: str
    world_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The strategy, and what tells this group from others of its name: ``dgc_ring density=0.01``."""
        return " ".join([self.strategy, *(f"{key.rpartition('.')[2]}={value}" for key, value in self.settings.items())])

    def spread(self, key: str, kind: str = "numbers") -> Spread | None:
        """Return the spread of a figure; `kind` is ``numbers``, ``last`` or ``best``."""
        return Spread.of([getattr(run, kind)[key] for run in self.runs if key in getattr(run, kind)])


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Read every run at or below the folders: from ``summary.json`` where there is one, else from W&B's file.

    Evaluation jobs are left out; they have no steps to compare.

    Raises:
        FileNotFoundError: If a folder does not exist.
        ValueError: If there is no run in any of them.
    """
    runs: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder: give folders of runs, for example outputs/train")
        for path in sorted(folder.rglob(SUMMARY)):
            run = _from_summary(path)
            if run is not None:
                runs[path.parent.resolve()] = run
        for path in find_wandb_files(folder):
            home = path.parents[2].resolve()  # <run>/wandb/offline-run-.../run-....wandb
            if home not in runs and not (home / SUMMARY).exists():
                run = _from_wandb(home, read_wandb_run(path))
                if run is not None:
                    runs[home] = run
    if not runs:
        raise ValueError(f"no run in {', '.join(map(str, folders))}: runs leave {SUMMARY} in their folder")
    return list(runs.values())


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Gather runs that differ in nothing but their seed, which becomes the spread."""
    named: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        named.setdefault((run.recipe, run.strategy, run.world_size), []).append(run)
    groups: list[Group] = []
    for (recipe, strategy, world_size), members in sorted(named.items()):
        differing = _differing_settings(members)
        parts: dict[tuple[str, ...], Group] = {}
        for run in sorted(members, key=lambda run: (run.seed is None, run.seed or 0, str(run.folder))):
            settings = {key: run.config.get(key) for key in differing}
            group = Group(strategy, recipe, world_size, settings)
            parts.setdefault(tuple(map(repr, settings.values())), group).runs.append(run)
        groups += parts.values()
    return groups


def _differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings of strategy, model, data and Trainer that are not the same in all runs."""
    keys = {key for run in runs for key in run.config if key.startswith(_SECTIONS) and key not in _NO_SETTINGS}
    return sorted(key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1)


def read_curve(run: Run, metric: str) -> list[tuple[float, float]]:
    """Return (step, value) for a metric from the run's ``csv/metrics.csv``; nothing if it was not logged there."""
    path = run.folder / "csv" / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(float(row["step"]), float(row[metric])) for row in rows if row.get(metric) and row.get("step")]


def _from_summary(path: Path) -> Run | None:
    content = json.loads(path.read_text())
    if content.get("job_type", "train") == "eval":
        return None
    return Run(
        folder=path.parent,
        strategy=str(content["strategy"]),
        recipe=str(content.get("recipe", "")),
        world_size=int(content["world_size"]),
        seed=content.get("seed"),
        numbers=_numbers(content),
        last=_numbers(content.get("last", {})),
        best=_numbers(content.get("best", {})),
        config=content.get("config", {}),
    )


def _from_wandb(folder: Path, run: WandbRun) -> Run | None:
    config = run.config
    if run.job_type == "eval" or "strategy.name" not in config:
        return None
    parts: dict[str, dict[str, Any]] = {"last": {}, "best": {}}
    for key, value in run.summary.items():
        kind, _, metric = key.partition("/")
        if kind in parts:
            parts[kind][metric] = value
    return Run(
        folder=folder,
        strategy=str(config["strategy.name"]),
        recipe=str(config.get("recipe", "")),
        world_size=int(config.get("world_size", 1)),
        seed=config.get("seed"),
        numbers=_numbers(
            {key: value for key, value in run.summary.items() if not key.startswith(("last/", "best/", "_"))}
        ),
        last=_numbers(parts["last"] or run.summary),
        best=_numbers(parts["best"]),
        config=config,
    )


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("world_size", "seed")
    }
