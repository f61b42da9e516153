"""`{"loss", "num_tokens"}` through the Trainer: the exact mean over all tokens of a step, however they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import SGD

from lightning_distlab.payloads import Wire
from lightning_distlab.strategies import CompressedStrategy, DGCStrategy
from tests.strategies.fits import Small, distance, fit


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 67), nn.Tanh(), nn.Linear(67, 1))


class Ragged(Small):
    """Each sample counts 0 to 3 times, so that batches hold different numbers of tokens, one of rank 1's none."""

    def __init__(self, *, whole: bool = False, **options: Any) -> None:
        super().__init__(net, lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01), **options)
        self.whole = whole

    @staticmethod
    def counts(x: torch.Tensor) -> torch.Tensor:
        return (x[:, 0].abs() * 3).floor().clamp(max=3) * (x[:, 1] > -0.5)

    def total(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        counts = self.counts(x)
        return (counts[:, None] * (self.net(x) - y) ** 2).sum(), counts.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        total, tokens = self.total(batch)
        if self.whole:  # one process, all samples of a step in one batch
            return total / tokens
        return {"loss": total / tokens.clamp(min=1), "num_tokens": int(tokens)}


STRATEGIES = {
    "bucket": lambda: CompressedStrategy(start_method="fork"),
    "bucket, several": lambda: DGCStrategy(
        1.0, momentum_masking=False, wire=Wire(), start_method="fork", bucket_cap_mb=0.001, overlap="bucket"
    ),
    "after_backward": lambda: DGCStrategy(
        1.0, momentum_masking=False, wire=Wire(), start_method="fork", overlap="after_backward"
    ),
    "virtual": lambda: CompressedStrategy(start_method="fork", virtual_ranks=2),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_exact_mean_over_tokens(tmp_path: Path, name: str, accumulate: int) -> None:
    devices = 1 if name == "virtual" else 2
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "steps": 7}
    ours = fit(tmp_path / "ours", Ragged(), STRATEGIES[name](), devices, **options)
    whole = Ragged(whole=True, batch_size=8 * accumulate)
    alone = fit(tmp_path / "alone", whole, DDPStrategy(start_method="fork"), 1, steps=7)
    assert distance(ours.weights, alone.weights) <= 1e-10


class Undecided(Ragged):
    """Rank 1 returns a scalar, rank 0 counts tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output["loss"] if self.global_rank == 1 else output


def test_ranks_that_mix_the_two_forms_are_told_the_rule(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="1 of 2 ranks return num_tokens"):
        fit(tmp_path, Undecided(), CompressedStrategy(start_method="fork"), 2, steps=3)
