"""Progress for logs and pipes: one plain line per epoch instead of a bar that redraws itself."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from rich.console import Console
from typing_extensions import override


class LineProgress(ProgressBar):
    """Prints, on rank 0, one line per epoch: steps, seconds, and what the model shows with ``prog_bar=True``."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._start = 0.0

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def disable(self) -> None:
        self._enabled = False

    @property
    def is_enabled(self) -> bool:
        """Whether lines are printed; Lightning asks."""
        return self._enabled

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            # made anew each time: a console holds a lock, and spawned ranks receive this callback by pickle
            Console(highlight=False, soft_wrap=True).print(*args)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._start = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = {**self.get_metrics(trainer, pl_module)}  # every rank takes part in computing them
        if not self._enabled:
            return
        metrics.pop("v_num", None)
        shown = "  ".join(f"{name} {_short(value)}" for name, value in metrics.items())
        total = trainer.max_epochs if trainer.max_epochs not in (None, -1) else "?"
        seconds = time.perf_counter() - self._start
        self.print(f"epoch {trainer.current_epoch + 1}/{total}  step {trainer.global_step}  {seconds:.1f} s  {shown}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def progress_for_output(refresh_rate: int = 10) -> ProgressBar:
    """Return a Rich bar when the output is a terminal, else `LineProgress`.

    Args:
        refresh_rate: Batches between two redraws of the bar.
    """
    return RichProgressBar(refresh_rate=refresh_rate) if sys.stdout.isatty() else LineProgress()
