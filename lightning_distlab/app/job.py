"""One job from beginning to end: its folder, its marks, and that nothing of it is left for the next job of a sweep."""

from __future__ import annotations

import hashlib
import json
import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_distlab.app.loggers import finish_wandb
from lightning_distlab.app.messages import one_line, was_reported
from lightning_distlab.app.resolvers import recipe_name, strategy_name
from lightning_distlab.app.secrets import masked
from lightning_distlab.strategies.child_processes import close_job

log = logging.getLogger(__name__)

DONE = "DONE"
# Settings under which a finished job still counts as the same job.
_NOT_IDENTITY = ("skip_done", "print_config", "paths", "tags")


@dataclass
class JobResult:
    """What a job leaves in memory.

    Attributes:
        metrics: Last value of every logged metric.
        summary: The content of ``summary.json``.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A job's folder and names, found out once in the launching process, where Hydra's state is at hand.

    Attributes:
        folder: Where everything of this job goes.
        kind: ``train`` or ``eval``.
        strategy: The word behind ``strategy=``.
        recipe: What is trained.
        fingerprint: Of the configuration, to recognise a finished job.
    """

    folder: Path
    kind: str
    strategy: str
    recipe: str
    fingerprint: str

    @classmethod
    def of(cls, cfg: DictConfig) -> Job:
        """Read folder and names from the composed configuration."""
        plain = {key: value for key, value in masked(cfg).items() if key not in _NOT_IDENTITY}
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()
        return cls(Path(cfg.paths.output_dir), str(cfg.task_name), strategy_name(), recipe_name(), digest)

    def finished_metric(self, name: str | None) -> tuple[bool, float | None]:
        """Say whether the folder holds the DONE mark of this very configuration, and which value the metric had."""
        mark = self.folder / DONE
        if not mark.exists():
            return False, None
        content = json.loads(mark.read_text())
        if content["fingerprint"] != self.fingerprint:
            log.warning("%s is of another configuration: the job runs again", mark)
            return False, None
        return True, content["metrics"].get(name)

    def clear(self) -> None:
        """Take away the marks of an earlier run in the same folder."""
        for name in (DONE, "error.log"):
            (self.folder / name).unlink(missing_ok=True)

    def mark_done(self, result: JobResult) -> None:
        """Leave the DONE mark, last of all."""
        content = {"fingerprint": self.fingerprint, "metrics": result.metrics}
        (self.folder / DONE).write_text(json.dumps(content, indent=2) + "\n")

    def record(self, error: BaseException) -> None:
        """Write an error with its traceback into the folder, and one line or all of it into the job's log."""
        rank = current_rank()
        path = self.folder / (f"error-rank{rank}.log" if rank else "error.log")
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
        line = one_line(error)
        if line is None and rank == 0:
            log.error("the job failed", exc_info=error)
        elif line is None:
            log.error("rank %d: %s: %s (traceback: %s)", rank, type(error).__name__, error, path)
        else:
            log.error("%s (traceback: %s)", line, path)
        was_reported(error, mark=True)


def current_rank() -> int:
    """Return the global rank of this process as Lightning knows it; 0 before any is known."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


Task = Callable[[DictConfig, Job], JobResult]


def run_job(task: Task, cfg: DictConfig) -> float | None:
    """Run a task as one job of Hydra and return the metric that ``optimized_metric`` names.

    Whatever happens: the error is in the job's folder, the W&B run is ended, child processes are gone and the
    environment is as before, so that the next job of a sweep begins from nothing.

    Args:
        task: `train` or `evaluate`, or one of your own.
        cfg: The composed configuration.

    Raises:
        ValueError: If ``optimized_metric`` was not logged; the message names what was.
    """
    job = Job.of(cfg)
    wanted = cfg.get("optimized_metric")
    if cfg.get("skip_done"):
        done, value = job.finished_metric(wanted)
        if done:
            log.info("%s is done already: skipped (skip_done=false runs it again)", job.folder)
            return value
    if current_rank() == 0:
        job.clear()
    if cfg.get("print_config") and current_rank() == 0:
        _print_config(cfg)
    failed = True
    try:
        result = task(cfg, job)
        close_job()
        value = _metric(result, wanted)
        if current_rank() == 0:
            job.mark_done(result)
        failed = False
        return value
    except Exception as error:
        job.record(error)
        with suppress(RuntimeError):  # the first error is the one to show
            close_job(failed=True)
        raise
    finally:
        finish_wandb(exit_code=int(failed))


def _metric(result: JobResult, name: str | None) -> float | None:
    if name is None or current_rank() != 0:
        return None
    if name not in result.metrics:
        logged = ", ".join(sorted(result.metrics)) or "no metrics"
        raise ValueError(
            f"optimized_metric={name!r} was not logged; logged were {logged}. "
            "Choose one of them, or optimized_metric=null."
        )
    return result.metrics[name]


def _print_config(cfg: DictConfig) -> None:
    from rich.console import Console
    from rich.syntax import Syntax

    text = OmegaConf.to_yaml(OmegaConf.create(masked(cfg)), resolve=False)
    Console().print(Syntax(text, "yaml", background_color="default"))
