"""Integer payloads over every algorithm: exact sums, whatever the number of contributions in a message."""

import pytest
import torch

from lightning_distlab.collectives import COLLECTIVES, legal_collectives
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.payloads import Bundle, ExactPayload, Flags, LevelPayload, Op, QuantaPayload, RoundSpec
from tests.payloads.test_levels import some as levels
from tests.payloads.test_quanta import some as quanta

OURS = [name for name in COLLECTIVES if name not in ("native", "hierarchical", "gtopk", "balanced")]


def play(name, payloads):
    world, collective = len(payloads), COLLECTIVES[name]()
    driver = InProcessDriver(world, faithful=True)
    results = driver.run({r: collective.run(Op.SUM, payloads[r], r, world) for r in range(world)}, name)
    return [results[r] for r in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("name", OURS)
def test_sums(name, world):
    payloads = [
        Bundle(
            (levels(37, 1, "base3", r), levels(11, 100, "bits", r), quanta(60, 10 + r, r), quanta(9, 9, r)),
            Flags.NONE, 0, 4,
        )
        for r in range(world)
    ]  # fmt: skip
    for result in play(name, payloads):
        for position in (0, 1):
            expected = torch.stack([p.parts[position].levels.long() for p in payloads]).sum(0)
            assert torch.equal(result.parts[position].levels.long(), expected)
        for position in (2, 3):
            expected = torch.stack([p.parts[position].to_dense() for p in payloads]).sum(0)
            assert torch.equal(result.parts[position].to_dense(), expected)


def test_pairs():
    assert set(legal_collectives([RoundSpec(Op.SUM, LevelPayload)])) == {*OURS, "hierarchical", "gtopk", "balanced"}
    assert set(legal_collectives([RoundSpec(Op.SUM, QuantaPayload)])) == {*OURS, "hierarchical", "gtopk", "balanced"}
    assert ExactPayload(torch.ones(2)).rounded(None)[1] is None
