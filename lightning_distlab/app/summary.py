"""`summary.json`: one run in one small file, for programs and for `distlab compare`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_distlab.app.build import Parts
from lightning_distlab.app.hparams import flat_hparams
from lightning_distlab.app.job import Job, JobResult
from lightning_distlab.app.loggers import log_to_wandb_summary

SUMMARY = "summary.json"
# Always present; null where a strategy (Lightning's own) does not count its communication.
COMM_KEYS = (
    "comm/dense_bytes",
    "comm/payload_bytes",
    "comm/payload_ratio",
    "comm/bytes_sent_per_rank",
    "comm/codec_ms",
    "comm/skipped_steps",
)


def averaging_ranks(trainer: pl.Trainer) -> int:
    """Return the number of ranks whose gradients are averaged, be they processes or virtual."""
    return int(getattr(trainer.strategy, "averaged_ranks", trainer.world_size))


def settings(parts: Parts, job: Job) -> dict[str, Any]:
    """Return the run's settings under flat keys, the model's size among them."""
    hparams = flat_hparams(parts.cfg, job.strategy, job.recipe, averaging_ranks(parts.trainer))
    return hparams | {"model.parameters": sum(p.numel() for p in parts.model.parameters())}


def comm_summary(trainer: pl.Trainer) -> dict[str, float]:
    """Return what the strategy counted, by ``comm/`` keys; nothing where it counts nothing. All ranks call this."""
    count = getattr(trainer.strategy, "comm_summary", None)
    if count is None:
        return {}
    counted: Mapping[str, float] = count()
    return {key if key.startswith("comm/") else f"comm/{key}": value for key, value in counted.items()}


def publish(parts: Parts, job: Job, *, steps: int, timings: dict[str, float], comm: dict[str, float]) -> JobResult:
    """Put a run's summary together; rank 0 writes it to ``summary.json`` and the W&B summary.

    Args:
        parts: The finished run.
        job: Its folder and names.
        steps: Optimizer steps done.
        timings: Seconds: ``wall_s`` of the training (or of the evaluation), ``test_s``.
        comm: Of `comm_summary`.
    """
    history = parts.history
    measured: dict[str, Any] = {"steps": steps, **timings, **dict.fromkeys(COMM_KEYS), **comm}
    summary: dict[str, Any] = {
        "strategy": job.strategy,
        "recipe": job.recipe,
        "job_type": job.kind,
        "world_size": averaging_ranks(parts.trainer),
        "seed": parts.cfg.get("seed"),
        **measured,
        "last": history.last,
        "best": history.best,
        "config": settings(parts, job),
    }
    if parts.trainer.is_global_zero:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / SUMMARY).write_text(json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")
        flat = {f"{kind}/{name}": value for kind in ("last", "best") for name, value in summary[kind].items()}
        log_to_wandb_summary(parts.trainer.loggers, measured | flat)
    return JobResult(metrics=dict(history.last), summary=summary)


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON has no word for, by strings."""
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
