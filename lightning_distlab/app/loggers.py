"""Weights & Biases, offline unless asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import Logger, WandbLogger
from typing_extensions import override


class RankWandbLogger(WandbLogger):
    """Lightning's logger, pickled without a run: a spawned rank 0 begins it, and ends it, by itself."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_experiment": None}


def wandb_logger(
    *,
    save_dir: str,
    project: str,
    name: str,
    group: str,
    job_type: str,
    tags: Sequence[str] = (),
    offline: bool = True,
    entity: str | None = None,
) -> WandbLogger:
    """Return a W&B logger that writes to ``<save_dir>/wandb`` and sends nothing unless ``offline=false``.

    The key for sending comes from ``wandb login`` or the environment; there is no option for it. Metadata about the
    process are off, because they would hold the command line.

    Args:
        save_dir: The run's folder.
        project: The question that runs answer together.
        name: This run, e.g. ``dgc_ring-s0``.
        group: Runs that differ only in their seed.
        job_type: ``train`` or ``eval``.
        tags: Words to filter by.
        offline: Whether nothing leaves this machine.
        entity: User or team at the server.
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    # not WandbLogger(offline=True): that sets WANDB_MODE for the whole process, later jobs of a sweep included
    logger = RankWandbLogger(
        save_dir=save_dir,
        project=project,
        name=name,
        group=group,
        job_type=job_type,
        tags=list(tags),
        entity=entity,
        mode="offline" if offline else "online",
        settings=wandb.Settings(x_disable_meta=True, silent=True),
    )
    logger._wandb_init.pop("anonymous", None)  # an option that W&B has given up: it warns, whatever the value
    return logger


def finish_wandb(exit_code: int = 0) -> None:
    """End the W&B run of this process, if there is one, so that the next job of a sweep begins its own."""
    if wandb.run is not None:
        wandb.finish(exit_code=exit_code)


def log_to_wandb_summary(loggers: Sequence[Logger], values: dict[str, float | int | str | None]) -> None:
    """Write values into the summary of every W&B run among `loggers`: the columns of its run table."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(values)
