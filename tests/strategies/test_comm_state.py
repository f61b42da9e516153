"""Checkpoints: exact at the same world size, mean-preserving at another, stock on the outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import SGD

from lightning_distlab.payloads import Wire
from lightning_distlab.strategies import CompressedStrategy, DGCStrategy, SparseStrategy
from lightning_distlab.strategies.comm_state import KEY
from tests.strategies.fits import Fit, Small, distance, fit, same_bits


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 67), nn.Tanh(), nn.Linear(67, 1))


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def module(**options: Any) -> Small:
    return Small(net, sgd, dtype=torch.float32, **options)


class ByIndex(Small):
    """Takes its data by the batch's index: Lightning goes on inside an epoch, but plain loaders start anew."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        virtual = getattr(self.trainer.strategy, "virtual_ranks", 1)
        ranks, rank = self.trainer.world_size * virtual, self.global_rank + self.calls % virtual
        self.calls += 1
        x, y = self.data.tensors
        start = 4 * (batch_idx * ranks + rank)
        return super().training_step((x[start : start + 4], y[start : start + 4]), batch_idx)


def dgc(**options: Any) -> DGCStrategy:
    return DGCStrategy(**({"density": 0.05, "start_method": "fork", "dense_when_cheaper": False} | options))


def load(path: Path | None) -> dict[str, Any]:
    assert path is not None
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


@pytest.mark.parametrize(("kind", "options", "devices", "stop"), [
    ("dgc", {"warmup_steps": 10}, 2, 9),
    ("dgc", {"warmup_epochs": 2, "collective": "gather"}, 2, 9),
    ("dgc", {"virtual_ranks": 3}, 1, 5),
    ("dgc", {"clip_norm": 1.0, "clip_mode": "previous", "overlap": "after_backward"}, 2, 9),
    ("sparse", {}, 2, 9),
], ids=["warm-up in steps", "warm-up in epochs", "virtual", "previous norm", "sparse"])  # fmt: skip
def test_resume_is_exact(tmp_path: Path, kind: str, options: dict[str, Any], devices: int, stop: int) -> None:
    """12 batches an epoch for 2 ranks, 8 for 3: the breaks lie inside an epoch and inside the warm-ups."""

    def strategy() -> CompressedStrategy:
        return dgc(**options) if kind == "dgc" else SparseStrategy(0.05, start_method="fork", **options)

    def made() -> Small:
        return ByIndex(net, sgd, dtype=torch.float32)

    through = fit(tmp_path / "through", made(), strategy(), devices, steps=20)
    first = fit(tmp_path / "first", made(), strategy(), devices, steps=stop, save=True)
    assert first.ranks[0]["global_step"] == stop
    second = fit(tmp_path / "second", made(), strategy(), devices, steps=20, resume=first.checkpoint)
    assert second.ranks[0]["global_step"] == through.ranks[0]["global_step"] == 20
    assert same_bits(second.weights, through.weights)
    for rank, states in through.states().items():
        for name, state in states.items():
            assert same_bits(state, second.states()[rank][name])


def sums(states: dict[int, dict[str, dict[str, Tensor]]], key: str) -> dict[str, Tensor]:
    """Mean over ranks of a memory, in fp64."""
    names = [name for name, state in states[0].items() if key in state]
    return {n: torch.stack([s[n][key].double() for s in states.values()]).mean(dim=0) for n in names}


class LookAtStart(pl.Callback):
    """Records memories as they are when training starts, on each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, CompressedStrategy)
        assert strategy.engine is not None
        engine = strategy.engine
        states = {r: {n: dict(s) for n, s in engine.state_dict(r).items()} for r in engine.driver.ranks}
        torch.save({"states": states, "steps": engine.steps_done}, self.folder / f"start{trainer.global_rank}.pt")


@pytest.mark.parametrize(("before", "after", "virtual"), [(2, 4, 1), (4, 2, 1), (2, 1, 3)])
def test_another_world_size_keeps_the_mean(tmp_path: Path, before: int, after: int, virtual: int) -> None:
    first = fit(tmp_path / "first", module(batch_size=2), dgc(), before, steps=6, save=True)
    again = fit(
        tmp_path / "again",
        module(batch_size=2),
        dgc(virtual_ranks=virtual),
        after,
        steps=7,
        resume=first.checkpoint,
        callbacks=(LookAtStart(tmp_path),),
    )
    assert again.ranks[0]["global_step"] == 7
    starts = [torch.load(tmp_path / f"start{r}.pt", weights_only=True) for r in range(after)]
    assert [start["steps"] for start in starts] == [6] * after
    restored = {r: s for start in starts for r, s in start["states"].items()}
    assert sorted(restored) == list(range(max(after, virtual)))
    for key in ("velocity", "momentum", "decay"):
        assert distance(sums(restored, key), sums(first.states(), key)) < 1e-7


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Two ranks of DGC, six steps, saved."""
    return fit(tmp_path_factory.mktemp("saved"), module(), dgc(), 2, steps=6, save=True)


def test_what_a_checkpoint_holds(saved: Fit) -> None:
    own = load(saved.checkpoint)[KEY]
    assert {k: v for k, v in own.items() if k != "ranks"} == {
        "format": 1,
        "compressor": "dgc",
        "world_size": 2,
        "steps": 6,
    }
    for rank, states in saved.states().items():
        for name, state in states.items():
            assert same_bits(own["ranks"][str(rank)][name], state)


def changed(saved: Fit, path: Path, change: Any) -> Path:
    checkpoint = load(saved.checkpoint)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


def test_a_missing_rank_is_refused(saved: Fit, tmp_path: Path) -> None:
    path = changed(saved, tmp_path / "broken.ckpt", lambda c: c[KEY]["ranks"].pop("1"))
    with pytest.raises(Exception, match=r"communication state of rank 1 is missing.*comm_state='reset'"):
        fit(tmp_path / "fit", module(), dgc(), 2, steps=7, resume=path)


def test_missing_state_is_refused_unless_reset(saved: Fit, tmp_path: Path) -> None:
    path = changed(saved, tmp_path / "without.ckpt", lambda c: c.pop(KEY))
    with pytest.raises(Exception, match=r"holds no communication state.*comm_state='reset'"):
        fit(tmp_path / "refused", module(), dgc(), 2, steps=7, resume=path)
    done = fit(tmp_path / "reset", module(), dgc(comm_state="reset"), 2, steps=7, resume=path)
    assert done.ranks[0]["global_step"] == 7


def test_another_compressor_is_refused(saved: Fit, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"belongs to 'dgc', this run compresses with 'sparse'"):
        fit(tmp_path, module(), SparseStrategy(0.05, start_method="fork"), 2, steps=7, resume=saved.checkpoint)


def test_mean_and_drop(saved: Fit, tmp_path: Path) -> None:
    mean = fit(tmp_path / "mean", module(), dgc(comm_state="mean"), 2, steps=6, save=True)
    own = load(mean.checkpoint)[KEY]
    assert "ranks" not in own
    for key in ("velocity", "momentum", "decay"):
        held = {n: s[key].double() for n, s in own["mean"].items() if key in s}
        assert distance(held, sums(saved.states(), key)) < 1e-7
    done = fit(tmp_path / "again", module(), dgc(comm_state="mean"), 2, steps=8, resume=mean.checkpoint)
    assert done.ranks[0]["global_step"] == 8
    dropped = fit(tmp_path / "drop", module(), dgc(comm_state="drop"), 2, steps=6, save=True)
    assert KEY not in load(dropped.checkpoint)
    done = fit(tmp_path / "go on", module(), dgc(comm_state="drop"), 2, steps=8, resume=dropped.checkpoint)
    assert done.ranks[0]["global_step"] == 8


def test_a_stock_trainer_finds_the_momentum(saved: Fit, tmp_path: Path) -> None:
    (state,) = load(saved.checkpoint)["optimizer_states"]
    names = list(saved.weights)
    group = state["param_groups"][0]
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.01)
    u, d = sums(saved.states(), "momentum"), sums(saved.states(), "decay")
    for index, name in enumerate(names):
        expected = (u[name] + d[name]).view_as(saved.weights[name])
        assert float((state["state"][index]["momentum_buffer"] - expected).abs().max()) < 1e-6

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            optimizer = trainer.optimizers[0]
            buffers = [
                optimizer.state[p]["momentum_buffer"].clone() for g in optimizer.param_groups for p in g["params"]
            ]
            torch.save(buffers, tmp_path / "stock.pt")

    stock = DDPStrategy(start_method="fork")
    done = fit(tmp_path / "stock", module(), stock, 1, steps=8, resume=saved.checkpoint, callbacks=(Look(),))
    assert done.ranks[0]["global_step"] == 8
    buffers = torch.load(tmp_path / "stock.pt", weights_only=True)
    assert all(torch.equal(b, state["state"][i]["momentum_buffer"]) for i, b in enumerate(buffers))


def test_a_stock_checkpoint_goes_on_in_dgc(tmp_path: Path) -> None:
    """Everything sent, masking off: going on in DGC is going on in SGD, so the momentum must have moved in."""

    def exact() -> Small:
        return ByIndex(net, lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True))

    stock = fit(tmp_path / "stock", exact(), DDPStrategy(start_method="fork"), 2, steps=6, save=True)
    through = fit(tmp_path / "through", exact(), DDPStrategy(start_method="fork"), 2, steps=12)
    lossless = {"density": 1.0, "momentum_masking": False, "wire": Wire()}
    with pytest.raises(Exception, match="holds no communication state"):
        fit(tmp_path / "refused", exact(), dgc(**lossless), 2, steps=12, resume=stock.checkpoint)
    moved = dgc(**lossless, comm_state="reset")
    ours = fit(tmp_path / "ours", exact(), moved, 2, steps=12, resume=stock.checkpoint)
    assert distance(ours.weights, through.weights) <= 1e-12


def test_a_checkpoint_is_validated(saved: Fit, tmp_path: Path) -> None:
    results = []
    for strategy, devices in ((dgc(), 2), (dgc(virtual_ranks=2), 1)):
        trainer = pl.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_progress_bar=False,
            default_root_dir=str(tmp_path), enable_model_summary=False,
        )  # fmt: skip
        (metrics,) = trainer.validate(module(), ckpt_path=str(saved.checkpoint), verbose=False, weights_only=True)
        results.append(metrics["val_loss"])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
