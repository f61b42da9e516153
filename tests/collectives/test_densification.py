"""Sparse sums fill up on their way, PowerSGD's do not."""

import pytest
import torch

from lightning_distlab.collectives import RecursiveDoubling
from lightning_distlab.compression import Param, PowerSGD
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.payloads import Op, SparsePayload


def watched(exchange, sizes):
    """The same exchange; entries of each message are noted."""
    answer = None
    while True:
        try:
            posted = exchange.send(answer)
        except StopIteration as stop:
            return stop.value
        sizes.append([payload.indices.numel() for _, payload in posted.sends])
        answer = yield posted


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_density_doubles_at_every_step_of_a_butterfly_where_supports_are_disjoint(ranks):
    size, entries = 4096, 8
    sizes = {rank: [] for rank in range(ranks)}
    running = {}
    for rank in range(ranks):
        indices = torch.arange(entries) * ranks + rank
        payload = SparsePayload(indices, torch.ones(entries), size, entries)
        running[rank] = watched(RecursiveDoubling().run(Op.SUM, payload, rank, ranks), sizes[rank])
    results = InProcessDriver(ranks).run(running, "recursive_doubling")
    steps = ranks.bit_length() - 1
    assert all(sizes[rank] == [[entries * 2**step] for step in range(steps)] for rank in range(ranks))
    assert all(result.indices.numel() == ranks * entries for result in results.values())


def test_what_powersgd_sends_at_a_step_does_not_depend_on_the_number_of_ranks():
    payload, per_step = set(), set()
    for ranks in (2, 8, 32):
        driver = InProcessDriver(ranks)
        params = {"w": Param("w", torch.zeros(64, 96))}
        engine = Engine(PowerSGD(rank=2), RecursiveDoubling(), driver, params)
        engine.begin()
        engine.submit({rank: {"w": torch.randn(64, 96)} for rank in range(ranks)})
        engine.finish()
        account = driver.ledger.account(0, "replicate", "recursive_doubling")
        payload.add(driver.ledger.payload_bytes)
        per_step.add(account.bytes_sent / account.steps)
    assert len(payload) == len(per_step) == 1
