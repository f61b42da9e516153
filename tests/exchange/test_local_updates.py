"""Local SGD and delayed averages: what must hold for every optimizer, and the paper's comparison."""

import math

import pytest
import torch
from torch import nn

from lightning_distlab.collectives import HalvingDoubling, Native, Ring
from lightning_distlab.exchange.drivers import InProcessDriver, TorchDriver
from lightning_distlab.exchange.local_updates import LocalUpdates
from tests.helpers.fork import fork_ranks

F = torch.float64
RANKS = 3
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def data(rank, step, same=False):
    generator = torch.Generator().manual_seed(1000 * step + (0 if same else rank))
    x = torch.randn(8, 5, generator=generator, dtype=F)
    return x, x.sum(1, keepdim=True).sin() + (0 if same else 0.1 * rank)


class Run:
    """All ranks in one process, each with its network, optimizer and cosine schedule."""

    def __init__(self, optimizer="sgd", steps=40, ranks=RANKS, same=False, collective=None, **options):
        self.nets = [network() for _ in range(ranks)]
        self.optimizers = [OPTIMIZERS[optimizer](net.parameters()) for net in self.nets]
        self.schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, steps) for o in self.optimizers]
        weights = {rank: list(net.parameters()) for rank, net in enumerate(self.nets)}
        self.updates = LocalUpdates(InProcessDriver(ranks), weights, collective, **options)
        self.same, self.step = same, 0

    def train(self, steps, skipping=()):
        for _ in range(steps):
            for rank, net in enumerate(self.nets):
                x, y = data(rank, self.step, self.same)
                self.optimizers[rank].zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                if (rank, self.step) not in skipping:
                    self.optimizers[rank].step()
                self.schedules[rank].step()
            self.updates.after_step()
            self.step += 1
        return self

    def flat(self, rank=0):
        return torch.cat([p.detach().reshape(-1) for p in self.nets[rank].parameters()])


def synchronous(steps, optimizer="sgd"):
    net = network()
    opt = OPTIMIZERS[optimizer](net.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
    for step in range(steps):
        opt.zero_grad()
        sum(nn.functional.mse_loss(net(x), y) / RANKS for x, y in (data(r, step) for r in range(RANKS))).backward()
        opt.step()
        schedule.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("collective", [None, Ring(), HalvingDoubling(), Native()], ids=str)
def test_no_delay_and_no_period_is_data_parallelism(collective):
    run = Run(collective=collective).train(40)
    for rank in range(RANKS):
        torch.testing.assert_close(run.flat(rank), synchronous(40), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("period", "delay"), [(1, 0), (5, 0), (1, 4), (5, 7), (3, 20), (7, 2)])
def test_replicas_are_one_after_the_drain(optimizer, period, delay):
    run = Run(optimizer, period=period, delay=delay).train(33)
    apart = (run.flat(0) - run.flat(1)).abs().max()
    assert (apart < 1e-13) == (delay == 0 and 33 % period == 0)
    assert run.updates.in_flight == len([end for end in range(period, 34, period) if end + delay > 33])
    run.updates.drain()
    assert run.updates.in_flight == 0
    assert all(torch.equal(run.flat(rank), run.flat(0)) for rank in range(RANKS))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_drain_itself_leaves_rounding_only(optimizer, monkeypatch):
    """Before their weights are averaged replicas differ by less than 1e-12, under a schedule and for any optimizer."""
    run = Run(optimizer, period=2, delay=5).train(32)
    seen = []
    real = LocalUpdates._open

    def watched(self, vectors):
        seen.append(max(float((v - vectors[0]).abs().max()) for v in vectors.values()))
        return real(self, vectors)

    monkeypatch.setattr(LocalUpdates, "_open", watched)
    run.updates.drain()
    assert seen[-1] < 1e-12


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_corrections_do_not_move_the_mean(optimizer):
    run = Run(optimizer, period=2, delay=3)
    for _ in range(12):
        before = sum(run.flat(r) for r in range(RANKS))
        for rank, net in enumerate(run.nets):
            x, y = data(rank, run.step)
            run.optimizers[rank].zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            run.optimizers[rank].step()
        stepped = sum(run.flat(r) for r in range(RANKS))
        run.updates.after_step()
        run.step += 1
        torch.testing.assert_close(sum(run.flat(r) for r in range(RANKS)), stepped, rtol=1e-13, atol=1e-13)
        assert not torch.equal(before, stepped)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_identical_data_is_undelayed_training(optimizer):
    late, alone = Run(optimizer, same=True, delay=20).train(40), Run(optimizer, ranks=1, same=True).train(40)
    late.updates.drain()
    torch.testing.assert_close(late.flat(), alone.flat(), rtol=1e-11, atol=1e-12)


def test_a_rank_that_skips_a_step_stays_in_step():
    run = Run("adam", period=2, delay=3).train(20, skipping={(1, 4), (1, 5), (2, 11)})
    run.updates.drain()
    assert all(torch.equal(run.flat(rank), run.flat(0)) for rank in range(RANKS))


@pytest.mark.parametrize("delay", [1, 5, 10, 20])
@pytest.mark.parametrize(("share", "stable"), [(0.98, True), (1.02, False)])
def test_the_bound_of_delayed_means_alone(delay, share, stable):
    """On curvature λ they are stable while lr λ < 2 sin(π / (2 (2 D + 1))); swapped for one's own there is no bound."""
    lr = share * 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    sizes = {}
    for corrected in (False, True):
        weights = {rank: [torch.ones(1, dtype=F)] for rank in range(2)}
        updates = LocalUpdates(InProcessDriver(2), weights, delay=delay, corrected=corrected)
        largest = []
        for _ in range(8000):
            for rank in range(2):
                weights[rank][0] -= lr * weights[rank][0]  # the gradient of w^2 / 2
            updates.after_step()
            largest.append(float(weights[0][0].abs()))
        sizes[corrected] = max(largest[-500:]), max(largest[3500:4000])
    end, middle = sizes[False]
    assert end < middle if stable else end > middle
    assert sizes[True][0] < 1e-6


def test_real_ranks():
    expected = Run("momentum", period=2, delay=3).train(11)
    expected.updates.drain()

    def body(rank):
        net = network()
        optimizer = OPTIMIZERS["momentum"](net.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        updates = LocalUpdates(TorchDriver(), {rank: list(net.parameters())}, period=2, delay=3)
        for step in range(11):
            x, y = data(rank, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            schedule.step()
            updates.after_step()
        updates.drain()
        return torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    for flat in fork_ranks(RANKS, body):
        torch.testing.assert_close(flat, expected.flat(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("bad", [{"period": 0}, {"period": 1.5}, {"delay": -1}, {"delay": True}])
def test_bad_options_are_refused(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        LocalUpdates(InProcessDriver(1), {0: [torch.zeros(1)]}, **bad)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"weights are given for ranks \[0\], the driver plays \[0, 1\]"):
        LocalUpdates(InProcessDriver(2), {0: [torch.zeros(1)]})
    with pytest.raises(ValueError, match="one dtype"):
        LocalUpdates(InProcessDriver(1), {0: [torch.zeros(1), torch.zeros(1, dtype=F)]})
