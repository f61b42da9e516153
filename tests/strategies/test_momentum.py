"""Momentum and weight decay are lent to the compressor for the time of a step, and are the user's otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import SGD

from lightning_distlab.compression.base import Param
from lightning_distlab.payloads import Wire
from lightning_distlab.strategies import DGCStrategy, SparseStrategy
from lightning_distlab.strategies.momentum import MomentumLoan, momentum_buffers
from tests.strategies.fits import Small, distance, fit


def made() -> tuple[nn.Module, SGD, dict[str, Param], MomentumLoan]:
    net = nn.Linear(3, 2)
    optimizer = SGD([
        {"params": [net.weight], "weight_decay": 0.1},
        {"params": [net.bias], "momentum": 0.5},
    ], lr=0.1, momentum=0.9, nesterov=True)  # fmt: skip
    params = {name: Param(name, p.detach()) for name, p in net.named_parameters()}
    names = {id(p): name for name, p in net.named_parameters()}
    return net, optimizer, params, MomentumLoan([optimizer], params, names, "dgc")


def test_zero_while_it_steps_and_back_afterwards() -> None:
    net, optimizer, params, _ = made()
    weight, bias = params["weight"].hyper, params["bias"].hyper
    assert (weight.momentum, weight.nesterov, weight.weight_decay) == (0.9, True, 0.1)
    assert (bias.momentum, bias.weight_decay) == (0.5, 0.0)
    before = net.weight.detach().clone()
    net.weight.grad, net.bias.grad = torch.ones(2, 3), torch.ones(2)
    for _ in range(2):
        optimizer.step()
    # plain descent: no momentum, no decay, no buffers of the optimizer's own
    assert torch.equal(net.weight.detach(), before - 0.1 * torch.ones(2, 3) - 0.1 * torch.ones(2, 3))
    assert not any("momentum_buffer" in state and state["momentum_buffer"] is not None
                   for state in optimizer.state.values())  # fmt: skip
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0]


def test_what_a_schedule_writes_counts_at_once() -> None:
    _, optimizer, params, loan = made()
    optimizer.param_groups[0]["momentum"] = 0.7
    loan.refresh()
    assert params["weight"].hyper.momentum == 0.7


def test_given_back_after_a_step_that_raised() -> None:
    _, optimizer, _, loan = made()

    def closure() -> float:
        assert optimizer.param_groups[0]["momentum"] == 0.0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    loan.close()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    optimizer.step()
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_buffers_are_local_momentum_plus_that_of_the_decay() -> None:
    u, d = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])
    buffers = momentum_buffers({"a": {"momentum": u, "decay": d}, "b": {"momentum": u}, "c": {"velocity": u}})
    assert torch.equal(buffers["a"], u + d)
    assert torch.equal(buffers["b"], u)
    assert buffers["b"].data_ptr() != u.data_ptr()
    assert "c" not in buffers


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 67), nn.Tanh(), nn.Linear(67, 1))


class Cycles(Small):
    """OneCycleLR writes the momentum of every step."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Monitor(pl.Callback):
    """What the user sees between steps."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[float]()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["momentum"])
        torch.save(self.seen, self.path)


def test_momentum_cycles_as_in_stock_training(tmp_path: Path) -> None:
    ours = DGCStrategy(1.0, momentum_masking=False, wire=Wire(), start_method="fork")
    a = fit(tmp_path / "a", Cycles(net), ours, 2, callbacks=(Monitor(tmp_path / "a.pt"),))
    stock = DDPStrategy(start_method="fork")
    b = fit(tmp_path / "b", Cycles(net), stock, 2, callbacks=(Monitor(tmp_path / "b.pt"),))
    assert distance(a.weights, b.weights) <= 1e-12
    seen = torch.load(tmp_path / "a.pt", weights_only=True)
    assert seen == torch.load(tmp_path / "b.pt", weights_only=True)
    assert len(set(seen)) > 10


def test_sparse_leaves_momentum_to_the_optimizer(tmp_path: Path) -> None:
    done = fit(tmp_path, Small(net), SparseStrategy(0.05, start_method="fork"), 2, steps=3, save=True)
    assert done.checkpoint is not None
    (state,) = torch.load(done.checkpoint, weights_only=True)["optimizer_states"]
    assert all("momentum_buffer" in entry for entry in state["state"].values())
    assert all("momentum" not in memory for memory in done.states()[0].values())


def test_adam_gets_plain_error_feedback_and_a_warning(tmp_path: Path) -> None:
    adam = Small(net, lambda p: torch.optim.Adam(p, lr=0.01))
    done = fit(tmp_path, adam, DGCStrategy(0.05, start_method="fork"), 2, steps=5)
    assert set(done.states()[0]["net.0.weight"]) == {"velocity"}
    params = {"weight": Param("weight", torch.zeros(3))}
    weight = nn.Parameter(torch.zeros(3))
    with pytest.warns(UserWarning, match="plain error feedback"):
        MomentumLoan([torch.optim.Adam([weight])], params, {id(weight): "weight"}, "dgc")
