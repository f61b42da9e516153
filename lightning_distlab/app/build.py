"""From a composed configuration to Trainer, model and data, through the allow-list."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from lightning_distlab.app.instantiate import instantiate
from lightning_distlab.app.metrics import MetricHistory


@dataclass
class Parts:
    """Everything that a job works with.

    Attributes:
        cfg: The configuration, resolved and as plain containers, good in any process.
        trainer: With callbacks, loggers and strategy inside.
        model: The LightningModule.
        datamodule: The data.
        history: The callback that holds last and best metrics.
    """

    cfg: dict[str, Any]
    trainer: pl.Trainer
    model: pl.LightningModule
    datamodule: pl.LightningDataModule
    history: MetricHistory


def check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint that is not there, while there is one process only.

    Raises:
        FileNotFoundError: If the path is on this machine and nothing lies there.
    """
    if path is not None and "://" not in path and not Path(path).exists():
        raise FileNotFoundError(
            f"ckpt_path={path}: there is no such file (relative paths count from {Path.cwd()}); runs keep theirs in "
            "<run>/checkpoints/last.ckpt"
        )


def build(cfg: DictConfig) -> Parts:
    """Seed, then build datamodule, model, callbacks, loggers, strategy and Trainer, in this order."""
    plain = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    settings = {str(key): value for key, value in plain.items()}
    check_devices(settings["trainer"])
    check_checkpoint(settings.get("ckpt_path"))
    seed(settings.get("seed"))
    datamodule = instantiate(settings["data"], "data")
    model = instantiate(settings["model"], "model")
    history = MetricHistory()
    callbacks: list[Callback] = [*_each(settings, "callbacks"), history]
    loggers: list[Logger] = _each(settings, "logger")
    strategy = instantiate(settings.get("strategy"), "strategy") or "auto"
    make_trainer = instantiate(settings["trainer"], "trainer", _partial_=True)
    trainer = make_trainer(callbacks=callbacks, logger=loggers or False, strategy=strategy)
    return Parts(settings, trainer, model, datamodule, history)


def check_devices(trainer: Mapping[str, Any]) -> None:
    """Refuse more CUDA devices than there are, while nothing has been built.

    Raises:
        ValueError: With both numbers and what to type instead.
    """
    if trainer.get("accelerator") not in ("gpu", "cuda"):
        return
    devices, there = trainer.get("devices", "auto"), torch.cuda.device_count()
    wanted = max(devices, default=0) + 1 if isinstance(devices, list) else devices
    if there == 0 or (isinstance(wanted, int) and wanted > there):
        instead = f"trainer.devices={there}, or " if there else ""
        raise ValueError(
            f"trainer.devices={devices} with trainer.accelerator={trainer['accelerator']}, but this machine has "
            f"{there} CUDA devices: use {instead}trainer.accelerator=cpu, where devices is any number of processes."
        )


def seed(value: int | None) -> None:
    """Seed all generators and loader workers; 0 is a seed like any other, None leaves them to chance."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)  # of an earlier job of the same sweep
    if value is not None:
        pl.seed_everything(value, workers=True, verbose=False)


def _each(settings: Mapping[str, Any], group: str) -> list[Any]:
    """Build every member of a group such as ``callbacks``; members set to null are left out."""
    members = (instantiate(member, f"{group}.{name}") for name, member in (settings.get(group) or {}).items())
    return [member for member in members if member is not None]
