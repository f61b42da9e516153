"""Test a checkpoint."""

from __future__ import annotations

import functools
import time

from omegaconf import DictConfig

from lightning_distlab.app.build import Parts, build
from lightning_distlab.app.job import Job, JobResult
from lightning_distlab.app.summary import publish
from lightning_distlab.app.train import in_ranks, log_settings


def evaluate(cfg: DictConfig, job: Job) -> JobResult:
    """Run the test set through the checkpoint ``cfg.ckpt_path``, whichever strategy has written it.

    Args:
        cfg: The composed configuration.
        job: Its folder and names.

    Returns:
        On rank 0 metrics and summary.
    """
    parts = build(cfg)
    return in_ranks(parts, functools.partial(_test, parts, job))


def _test(parts: Parts, job: Job) -> JobResult:
    log_settings(parts, job)
    start = time.perf_counter()
    parts.trainer.test(
        parts.model, datamodule=parts.datamodule, ckpt_path=str(parts.cfg["ckpt_path"]), weights_only=True
    )
    return publish(
        parts, job, steps=parts.trainer.global_step, timings={"wall_s": time.perf_counter() - start}, comm={}
    )
