"""Fit, test on the best checkpoint, summarise: one training job on any number of ranks."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig

from lightning_distlab.app.build import Parts, build
from lightning_distlab.app.job import Job, JobResult
from lightning_distlab.app.loggers import finish_wandb
from lightning_distlab.app.summary import comm_summary, publish, settings
from lightning_distlab.strategies.launcher import refuse_early

log = logging.getLogger(__name__)


def train(cfg: DictConfig, job: Job) -> JobResult:
    """Train as `cfg` says, on all its ranks, and test the best checkpoint.

    Args:
        cfg: The composed configuration; ``train`` and ``test`` switch the two halves, ``ckpt_path`` resumes.
        job: Its folder and names.

    Returns:
        On rank 0 metrics and summary.
    """
    parts = build(cfg)
    return in_ranks(parts, functools.partial(_fit_and_test, parts, job))


def in_ranks(parts: Parts, body: Callable[[], JobResult]) -> JobResult:
    """Run `body` where the ranks are.

    With popen or torchrun each rank runs the whole program, so that is here. Forked and spawned workers end with each
    call of the Trainer and take loggers and counters with them; there the whole body runs in one set of workers.
    """
    trainer, model = parts.trainer, parts.model
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _MultiProcessingLauncher):
        return body()
    trainer.state.fn = TrainerFn.FITTING
    refuse_early(trainer.strategy, trainer, model)
    # The model is an argument of its own so that Lightning undoes the sharing of its memory among spawned ranks.
    result = launcher.launch(functools.partial(_in_worker, trainer, body), model)
    assert isinstance(result, JobResult)
    return result


def _in_worker(trainer: pl.Trainer, body: Callable[[], JobResult], _: pl.LightningModule) -> JobResult:
    strategy = trainer.strategy
    strategy._launcher = None  # this is a rank already: no launch inside of it
    set_world_ranks = getattr(strategy, "set_world_ranks", None)
    assert set_world_ranks is not None
    set_world_ranks()  # before anything asks who is rank 0
    exit_code = 1
    try:
        result = body()
        exit_code = 0
        return result
    finally:
        finish_wandb(exit_code)


def _fit_and_test(parts: Parts, job: Job) -> JobResult:
    cfg, trainer = parts.cfg, parts.trainer
    log_settings(parts, job)
    timings: dict[str, float] = {}
    comm: dict[str, float] = {}
    steps = 0
    if cfg["train"]:
        trainer.fit(parts.model, datamodule=parts.datamodule, ckpt_path=cfg["ckpt_path"], weights_only=True)
        timings["wall_s"] = parts.history.train_s
        steps = trainer.global_step
        comm = comm_summary(trainer)
    if cfg["test"] and not getattr(trainer, "fast_dev_run", False):
        start = time.perf_counter()
        trainer.test(parts.model, datamodule=parts.datamodule, ckpt_path=_checkpoint_to_test(parts), weights_only=True)
        timings["test_s"] = time.perf_counter() - start
    return publish(parts, job, steps=steps, timings=timings, comm=comm)


def _checkpoint_to_test(parts: Parts) -> str | None:
    """Choose the best checkpoint of this run, else the given one, else (None) the weights as they are."""
    if not parts.cfg["train"]:
        return None if parts.cfg["ckpt_path"] is None else str(parts.cfg["ckpt_path"])
    with suppress(AttributeError):
        best = parts.trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        if best:
            return str(best)
    log.info("no best checkpoint: testing the weights of the last step")
    return None


def log_settings(parts: Parts, job: Job) -> None:
    """Send the flat settings and the number of parameters to every logger."""
    hparams = settings(parts, job)
    for logger in parts.trainer.loggers:
        logger.log_hyperparams(hparams)
