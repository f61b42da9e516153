"""Last and best value of everything that a run logs."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_distlab.report.metrics import lower_is_better


class MetricHistory(Callback):
    """Keeps the last and the best value of every logged metric, as plain numbers.

    Attributes:
        last: By metric name, the value logged last.
        best: By metric name, the smallest or largest value, see `lower_is_better`. NaN never is the best.
        train_s: Seconds from the first training step to the end of training, validation included.
    """

    def __init__(self) -> None:
        self.train_s = 0.0
        self._start = 0.0
        self.last: dict[str, float] = {}
        self.best: dict[str, float] = {}

    def update(self, metrics: dict[str, Any]) -> None:
        """Take in metrics by name: numbers or tensors of one element."""
        for name, value in metrics.items():
            if name.startswith("comm/"):
                continue  # running totals; the summary has their final state
            number = float(value)
            self.last[name] = number
            if math.isnan(number):
                continue
            better = min if lower_is_better(name) else max
            self.best[name] = better(self.best.get(name, number), number)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.update(trainer.callback_metrics)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.update(trainer.callback_metrics)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.train_s = time.perf_counter() - self._start
        self.update(trainer.callback_metrics)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.update(trainer.callback_metrics)
