"""Small networks and data that the capability table is tried on: odd shapes, fp64, no BatchNorm unless said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset

INPUTS, HIDDEN, OUTPUTS, SAMPLES, BATCH = 7, 13, 5, 24, 2


def dataset(samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Regression with a fixed answer."""
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, INPUTS, generator=generator, dtype=dtype)
    y = torch.sin(x @ torch.randn(INPUTS, OUTPUTS, generator=generator, dtype=dtype))
    return TensorDataset(x, y)


def loader(data: Dataset[Any] | None = None, batch: int = BATCH) -> DataLoader[Any]:
    """What a user hands to the Trainer, which divides and shuffles it."""
    return DataLoader(data if data is not None else dataset(), batch_size=batch)


class United(Sampler[int]):
    """For one process: at each step the samples that N ranks with batches of `batch` see together."""

    def __init__(self, data: Any, ranks: int, batch: int) -> None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.shares = [DistributedSampler(data, ranks, rank, shuffle=True, seed=seed) for rank in range(ranks)]
        self.batch = batch

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls it."""
        for share in self.shares:
            share.set_epoch(epoch)

    def __len__(self) -> int:
        return sum(map(len, self.shares))

    def __iter__(self) -> Iterator[int]:
        shares = [list(share) for share in self.shares]
        for start in range(0, len(shares[0]), self.batch):
            for share in shares:
                yield from share[start : start + self.batch]


def united(ranks: int, data: Dataset[Any] | None = None, batch: int = BATCH) -> DataLoader[Any]:
    """The same data for one process that stands for all ranks."""
    data = data if data is not None else dataset()
    return DataLoader(data, batch_size=ranks * batch, sampler=United(data, ranks, batch))


class Endless(IterableDataset[Any]):
    """A stream without a length; each rank reads its own share, `steps` samples of it (or steps[rank])."""

    def __init__(self, steps: int | tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        self.steps = steps
        self.data = dataset(dtype=dtype)

    def __iter__(self) -> Any:
        started = torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if started else 0
        world = torch.distributed.get_world_size() if started else 1
        steps = self.steps if isinstance(self.steps, int) else self.steps[rank]
        return (self.data[i * world + rank] for i in range(steps))


class Regression(pl.LightningModule):
    """A two-layer network; `sgd` are the arguments of torch's SGD."""

    def __init__(self, dtype: torch.dtype = torch.float64, **sgd: Any) -> None:
        super().__init__()
        generator_state = torch.get_rng_state()
        torch.manual_seed(0)
        self.net = self.build()
        torch.set_rng_state(generator_state)
        self.to(dtype)
        self.sgd = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, **sgd}

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], **self.sgd)


class Silent(Regression):
    """Logs nothing, so nothing but gradients travels."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class OneCycle(Regression):
    """The learning rate goes up and down, the momentum down and up, every step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8, cycle_momentum=True)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Frozen(Regression):
    """The first layer does not train."""

    def build(self) -> nn.Module:
        net = super().build()
        net[0].requires_grad_(False)
        return net


class Unused(Regression):
    """Two heads; one is used in every second step only, one never."""

    def build(self) -> nn.Module:
        self.sometimes = nn.Linear(INPUTS, OUTPUTS)
        self.never = nn.Linear(INPUTS, OUTPUTS)
        return super().build()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss + self.sometimes(batch[0]).square().mean() if batch_idx % 2 else loss


class Tied(Regression):
    """Two layers share a weight."""

    def build(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Tanh(), nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS))
        net[2].weight = net[0].weight
        return net


class Normalised(Regression):
    """With BatchNorm, whose running statistics differ between ranks until they are averaged."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, OUTPUTS))


class Finetuned(Regression):
    """A `backbone` that a callback freezes and unfreezes."""

    def build(self) -> nn.Module:
        self.backbone = nn.Linear(INPUTS, HIDDEN)
        return nn.Linear(HIDDEN, OUTPUTS)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(torch.tanh(self.backbone(x))), y)


class Adversarial(Regression):
    """Two optimizers, stepped by hand, that pull at one another; `toggle` freezes the one not at work."""

    def __init__(self, **sgd: Any) -> None:
        super().__init__(**sgd)
        self.automatic_optimization = False

    def build(self) -> nn.Module:
        self.critic = nn.Linear(OUTPUTS, 1)
        return super().build()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward((self.net(x) - y).square().mean() - 0.1 * self.critic(self.net(x)).mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        fake = self.critic(self.net(x).detach())
        self.manual_backward(((self.critic(y) - 1).square() + fake.square()).mean())
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), **self.sgd), torch.optim.SGD(self.critic.parameters(), lr=0.02)]
