"""Ranks that own index ranges: each tensor of a bucket is cut by itself."""

import pytest
import torch

from lightning_distlab.collectives import Gather, Ring
from lightning_distlab.compression.base import Compressor, Param
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.payloads import DensePayload, Op, Request, RoundSpec, even_bounds

SIZES = {"a": 7, "b": 2, "c": 11, "d": 1}


class ByOwners(Compressor):
    """The owner of a range averages it; the averages are then laid together."""

    name = "by_owners"
    rounds = (RoundSpec(Op.SCATTER_SUM, DensePayload), RoundSpec(Op.ALL_GATHER, DensePayload))

    def exchange(self, grad, state, param, step):
        start, end = even_bounds(grad.numel(), step.world_size)[step.rank : step.rank + 2]
        reply = yield Request(Op.SCATTER_SUM, DensePayload(grad.clone()))
        assert reply.payload.length == end - start
        whole = torch.full_like(grad, float("nan"))  # only the own range may count
        whole[start:end] = reply.payload.values / step.world_size
        reply = yield Request(Op.ALL_GATHER, DensePayload(whole), final=True)
        grad.copy_(reply.payload.values)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("collective", [Gather, Ring])
def test_every_tensor_has_its_own_ranges(collective, world):
    params = {name: Param(name, torch.zeros(size, dtype=torch.float64)) for name, size in SIZES.items()}
    engine = Engine(ByOwners(), collective(), InProcessDriver(world), params)
    torch.manual_seed(world)
    gradients = {
        rank: {name: torch.randn(size, dtype=torch.float64) for name, size in SIZES.items()} for rank in range(world)
    }
    expected = {name: sum(gradients[rank][name] for rank in range(world)) / world for name in SIZES}
    engine.begin()
    engine.submit(gradients)
    assert not engine.finish().skipped
    for rank in range(world):
        for name in SIZES:
            torch.testing.assert_close(gradients[rank][name], expected[name], rtol=1e-12, atol=1e-12)
            assert torch.equal(gradients[rank][name], gradients[0][name])
