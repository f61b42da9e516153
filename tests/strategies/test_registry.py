"""Names, and what bad input gets: a clear error while there is one process only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.optim import SGD

from lightning_distlab.strategies import NAMES, CompressedStrategy, DGCStrategy, SparseStrategy
from lightning_distlab.strategies.registry import register
from tests.strategies.fits import Small, fit


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 1))


@pytest.mark.parametrize("name", NAMES)
def test_names_work_in_a_trainer(name: str) -> None:
    register()
    trainer = pl.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, NAMES[name][0])
    collective = getattr(trainer.strategy, "collective", None)
    if collective is not None and "collective" in NAMES[name][2]:
        assert collective.name == NAMES[name][2]["collective"]


def test_lightnings_own_names_are_untouched() -> None:
    code = (
        "from lightning.pytorch.strategies import StrategyRegistry as R; before = dict(R);"
        "import lightning_distlab.strategies; assert before.items() <= dict(R).items(); assert len(R) > len(before)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "dgc_ring" in StrategyRegistry


@pytest.mark.parametrize(("make", "message"), [
    (lambda: DGCStrategy(0.0), r"density=0.0.*\(0, 1\]"),
    (lambda: DGCStrategy(1.5), r"density=1.5.*\(0, 1\]"),
    (lambda: DGCStrategy(float("nan")), r"density=nan.*\(0, 1\]"),
    (lambda: SparseStrategy(-0.1), r"density=-0.1.*\(0, 1\]"),
    (lambda: DGCStrategy(collective="rign"), r"collective='rign' is unknown \(did you mean ring"),
    (lambda: DGCStrategy(collective="native"), r"native"),
    (lambda: DGCStrategy(clip_norm=1.0, overlap="bucket"), "needs the whole gradient.*after_backward"),
    (lambda: SparseStrategy(overlap="bucket"), "needs the whole gradient.*after_backward"),
    (lambda: DGCStrategy(overlap="buckets"), r"overlap='buckets' is unknown \(did you mean bucket"),
    (lambda: DGCStrategy(overlap="bucket", find_unused_parameters=True), "residuals would be lost"),
    (lambda: DGCStrategy(comm_state="all"), "comm_state='all' is unknown"),
    (lambda: DGCStrategy(virtual_ranks=0), "virtual_ranks=0 must be a whole number of at least 1"),
    (lambda: DGCStrategy(virtual_ranks=2, overlap="bucket"), "virtual_ranks=2 plays all ranks"),
    (lambda: DGCStrategy(bucket_cap_mb=0), "bucket_cap_mb=0 must be positive"),
    (lambda: DGCStrategy(timeout_s=0), "timeout_s=0 must be positive"),
    (lambda: DGCStrategy(start_method="thread"), "start_method='thread' is unknown"),
    (lambda: DGCStrategy(warmup_steps=3, warmup_epochs=1), "both give the length"),
    (lambda: CompressedStrategy(check_replicas_every_n_steps=-1), "check_replicas_every_n_steps=-1 must be"),
])  # fmt: skip
def test_options_are_checked_when_the_strategy_is_made(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises((TypeError, ValueError), match="momentum_maskin"):
        DGCStrategy(momentum_maskin=False)


class NoLaunch(pl.Callback):
    """Training must not start."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        raise AssertionError("a process was started")


class Lookup(Small):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Embedding(5, 3, sparse=True))


class Complex(Small):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__(net)
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class Manual(Small):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__(net)
        self.automatic_optimization = False


@pytest.mark.parametrize("start_method", ["fork", "popen"])
@pytest.mark.parametrize(("options", "make", "trainer", "message"), [
    ({}, lambda: Small(net), {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0.*clip_norm"),
    ({}, Lookup, {}, "net yields sparse gradients.*sparse=False"),
    ({}, Complex, {}, "phase is complex.*view_as_real"),
    ({"virtual_ranks": 2}, lambda: Small(net), {}, "virtual_ranks=2.*devices x nodes = 2"),
    ({"virtual_ranks": 2}, Manual, {"devices": 1}, "needs automatic optimization"),
    ({"virtual_ranks": 2}, lambda: Small(net), {"devices": 1, "sync_batchnorm": True}, "sync_batchnorm=True has no"),
    ({}, lambda: Small(net), {"sync_batchnorm": True}, "SyncBatchNorm has no CPU kernel"),
], ids=["clipping", "sparse", "complex", "virtual x devices", "virtual manual", "virtual sync", "sync"])  # fmt: skip
def test_refused_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, start_method: Any, options: Any, make: Any, trainer: Any, message: str
) -> None:
    def no_process(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    monkeypatch.setattr(torch.multiprocessing, "start_processes", no_process)
    made = pl.Trainer(**({
        "accelerator": "cpu", "devices": 2, "strategy": DGCStrategy(0.05, start_method=start_method, **options),
        "logger": False, "enable_checkpointing": False, "callbacks": [NoLaunch()], "max_steps": 2,
        "enable_progress_bar": False,
    } | trainer))  # fmt: skip
    with pytest.raises(ValueError, match=message):
        made.fit(make())


@pytest.mark.parametrize(("optimizer", "message"), [
    (lambda p: torch.optim.RMSprop(p, momentum=0.9), "Momentum would be applied twice: RMSprop"),
    (lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "dampening=0.5"),
    (lambda p: SGD(p, lr=0.1, maximize=True), "maximize=True"),
], ids=["RMSprop", "dampening", "maximize"])  # fmt: skip
def test_momentum_owned_twice(tmp_path: Path, optimizer: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        fit(tmp_path, Small(net, optimizer), DGCStrategy(0.05, start_method="fork"), 2, steps=2)


class SparseByHand(Small):
    """A layer that yields sparse gradients without saying so beforehand."""

    def __init__(self) -> None:
        super().__init__(net)
        self.table = nn.Parameter(torch.ones(7, 1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = nn.functional.embedding(torch.tensor([1, 3]), self.table, sparse=True)
        return super().training_step(batch, batch_idx) + rows.sum()


def test_a_sparse_gradient_that_nobody_announced(tmp_path: Path) -> None:
    strategy = DGCStrategy(0.05, start_method="fork", overlap="after_backward")
    with pytest.raises(Exception, match=r"table.*sparse"):
        fit(tmp_path, SparseByHand(), strategy, 2, steps=2)


class Unfreezes(Small):
    """The first layer joins at step 3."""

    def __init__(self) -> None:
        super().__init__(net, lambda p: SGD(p, lr=0.05, momentum=0.9), dtype=torch.float32)
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.net[0].requires_grad_(True)


def test_unfrozen_parameters_take_part(tmp_path: Path) -> None:
    start = {n: p.detach().clone() for n, p in Unfreezes().named_parameters()}
    done = fit(tmp_path, Unfreezes(), DGCStrategy(0.5, start_method="fork"), 2, steps=6)
    assert done.ranks[0]["overlap"] == "after_backward"
    assert set(done.states()[0]) == set(start)
    assert not torch.equal(done.weights["net.0.weight"], start["net.0.weight"])
    assert all(torch.equal(done.weights[n], done.ranks[1]["weights"][n]) for n in start)


def test_unfrozen_parameters_and_buckets_are_refused_with_the_remedy(tmp_path: Path) -> None:
    strategy = DGCStrategy(0.5, start_method="fork", overlap="bucket")
    with pytest.raises(Exception, match=r"2 parameters were unfrozen.*overlap='after_backward'"):
        fit(tmp_path, Unfreezes(), strategy, 2, steps=6)


def test_one_device_says_that_nothing_is_communicated(tmp_path: Path) -> None:
    done = fit(tmp_path, Small(net), DGCStrategy(0.05, start_method="fork"), 1, steps=3)
    assert done.ranks[0]["summary"]["comm/bytes_sent_per_rank"] == 0
