"""One cell of the capability table at work: runs in forked ranks, and what they report."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core import rank_zero
from torch import Tensor
from typing_extensions import override

from tests.conformance.columns import Column
from tests.conformance.networks import loader, united

QUIET: Mapping[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}


@dataclass
class Facts:
    """What one rank saw at the end of a fit.

    Attributes:
        weights: The module's state dict.
        steps: Optimizer steps.
        exchanges: Steps in the ledger.
        bytes_sent: Of the gradient exchange and all else.
        overlap: How gradients reached the engine.
        groups: Param_groups of the optimizers, without parameters.
        noted: What the module put into its attribute `noted`.
        metrics: Callback metrics.
    """

    weights: dict[str, Tensor]
    steps: int
    exchanges: int = 0
    bytes_sent: float = 0.0
    overlap: str = ""
    groups: list[dict[str, Any]] = field(default_factory=list)
    noted: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Witness(pl.Callback):
    """Writes each rank's `Facts` into a folder when the fit is over, for the parent to read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counted: dict[str, Any] = {}

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if hasattr(strategy, "ledger"):
            self.counted = {
                "exchanges": strategy.ledger.steps,
                "bytes_sent": strategy.comm_summary()["comm/bytes_sent_per_rank"],
                "overlap": strategy.overlap,
            }

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        facts: dict[str, Any] = {
            "weights": {name: value.clone() for name, value in pl_module.state_dict().items()},
            "steps": trainer.global_step,
            "groups": [
                {k: v for k, v in g.items() if k != "params"} for o in trainer.optimizers for g in o.param_groups
            ],
            "noted": getattr(pl_module, "noted", {}),
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }
        torch.save({**facts, **self.counted}, self.folder / f"rank{trainer.global_rank}.pt")


class Case:
    """A column of the table, and a folder.

    Args:
        column: The strategy.
        folder: Empty; for checkpoints and reports.
    """

    def __init__(self, column: Column, folder: Path) -> None:
        self.column = column
        self.folder = folder
        self._numbers = itertools.count()

    def trainer(
        self, *, lossless: bool = False, options: Mapping[str, Any] | None = None, **settings: Any
    ) -> pl.Trainer:
        """A Trainer with this column's strategy; `options` are the strategy's, `settings` the Trainer's."""
        strategy = self.column.build(lossless, **(options or {}))
        return pl.Trainer(**{**QUIET, "devices": self.column.devices, **settings}, strategy=strategy)

    def fit(
        self,
        module: pl.LightningModule,
        train: Any = None,
        val: Any = None,
        *,
        callbacks: Sequence[pl.Callback] = (),
        ckpt_path: Path | None = None,
        **settings: Any,
    ) -> list[Facts]:
        """Train a copy of a module and hear from all ranks."""
        folder = self.folder / f"fit{next(self._numbers)}"
        folder.mkdir()
        trainer = self.trainer(callbacks=[*copy.deepcopy(list(callbacks)), Witness(folder)], **settings)
        return _fit(trainer, folder, module, train if train is not None else loader(), val, ckpt_path)

    def one(
        self,
        module: pl.LightningModule,
        train: Any = None,
        val: Any = None,
        *,
        callbacks: Sequence[pl.Callback] = (),
        ckpt_path: Path | None = None,
        **settings: Any,
    ) -> Facts:
        """The same in a stock Trainer on one device, on the batches of all ranks united."""
        folder = self.folder / f"one{next(self._numbers)}"
        folder.mkdir()
        settings.pop("lossless", None)
        settings.pop("options", None)
        trainer = pl.Trainer(
            **{**QUIET, "devices": 1, **settings}, callbacks=[*copy.deepcopy(list(callbacks)), Witness(folder)]
        )
        train = train if train is not None else united(self.column.ranks)
        return _fit(trainer, folder, module, train, val, ckpt_path)[0]

    def parity(self, module: pl.LightningModule, tolerance: float = 1e-10, **settings: Any) -> list[Facts]:
        """Without loss, N ranks equal one process; returns the ranks' facts."""
        expected = self.one(module, **settings)
        facts = self.fit(module, lossless=True, **settings)
        for own in facts:
            same_weights(own.weights, expected.weights, tolerance)
        before = module.state_dict()
        assert any(not torch.equal(before[name], expected.weights[name]) for name in before), "nothing was learned"
        return facts

    def heard(self, module: pl.LightningModule, **settings: Any) -> str:
        """What a fit logs."""
        path = self.folder / "messages.log"
        handler = logging.FileHandler(path)
        logger = rank_zero.log  # what `rank_zero_info` writes to; a test before this one may have silenced it
        before = (logger.level, logger.disabled)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.disabled = False
        try:
            self.fit(module, **settings)
        finally:
            logger.level, logger.disabled = before
            logger.removeHandler(handler)
            handler.close()
        return path.read_text()


def _fit(
    trainer: pl.Trainer, folder: Path, module: pl.LightningModule, train: Any, val: Any, ckpt_path: Path | None
) -> list[Facts]:
    trainer.fit(copy.deepcopy(module), train, val, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    files = sorted(folder.glob("rank*.pt"))
    assert len(files) == trainer.world_size, f"only {[f.name for f in files]} reported"
    return [Facts(**torch.load(file, weights_only=True)) for file in files]


def same_weights(own: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float = 0.0) -> None:
    """Compare two state dicts; tolerance 0 means bit for bit."""
    assert own.keys() == other.keys()
    for name in own:
        if tolerance:
            torch.testing.assert_close(
                own[name], other[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert torch.equal(own[name], other[name]), name
