"""Virtual ranks: shares of the data, random numbers, running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

from lightning_distlab.collectives import Native
from lightning_distlab.compression import NoCompression
from lightning_distlab.compression.base import Param
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.parallel.rng import RankStreams
from lightning_distlab.strategies.adapters import StepFacts
from lightning_distlab.strategies.progress import global_seed
from lightning_distlab.strategies.virtual import VirtualAdapter, VirtualLoader


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0)), batch_size=2, **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_are_those_of_distributed_samplers(shuffle: bool) -> None:
    own = loader(shuffle=shuffle)
    virtual = VirtualLoader(own, RankStreams(3), 3)
    for epoch in (0, 1):
        virtual.set_epoch(epoch)
        batches = list(virtual)
        assert len(batches) == len(virtual) == 4
        for rank in range(3):
            sampler = DistributedSampler(own.dataset, 3, rank, shuffle=shuffle, seed=global_seed())
            sampler.set_epoch(epoch)
            assert torch.cat([batch[rank][0] for batch in batches]).tolist() == [float(i) for i in sampler]
        everything = torch.cat([part[0] for batch in batches for part in batch])
        assert sorted(everything.tolist()) == [float(i) for i in range(24)]


class Stream(IterableDataset[Any]):
    """Has no indices."""

    def __iter__(self) -> Any:
        return iter(torch.arange(4.0))


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match=r"virtual_ranks needs a train DataLoader.*Stream"):
        VirtualLoader(DataLoader(Stream()), RankStreams(2), 2)
    weighted = loader(sampler=WeightedRandomSampler([1.0] * 24, 24))
    with pytest.raises(ValueError, match=r"WeightedRandomSampler.*use_distributed_sampler=True"):
        VirtualLoader(weighted, RankStreams(2), 2)


def test_outside_the_blocks_the_process_stands_where_rank_0_does() -> None:
    torch.manual_seed(1)
    streams = RankStreams(2)
    drawn: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(3):
        for rank in (0, 1):
            with streams.use(rank):
                drawn[rank].append(float(torch.rand(())))
        outside = float(torch.rand(()))
        drawn[0].append(outside)
        drawn[1].append(outside)
    torch.manual_seed(1)
    alone = [float(torch.rand(())) for _ in range(6)]
    assert drawn[0] == drawn[1] == alone


def test_a_rank_that_drew_differently_stays_where_it_is() -> None:
    torch.manual_seed(1)
    streams = RankStreams(2)
    with streams.use(1):
        torch.rand(5)
    torch.rand(3)
    with streams.use(1):
        sixth = float(torch.rand(()))
    torch.manual_seed(1)
    assert sixth == float(torch.rand(6)[5])


def adapter(module: nn.Module, ranks: int) -> VirtualAdapter:
    params = {name: Param(name, p.detach()) for name, p in module.named_parameters()}
    names = {id(p): name for name, p in module.named_parameters()}
    engine = Engine(NoCompression(), Native(), InProcessDriver(ranks), params)
    return VirtualAdapter(engine, StepFacts, names, module, RankStreams(ranks), 1 << 20)


def test_running_statistics_are_each_ranks_own_until_averaged() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    own = adapter(module, 2)
    x = torch.randn(2, 8, 2)
    for rank in (0, 1):
        own.forward_as(rank, lambda rank=rank: module(x[rank]))
    expected = 0.1 * torch.stack([module[0](x[rank]).mean(dim=0) for rank in (0, 1)]).mean(dim=0)
    assert torch.equal(module[1].running_mean, torch.zeros(3))
    own.average_buffers()
    torch.testing.assert_close(module[1].running_mean, expected)
    assert int(module[1].num_batches_tracked) == 1


def test_averages_over_ranks_accumulated_over_batches() -> None:
    module = nn.Linear(2, 3)
    own = adapter(module, 3)
    weights = list(module.parameters())
    total = torch.zeros(3, 2)
    for _ in range(2):
        for rank in range(3):
            x = torch.randn(4, 2)
            module(x).pow(2).mean().backward()
            assert module.weight.grad is not None
            total += module.weight.grad
            own.collect(rank, weights)
            assert module.weight.grad is None
    outcome = own.after_backward(weights)
    assert not outcome.skipped
    torch.testing.assert_close(module.weight.grad, total / 3)
