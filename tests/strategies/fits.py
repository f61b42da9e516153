"""Small fits in forked workers, and what they leave behind: every rank's weights, flags and memories, as files."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_distlab.strategies import CompressedStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning.*")


class Small(pl.LightningModule):
    """A small regression with an optimizer of the test's choice; everything random comes from its seed."""

    def __init__(
        self,
        net: Callable[[], nn.Module],
        optimizer: Callable[[Any], Any] | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        samples: int = 96,
        batch_size: int = 4,
        shuffle: bool = False,
        features: int = 5,
    ) -> None:
        super().__init__()
        pl.seed_everything(7, verbose=False)
        self.net = net().to(dtype)
        self.make_optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(samples, features, generator=generator, dtype=dtype)
        y = torch.sin(x.sum(dim=1, keepdim=True)) + 0.1 * torch.randn(samples, 1, generator=generator, dtype=dtype)
        self.data = TensorDataset(x, y)
        self.batch_size, self.shuffle = batch_size, shuffle

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size)


class Recorder(pl.Callback):
    """Writes what each rank holds at the end of the fit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        left: dict[str, Any] = {
            "weights": {n: p.detach().clone() for n, p in module.named_parameters()},
            "buffers": {n: b.detach().clone() for n, b in module.named_buffers()},
            "global_step": trainer.global_step,
        }
        if isinstance(strategy, CompressedStrategy) and strategy.engine is not None:
            engine = strategy.engine
            left |= {
                "steps": strategy.ledger.steps,
                "skipped": strategy.ledger.skipped_steps,
                "overlap": strategy.overlap,
                "summary": strategy.comm_summary(),
                "states": {
                    r: {n: {k: v.clone() for k, v in s.items()} for n, s in engine.state_dict(r).items()}
                    for r in engine.driver.ranks
                },
            }
        torch.save(left, self.folder / f"rank{trainer.global_rank}.pt")


@dataclass
class Fit:
    """What a fit left.

    Attributes:
        ranks: Each process's record.
        checkpoint: Path of the checkpoint written after the last step, if asked for.
    """

    ranks: list[dict[str, Any]]
    checkpoint: Path | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Rank 0's parameters."""
        weights: dict[str, Tensor] = self.ranks[0]["weights"]
        return weights

    def states(self) -> dict[int, dict[str, dict[str, Tensor]]]:
        """Memory of all ranks, real or virtual."""
        return {r: s for record in self.ranks for r, s in record["states"].items()}


def fit(
    folder: Path,
    module: pl.LightningModule,
    strategy: Any,
    devices: int = 2,
    *,
    steps: int = 20,
    save: bool = False,
    resume: Path | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    seed: int = 7,
    **trainer: Any,
) -> Fit:
    """Train for a number of optimizer steps on forked workers."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.pt"):
        old.unlink()
    pl.seed_everything(seed, verbose=False)
    extra: list[pl.Callback] = [Recorder(folder), *callbacks]
    if save:
        extra.append(Saver(folder / "end.ckpt"))
    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": devices, "strategy": strategy, "max_steps": steps, "max_epochs": -1,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "limit_val_batches": 0, "use_distributed_sampler": True, "default_root_dir": str(folder),
    }  # fmt: skip
    made = pl.Trainer(callbacks=extra, **(options | trainer))
    made.fit(module, ckpt_path=str(resume) if resume else None, weights_only=True if resume else None)
    records = [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(devices)]
    return Fit(records, folder / "end.ckpt" if save else None, dict(made.callback_metrics))


class Saver(pl.Callback):
    """Saves a whole checkpoint after the last step, within an epoch or, as ModelCheckpoint does, at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == trainer.max_steps and not trainer.is_last_batch:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.max_epochs in (-1, trainer.current_epoch + 1) and trainer.is_last_batch:
            trainer.save_checkpoint(self.path)


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors agree in every bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Largest absolute difference."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
