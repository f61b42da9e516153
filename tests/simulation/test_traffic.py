"""Rounds and bytes by formula equal those that are really carried out."""

import math

import pytest
import torch

from lightning_distlab.collectives import COLLECTIVES, Hierarchical, ParameterServer
from lightning_distlab.exchange.drivers import InProcessDriver, Link
from lightning_distlab.payloads import Bundle, DensePayload, Flags, LevelPayload, Op, SignPayload
from lightning_distlab.simulation.traffic import Traffic, critical_bytes, traffic_of

OURS = ("gather", "ring", "recursive_doubling", "halving_doubling", "tree", "parameter_server", "sequential", "gtopk",
        "balanced")  # fmt: skip


def played(collective, payloads):
    """Rounds, and the sum over rounds of what goes through the busiest rank."""
    ranks = len(payloads)
    driver = InProcessDriver(ranks, Link(bandwidth_bytes_per_s=1.0))
    driver.run({r: collective.run(Op.SUM, payloads[r], r, ranks) for r in range(ranks)}, "x")
    return driver.ledger.account(0, driver.axis, "x").steps, driver.clock_s


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("name", OURS)
def test_dense(name, ranks):
    size = 1680  # divisible by all of these numbers of ranks
    collective = COLLECTIVES[name]()
    rounds, through = played(collective, [DensePayload(torch.ones(size)) for _ in range(ranks)])
    assert critical_bytes(collective, ranks, 4.0 * size, 4.0 * size) == pytest.approx(through)
    traffic = traffic_of([(Op.SUM, DensePayload(torch.ones(size)))], collective, ranks, 0.0)
    assert (traffic.rounds, traffic.bytes) == (rounds, pytest.approx(through))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["gather", "tree", "parameter_server", "sequential"])
def test_sums_of_levels_grow(name, ranks):
    collective = COLLECTIVES[name]()
    payload = LevelPayload(torch.ones(8000, dtype=torch.int8), 1)
    rounds, through = played(collective, [payload] * ranks)
    traffic = traffic_of([(Op.SUM, payload)], collective, ranks, 0.0)
    assert traffic.rounds == rounds
    # The model doubles what is merged twice; log2(2 k + 1) bits grow more slowly inside a tree.
    assert through <= traffic.bytes * 1.001
    assert traffic.bytes <= through * (1.35 if name == "tree" else 1.001)


@pytest.mark.parametrize(("k", "nodes"), [(2, 2), (2, 4), (4, 2)])
def test_nodes_have_a_link_of_their_own(k, nodes):
    size = 1680
    payload = DensePayload(torch.ones(size))
    collective = Hierarchical(k)
    traffic = traffic_of([(Op.SUM, payload)], collective, k * nodes, 4.0 * size)
    rounds, through = played(collective, [payload] * (k * nodes))
    ring = 2 * (k - 1), 2 * 4.0 * size * (k - 1) / k
    assert traffic.rounds + traffic.inner_rounds == rounds + ring[0]
    assert traffic.bytes + traffic.inner_bytes == pytest.approx(through + ring[1])
    assert traffic.bytes == critical_bytes(collective.outer, nodes, 4.0 * size / k, 4.0 * size / k)
    with pytest.raises(ValueError, match="does not divide"):
        traffic_of([(Op.SUM, payload)], collective, k * nodes + 1, 0.0)


def test_owned_ranges():
    payload = SignPayload(torch.ones(800, dtype=torch.uint8), torch.zeros(8, 2), 100, 0, torch.float32)
    message = Bundle((payload,), Flags.NONE, 0, 1)
    messages = [(Op.SCATTER_SUM, message), (Op.ALL_GATHER, message)]
    traffic = traffic_of(messages, COLLECTIVES["gather"](), 4, 0.0)
    assert traffic.rounds == 2
    assert traffic.bytes == 2 * message.wire_size() * 3 / 4


def test_a_hundred_thousand_ranks():
    messages = [(Op.SUM, DensePayload(torch.ones(1000)))]
    assert traffic_of(messages, COLLECTIVES["halving_doubling"](), 2**17, 0.0).rounds == 34
    server = traffic_of(messages, ParameterServer(), 100_000, 0.0)
    assert server.bytes == 2 * 99_999 * 4000


def test_seconds_of_traffic():
    traffic = Traffic(3, 100.0, 2, 1000.0)
    assert traffic.seconds(Link(1.0, 10.0), Link(0.1, 1000.0)) == pytest.approx((3.2, 11.0))
    assert traffic.seconds(Link(1.0, math.inf), Link(0.0, math.inf), handshakes=2) == (6.0, 0.0)
