"""Communication of a run: a few numbers on the way, the whole table at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from typing_extensions import override

from lightning_distlab.callbacks.comm_report import CommReport, CountsCommunication
from lightning_distlab.exchange.ledger import Ledger
from lightning_distlab.strategies.compat import publish_metrics

CSV_NAME = "communication.csv"


class CommSummary(Callback):
    """Reports what a strategy communicated, as rank 0 counts it. Communicates nothing itself, and never synchronises.

    While training: payload ratio and MiB per step on the progress bar, and the running total of bytes sent in the
    loggers (an axis to draw accuracy against), every `log_every_n_steps`. At the end, also of an interrupted run: a
    table on the terminal, `communication.csv` beside the first logger's files, all `comm/` numbers in
    `callback_metrics` and every logger, and a table in W&B.

    A strategy takes part by having `ledger` and `comm_summary()`; for others there is nothing to report, which is said
    once.

    Args:
        console: Where the table is printed; None is standard output. Another one cannot travel to spawned processes.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._counted: Ledger | None = None
        self._seconds = 0.0
        self._started: float | None = None
        self._logged_step = 0
        self._reported = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        self._reported = False
        if not isinstance(strategy, CountsCommunication):
            self._counted = None
            rank_zero_info(
                f"CommSummary: {type(strategy).__name__} does not count its communication, there is nothing to report."
            )
        elif strategy.ledger is not self._counted:
            self._counted, self._seconds, self._logged_step = strategy.ledger, 0.0, 0

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
        interval = int(getattr(trainer, "log_every_n_steps", 0))  # 0 in a barebones Trainer
        due = interval > 0 and trainer.global_step % interval == 0
        if due and self._counted is not None and self._counted.steps != self._logged_step:
            self._logged_step = self._counted.steps
            self._log_progress(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._print(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.training and self._counted is not None and self._counted.steps and not self._reported:
            self._publish(trainer)
            self._print(trainer)

    def _report(self, trainer: pl.Trainer) -> CommReport | None:
        """This rank's numbers, if the strategy counts."""
        strategy = trainer.strategy
        if not isinstance(strategy, CountsCommunication):
            return None
        ranks = int(getattr(strategy, "averaged_ranks", trainer.world_size))
        return CommReport.of(strategy, rank=trainer.global_rank, ranks=ranks, step_s=self._seconds)

    def _log_progress(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Two numbers on the bar, three in the loggers."""
        report = self._report(trainer)
        assert report is not None
        if report.ranks == 1:
            return
        now = report.metrics()
        for name in ("comm/payload_ratio", "comm/mib_per_step"):
            pl_module.log(name, now[name], prog_bar=True, rank_zero_only=True)
        pl_module.log("comm/bytes_sent_per_rank", now["comm/bytes_sent_per_rank"], rank_zero_only=True)

    def _publish(self, trainer: pl.Trainer) -> None:
        """Numbers for Lightning and the loggers, the file, the table in W&B."""
        report = self._report(trainer)
        if report is None:
            return
        publish_metrics(trainer, report.metrics())
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        report.write_csv(_folder(trainer) / CSV_NAME)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table(
                    "comm/table",
                    columns=["axis", "exchange", "steps", "messages", "MiB sent", "bytes are"],
                    data=[list(row) for row in report.rows()],
                )

    def _print(self, trainer: pl.Trainer) -> None:
        report = self._report(trainer)
        self._reported = True
        if report is not None and trainer.is_global_zero:
            (self._console or Console()).print(report.render())


def _folder(trainer: pl.Trainer) -> Path:
    """`trainer.log_dir` as rank 0 sees it; the property itself asks all ranks, which a report must not."""
    first = trainer.loggers[0] if trainer.loggers else None
    if isinstance(first, CSVLogger | TensorBoardLogger):
        return Path(first.log_dir)
    return Path((first.save_dir if first is not None else None) or trainer.default_root_dir)
