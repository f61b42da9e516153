"""Through the Trainer: everything sent and masking off is torch's SGD on the union of the ranks' batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import SGD

from lightning_distlab.payloads import Wire
from lightning_distlab.strategies import CompressedStrategy, DGCStrategy, SparseStrategy
from tests.strategies.fits import Small, distance, fit, same_bits

OPTIMIZERS: dict[str, Callable[[Any], SGD]] = {
    "heavy ball": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "weight decay": lambda p: SGD(p, lr=0.05, weight_decay=0.01),
    "nesterov and weight decay": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
}


def odd_net() -> nn.Module:
    """Shapes that no world size divides, and tensors both above and below the exclusion bounds."""
    return nn.Sequential(nn.Linear(5, 67), nn.Tanh(), nn.Linear(67, 7), nn.Tanh(), nn.Linear(7, 1, bias=False))


def lossless(**options: Any) -> DGCStrategy:
    """DGC that sends everything, exactly."""
    return DGCStrategy(1.0, momentum_masking=False, wire=Wire(), start_method="fork", **options)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dgc_that_sends_everything_is_sgd(tmp_path: Path, optimizer: str, ranks: int) -> None:
    ours = fit(tmp_path / "ours", Small(odd_net, OPTIMIZERS[optimizer], batch_size=8 // ranks), lossless(), ranks)
    stock = fit(
        tmp_path / "stock",
        Small(odd_net, OPTIMIZERS[optimizer], batch_size=8 // ranks),
        DDPStrategy(start_method="fork"),
        ranks,
    )
    assert ours.ranks[0]["steps"] == 20
    assert distance(ours.weights, stock.weights) <= 1e-12


@pytest.mark.parametrize("strategy", [
    lossless(collective="gather", overlap="after_backward"),
    lossless(collective="recursive_doubling"),
    SparseStrategy(1.0, wire=Wire(), scope="tensor", start_method="fork"),
    CompressedStrategy(start_method="fork"),
], ids=["dgc gather", "dgc recursive doubling", "sparse ring", "none native"])  # fmt: skip
def test_lossless_settings_equal_one_process_on_the_union_batch(tmp_path: Path, strategy: Any) -> None:
    """DistributedSampler deals samples out in turn, so that two batches of 4 make one process's batch of 8."""
    optimizer = OPTIMIZERS["nesterov and weight decay"]
    ours = fit(tmp_path / "ours", Small(odd_net, optimizer), strategy, accumulate_grad_batches=3, steps=7)
    alone = fit(
        tmp_path / "alone",
        Small(odd_net, optimizer, batch_size=8),
        DDPStrategy(start_method="fork"),
        1,
        accumulate_grad_batches=3,
        steps=7,
    )
    assert distance(ours.weights, alone.weights) <= 1e-10


class Images(Small):
    """Convolution, BatchNorm, dropout, shuffled data: everything that depends on a rank's own random numbers."""

    def __init__(self, p: float = 0.3, **options: Any) -> None:
        optimizer = OPTIMIZERS["nesterov and weight decay"]
        super().__init__(partial(images_net, p), optimizer, dtype=torch.float32, features=64, shuffle=True, **options)


def images_net(p: float) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(p),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.Flatten(),
        nn.Linear(128, 1),
    )


@pytest.mark.parametrize("collective", ["ring", "gather", "recursive_doubling"])
def test_two_virtual_ranks_are_two_real_ones(tmp_path: Path, collective: str) -> None:
    def strategy(**options: Any) -> DGCStrategy:
        return DGCStrategy(0.05, collective=collective, start_method="fork", **options)

    options: dict[str, Any] = {"accumulate_grad_batches": 2, "steps": 15}
    real = fit(tmp_path / "real", Images(), strategy(), 2, **options)
    virtual = fit(tmp_path / "virtual", Images(), strategy(virtual_ranks=2), 1, **options)
    assert same_bits(real.weights, virtual.weights)
    for rank, states in real.states().items():
        for name, state in states.items():
            assert same_bits(state, virtual.states()[rank][name])
    real_summary, virtual_summary = real.ranks[0]["summary"], virtual.ranks[0]["summary"]
    assert real_summary["comm/payload_bytes"] == virtual_summary["comm/payload_bytes"]
    assert real_summary["comm/dense_bytes"] == virtual_summary["comm/dense_bytes"]


def test_virtual_ranks_average_running_statistics_as_real_ones_do(tmp_path: Path) -> None:
    """Without dropout: what an evaluation draws comes from the process, not from each virtual rank's stream."""
    options: dict[str, Any] = {"steps": 12, "limit_val_batches": 2, "val_check_interval": 4}
    real = fit(tmp_path / "real", Images(p=0.0), DGCStrategy(0.05, start_method="fork"), 2, **options)
    virtual = fit(
        tmp_path / "virtual", Images(p=0.0), DGCStrategy(0.05, start_method="fork", virtual_ranks=2), 1, **options
    )
    assert same_bits(real.weights, virtual.weights)
    assert same_bits(real.ranks[0]["buffers"], real.ranks[1]["buffers"]), "the last step ended with an evaluation"
    assert same_bits(real.ranks[0]["buffers"], virtual.ranks[0]["buffers"])
