"""NaN or infinity on one rank: the step is lost on all, counted, and nothing else has happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_distlab.strategies import CompressedStrategy, DGCStrategy, SparseStrategy
from tests.strategies.fits import Small, fit, same_bits


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 67), nn.Tanh(), nn.Linear(67, 1))


class Poisoned(Small):
    """One rank's loss is not finite in one micro-batch."""

    def __init__(self, bad: float, batch: int, **options: Any) -> None:
        super().__init__(net, lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01), **options)
        self.bad, self.batch = bad, batch
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        strategy = self.trainer.strategy
        assert isinstance(strategy, CompressedStrategy)
        rank = self.calls % strategy.virtual_ranks if strategy.virtual_ranks > 1 else self.global_rank
        self.calls += 1
        return loss * self.bad if rank == 1 and batch_idx == self.batch else loss


class Before(pl.Callback):
    """Checks that the step with the bad batch left weights and memories as they were, and that the next moves both."""

    def __init__(self, step: int, memory: bool) -> None:
        self.step, self.memory = step, memory
        self.checked = 0

    def held(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, torch.Tensor]:
        strategy = trainer.strategy
        assert isinstance(strategy, CompressedStrategy)
        assert strategy.engine is not None
        held = {f"w/{n}": p.detach().clone() for n, p in module.named_parameters()}
        for rank in strategy.engine.driver.ranks:
            for name, state in strategy.engine.state_dict(rank).items():
                held |= {f"{rank}/{name}/{key}": value.clone() for key, value in state.items()}
        return held

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.before = self.held(trainer, module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy, after = trainer.strategy, self.held(trainer, module)
        assert isinstance(strategy, CompressedStrategy)
        assert all(bool(value.isfinite().all()) for value in after.values())
        unmoved = [name for name in self.before if torch.equal(self.before[name], after[name])]
        if batch_idx == self.step:
            assert len(unmoved) == len(self.before), set(self.before) - set(unmoved)
            assert strategy.ledger.skipped_steps == 1
            self.checked += 1
        else:
            assert not [name for name in unmoved if name.startswith("w/")]
        assert any(not name.startswith("w/") for name in self.before) == self.memory

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert self.checked == 1


DGC = {"density": 0.05, "start_method": "fork"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize(("strategy", "memory", "devices"), [
    (lambda: DGCStrategy(**DGC, overlap="bucket", bucket_cap_mb=0.0005), True, 2),
    (lambda: DGCStrategy(**DGC, overlap="after_backward", collective="gather", bucket_cap_mb=0.0005), True, 2),
    (lambda: DGCStrategy(**DGC, collective="recursive_doubling", clip_norm=1.0), True, 3),
    (lambda: SparseStrategy(0.05, start_method="fork"), True, 2),
    (lambda: CompressedStrategy(start_method="fork", bucket_cap_mb=0.0005), False, 2),
    (lambda: CompressedStrategy(start_method="fork", overlap="after_backward"), False, 2),
    (lambda: DGCStrategy(**DGC, virtual_ranks=2), True, 1),
], ids=["bucket", "named", "doubling clip", "sparse global", "native bucket", "native named", "virtual"])  # fmt: skip
def test_a_bad_step_is_skipped_by_all(tmp_path: Path, strategy: Any, memory: bool, devices: int, bad: float) -> None:
    done = fit(tmp_path, Poisoned(bad, 3), strategy(), devices, steps=6, callbacks=(Before(3, memory),))
    for record in done.ranks:
        assert record["skipped"] == 1
        assert record["summary"]["comm/skipped_steps"] == 1.0
        assert same_bits(record["weights"], done.weights)


@pytest.mark.parametrize("overlap", ["bucket", "after_backward"])
def test_a_bad_micro_batch_loses_its_whole_window(tmp_path: Path, overlap: str) -> None:
    strategy = DGCStrategy(**DGC, overlap=overlap)  # type: ignore[arg-type]
    done = fit(tmp_path, Poisoned(float("nan"), 3), strategy, 2, steps=4, accumulate_grad_batches=2)
    assert [record["skipped"] for record in done.ranks] == [1, 1]
    assert all(bool(weight.isfinite().all()) for weight in done.weights.values())


class Scaled(Poisoned):
    """Half-precision forward, with what the scaler did on each rank written down."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales = [*getattr(self, "scales", []), self.trainer.precision_plugin.scaler.get_scale()]

    def on_train_end(self) -> None:
        torch.save(torch.tensor(self.scales), Path(self.trainer.default_root_dir) / f"scales{self.global_rank}.pt")


@pytest.mark.parametrize("overlap", ["bucket", "after_backward"])
def test_the_loss_scaler_of_every_rank_sees_infinity(tmp_path: Path, overlap: str) -> None:
    """The scale halves on both ranks after the bad step, though only one had the infinity."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))  # type: ignore[attr-defined]
    strategy = DGCStrategy(**DGC, overlap=overlap)  # type: ignore[arg-type]
    module = Scaled(float("inf"), 3, dtype=torch.float32)
    done = fit(tmp_path, module, strategy, 2, steps=6, plugins=[plugin], callbacks=(Before(3, True),))
    for rank, record in enumerate(done.ranks):
        scales = torch.load(tmp_path / f"scales{rank}.pt", weights_only=True)
        assert scales.tolist() == [256.0] * 3 + [128.0] * 3
        assert record["skipped"] == 1
        assert same_bits(record["weights"], done.weights)
